from pathlib import Path

import pytest

from linux import rbd_sysfs
from linux.rbd_sysfs import RbdImage


@pytest.mark.parametrize(
    ("command", "image"),
    [
        ("rbd-nbd map rbd/csi-vol-1", RbdImage("rbd", "csi-vol-1")),
        ("/usr/bin/rbd-nbd map pool/ns/img@snap", RbdImage("pool", "img", "ns", "snap")),
        ("rbd-nbd map img", RbdImage("rbd", "img")),
        ("rbd-nbd attach --device /dev/nbd0 p/i --cookie c", RbdImage("p", "i")),
        (
            "rbd-nbd map p/i --id csi -m 10.0.0.1,10.0.0.2 --keyfile=/k --try-netlink --read-only",
            RbdImage("p", "i"),
        ),
        ("rbd-nbd --conf /etc/ceph/ceph.conf --read-only map p/i", RbdImage("p", "i")),
        ("rbd-nbd map p/i --snap-id 4", RbdImage("p", "i", snapshot="id 4")),
        ("rbd-nbd list-mapped", None),
        ("rbd-nbd unmap /dev/nbd0", None),
        ("rbd-nbd map p/n/i/too-much", None),
        ("rbd-nbd --unknown map p/i", None),  # rather nothing than something wrong
        ("qemu-nbd map p/i", None),
        ("", None),
    ],
)
def test_parse_nbd_command(command: str, image: RbdImage | None) -> None:
    assert rbd_sysfs.parse_nbd_command(command.split()) == image


def test_nbd_image_of_an_ended_process_is_unknown(tmp_path: Path) -> None:
    (tmp_path / "pid").write_text("77")
    assert rbd_sysfs.nbd_image(str(tmp_path), 1, tmp_path) is None
    (tmp_path / "pid").write_text("")
    assert rbd_sysfs.nbd_image(str(tmp_path), None, tmp_path) is None


def test_supported_features_are_hexadecimal_and_0_without_driver(tmp_path: Path) -> None:
    assert rbd_sysfs.supported_features(tmp_path) == 0
    (tmp_path / "bus/rbd").mkdir(parents=True)
    (tmp_path / "bus/rbd/supported_features").write_text("0x3f7\n")
    assert rbd_sysfs.supported_features(tmp_path) == 0x3F7
