"""Which devices of recorded nodes are one disk. Pure."""

from pathlib import Path
from typing import Any

import pytest

from linux.stack import StackedDevice
from tests.volumes.guard.test_scope import NODE, Tree
from volumes.node import naming

NODE_OF_ALL: dict[str, Any] = {
    "drivers": {8: "sd", 252: "virtblk", 253: "device-mapper", 259: "blkext", 7: "loop"},
    "mounts": [],
    "devices": {
        # two paths of one LUN, multipath and LUKS on them
        "sdf": {"dev": "8:80", "device/wwid": "naa.600a0b80000001", "device/model": "LUN"},
        "sdg": {"dev": "8:96", "device/wwid": "naa.600a0b80000001", "device/model": "LUN"},
        "dm-2": {"dev": "253:2", "dm/name": "mpatha", "dm/uuid": "mpath-3600a0b80000001",
                 "slaves": ["sdf", "sdg"]},
        "dm-3": {"dev": "253:3", "dm/name": "luks-1", "dm/uuid": "CRYPT-LUKS2-1-luks-1",
                 "slaves": ["dm-2"]},
        "sdf1": {"dev": "8:81", "disk": "sdf"},
        # losetup -o, and plain dm-crypt, which may begin anywhere
        "loop0": {"dev": "7:0", "loop/backing_file": "/dev/sdf", "loop/offset": "0",
                  "loop/sizelimit": "0", "lower": "sdf"},
        "loop1": {"dev": "7:1", "loop/backing_file": "/dev/sdf", "loop/offset": "512",
                  "lower": "sdf"},
        "loop2": {"dev": "7:2", "loop/backing_file": "/dev/sdf", "loop/sizelimit": "512",
                  "lower": "sdf"},
        "dm-4": {"dev": "253:4", "dm/name": "p", "dm/uuid": "CRYPT-PLAIN-p", "slaves": ["sdf"]},
    },
}  # fmt: skip


@pytest.fixture
def devices(tmp_path: Path) -> dict[str, StackedDevice]:
    return {each.name: each for each in Tree(tmp_path, NODE_OF_ALL, {}).read().devices}


def test_what_is_on_all_of_a_disk_is_that_disk(devices: dict[str, StackedDevice]) -> None:
    said = {name: " ".join(sorted(naming.disks(each, devices))) for name, each in devices.items()}
    assert said == {
        "sdf": "8:80", "sdg": "8:96", "dm-2": "8:80 8:96", "dm-3": "8:80 8:96", "sdf1": "8:81",
        "loop0": "8:80", "loop1": "7:1", "loop2": "7:2", "dm-4": "253:4",
    }  # fmt: skip


@pytest.mark.parametrize("name", NODE)
def test_no_two_disks_of_a_node_are_one(name: str, tmp_path: Path) -> None:
    """But paths of one, what encrypts it and what loops over it."""
    found = {each.name: each for each in Tree(tmp_path, NODE[name], {}).read().devices}
    said: dict[str, set[str]] = {}
    for each in found.values():
        through = each.uuid.startswith(("CRYPT-", "mpath-")) or (
            each.driver == "loop" and each.below
        )
        for disk in naming.disks(each, found) if not through and each.size else ():
            said.setdefault(disk, set()).add(each.wwid or each.name)
    assert [each for each in said.values() if len(each) > 1] == []


@pytest.mark.parametrize(("device", "expected"), [
    (StackedDevice("dm-1", (253, 1), size=1, uuid="LVM-1"), True),
    (StackedDevice("dm-1", (253, 1), size=1, uuid="CRYPT-1", below=("sdz",)), True),
    (StackedDevice("sdz1", (8, 9), size=1, partition=True, below=("sdz",)), True),
    (StackedDevice("loop1", (7, 1), driver="loop", size=1, below=("sdz",)), True),
    (StackedDevice("drbd1", (147, 1), driver="drbd", size=1, below=("sdz",)), False),
    (StackedDevice("dm-1", (253, 1), size=1, uuid="mpath-1", below=("sdz",)), False),
    (StackedDevice("md1", (9, 1), driver="md", size=1, below=("sdz",)), False),
    (StackedDevice("md1", (9, 1), driver="md", below=("sdz",)), True),  # it stopped
])  # fmt: skip
def test_what_lost_the_only_device_that_it_lies_on(device: StackedDevice, expected: bool) -> None:
    """DRBD reads from a peer, multipath waits, and others say it by their size."""
    assert bool(naming.gone(device, {})) is expected
    over = StackedDevice("dm-9", (253, 9), size=1, uuid="CRYPT-2", below=(device.name,))
    assert bool(naming.gone(over, {device.name: device})) is expected
