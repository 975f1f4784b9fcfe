"""A scan of an invented /proc and host root: kubelet's directory, and the trip through the pipe."""

import asyncio
import dataclasses
import json
import os
import stat
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kit.child
import kit.messages
import kit.processes
from linux import blockdev, loop
from tests.volumes.audit.world import (
    DEVICE,
    IMAGE,
    INVENTORY,
    OWNER,
    device,
    place,
    scene,
    space,
    volume,
)
from volumes.audit import repair, scheduler
from volumes.audit.inventory import holders, model, scan
from volumes.audit.inventory.holders import Processes
from volumes.audit.inventory.model import Inventory
from volumes.audit.rules import mappings, mounting
from volumes.node import raw_block

CSI = "plugins/kubernetes.io/csi/rbd.csi.ceph.com/aa"


POD = "0::/kubepods.slice/kubepods-pod8d2a38a4_b6d2_4e0c_a9a2_5f4a7d2c9c11.slice/cri-x.scope"


class Host:
    """What a look needs of /proc; the host's files lie below ``root``, not below ours."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.root = folder / "proc", folder / "root"
        self.root.mkdir()
        self.processes = 0
        self.process("systemd")
        (self.proc / "1/root").symlink_to(self.root)
        (self.proc / "devices").write_text("Block devices:\n  7 loop\n")
        self.mounts("/")

    def process(self, comm: str, cgroup: str = "0::/x", space: int = 4026531841) -> None:
        self.processes += 1
        home = self.proc / str(self.processes)
        (home / "ns").mkdir(parents=True)
        (home / "ns/mnt").symlink_to(f"mnt:[{space}]")
        (home / "comm").write_text(f"{comm}\n")
        (home / "cgroup").write_text(f"{cgroup}\n")

    def mounts(self, *targets: str) -> None:
        lines = (
            f"{n} 1 8:1 / {at} rw shared:1 - ext4 /dev/sda1 rw" for n, at in enumerate(targets)
        )
        (self.proc / "1/mountinfo").write_text("".join(f"{line}\n" for line in lines))

    def look(
        self,
        *,
        users_of: tuple[str, ...] = ("none",),
        kubelet_set: bool = False,
        deep: bool = False,
        kept: scan.Kept | None = None,
    ) -> Inventory:
        request = scan.Request(
            drivers=("none",),
            kubelet="/var/lib/kubelet",
            proc=str(self.proc),
            sys="/sys",
            containers="/nonexistent",
            deep=deep,
            users_of=users_of,
            kubelet_set=kubelet_set,
        )
        return scan.scan(request, kept)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_a_scan_is_of_the_time_when_it_begins(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes while it runs, a line of the log above all, it may not have seen."""
    read = blockdev.Scans.scan
    times: list[float] = []

    def noted(*arguments: Any) -> list[blockdev.BlockDevice]:
        times.append(time.time())
        return read(*arguments)

    monkeypatch.setattr(blockdev.Scans, "scan", noted)
    assert host.look().taken <= times[0]


@pytest.mark.parametrize("link", ["/data/kubelet", "../../data/./kubelet", "/srv/../srv/k"])
def test_linked_kubelet_directory_is_followed_on_the_host(host: Host, link: str) -> None:
    staging = host.root / "data/kubelet" / CSI
    (staging / "globalmount").mkdir(parents=True)
    (staging / "vol_data.json").write_text(json.dumps({"volumeHandle": "h1"}))
    meta = {"pool": "rbd", "image": "csi-vol-1"}
    (staging / "globalmount/image-meta.json").write_text(json.dumps(meta))
    (host.root / "srv").mkdir()
    (host.root / "srv/k").symlink_to("/data/kubelet")
    (host.root / "var/lib").mkdir(parents=True)
    (host.root / "var/lib/kubelet").symlink_to(link)
    mounted = f"/data/kubelet/{CSI}/globalmount/h1"
    host.mounts("/", "/data", mounted)
    inventory = host.look(kubelet_set=True)
    (volume,) = inventory.volumes
    assert (volume.handle, volume.mounts) == ("h1", (mounted,))
    assert volume.image is not None and volume.image.name == "csi-vol-1"
    assert inventory.kubelet is not None and inventory.kubelet.target == "/data"
    assert inventory.no_records == ""


def test_loop_of_links_ends(host: Host) -> None:
    (host.root / "var/lib").mkdir(parents=True)
    (host.root / "var/lib/kubelet").symlink_to("kubelet")
    assert "no kubelet directory" in host.look(kubelet_set=True).no_records


def test_missing_kubelet_directory_is_a_gap_only_with_a_kubelet(host: Host) -> None:
    nothing = host.look()
    assert (nothing.no_records, nothing.gaps) == ("", ())  # no kubelet here, nothing is missing
    assert "at /var/lib/kubelet" in host.look(kubelet_set=True).no_records  # somebody said so
    host.process("kubelet")
    missing = host.look()
    assert missing.no_records == "no kubelet directory at /var/lib/kubelet"
    assert any("set kubelet.root_dir" in gap for gap in missing.gaps)
    (host.root / "var/lib/kubelet").mkdir(parents=True)
    assert host.look().no_records == ""


@pytest.mark.parametrize(
    ("name", "cgroup", "ours"),
    [
        ("kubelet", "0::/system.slice/kubelet.service", True),
        ("kubelite", "0::/system.slice/snap.service", True),
        ("k3s-agent", "0::/x", True),
        ("kubelet", POD, False),  # a cluster in a pod has its own records and mounts
        ("k3s-server", POD, False),
        ("kubelet-wrapper", "0::/x", False),
    ],
)
def test_only_this_nodes_kubelet_counts_whatever_contains_it(
    host: Host, name: str, cgroup: str, ours: bool
) -> None:
    host.process(name, cgroup, space=4026532000)
    line = "7 1 8:2 / /var/lib/kubelet rw - ext4 /dev/sda2 rw\n"
    (host.proc / "2/mountinfo").write_text(line)
    (host.proc / "2/root").symlink_to(host.root)
    assert (host.look().no_records != "") == ours
    (host.root / "var/lib/kubelet").mkdir(parents=True)
    found = host.look().kubelet
    assert found is not None
    tables = scan._host_tables(str(host.proc), Processes(str(host.proc), "/none"), [], scan.Kept())
    assert (4026532000 in tables) == ours


def test_quick_scan_keeps_no_records_until_the_directory_exists() -> None:
    before = dataclasses.replace(INVENTORY, no_records="no kubelet directory at /k")
    quick = dataclasses.replace(INVENTORY, deep=False)
    assert scheduler.merged(quick, before).no_records == before.no_records
    there = dataclasses.replace(quick, kubelet=place("/", device=(8, 1)))
    assert scheduler.merged(there, before).no_records == ""
    assert scheduler.merged(INVENTORY, before).no_records == ""  # a full look knows itself


def test_inventory_survives_the_pipe() -> None:
    """Names of files need not be UTF-8."""
    odd = place("/mnt/" + os.fsdecode(b"\xff"))
    at = scene(
        spaces=(space(),),
        host=(odd,),
        volumes=(volume(image=IMAGE),),
        raw={"rbd0": ("/dev/x",)},
        users=(model.User(OWNER, (8, 1), ("fd 3",), 1),),
    )
    assert at.inventory is not None
    assert at.inventory.by_number  # what is computed is not sent
    text = kit.messages.encode(at.inventory)
    assert kit.messages.decode(text, Inventory) == at.inventory


def test_mount_that_appears_during_the_visit_is_on_the_host(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Namespaces visited after it show it; without the host's mount it would look leaked."""
    disk = dataclasses.replace(DEVICE, number=(8, 1))
    monkeypatch.setattr(blockdev.Scans, "scan", lambda *_: [disk])
    host.mounts()
    copy = place("/globalmount", device=(8, 1), propagation="slave")

    class Visit:
        def __init__(self, *_: object) -> None: ...

        def visit(self, _: object) -> holders.Visited:
            host.mounts("/globalmount")
            return holders.Visited(spaces=[space(copy)])

    monkeypatch.setattr(holders, "Namespaces", Visit)
    inventory = host.look(deep=True)
    assert [mount.target for mount in inventory.on_host(disk)] == ["/globalmount"]
    assert mounting.copies(inventory, disk) == []


RBD = blockdev.BlockDevice("rbd0", (252, 0), "rbd", 1, False, diskseq=1, image=IMAGE)
RAW = "/var/lib/kubelet/plugins/kubernetes.io/csi/volumeDevices"


def _closed_raw_volume(host: Host, monkeypatch: pytest.MonkeyPatch) -> Inventory:
    """Its pod has it closed at this moment: nothing but kubelet's traces says that it is used."""
    monkeypatch.setattr(blockdev.Scans, "scan", lambda *_: [RBD])
    found = host.look(users_of=("rbd0",), deep=True)
    assert found.devices == (RBD,)
    return dataclasses.replace(found, kubelet=found.kubelet or place("/var/lib/kubelet"))


def _check_held(found: Inventory, where: str) -> None:
    assert found.raw == {"rbd0": (where,)}
    assert not mappings.is_idle(found, RBD)
    assert repair.why_held(found, RBD) == "it is in use again"


def test_device_without_a_trace_of_kubelet_is_idle(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert mappings.is_idle(_closed_raw_volume(host, monkeypatch), RBD)


def test_guard_and_audit_agree_on_a_raw_volume(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    target = f"{RAW}/publish/pv/uid"
    table = host.proc / "1/mountinfo"
    table.write_text(f"7 1 0:5 /rbd0 {target} rw - devtmpfs udev rw\n")
    assert raw_block.published(table.read_bytes()) == {"rbd0": {7}}
    _check_held(_closed_raw_volume(host, monkeypatch), target)


@pytest.mark.parametrize("own_namespace", [False, True])
def test_raw_volume_on_a_node_of_tmpfs_is_not_idle(
    host: Host, monkeypatch: pytest.MonkeyPatch, own_namespace: bool
) -> None:
    target = f"{RAW}/publish/pv/uid"
    line = f"7 1 0:9 /anything {target} rw - tmpfs tmpfs rw\n"
    home = "1"
    if own_namespace:
        host.process("kubelet")
        home = str(host.processes)
        (host.proc / home / "ns/mnt").unlink()
        (host.proc / home / "ns/mnt").symlink_to("mnt:[4026531999]")
        (host.proc / home / "root").symlink_to(host.proc.parent / "other")
    (host.proc / home / "mountinfo").write_text(line)
    seen = os.stat

    def stat_of(path: str, *given: Any, **more: Any) -> Any:
        if str(path) == f"{host.proc}/{home}/root{target}":
            return SimpleNamespace(st_mode=stat.S_IFBLK | 0o600, st_rdev=os.makedev(252, 0))
        return seen(path, *given, **more)

    monkeypatch.setattr(os, "stat", stat_of)
    _check_held(_closed_raw_volume(host, monkeypatch), target)


@pytest.mark.parametrize(
    "meta",
    [
        {"pool": IMAGE.pool, "image": IMAGE.name, "device": "/dev/rbd0"},
        {"pool": IMAGE.pool, "image": IMAGE.name, "radosNamespace": IMAGE.namespace},
    ],
)
def test_raw_volume_of_which_kubelet_has_a_record_is_not_idle(
    host: Host, monkeypatch: pytest.MonkeyPatch, meta: dict[str, str]
) -> None:
    data = Path(f"{host.root}{RAW}/pv/data")
    staging = Path(f"{host.root}{RAW}/staging/pv")
    for each in (data, staging):
        each.mkdir(parents=True)
    (staging / "image-meta.json").write_text(json.dumps(meta))
    assert mappings.is_idle(_closed_raw_volume(host, monkeypatch), RBD)  # not kubelet's
    (data / "vol_data.json").write_text(json.dumps({"specVolID": "pv", "volumeHandle": "h"}))
    _check_held(_closed_raw_volume(host, monkeypatch), f"{RAW}/pv")


A, B = (dataclasses.replace(IMAGE, name=name) for name in "AB")
STALE = {"staging": f"{RAW}/pv", "image": A, "device": "nbd0"}


@pytest.mark.parametrize(("volumes", "expected"), [
    ([volume(device="nbd0", image=B), volume(**STALE)], B),
    ([volume(device="nbd0", image=A), volume(device="nbd0", image=B, number=(43, 0))], B),
    ([volume(**STALE)], None),
    ([volume(**{**STALE, "device": ""})], None),
])  # fmt: skip
def test_an_image_that_the_driver_does_not_show_is_that_of_what_is_there(
    volumes: list[model.Volume], expected: Any
) -> None:
    """Not that of a record that an earlier attachment left behind."""
    nbd = blockdev.BlockDevice("nbd0", (43, 0), "nbd", 1, False)
    assert [each.image for each in scan._named([nbd], volumes)] == [expected]


def test_quick_scan_sees_what_kubelet_alone_has_mounted(host: Host) -> None:
    """A rule that asks two looks in a row would see it only now and then."""
    home = f"/var/lib/kubelet/{CSI}"
    (host.root / home[1:]).mkdir(parents=True)
    (host.root / home[1:] / "vol_data.json").write_text(json.dumps({"volumeHandle": "h1"}))
    host.process("kubelet", space=4026531999)
    line = f"7 1 8:2 / {home}/globalmount rw - ext4 /dev/sda2 rw\n"
    (host.proc / "2/mountinfo").write_text(line)
    kept = scan.Kept()

    def seen(*, deep: bool = False) -> list[int]:
        found = host.look(users_of=(), deep=deep, kept=kept)
        return [len(each.mounts) for each in found.volumes] + list(found.host_spaces)

    assert seen() == [0, 4026531841]
    for deep in (True, False, False):
        assert seen(deep=deep) == [1, 4026531841, 4026531999]
    (host.proc / "2/comm").write_text("another\n")  # it has the pid now
    assert seen() == [0, 4026531841]


def test_related_devices_share_content_or_a_client() -> None:
    watched = [DEVICE]
    others = {
        "the same image": device(name="rbd1", client=None),
        "a snapshot of it": device(
            name="rbd2", client=None, image=dataclasses.replace(IMAGE, snapshot="s")
        ),
        "the same client": device(name="rbd3", image=dataclasses.replace(IMAGE, name="another")),
        "a stranger": device(
            name="rbd4", client=None, image=dataclasses.replace(IMAGE, name="another")
        ),
        "a loop of nothing": blockdev.BlockDevice("loop0", (7, 0), "loop", 1, False),
    }
    found = model.related(watched, others.values())
    assert {each for each in others if others[each] in found} == {
        "the same image", "the same client",
    }  # fmt: skip
    file = blockdev.BlockDevice("loop1", (7, 1), "loop", 1, False, backing="/image")
    assert model.related([file], [dataclasses.replace(file, name="loop2")])


@pytest.mark.parametrize(("errors", "options", "stops"), [
    ("1", "rw\nerrors=remount-ro\n", True),
    ("3", "rw\nerrors=continue\n", False),
    ("3", None, False),
    ("0", "rw\nerrors=remount-ro\n", None),
])  # fmt: skip
def test_errors_of_a_live_ext4_are_read_from_sysfs(
    tmp_path: Path, errors: str, options: str | None, stops: bool | None
) -> None:
    """Also of one that lies on a mapping; whether it stops at an error, /proc/fs says."""
    sys, proc = tmp_path / "sys", tmp_path / "proc"
    for folder, name, text in (
        (sys / "fs/ext4/dm-3", "errors_count", errors),
        (sys / "fs/ext4/dm-3", "last_error_time", "1700000000"),
        (proc / "fs/ext4/dm-3", "options", options),
    ):
        folder.mkdir(parents=True, exist_ok=True)
        if text is not None:
            (folder / name).write_text(f"{text}\n")
    layers = (blockdev.DeviceLayer("dm-3", (253, 3), ("ext4",)),)
    found = scan._fs_errors([device(active=("ext4",), layers=layers)], str(sys), str(proc))
    if stops is None:
        assert found == {}
    else:
        assert found == {"dm-3": model.FsErrors(int(errors), 1700000000.0, stops)}


@pytest.mark.parametrize("hangs", [False, True])
async def test_a_loop_device_whose_file_hangs_costs_the_loop_devices_alone(
    monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    deadlines = []

    async def call(*_: object, deadline: float) -> tuple[list[loop.Backing], list[str]]:
        deadlines.append(deadline)
        if hangs:
            raise kit.processes.DeadlineError("backings", "no answer within 5s", "")
        return [("loop3", "/mnt/disk.img", [[0, 0], [8, 1]]), ("loop4", "/x", [[8, 2]])], []

    monkeypatch.setattr(kit.child, "call", call)
    seen = model.User(OWNER, (8, 1), ("fd 3",), 1)
    searched = dataclasses.replace(INVENTORY, users=(seen,), users_of=((8, 1),))
    until = time.monotonic() + (2.0 if hangs else 60.0)
    found = await scan._with_loops(searched, until)
    assert 0 < deadlines[0] <= (2.0 if hangs else scan.LOOPS_SECONDS), "what the scan has left"
    assert found.users[0] == seen
    assert [each.owner.label for each in found.users[1:]] == (
        [] if hangs else ["loop device loop3"]
    )
    assert len(found.gaps) == hangs


@pytest.mark.parametrize(
    ("hung", "ends"), [(0, True), (0, False), (3, True), (3, False), (4, True)]
)
async def test_loop_devices_of_servers_are_asked_each_by_itself(
    monkeypatch: pytest.MonkeyPatch, hung: int, ends: bool
) -> None:
    """One whose path looks served may lie on a disk: the path is of another mount namespace. So
    many hang since an earlier scan. Of five others the server is dead; the child that asked
    ``ends`` when it is killed."""
    names = [f"loop{number}" for number in range(20)]
    hanging, dead = set(names[:hung]), set(names[15:])

    async def call(function: object, *name: str, deadline: float) -> object:
        assert 0 < deadline <= scan.LOOPS_SECONDS
        if function is loop.backings:
            return [], names
        await asyncio.sleep(0)
        if name[0] in dead:
            hanging.update(() if ends else name)
            assert len(hanging) <= 4, "no more of them than that hang at once"
            raise kit.processes.DeadlineError("backing", "no answer within 2s", "")
        return [(name[0], "/x", [[8, 1]])]

    async def hangs(_: object, name: str, *, seconds: float = 0.0) -> bool:
        return name in hanging

    monkeypatch.setattr(kit.child, "call", call)
    monkeypatch.setattr(kit.child, "hangs", hangs)
    answered = set()
    for _ in range(1 if ends else 100):
        hanging = set(names[:hung])
        found, silent = await scan.backings(5.0)
        now = {name for name, _, _ in found}
        assert sorted([*now, *silent]) == sorted(names)
        answered |= now
    assert answered == (set() if hung == 4 else set(names[hung:15])), "each has its turn"
    inventory = await scan._with_loops(INVENTORY, time.monotonic() + 60)
    assert inventory.gaps[-1].startswith("loop devices: no answer of ")
