"""Which volume of Kubernetes lies on which block device, on recorded nodes. Pure."""

from pathlib import Path
from typing import Any

import pytest

from linux.stack import StackedDevice
from tests.volumes.guard.test_scope import NODE, Tree
from volumes.node import naming
from volumes.node.naming import Recorded

# Names as the drivers' documents, udev's 60-persistent-storage.rules and the kernel have them.
UUID = "0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9"
PVC = f"pvc-{UUID}"
EBS = "vol-0a1b2c3d4e5f60718"
NODE_OF_ALL: dict[str, Any] = {
    "drivers": {8: "sd", 252: "virtblk", 253: "device-mapper", 259: "blkext", 7: "loop"},
    "mounts": [],
    "devices": {
        "sda": {"dev": "8:0", "links": ["by-id/scsi-0HC_Volume_10234567"]},
        "sda1": {"dev": "8:1", "disk": "sda", "links": ["by-id/scsi-0HC_Volume_10234567-part1"]},
        "sdb": {"dev": "8:16", "links": [
            f"by-path/ip-10.1.0.9:3260-iscsi-iqn.2019-10.io.longhorn:{PVC}-lun-1"
        ]},
        "sdc": {"dev": "8:32", "links": ["by-id/google-data-1",
                                         "by-id/scsi-0Google_PersistentDisk_data-1"]},
        "sdd": {"dev": "8:48", "links": ["by-id/google-my-data-1"]},
        "sde": {"dev": "8:64", "links": ["by-id/scsi-0DO_Volume_pvc-77"]},
        "vda": {"dev": "252:0", "serial": UUID[:20].replace("0a", "1a")},
        "nvme0n1": {"dev": "259:0", "device/serial": EBS.replace("-", ""), "wwid": "nvme.1d0f-1"},
        "dm-0": {"dev": "253:0", "dm/name": f"my--vg-{UUID.replace('0a', '2a').replace('-', '--')}",
                 "dm/uuid": "LVM-1", "slaves": ["sda1"]},
        "dm-1": {"dev": "253:1", "dm/name": "my--vg-data--2", "dm/uuid": "LVM-2",
                 "slaves": ["sda1"]},
        # two paths of one LUN, and multipath and LUKS on them
        "sdf": {"dev": "8:80", "device/wwid": "naa.600a0b80000001", "device/model": "LUN"},
        "sdg": {"dev": "8:96", "device/wwid": "naa.600a0b80000001", "device/model": "LUN"},
        "dm-2": {"dev": "253:2", "dm/name": "mpatha", "dm/uuid": "mpath-3600a0b80000001",
                 "slaves": ["sdf", "sdg"]},
        "dm-3": {"dev": "253:3", "dm/name": "luks-1", "dm/uuid": "CRYPT-LUKS2-1-luks-1",
                 "slaves": ["dm-2"]},
        "dm-4": {"dev": "253:4", "dm/name": "mpatha1", "dm/uuid": "part1-mpath-3600a0b80000001",
                 "slaves": ["dm-2"]},
        # kubelet's loop device over a raw block volume whose publication is gone
        "sdh": {"dev": "8:112"},
        "loop0": {"dev": "7:0", "lower": "sdh", "loop/backing_file":
                  "/var/lib/kubelet/plugins/kubernetes.io/csi/volumeDevices/pvc-9/dev/uid"},
    },
}  # fmt: skip


@pytest.fixture
def devices(tmp_path: Path) -> dict[str, StackedDevice]:
    return {each.name: each for each in Tree(tmp_path, NODE_OF_ALL, {}).read().devices}


@pytest.mark.parametrize(("claim", "on"), [
    (Recorded("csi.hetzner.cloud", "10234567"), "sda"),
    (Recorded("driver.longhorn.io", PVC), "sdb"),
    (Recorded("pd.csi.storage.gke.io", "projects/p/zones/z/disks/data-1"), "sdc"),
    (Recorded("dobs.csi.digitalocean.com", "6a7b", "pvc-77"), "sde"),
    (Recorded("cinder.csi.openstack.org", UUID.replace("0a", "1a")), "vda"),
    (Recorded("ebs.csi.aws.com", EBS), "nvme0n1"),
    (Recorded("topolvm.io", UUID.replace("0a", "2a")), "dm-0"),
    (Recorded("local.csi.openebs.io", "data-2"), "dm-1"),
    (Recorded("iscsi.csi.example", "lun-7", number=(253, 2)), "dm-2"),
    (Recorded("iscsi.csi.example", "lun-7", number=(253, 2)), "sdf"),
    (Recorded("iscsi.csi.example", "lun-7", number=(8, 96)), "sdf"),
    (Recorded("iscsi.csi.example", "lun-7", number=(253, 3)), "dm-2"),
    (Recorded("raw.csi.example", "x", "pvc-9"), "sdh"),
])  # fmt: skip
def test_a_device_is_named_by_its_volume(
    claim: Recorded, on: str, devices: dict[str, StackedDevice]
) -> None:
    others = [
        Recorded("other.csi.example", "other", "pvc-1"),
        Recorded("a.csi.example", "b", number=(9, 9)),
    ]
    assert naming.on_device(on, [*others, claim], devices) == claim


@pytest.mark.parametrize(("claim", "on"), [
    (Recorded("csi.hetzner.cloud", "10234567"), "sda1"),  # a part of it
    (Recorded("csi.hetzner.cloud", "1023456"), "sda"),
    (Recorded("pd.csi.storage.gke.io", "projects/p/zones/z/disks/data"), "sdc"),
    (Recorded("pd.csi.storage.gke.io", "projects/p/zones/z/disks/data-1"), "sdd"),
    (Recorded("driver.longhorn.io", f"{PVC}0"), "sdb"),
    (Recorded("driver.longhorn.io", "pvc"), "sdb"),
    (Recorded("driver.longhorn.io", PVC[:-1]), "sdb"),
    (Recorded("driver.longhorn.io", PVC[1:]), "sdb"),
    (Recorded("local.csi.openebs.io", "2"), "dm-1"),
    (Recorded("any.csi.example", "", ""), "vda"),
    (Recorded("driver.longhorn.io", PVC, number=(8, 0)), "sdb"),  # it is mounted elsewhere
    (Recorded("raw.csi.example", "x", "pvc"), "sdh"),
    (Recorded("topolvm.io", UUID.replace("0a", "2a")), "none"),
])  # fmt: skip
def test_where_nothing_says_it_a_device_has_no_name(
    claim: Recorded, on: str, devices: dict[str, StackedDevice]
) -> None:
    assert naming.on_device(on, [claim], devices) is None


def test_two_volumes_on_a_device_leave_it_without_a_name(
    devices: dict[str, StackedDevice],
) -> None:
    one, other = (
        Recorded("a.example", "1", number=(8, 0)),
        Recorded("a.example", "2", number=(8, 0)),
    )
    assert naming.on_device("sda", [one, other], devices) is None
    assert naming.on_device("sda", [one, one], devices) == one  # kubelet may have two records


def test_a_volume_after_which_two_disks_are_called_has_none(
    devices: dict[str, StackedDevice],
) -> None:
    devices["sdz"] = StackedDevice("sdz", (65, 144), links=("by-id/scsi-0HC_Volume_10234567",))
    claim = Recorded("csi.hetzner.cloud", "10234567")
    assert naming.on_device("sda", [claim], devices) is None
    assert naming.on_device("sdz", [claim], devices) is None


def test_a_partition_of_a_disk_has_its_link_too(devices: dict[str, StackedDevice]) -> None:
    devices["sdb1"] = StackedDevice(
        "sdb1", (8, 17), partition=True, below=("sdb",), links=(f"by-path/x:{PVC}-lun-1-part1",)
    )
    claim = Recorded("driver.longhorn.io", PVC)
    assert naming.on_device("sdb", [claim], devices) == claim
    assert naming.on_device("sdb1", [claim], devices) is None


def test_a_part_of_a_disk_is_the_same_through_multipath(devices: dict[str, StackedDevice]) -> None:
    devices["sdg1"] = StackedDevice("sdg1", (8, 97), partition=True, below=("sdg",))
    assert naming.disk(devices["dm-4"], devices) == naming.disk(devices["sdg1"], devices)
    assert naming.disk(devices["dm-4"], devices) != naming.disk(devices["sdg"], devices)
    for made in (
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
