"""Trees of files stand in for drivers that this kernel does not have; loop devices are real."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kit.errors
from linux import blockdev
from linux.blockdev import BlockDevice, DeviceLayer
from linux.rbd_sysfs import RbdClient, RbdImage
from tests.testbed import blockdev as testbed
from tests.testbed.waiting import until


class Tree:
    """A sysfs and a proc with what a test puts there."""

    def __init__(self, folder: Path) -> None:
        self.sys, self.proc = folder / "sys", folder / "proc"
        self.write(
            self.proc / "devices",
            "Character devices:\n 5 rbd9\n\nBlock devices:\n  7 loop\n 43 nbd\n252 rbd\n"
            "253 device-mapper\n254 rbd3\n259 blkext\n",
        )
        (self.sys / "block").mkdir(parents=True)
        (self.sys / "class/block").mkdir(parents=True)

    @staticmethod
    def write(path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def disk(self, name: str, number: str, **files: str) -> Path:
        home = self.sys / "block" / name
        content = {"dev": number, "size": "2048", "ro": "0", "diskseq": "7"} | files
        for file, text in content.items():
            self.write(home / file, text)
        (home / "holders").mkdir()
        (self.sys / "class/block" / name).symlink_to(home)
        return home

    def partition(self, disk: str, name: str, number: str) -> Path:
        home = self.sys / "block" / disk / name
        for file, text in {"dev": number, "size": "1024", "partition": "1"}.items():
            self.write(home / file, text)
        (home / "holders").mkdir()
        (self.sys / "class/block" / name).symlink_to(home)
        return home

    def hold(self, below: Path, holder: str) -> None:
        (below / "holders" / holder).symlink_to(self.sys / "block" / holder)

    def superblock(self, fs: str, name: str) -> None:
        (self.sys / "fs" / fs / name).mkdir(parents=True)

    def mapping(self, number: int, **files: str) -> None:
        content = {
            "pool": "rbd",
            "pool_id": "3",
            "pool_ns": "team",
            "name": "vol",
            "image_id": "101db0894ea2",
            "current_snap": "-",
            "cluster_fsid": "f10a1c15",
            "client_id": "client4144",
            "client_addr": "10.0.0.5:0/12",
            "features": "0x3d",
        }
        for file, text in (content | files).items():
            self.write(self.sys / f"bus/rbd/devices/{number}/{file}", text)

    def identify(self, name: str) -> BlockDevice:
        found = blockdev.identify(name, self.sys, self.proc)
        assert found is not None
        return found

    def scan(self, *drivers: str) -> list[BlockDevice]:
        return blockdev.Scans().scan(drivers, None, self.sys, self.proc)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_majors_give_one_driver_to_all_rbd_majors(tree: Tree) -> None:
    found = blockdev.majors(tree.proc)
    assert (found[252], found[254], found[7]) == ("rbd", "rbd", "loop")
    assert 5 not in found  # a character device
    with pytest.raises(OSError):
        blockdev.majors(tree.proc / "none")


def test_identify_reads_kernel_rbd_with_image_and_client(tree: Tree) -> None:
    tree.disk("rbd3", "254:48")
    tree.mapping(3, config_info="10.0.0.1:6789 name=csi,secret=QVFB,key=client.csi,ms_mode=crc")
    found = tree.identify("rbd3")
    assert found.image == RbdImage("rbd", "vol", "team", "", "101db0894ea2", "f10a1c15", 3)
    assert found.client == RbdClient(
        *("3", "client4144", "10.0.0.5:0/12", 0x3D),
        "10.0.0.1:6789 name=csi,secret=<hidden>,key=<hidden>,ms_mode=crc",
    )
    assert found.volume == "rbd:f10a1c15/3/team/101db0894ea2"
    assert (found.title, found.label) == ("rbd/team/vol", "rbd3 (rbd/team/vol)")
    assert (found.number, found.size, found.diskseq) == ((254, 48), 2**20, 7)
    assert blockdev.identify("rbd4", tree.sys, tree.proc) is None


def test_identify_gives_a_snapshot_another_volume_with_the_same_head(tree: Tree) -> None:
    tree.disk("rbd3", "254:48")
    tree.mapping(3)
    image = tree.identify("rbd3")
    tree.mapping(3, current_snap="s1")
    snapshot = tree.identify("rbd3")
    assert snapshot.volume == image.volume + "@s1"
    assert snapshot.image is not None and image.image is not None
    assert snapshot.image.head == image.image.head
    assert snapshot.image.spec == "rbd/team/vol@s1"


def test_identify_without_image_id_names_no_volume(tree: Tree) -> None:
    tree.disk("rbd3", "254:48")
    tree.mapping(3, image_id="")
    assert tree.identify("rbd3").volume == ""


def test_identify_partition_has_driver_image_and_diskseq_of_its_disk(tree: Tree) -> None:
    tree.disk("rbd3", "252:48")
    tree.partition("rbd3", "rbd3p1", "259:5")
    tree.mapping(3)
    disk, part = tree.identify("rbd3"), tree.identify("rbd3p1")
    assert (part.parent, part.driver, part.number) == ("rbd3", "rbd", (259, 5))
    assert (part.image, part.diskseq, part.volume) == (disk.image, 7, disk.volume)
    assert (disk.partitions, disk.holders, disk.stacked) == (("rbd3p1",), (), ("rbd3p1",))
    assert part.partitions == ()


def test_attachment_differs_after_each_attach_only(tree: Tree) -> None:
    home = tree.disk("nbd0", "43:0", backend="csi-vol-1", pid="77")
    first = tree.identify("nbd0")
    assert (first.volume, first.title) == ("nbd:csi-vol-1", "csi-vol-1")
    tree.write(home / "ro", "1")
    assert tree.identify("nbd0").attachment == first.attachment
    tree.write(home / "diskseq", "8")
    assert tree.identify("nbd0").attachment != first.attachment
    (home / "diskseq").unlink()  # before Linux 5.15
    assert tree.identify("nbd0").diskseq is None


def test_identify_never_reads_the_command_line_of_rbd_nbd(tree: Tree) -> None:
    tree.disk("nbd0", "43:0", pid="77")
    tree.write(tree.proc / "77/cmdline", "rbd-nbd\0map\0pool/img\0")
    assert tree.identify("nbd0").image is None


def test_scan_finds_the_image_of_rbd_nbd_once_its_process_shows(tree: Tree) -> None:
    tree.disk("nbd0", "43:0", pid="77\n")
    (device,) = tree.scan("nbd")
    assert device.image is None  # its process cannot be seen yet
    tree.write(tree.proc / "77/cmdline", "rbd-nbd\0map\0pool/img\0")
    (device,) = tree.scan("nbd")
    assert device.image == RbdImage("pool", "img")


def test_scan_reads_a_command_line_once_for_each_attach(tree: Tree) -> None:
    home = tree.disk("nbd0", "43:0", pid="77")
    for command, diskseq, image in (("a", "8", "a"), ("b", "8", "a"), ("b", "9", "b")):
        tree.write(tree.proc / "77/cmdline", f"rbd-nbd\0map\0pool/{command}\0")
        tree.write(home / "diskseq", diskseq)
        (device,) = tree.scan("nbd")
        assert device.image == RbdImage("pool", image)


def test_scan_leaves_out_other_drivers_and_devices_without_medium(tree: Tree) -> None:
    tree.disk("loop0", "7:0", size="0")
    tree.disk("loop1", "7:1")
    tree.disk("rbd0", "252:0")
    assert [device.name for device in tree.scan("loop")] == ["loop1"]
    assert [device.name for device in tree.scan("loop", "rbd")] == ["loop1", "rbd0"]
    assert tree.scan("zram") == []


def test_scan_attributes_file_system_on_encrypted_layer_to_device(tree: Tree) -> None:
    """ceph-csi: /dev/mapper/luks-rbd-... on rbd0."""
    tree.hold(tree.disk("rbd0", "252:0"), "dm-0")
    tree.disk("dm-0", "253:0")
    tree.superblock("xfs", "dm-0")
    (device,) = tree.scan("rbd")
    assert (device.active, device.holders) == (("xfs",), ("dm-0",))
    assert device.layers == (DeviceLayer("dm-0", (253, 0), ("xfs",)),)
    assert device.numbers == {(252, 0), (253, 0)}
    assert device.live == {(253, 0)}
    assert device.name_of((253, 0)) == "dm-0"


def test_scan_finds_superblock_directly_on_device_and_btrfs_without_number(tree: Tree) -> None:
    tree.disk("rbd0", "252:0")
    tree.disk("rbd1", "252:16")
    tree.superblock("ext4", "rbd0")
    tree.superblock("btrfs/uuid/devices", "rbd1")
    ext4, btrfs = tree.scan("rbd")
    assert ext4.active == ("ext4",) and ext4.live == {(252, 0)}
    assert btrfs.active == ("btrfs",) and btrfs.live == frozenset()


def test_scan_follows_layers_to_the_top_once_each(tree: Tree) -> None:
    """LVM over two partitions, encrypted; and a loop that no kernel should make."""
    tree.disk("rbd1", "252:16")
    tree.disk("rbd10", "252:160")  # not a partition of rbd1
    first = tree.partition("rbd1", "rbd1p1", "259:1")
    second = tree.partition("rbd1", "rbd1p2", "259:2")
    tree.hold(first, "dm-0")
    tree.hold(second, "dm-0")
    tree.hold(tree.disk("dm-0", "253:0"), "dm-1")
    tree.hold(tree.disk("dm-1", "253:1"), "dm-0")
    tree.superblock("ext4", "dm-1")
    device, other = tree.scan("rbd")
    assert (device.stacked, device.holders) == (("rbd1p1", "rbd1p2"), ())
    assert [layer.name for layer in device.layers] == ["rbd1p1", "rbd1p2", "dm-0", "dm-1"]
    assert device.active == ("ext4",)
    assert device.live == {(253, 1)}
    assert (other.layers, other.active, other.live) == ((), (), frozenset())


def test_scan_bounds_layers(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blockdev, "MOST_LAYERS", 3)
    tree.disk("rbd0", "252:0")
    for number in range(1, 9):
        tree.partition("rbd0", f"rbd0p{number}", f"259:{number}")
    (device,) = tree.scan("rbd")
    assert len(device.layers) == 3


def test_backing_file_is_a_loop_file_that_exists(tree: Tree) -> None:
    home = tree.disk("loop1", "7:1")
    tree.write(home / "loop/backing_file", "/data/image\n")
    assert tree.identify("loop1").backing_file == "/data/image"
    assert tree.identify("loop1").volume == "loop:/data/image"
    tree.write(home / "loop/backing_file", "/data/image (deleted)\n")
    assert tree.identify("loop1").backing_file == ""


@pytest.mark.parametrize("fs", ["ext4", "xfs", "btrfs/uuid/devices"])
def test_in_use_below_a_device_or_a_live_file_system(tree: Tree, fs: str) -> None:
    held = tree.disk("rbd0", "252:0")
    tree.disk("rbd1", "252:16")
    assert not blockdev.in_use(tree.identify("rbd0"), tree.sys)
    tree.superblock(fs, "rbd1")
    assert blockdev.in_use(tree.identify("rbd1"), tree.sys)
    assert not blockdev.in_use(tree.identify("rbd0"), tree.sys)
    tree.hold(held, "dm-0")
    assert blockdev.in_use(tree.identify("rbd0"), tree.sys)


def test_by_path_refuses_what_is_not_a_device(tmp_path: Path) -> None:
    with pytest.raises(kit.errors.NotFoundError):
        blockdev.by_path(str(tmp_path / "none"))
    with pytest.raises(kit.errors.RefusedError, match="not a block device"):
        blockdev.by_path("/dev/null")


# --- real loop devices


@pytest.fixture
def loop(area: Path) -> Iterator[str]:
    image = area / "image"
    with image.open("wb") as stream:
        stream.truncate(64 * testbed.MiB)
    with testbed.loop(image) as device:
        yield device


def _number(path: str) -> blockdev.Number:
    device = os.stat(path).st_rdev
    return os.major(device), os.minor(device)


@pytest.mark.real
def test_identify_scan_and_by_path_agree_on_a_loop_device(loop: str, area: Path) -> None:
    found = blockdev.by_path(loop)
    assert (found.path, found.driver, found.size) == (loop, "loop", 64 * testbed.MiB)
    assert found.backing_file == str(area / "image")
    assert blockdev.name_of(found.number) == found.name and found.name in blockdev.names()
    assert blockdev.identify(found.name) == found
    assert found in blockdev.Scans().scan(("loop",))


@pytest.mark.real
def test_a_path_that_leads_to_another_number_is_left_alone(loop: str) -> None:
    number = _number(loop)
    with pytest.raises(OSError, match="is no longer device"):
        blockdev.detach_loop(loop, (number[0], number[1] + 1))
    assert blockdev.by_path(loop).backing


@pytest.mark.real
def test_a_claimed_device_is_claimed_by_nobody_else(loop: str) -> None:
    once, again = (blockdev.claimed(loop, _number(loop)) for _ in range(2))
    with once, pytest.raises(OSError, match="busy"), again:
        pass


@pytest.mark.real
def test_detach_loop_frees_the_device(loop: str) -> None:
    blockdev.detach_loop(loop, _number(loop))
    until(lambda: not blockdev.by_path(loop).backing)  # at once, unless somebody reads it


def test_known_devices_are_read_again_only_when_they_may_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sysfs, proc = tmp_path / "sys", tmp_path / "proc"
    proc.mkdir()
    (proc / "devices").write_text("Block devices:\n252 rbd\n253 device-mapper\n")
    values = {
        "rbd0": {"dev": "252:0", "size": "8", "diskseq": "1"},
        "rbd16": {"dev": "252:16", "size": "8"},  # before Linux 5.15
        "dm-0": {"dev": "253:0", "size": "8", "diskseq": "2"},
    }
    for name, files in values.items():
        home = sysfs / "class/block" / name
        home.mkdir(parents=True)
        for file, text in files.items():
            (home / file).write_text(f"{text}\n")
    monkeypatch.setattr(blockdev, "SYSFS", sysfs)
    asked: list[str] = []
    real = blockdev.identify

    def identify(name: str, *where: Any) -> blockdev.BlockDevice | None:
        asked.append(name)
        return real(name, *where)

    monkeypatch.setattr(blockdev, "identify", identify)
    kept = blockdev.Known()
    assert [each.name for each in kept.all(sysfs, proc)] == ["dm-0", "rbd0", "rbd16"]
    asked.clear()
    assert len(kept.all(sysfs, proc)) == 3 and asked == ["dm-0", "rbd16"]
    asked.clear()
    (sysfs / "class/block/rbd0/diskseq").write_text("3\n")
    found = {each.name: each for each in kept.all(sysfs, proc)}
    assert found["rbd0"].diskseq == 3 and "rbd0" in asked
    shutil.rmtree(sysfs / "class/block/rbd0")
    assert "rbd0" not in {each.name for each in kept.all(sysfs, proc)}


def test_scans_read_what_uevents_name_and_all_where_that_is_not_enough(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        tree.disk(f"rbd{number}", f"252:{number * 16}")
    read: list[str] = []
    real = blockdev._device

    def device(name: str, *rest: Any) -> BlockDevice:
        read.append(name)
        return real(name, *rest)

    monkeypatch.setattr(blockdev, "_device", device)
    scans = blockdev.Scans()

    def scan(*changed: str, everything: bool = False) -> tuple[list[str], list[str]]:
        read.clear()
        found = scans.scan(("rbd",), None if everything else changed, tree.sys, tree.proc)
        return [each.name for each in found], list(read)

    every = ["rbd0", "rbd1", "rbd2"]
    assert scan() == (every, every)  # nothing is known yet
    assert scan() == (every, [])
    tree.write(tree.sys / "block/rbd1/size", "4096")
    assert scan("rbd1") == (every, ["rbd1"])
    assert scans._found["rbd1"].size == 4096 * 512
    for live in (True, False):
        home = tree.sys / "fs/ext4/rbd2"
        home.mkdir(parents=True) if live else home.rmdir()
        assert scan() == (every, []) and bool(scans._found["rbd2"].active) is live
    tree.write(tree.sys / "block/rbd2/size", "0")  # its medium is gone
    assert scan("rbd2") == (every[:2], [])
    tree.disk("rbd3", "252:48")
    assert scan("rbd3") == (["rbd0", "rbd1", "rbd3"], ["rbd3"])
    shutil.rmtree(tree.sys / "block/rbd3")
    assert scan("rbd3") == (every[:2], [])
    for odd in ("rbd0p1", "dm-0"):  # nobody says which devices it is about
        assert scan(odd) == (every[:2], every[:2])
    assert scan(everything=True) == (every[:2], every[:2])


@pytest.mark.parametrize(("mapping", "part"), [
    ("CRYPT-LUKS2-0123456789abcdef-luks-rbd-1", "CRYPT-LUKS2-0123456789abcdef"),
    ("CRYPT-LUKS1-0123abcd-rescue", "CRYPT-LUKS1-0123abcd"),
    ("CRYPT-LUKS2-0123456789abcdef-a+b", "CRYPT-LUKS2-0123456789abcdef"),
    ("CRYPT-LUKS2-0123456789abcdef-+a-b+", "CRYPT-LUKS2-0123456789abcdef"),
    (r"CRYPT-LUKS2-0123abcd-a\x20b:c@d=e", "CRYPT-LUKS2-0123abcd"),  # as libdevmapper writes it
    ("CRYPT-LUKS2-0123abcd-a\nb", "CRYPT-LUKS2-0123abcd"),  # as the kernel takes it
    ("CRYPT-PLAIN-a", "CRYPT-PLAIN-a"),  # nothing but its name
    ("LVM-0123-abcd", "LVM-0123-abcd"),
])  # fmt: skip
def test_name_of_a_luks_mapping_is_no_part_of_its_volume(mapping: str, part: str) -> None:
    image = RbdImage("rbd", "a", "", "", "101d", "f1", 3)
    below = blockdev.BlockDevice("rbd0", (252, 0), "rbd", 8, False, image=image)
    device = blockdev.BlockDevice(
        "dm-0", (253, 0), "device-mapper", 8, False, mapping=mapping, below=(below,)
    )
    assert device.volume == f"{below.volume}+{part}"
    assert below.part == ""


def test_name_of_a_luks_mapping_may_look_like_another_mapping() -> None:
    """A uuid alone is of one mapping: all behind is its name."""
    mapping = "CRYPT-LUKS2-0123abcd-a+LVM-b"
    device = blockdev.BlockDevice("dm-0", (253, 0), "device-mapper", 8, False, mapping=mapping)
    assert device.part == "CRYPT-LUKS2-0123abcd"


@pytest.mark.parametrize(("name", "whole"), [
    ("rbd0p1", "rbd0"), ("nvme0n1p12", "nvme0n1"), ("loop123405p1", "loop123405"),
    ("sda1", "sda"), ("vdab12", "vdab"), ("rbd10", "rbd10"), ("dm-3", "dm-3"), ("sda", "sda"),
])  # fmt: skip
def test_partition_is_called_after_its_device(name: str, whole: str) -> None:
    assert blockdev.whole_name(name) == whole


def test_patterns_of_names_are_those_of_a_shell() -> None:
    assert blockdev.is_named("rbd7", ("nbd*", "rbd?"))
    assert blockdev.is_named("rbd7", ("rbd[0-7]",))
    assert not blockdev.is_named("rbd17", ("rbd?",))
    assert not blockdev.is_named("rbd7", ())
