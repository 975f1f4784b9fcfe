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
        # two paths of one LUN, and multipath and LUKS on them
        "sdf": {"dev": "8:80", "device/wwid": "naa.600a0b80000001", "device/model": "LUN"},
        "sdg": {"dev": "8:96", "device/wwid": "naa.600a0b80000001", "device/model": "LUN"},
        "dm-2": {"dev": "253:2", "dm/name": "mpatha", "dm/uuid": "mpath-3600a0b80000001",
                 "slaves": ["sdf", "sdg"]},
        "dm-3": {"dev": "253:3", "dm/name": "luks-1", "dm/uuid": "CRYPT-LUKS2-1-luks-1",
                 "slaves": ["dm-2"]},
        "dm-4": {"dev": "253:4", "dm/name": "mpatha1", "dm/uuid": "part1-mpath-3600a0b80000001",
                 "slaves": ["dm-2"]},
        "sdh": {"dev": "8:112"},
    },
}  # fmt: skip


@pytest.fixture
def devices(tmp_path: Path) -> dict[str, StackedDevice]:
    return {each.name: each for each in Tree(tmp_path, NODE_OF_ALL, {}).read().devices}


def test_a_part_of_a_disk_is_the_same_through_multipath(devices: dict[str, StackedDevice]) -> None:
    devices["sdg1"] = StackedDevice("sdg1", (8, 97), partition=True, below=("sdg",))
    assert naming.disk(devices["dm-4"], devices) == naming.disk(devices["sdg1"], devices)
    assert naming.disk(devices["dm-4"], devices) != naming.disk(devices["sdg"], devices)
    paths = {naming.disk(devices[name], devices) for name in ("sdf", "sdg", "dm-2", "dm-3")}
    assert len(paths) == 1
    for made in (
        StackedDevice("nvme0n1", (259, 0)),
        StackedDevice("nvme0n1p2", (259, 9), partition=True, below=("nvme0n1",)),
        StackedDevice("dm-9", (253, 9), uuid="part2-mpath-1", below=("nvme0n1",)),
    ):
        devices[made.name] = made
    assert naming.disk(devices["nvme0n1p2"], devices) == naming.disk(devices["dm-9"], devices)


@pytest.mark.parametrize("name", NODE)
def test_no_two_disks_of_a_node_are_one(name: str, tmp_path: Path) -> None:
    """But paths of one, what encrypts it and what loops over it."""
    found = {each.name: each for each in Tree(tmp_path, NODE[name], {}).read().devices}
    said: dict[str, set[str]] = {}
    for each in found.values():
        through = each.uuid.startswith(("CRYPT-", "mpath-")) or (
            each.driver == "loop" and each.below
        )
        if not through and each.size:
            said.setdefault(naming.disk(each, found), set()).add(each.wwid or each.name)
    assert [each for each in said.values() if len(each) > 1] == []
