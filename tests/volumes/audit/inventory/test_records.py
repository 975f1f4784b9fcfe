"""kubelet's records and their mounts, by index: as many comparisons as there are volumes."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from linux import blockdev, mountinfo, rbd_sysfs, stack
from volumes.audit.inventory import model, records
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
    (kubelet / "pods/uid").mkdir(parents=True, exist_ok=True)
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


def _line(number: str, target: str, rest: str) -> mountinfo.Mount:
    root, more = rest.split(" ", 1)
    return mountinfo.parse_line(f"9 1 {number} {root} {target} rw - {more} rw".encode())


def _bound(target: str, root: str = "/node") -> mountinfo.Mount:
    return _line("0:6", target, f"{root} devtmpfs devtmpfs")


def _rbd(number: int, image: str = "") -> blockdev.BlockDevice:
    its = rbd_sysfs.RbdImage(pool="rbd", name=image) if image else None
    return blockdev.BlockDevice(f"rbd{number}", (252, number), "rbd", 1, False, image=its)


def test_raw_block_volumes_are_found_by_their_nodes_and_the_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mount that nobody removed may have the number of the device that came after it."""
    paths = {
        name: _raw(tmp_path, name, {"pool": "rbd", "image": name} if image else None)
        for name, image in (
            *(("one", True), ("two", False), ("none", False), ("secret", True), ("off", True)),
            *(("old", True), ("gone", False), ("renamed", False)),
        )
    }
    also = paths["one"].replace("publish/one", "one/dev")
    (tmp_path / "sys/dev/block").mkdir(parents=True)
    for name, number in (
        ("rbd0", "252:0"),
        ("rbd1", "252:1"),
        ("rbd2", "252:2"),
        ("dm-3", "253:3"),
    ):
        (tmp_path / f"sys/dev/block/{number}").symlink_to(f"../../{name}")
    (tmp_path / "sys/class/block/dm-3/slaves/rbd2").mkdir(parents=True)
    nodes = {
        paths["one"]: (252, 0), also: (252, 1), paths["two"]: (252, 0),
        paths["secret"]: (253, 3), paths["off"]: (252, 0), paths["old"]: (252, 0),
        paths["gone"]: (252, 0), paths["renamed"]: (252, 0),
    }  # fmt: skip

    def block_nodes(root: str, targets: list[str]) -> dict[str, tuple[int, int] | None]:
        return {each: nodes.get(each) if root == "/kubelets" else None for each in targets}

    monkeypatch.setattr(raw_block, "block_nodes", block_nodes)
    table = [_bound(each) for each in (*(paths[n] for n in ("one", "two", "secret", "off")), also)]
    table += [_bound(paths[n], "/rbd7//deleted") for n in ("old", "gone")]
    table.append(_bound(paths["renamed"], "/mapper/a//deleted"))
    devices = [_rbd(0, "new"), _rbd(1, "one"), _rbd(2, "secret")]
    found, _ = records.volumes(
        str(tmp_path), table, devices, roots=("", "/kubelets"), sys=tmp_path / "sys"
    )
    assert {v.name: (v.device, v.number, v.on if v.gone else "") for v in found} == {
        "one": ("rbd1", (252, 1), ""),
        "two": ("rbd0", (252, 0), ""),
        "none": ("", None, ""),
        "secret": ("rbd2", (253, 3), ""),
        "off": ("", None, ""),  # no device shows its image
        "old": ("", None, "rbd7"),
        "gone": ("", None, "rbd7"),
        "renamed": ("", None, ""),
    }
    assert {v.name: [p.path for p in v.publishes] for v in found if v.publishes} == {
        "one": [also],
        **{name: [paths[name]] for name in ("two", "secret", "old", "gone")},
    }


CEPH = {"pool": "rbd", "image": "one"}


@pytest.mark.parametrize(("devices", "expected"), [
    ([_rbd(3, "one")], ("rbd3", "")),  # mapped again, and not yet published to the new pod
    ([_rbd(0, "new"), _rbd(3, "one")], ("rbd3", "")),
    ([_rbd(0, "new")], ("", "rbd0")),  # the record is of an earlier attachment
    ([_rbd(0)], ("rbd0", "")),  # a driver that shows no image
    ([], ("", "rbd0")),
])  # fmt: skip
def test_a_raw_block_volume_is_on_a_device_that_shows_its_image(
    devices: list[blockdev.BlockDevice], expected: tuple[str, str], tmp_path: Path
) -> None:
    path = _raw(tmp_path, "one", {**CEPH, "device": "/dev/rbd0"})
    (found,), _ = records.volumes(str(tmp_path), [_bound(path, "/rbd0//deleted")], devices)
    assert (found.device, found.on if found.gone else "") == expected
    # A pod that has lost its device does not keep it busy.
    assert [p.path for p in found.publishes] == ([] if found.device else [path])


def test_what_a_record_names_first_is_asked_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lease waits for it: no other device is read then."""
    home = tmp_path / "plugins/kubernetes.io/csi/d.example/a"
    home.mkdir(parents=True)
    record = {"driverName": "d.example", "volumeHandle": "h-a", "specVolID": "a"}
    (home / "vol_data.json").write_text(json.dumps(record))
    table = [_line("252:0", f"{home}/globalmount", "/ ext4 /dev/rbd0")]
    asked: list[str] = []
    monkeypatch.setattr(blockdev, "identify", lambda name: _rbd(0))
    monkeypatch.setattr(records, "host_root", lambda proc: "")
    monkeypatch.setattr(mountinfo, "parse", lambda data: table)
    monkeypatch.setattr(stack, "reached", lambda names, *_: asked.extend(names))
    assert records.on_device("rbd0", str(tmp_path)) == ["d.example", "h-a", "a"]
    assert asked == []


def test_drivers_are_read_once_for_all_volumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for number in range(3):
        home = tmp_path / f"devices/sd{number}"
        home.mkdir(parents=True)
        (home / "dev").write_text(f"8:{number}\n")
        for at in (f"class/block/sd{number}", f"dev/block/8:{number}"):
            (tmp_path / at).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / at).symlink_to(home)
        found.append(model.Volume("d", f"h{number}", "s", (), "", None, (), number=(8, number)))
    read: list[object] = []

    def majors(proc: object) -> dict[int, str]:
        read.append(proc)
        return {8: "sd"}

    monkeypatch.setattr(blockdev, "majors", majors)
    said, _ = records.on_disks(found, {}, tmp_path)
    assert [volume.on for volume in said] == ["sd0", "sd1", "sd2"] and len(read) == 1


@pytest.mark.parametrize(("name", "mounts", "meta", "expected"), [
    ("vdb", {"one": ""}, None, ""),  # a node that is only a file
    ("vdb", {"one": "/vdb"}, None, "one"),
    ("vdb", {"one": "/vdb", "two": "/vdb"}, None, ""),  # two records fit
    ("vdb", {"one": "/vdb//deleted"}, None, ""),  # the number is the next device's
    ("vdb", {"one": "/vdb//deleted", "two": "/vdb"}, None, "two"),
    ("vdb", {"a": "/ ext4 /dev/vdb"}, None, "a"),
    ("vdb", {"a": "/ lustre 10.0.0.1@tcp:/fs"}, None, ""),  # its number may be a disk's
    # On a device that a staged volume is on: the first of them.
    ("vdb", {"one": "/vdb", "a": "/ ext4 /dev/vdb", "b": "/ ext4 /dev/vdb"}, None, "a"),
    ("dm-9", {"one": "/vdb"}, None, "one"),  # LUKS on it
    ("rbd0", {"one": "/rbd0"}, CEPH, ""),  # rbd0 shows another image
    ("rbd0", {"one": "/rbd0"}, {**CEPH, "device": "/dev/rbd0"}, ""),
    ("rbd0", {"one": "/rbd0"}, {**CEPH, "image": "new"}, "one"),
    ("rbd0", {"one": "/rbd0", "a": "/ ext4 /dev/rbd0"}, CEPH, "a"),
    ("rbd0", {"one": "/rbd0//deleted", "a": "/ ext4 /dev/rbd0"}, CEPH, "a"),
    ("rbd0", {"one": "/dm-4"}, {**CEPH, "image": "new"}, "one"),  # encrypted
])  # fmt: skip
@pytest.mark.parametrize("fails", [False, True])
def test_which_volume_is_on_a_device_for_the_witness(
    name: str, mounts: dict[str, str], meta: dict[str, str] | None, expected: str, fails: bool,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """For any CSI driver: "one" and "two" are published as raw block, others staged. What cannot be
    read adds nothing."""
    sizes: dict[str, stack.StackedDevice] = {
        "vdb": stack.StackedDevice("vdb", (254, 16), size=1),
        "rbd0": stack.StackedDevice("rbd0", (252, 0), size=1),
        "dm-9": stack.StackedDevice("dm-9", (253, 9), size=1, uuid="CRYPT-LUKS", below=("vdb",)),
        "dm-4": stack.StackedDevice("dm-4", (253, 4), size=1, uuid="CRYPT-LUKS", below=("rbd0",)),
    }
    numbers = {each.number: each.name for each in sizes.values()}
    made = {n: blockdev.BlockDevice(n, each.number, "", 1, False) for n, each in sizes.items()}
    made["rbd0"] = _rbd(0, "new")
    table, nodes = [], {}
    for volume, rest in mounts.items():
        node = next((each for each in sizes if rest.startswith(f"/{each}")), "vdb")
        number = sizes["rbd0" if "/dev/rbd0" in rest else node].number
        if volume in ("one", "two"):
            path = _raw(tmp_path, volume, meta if volume == "one" else None)
            nodes[path] = number
            table += [_bound(path, rest)] if rest else []
        else:
            home = tmp_path / f"plugins/kubernetes.io/csi/d.example/{volume}"
            home.mkdir(parents=True)
            record = {"driverName": "d.example", "volumeHandle": f"h-{volume}"}
            (home / "vol_data.json").write_text(json.dumps({**record, "specVolID": volume}))
            table.append(_line("{}:{}".format(*number), f"{home}/globalmount", rest))

    def reached(names: Any, known: dict[str, stack.StackedDevice], *_: Any) -> None:
        if fails:
            raise OSError(5, "no sysfs")
        known |= {each: sizes[each] for first in names for each in (first, *sizes[first].below)}

    slaves = {f"{each.name}/slaves": list(each.below) for each in sizes.values()}
    listed = rbd_sysfs.listed
    monkeypatch.setattr(
        rbd_sysfs, "listed", lambda at: slaves.get("/".join(at.split("/")[-2:])) or listed(at)
    )
    monkeypatch.setattr(blockdev, "identify", made.get)
    monkeypatch.setattr(blockdev, "name_of", lambda number, sysfs="": numbers.get(number, ""))
    monkeypatch.setattr(records, "host_root", lambda proc: "")
    monkeypatch.setattr(raw_block, "block_nodes", lambda _, paths: {p: nodes[p] for p in paths})
    monkeypatch.setattr(mountinfo, "parse", lambda data: table)
    monkeypatch.setattr(stack, "reached", reached)
    if fails and (name == "dm-9" or "/dm-4" in mounts.values()):
        expected = ""
    said = records.on_device(name, str(tmp_path))
    assert said == (["d.example", f"h-{expected}", expected] if expected else [])
