"""Devices from sysfs: trees of files stand in for drivers that this kernel does not have."""

from pathlib import Path

import pytest

from volumes.inventory import blocks, nbd
from volumes.inventory.model import Device, Image


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
