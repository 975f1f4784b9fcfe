"""Devices from sysfs: trees of files stand in for drivers that this kernel does not have."""

from pathlib import Path

import pytest

from volumes.inventory import blocks, nbd
from volumes.inventory.model import Device, Image, Layer


@pytest.mark.parametrize(
    ("command", "image"),
    [
        ("rbd-nbd map rbd/csi-vol-1", Image("rbd", "csi-vol-1")),
        ("/usr/bin/rbd-nbd map pool/ns/img@snap", Image("pool", "img", "ns", "snap")),
        ("rbd-nbd map img", Image("rbd", "img")),
        ("rbd-nbd attach --device /dev/nbd0 p/i --cookie c", Image("p", "i")),
        (
            "rbd-nbd map p/i --id csi -m 10.0.0.1,10.0.0.2 --keyfile=/k --try-netlink --read-only",
            Image("p", "i"),
        ),
        ("rbd-nbd --conf /etc/ceph/ceph.conf --read-only map p/i", Image("p", "i")),
        ("rbd-nbd map p/i --snap-id 4", Image("p", "i", snapshot="id 4")),
        ("rbd-nbd list-mapped", None),
        ("rbd-nbd unmap /dev/nbd0", None),
        ("rbd-nbd map p/n/i/too-much", None),
        ("rbd-nbd --unknown map p/i", None),  # rather nothing than something wrong
        ("qemu-nbd map p/i", None),
        ("", None),
    ],
)
def test_an_image_is_read_from_a_command_line(command: str, image: Image | None) -> None:
    assert nbd.parse(command.split()) == image


class Tree:
    """A sysfs and a proc with what a test puts there."""

    def __init__(self, folder: Path) -> None:
        self.sys, self.proc = folder / "sys", folder / "proc"
        self.write(self.proc / "devices", "Block devices:\n 43 nbd\n252 rbd\n253 device-mapper\n")
        (self.sys / "block").mkdir(parents=True)

    @staticmethod
    def write(path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def disk(self, name: str, number: str) -> Path:
        home = self.sys / "block" / name
        self.write(home / "dev", number)
        self.write(home / "size", "2048")
        self.write(home / "diskseq", "7")
        (home / "holders").mkdir()
        return home

    def partition(self, disk: str, name: str, number: str) -> Path:
        home = self.sys / "block" / disk / name
        self.write(home / "dev", number)
        self.write(home / "partition", "1")
        (home / "holders").mkdir()
        return home

    def hold(self, below: Path, holder: str) -> None:
        (below / "holders" / holder).symlink_to(self.sys / "block" / holder)

    def superblock(self, fs: str, name: str) -> None:
        (self.sys / "fs" / fs / name).mkdir(parents=True)

    def devices(self, *drivers: str) -> list[Device]:
        return blocks.devices(list(drivers), str(self.sys), str(self.proc))


def test_an_nbd_device_has_the_image_of_its_process(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.write(tree.disk("nbd0", "43:0") / "pid", "77\n")
    (device,) = tree.devices("nbd")
    assert device.image is None  # its process cannot be seen yet
    tree.write(tree.proc / "77/cmdline", "rbd-nbd\0map\0pool/img\0")
    (device,) = tree.devices("nbd")
    assert device.image == Image("pool", "img")


def test_a_file_system_on_an_encrypted_device_is_the_devices(tmp_path: Path) -> None:
    """ceph-csi: /dev/mapper/luks-rbd-... on rbd0."""
    tree = Tree(tmp_path)
    tree.hold(tree.disk("rbd0", "252:0"), "dm-0")
    tree.disk("dm-0", "253:0")
    tree.superblock("xfs", "dm-0")
    (device,) = tree.devices("rbd")
    assert (device.active, device.holders) == (("xfs",), ("dm-0",))
    assert device.layers == (Layer("dm-0", (253, 0), ("xfs",)),)
    assert device.numbers == {(252, 0), (253, 0)}
    assert device.live == {(253, 0)}
    assert device.name_of((253, 0)) == "dm-0"


def test_layers_are_followed_to_the_top_once_each(tmp_path: Path) -> None:
    """LVM over two partitions, encrypted; and a loop that no kernel should make."""
    tree = Tree(tmp_path)
    tree.disk("rbd1", "252:16")
    tree.disk("rbd10", "252:160")  # no partition of rbd1
    first = tree.partition("rbd1", "rbd1p1", "259:1")
    second = tree.partition("rbd1", "rbd1p2", "259:2")
    tree.hold(first, "dm-0")
    tree.hold(second, "dm-0")
    tree.hold(tree.disk("dm-0", "253:0"), "dm-1")
    tree.hold(tree.disk("dm-1", "253:1"), "dm-0")
    tree.superblock("ext4", "dm-1")
    device, other = tree.devices("rbd")
    assert device.holders == ("rbd1p1", "rbd1p2")
    assert [layer.name for layer in device.layers] == ["rbd1p1", "rbd1p2", "dm-0", "dm-1"]
    assert device.active == ("ext4",)
    assert device.live == {(253, 1)}
    assert (other.layers, other.active, other.live) == ((), (), frozenset())


def test_layers_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "MOST_LAYERS", 3)
    tree = Tree(tmp_path)
    tree.disk("rbd0", "252:0")
    for number in range(1, 9):
        tree.partition("rbd0", f"rbd0p{number}", f"259:{number}")
    (device,) = tree.devices("rbd")
    assert len(device.layers) == 3
