"""kubelet's records and their mounts, by index: as many comparisons as there are volumes."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from linux import blockdev, mountinfo, rbd_sysfs, stack
from volumes.audit.inventory import records
from volumes.node import raw_block


def _mount(number: int, target: str) -> mountinfo.Mount:
    line = f"{number} 1 252:{number} / {target} rw shared:1 - ext4 /dev/rbd{number} rw"
    return mountinfo.parse_line(line.encode())


def test_volumes_find_their_mounts_and_devices_among_thousands(tmp_path: Path) -> None:
    kubelet = f"{tmp_path}/kubelet"
    base = f"{kubelet}/plugins/kubernetes.io/csi/rbd.csi.ceph.com"
    mounts, devices = [], []
    for number in range(300):
        home = Path(f"{base}/{number:03}")
        home.mkdir(parents=True)
        home.joinpath("vol_data.json").write_text(json.dumps({"volumeHandle": f"h{number}"}))
        mounts.append(_mount(number, f"{home}/globalmount/{number}"))
        devices.append(blockdev.BlockDevice(f"rbd{number}", (252, number), "rbd", 1, False))
    # Neighbours in the order of names are not below.
    mounts += [_mount(n, f"{base}/001/globalmount{c}") for n, c in ((900, "-x"), (901, "0"))]
    found, gaps = records.volumes(kubelet, mounts, devices)
    assert not gaps
    assert [(v.handle, v.device, v.mounts) for v in found] == [
        (f"h{n}", f"rbd{n}", (f"{base}/{n:03}/globalmount/{n}",)) for n in range(300)
    ]


def test_mount_at_the_staging_directory_itself_counts(tmp_path: Path) -> None:
    assert records._at_or_below(["/a", "/a-b", "/a/b", "/a0", "/b"], "/a") == ["/a", "/a/b"]
    assert records._at_or_below(["/a/b"], "/a") == ["/a/b"]
    assert records._at_or_below(["/b"], "/a") == []


def test_what_is_mounted_within_a_volume_is_not_its_device(tmp_path: Path) -> None:
    home = tmp_path / "plugins/kubernetes.io/csi/d.example/1"
    home.mkdir(parents=True)
    (home / "vol_data.json").write_text(json.dumps({"volumeHandle": "h"}))
    mounts = [_mount(n, f"{home}/globalmount{below}") for n, below in ((1, ""), (2, "/x"))]
    devices = [blockdev.BlockDevice("rbd2", (252, 2), "rbd", 1, False)]
    for host, device in ((mounts, ""), (mounts[1:], "rbd2")):  # ceph-csi mounts below
        (found,), _ = records.volumes(str(tmp_path), host, devices)
        assert found.device == device


def _write(home: Path, handle: str, *, age: float = 60.0) -> None:
    home.mkdir(parents=True, exist_ok=True)
    record = home / "vol_data.json"
    record.write_text(json.dumps({"volumeHandle": handle}))
    for path in (record, *home.parents[:4], home):
        os.utime(path, (time.time() - age,) * 2)


def test_records_that_changed_are_read_again_and_others_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that was written a moment ago, whose next change would have the same time."""
    kubelet = f"{tmp_path}/kubelet"
    homes = [Path(kubelet, f"pods/{uid}/volumes/kubernetes.io~csi/pv") for uid in ("a", "b")]
    for home in homes:
        _write(home, f"handle of {home.parts[-4]}")
    mounts = [_mount(1, f"{homes[0]}/mount")]
    read: list[str] = []
    real = records._json

    def reading(path: str) -> dict[str, Any]:
        read.append(path)
        return real(path)

    monkeypatch.setattr(records, "_json", reading)
    monkeypatch.setattr(records, "_SETTLED_SECONDS", -60.0)  # ctime is now, whatever utime says
    files = records.Files()

    def handles(*, quick: bool) -> set[str]:
        if not quick:
            files.begin()
        by_target = {mount.target: mount for mount in mounts}
        found = records._publishes(kubelet, "", by_target, files, quick)
        return {publish.handle for each in found.values() for publish in each}

    assert handles(quick=False) == {"handle of a", "handle of b"} and len(read) == 2
    read.clear()
    assert handles(quick=False) == handles(quick=True) == {"handle of a", "handle of b"}
    assert not read
    _write(homes[1], "other")  # not mounted yet
    assert handles(quick=True) == {"handle of a", "other"} and len(read) == 1
    _write(homes[0].with_name("pv-2"), "second")
    assert handles(quick=True) == {"handle of a", "other"}  # it is not mounted
    mounts.append(_mount(2, f"{homes[0].with_name('pv-2')}/mount"))
    assert handles(quick=True) == {"handle of a", "other", "second"}
    monkeypatch.setattr(records, "_SETTLED_SECONDS", 60.0)
    _write(homes[1], "young")
    read.clear()
    assert "young" in handles(quick=True) and "young" in handles(quick=True) and len(read) == 2


def test_quick_scan_forgets_nothing_of_a_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Directories that did not change are listed once, however many quick scans lie between."""
    home = tmp_path / "pods/a/volumes/kubernetes.io~csi/pv-1"
    home.mkdir(parents=True)
    _write(home, "handle")
    listed: list[str] = []
    real = rbd_sysfs.listed

    def listing(path: str) -> list[str]:
        listed.append(path)
        return real(path)

    monkeypatch.setattr(rbd_sysfs, "listed", listing)
    monkeypatch.setattr(records, "_SETTLED_SECONDS", -60.0)
    files = records.Files()

    def scan(*, quick: bool) -> int:
        listed.clear()
        records.volumes(str(tmp_path), [], [], files=files, quick=quick)
        return len(listed)

    assert scan(quick=False) >= 2
    assert (scan(quick=True), scan(quick=True), scan(quick=False)) == (0, 0, 0)
    (home.parent / "pv-2").mkdir()
    assert scan(quick=False) == 1


def _raw(kubelet: Path, name: str, meta: dict[str, Any] | None = None) -> str:
    base = kubelet / "plugins/kubernetes.io/csi/volumeDevices"
    record = {"driverName": "d.example", "volumeHandle": f"h-{name}", "specVolID": name}
    (base / name / "data").mkdir(parents=True)
    (base / name / "data/vol_data.json").write_text(json.dumps(record))
    for home in (base / "publish" / name, base / name / "dev"):
        home.mkdir(parents=True)
        (home / "uid").touch()
    if meta is not None:
        (base / "staging" / name).mkdir(parents=True)
        (base / "staging" / name / "image-meta.json").write_text(json.dumps(meta))
    return f"{base}/publish/{name}/uid"


def _table(kubelet: Path, *targets: str) -> list[mountinfo.Mount]:
    lines = (f"9 1 0:6 /node {target} rw - devtmpfs devtmpfs rw" for target in targets)
    return [mountinfo.parse_line(line.encode()) for line in lines]


def test_raw_block_volumes_are_found_by_ceph_csis_record_else_by_their_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that nobody removed has the number of the device that came after it."""
    one = _raw(tmp_path, "one", {"pool": "rbd", "image": "one", "device": "/dev/rbd1"})
    two = _raw(tmp_path, "two")
    _raw(tmp_path, "three")
    also = one.replace("publish/one", "one/dev")
    (tmp_path / "sys/dev/block").mkdir(parents=True)
    for n in (0, 1):
        (tmp_path / f"sys/dev/block/252:{n}").symlink_to(f"../../rbd{n}")

    def nodes(root: str, targets: list[str]) -> dict[str, tuple[int, int] | None]:
        there = {one: (252, 0), also: (252, 1), two: (252, 0)} if root == "/kubelets" else {}
        return {target: there.get(target) for target in targets}

    monkeypatch.setattr(raw_block, "block_nodes", nodes)
    devices = [blockdev.BlockDevice(f"rbd{n}", (252, n), "rbd", 1, False) for n in (0, 1)]
    found, _ = records.volumes(
        str(tmp_path), _table(tmp_path, one, also, two), devices,
        roots=("", "/kubelets"), sys=tmp_path / "sys",
    )  # fmt: skip
    assert {(v.name, v.handle, v.device, v.number) for v in found} == {
        ("one", "h-one", "rbd1", (252, 1)),
        ("two", "h-two", "rbd0", (252, 0)),
        ("three", "h-three", "", None),
    }
    assert [p.path for v in found for p in v.publishes] == [also, two]


def test_an_old_record_of_ceph_csi_names_a_device_that_shows_another_image() -> None:
    image = rbd_sysfs.RbdImage(pool="rbd", name="new")
    device = blockdev.BlockDevice("rbd0", (252, 0), "rbd", 1, False, image=image)
    known = records._Devices([device], "/none", "/none")
    for name, found in (("new", device), ("old", None)):
        meta = {"pool": "rbd", "image": name, "device": "/dev/rbd0"}
        assert records._device(meta, records._image(meta), (), known) is found


@pytest.mark.parametrize(("bound", "expected"), [
    ((), []),  # a node that is only a file
    (("one",), ["d.example", "h-one", "one"]),
    (("one", "two"), []),  # two records fit
])  # fmt: skip
@pytest.mark.parametrize("fails", [False, True])
def test_a_device_is_named_for_the_witness_by_what_is_published(
    bound: tuple[str, ...],
    expected: list[str],
    fails: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For any CSI driver. What cannot be read adds nothing."""
    paths = {name: _raw(tmp_path, name) for name in ("one", "two")}
    made = {
        "vdb": blockdev.BlockDevice("vdb", (252, 0), "virtblk", 1, False),
        "dm-9": blockdev.BlockDevice("dm-9", (253, 9), "device-mapper", 1, False),
    }
    monkeypatch.setattr(blockdev, "identify", made.get)
    monkeypatch.setattr(blockdev, "name_of", lambda number, sysfs: "vdb")
    monkeypatch.setattr(records, "host_root", lambda proc: "")
    monkeypatch.setattr(
        raw_block, "block_nodes", lambda root, targets: dict.fromkeys(targets, (252, 0))
    )
    table = _table(tmp_path, *(paths[name] for name in bound))
    monkeypatch.setattr(mountinfo, "parse", lambda data: table)

    def reached(names: Any, known: dict[str, stack.StackedDevice], *_: Any) -> None:
        if fails:
            raise OSError(5, "no sysfs")
        luks = stack.StackedDevice("dm-9", (253, 9), size=1, uuid="CRYPT-1", below=("vdb",))
        known |= {"vdb": stack.StackedDevice("vdb", (252, 0), size=1), "dm-9": luks}

    monkeypatch.setattr(stack, "reached", reached)
    assert records.on_device("vdb", str(tmp_path)) == expected
    assert records.on_device("dm-9", str(tmp_path)) == ([] if fails else expected)
