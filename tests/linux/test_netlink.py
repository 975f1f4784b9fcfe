"""Uevents."""

from linux import netlink


def test_parse_uevent_of_block_devices_only() -> None:
    raw = b"add@/devices/rbd/0/block/rbd0\0ACTION=add\0SUBSYSTEM=block\0DEVNAME=rbd0\0DEVTYPE=disk"
    assert netlink.parse_uevent(raw) == netlink.Uevent("add", "rbd0", "disk")
    assert netlink.parse_uevent(raw.replace(b"=block", b"=net")) is None
    assert netlink.parse_uevent(b"libudev\0\xff\xff") is None
