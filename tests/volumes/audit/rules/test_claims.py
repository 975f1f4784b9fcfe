"""Rules about volumes of any CSI driver and their devices, over recorded nodes: /sys, mountinfo and
kubelet's records."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from linux import rbd_sysfs, stack
from tests.volumes.audit.world import judge, only, scene
from tests.volumes.guard.test_scope import Tree
from volumes.audit.inventory import scan
from volumes.audit.rules import mounting
from volumes.audit.rules.base import AuditRule
from volumes.audit.types import Scene, Severity
from volumes.node import raw_block

KUBELET = "/var/lib/kubelet"
CSI = f"{KUBELET}/plugins/kubernetes.io/csi"
DRIVER = "disk.csi.example"
DEVICES: dict[str, dict[str, Any]] = {
    "sda": {"dev": "8:0", "device/wwid": "naa.1"},
    "sda1": {"dev": "8:1", "disk": "sda"},
    "sda2": {"dev": "8:2", "disk": "sda"},
    "sdb": {"dev": "8:16", "device/wwid": "naa.600a0b80000002", "device/model": "LUN"},
    "sdc": {"dev": "8:32", "device/wwid": "naa.600a0b80000002", "device/model": "LUN"},
    "sdd": {"dev": "8:48"},
    "vdb": {"dev": "254:16", "serial": "Logical Volume"},  # SPDK says it of all
    "vdc": {"dev": "254:32", "serial": "Logical Volume"},
    "dm-0": {"dev": "253:0", "dm/name": "vg-a", "dm/uuid": "LVM-a", "slaves": ["sda1"]},
    "dm-1": {"dev": "253:1", "dm/name": "vg-b", "dm/uuid": "LVM-b", "slaves": ["sda1"]},
    "dm-2": {"dev": "253:2", "dm/name": "mpatha", "dm/uuid": "mpath-3600a",
             "slaves": ["sdb", "sdd"]},
    "dm-3": {"dev": "253:3", "dm/name": "c", "dm/uuid": "CRYPT-LUKS2-1-c", "slaves": ["sdc"]},
    "dm-4": {"dev": "253:4", "dm/name": "p", "dm/uuid": "CRYPT-PLAIN-p", "slaves": ["sdc"]},
    "loop0": {"dev": "7:0"},
    "loop5": {"dev": "7:5", "loop/backing_file": "/dev/sdb"},
    "loop6": {"dev": "7:6", "loop/backing_file": "/dev/sdb", "loop/offset": "512"},
}  # fmt: skip


class Node:
    """One recorded moment. A mount is 'NUMBER TARGET[ FSTYPE ROOT OPTIONS SOURCE SUPER]'."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.mounts: list[str] = []
        self.nodes: dict[str, tuple[int, int]] = {}
        self.kept = scan.Kept()
        self.hidden = False  # /sys/dev/block
        (folder / "root" / KUBELET[1:]).mkdir(parents=True)
        monkeypatch.setattr(raw_block, "block_nodes", self._block_nodes)
        monkeypatch.setattr(stack, "disk_below", lambda name: (8, 16))

    def _block_nodes(self, root: str, targets: list[str]) -> dict[str, tuple[int, int] | None]:
        return {target: self.nodes.get(target) for target in targets}

    def _write(self, path: str, **record: str) -> None:
        file = self.folder / "root" / path[1:]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(record))

    def _mount(self, number: str, target: str, rest: str) -> None:
        given = rest.split()
        usual = "ext4", "/", "rw", "/dev/sdx"
        fstype, root, options, source, *above = *given, *usual[len(given) :]
        line = f"1 {number} {root} {target} {options} - {fstype} {source} {[*above, options][0]}"
        self.mounts.append(f"{len(self.mounts) + 9} {line}")

    def staged(
        self, handle: str, number: str, rest: str = "", *pods: str, home: str = "",
        driver: str = DRIVER,
    ) -> None:  # fmt: skip
        home = f"{CSI}/{home or f'{driver}/{handle}'}"
        self._write(f"{home}/vol_data.json", driverName=driver, volumeHandle=handle)
        self._mount(number, f"{home}/globalmount", rest)
        for pod in pods:
            self.published(handle, number, pod, rest)

    def published(self, handle: str, number: str, pod: str, rest: str = "") -> None:
        home = f"{CSI}/{DRIVER}/{handle}"
        self._write(f"{home}/vol_data.json", driverName=DRIVER, volumeHandle=handle)
        at = f"{KUBELET}/pods/{pod}/volumes/kubernetes.io~csi/pvc-{handle}"
        self._write(
            f"{at}/vol_data.json",
            volumeHandle=handle,
            specVolID=f"pvc-{handle}",
            driverName=DRIVER,
        )
        self._mount(number, f"{at}/mount", rest)

    def raw(
        self, handle: str, number: tuple[int, int], pod: str, *, node: str | None = "/node",
        fstype: str = "devtmpfs", over: bool = False,
    ) -> None:  # fmt: skip
        """``node``: what kubelet mounted, None: a mknod is all that is left. ``over``: kubelet has
        forgotten the pod."""
        base = f"{CSI}/volumeDevices"
        if not over:
            self._write(f"{KUBELET}/pods/{pod}/volumeDevices/kubernetes.io~csi/pvc-{handle}")
        self._write(
            f"{base}/pvc-{handle}/data/vol_data.json",
            driverName=DRIVER,
            volumeHandle=handle,
            specVolID=f"pvc-{handle}",
        )
        self._write(f"{base}/publish/pvc-{handle}/{pod}")
        self.nodes[f"{base}/publish/pvc-{handle}/{pod}"] = number
        if node:
            self._mount("0:6", f"{base}/publish/pvc-{handle}/{pod}", f"{fstype} {node} rw {fstype}")

    def scene(
        self, changed: tuple[str, ...] | None = None, deep: bool = False, **devices: dict[str, Any]
    ) -> Scene:
        """``devices``: other files of them; of one that has gone an empty dict."""
        there = {name: fields for name, fields in {**DEVICES, **devices}.items() if fields}
        tree = self.folder / f"moment-{len(list(self.folder.iterdir()))}"
        drivers = {8: "sd", 253: "device-mapper", 259: "blkext", 7: "loop"}
        Tree(tree, {"drivers": drivers, "devices": there, "mounts": []}, {})
        (tree / "proc/1/root").symlink_to(self.folder / "root")
        (tree / "proc/1/mountinfo").write_text("".join(f"{line}\n" for line in self.mounts))
        types = "nodev\tlustre\nnodev\tnfs4\nnodev\tfuse\n\text4\n\tbtrfs\n\tsquashfs\n"
        (tree / "proc/filesystems").write_text(types)
        if self.hidden:
            shutil.rmtree(tree / "sys/dev/block")
        request = scan.Request(
            drivers=("rbd",),  # the audit watches none of them
            kubelet=KUBELET,
            proc=str(tree / "proc"),
            sys=str(tree / "sys"),
            containers="/nonexistent",
            deep=deep,
            changed=changed,
        )
        return scene(inventory=scan.scan(request, self.kept))


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    made = Node(tmp_path, monkeypatch)
    made._mount("8:1", "/", "")
    return made


def found(rule: AuditRule, at: Scene) -> int:
    outcome = judge(rule, at)
    assert outcome.unknown == ""
    return len(outcome.troubles)


# -- two-claims-one-device


@pytest.mark.parametrize(("one", "other"), [
    ("8:16", "8:16"),
    ("253:2", "8:16"),  # multipath, and one of its paths
    ("253:2", "8:48"),
    ("253:2", "253:2"),
    ("7:5", "8:16"),
    ("253:3", "8:32"),  # LUKS, and what it is on
    ("253:0", "253:0"),
    ("8:1", "8:1"),
])  # fmt: skip
def test_two_volumes_on_one_disk_are_critical(node: Node, one: str, other: str) -> None:
    """hetznercloud/csi-driver#1455: two days of mixed data."""
    node.staged("h1", one, "", "u1")
    node.staged("h2", other, "", "u2")
    trouble = only(mounting.two_claims_one_device, node.scene())
    rule = mounting.two_claims_one_device
    assert (trouble.severity or rule.severity) is Severity.CRITICAL and rule.patience == 5.0
    for said in ("PersistentVolume pvc-h1", "volume h2", "pod u1", "pod u2", "globalmount"):
        assert said in trouble.message
    assert trouble.evidence["volume"] == "h1, h2" and trouble.evidence["pods"] == "u1, u2"
    assert trouble.device and trouble.device in trouble.message and trouble.advice


def test_it_ends_with_one_of_the_volumes(node: Node) -> None:
    node.staged("h1", "8:16")
    node.staged("h2", "8:16")
    assert found(mounting.two_claims_one_device, node.scene()) == 1
    node.mounts.pop()
    assert found(mounting.two_claims_one_device, node.scene()) == 0


@pytest.mark.parametrize(("one", "other", "rest"), [
    ("8:1", "8:2", ""),  # partitions of one disk
    ("253:0", "253:1", ""),  # logical volumes of one group
    ("8:16", "8:32", ""),  # a copy, or a second node of one disk: nobody can say which
    ("254:16", "254:32", ""),  # equal serials
    ("7:5", "7:6", ""),  # parts of one disk
    ("8:16", "7:6", ""),
    ("253:4", "8:32", ""),
    ("8:16", "8:16", "ext4 / ro"),  # both only read it
    ("8:16", "8:16", "lustre / rw /fsx"),  # its number may be a disk's
    ("8:16", "8:16", "fuse.s3 / rw /bucket"),
    ("8:16", "8:16", "unknown / rw 10.0.0.1@tcp:/fsx"),
    ("8:1", "8:1", "ext4 /volumes"),  # folders of one file system (csi-driver-host-path)
    ("0:40", "0:40", "nfs4 /"),
    ("0:41", "0:41", "fuse.juicefs /"),
])  # fmt: skip
def test_other_volumes_are_on_disks_of_their_own(
    node: Node, one: str, other: str, rest: str
) -> None:
    node.staged("h1", one, rest, "u1")
    node.staged("h2", other, rest, "u2")
    assert found(mounting.two_claims_one_device, node.scene()) == 0


def test_one_writer_is_enough(node: Node) -> None:
    node.staged("h1", "8:16", "ext4 / ro")
    node.staged("h2", "8:16")
    assert found(mounting.two_claims_one_device, node.scene()) == 1


def test_a_file_system_that_errors_made_read_only_was_written(node: Node) -> None:
    for handle in ("h1", "h2"):
        node.staged(handle, "8:16", "ext4 / rw /dev/sdb ro,errors=remount-ro")
    assert found(mounting.two_claims_one_device, node.scene()) == 1


@pytest.mark.parametrize(("ro", "expected"), [("0", 1), ("1", 0)])
def test_raw_block_volumes_of_a_disk_that_takes_no_writes(
    node: Node, ro: str, expected: int
) -> None:
    node.raw("h1", (8, 16), "u1")
    node.raw("h2", (8, 16), "u2")
    at = node.scene(sdb={**DEVICES["sdb"], "ro": ro})
    assert found(mounting.two_claims_one_device, at) == expected


def test_the_staging_mount_says_who_writes(node: Node) -> None:
    """ceph-csi's remount for a pod clears the 'ro' of a ReadOnlyMany there."""
    for handle in ("h1", "h2"):
        node.staged(handle, "8:16", "ext4 / ro")
        node.published(handle, "8:16", f"u-{handle}")
    assert found(mounting.two_claims_one_device, node.scene()) == 0


def test_who_gives_both_to_pods_that_only_read_them_mixes_nothing(node: Node) -> None:
    for handle in ("h1", "h2"):
        node.staged(handle, "8:16")
        node.published(handle, "8:16", f"u-{handle}", "ext4 / ro")
    assert found(mounting.two_claims_one_device, node.scene()) == 0
    node.published("h2", "8:16", "u3")
    assert found(mounting.two_claims_one_device, node.scene()) == 1


def test_what_is_mounted_within_a_volume_is_another_volumes(node: Node) -> None:
    for number, handle in ((40, "h1"), (41, "h2")):
        node.staged(handle, f"0:{number}", "nfs4 / rw nas:/x")
        node._mount("8:1", f"{CSI}/{DRIVER}/{handle}/globalmount/x", "")
    assert found(mounting.two_claims_one_device, node.scene()) == 0
    for handle in ("h3", "h4"):  # ceph-csi mounts there only
        node.staged(handle, "8:2")
        node.mounts[-1] = node.mounts[-1].replace("/globalmount", "/globalmount/id")
    assert found(mounting.two_claims_one_device, node.scene()) == 1


@pytest.mark.parametrize(("driver", "expected"), [("other.csi", 1), (DRIVER, 0)])
def test_a_volume_is_its_driver_and_its_handle(node: Node, driver: str, expected: int) -> None:
    node.staged("h1", "8:16")
    node.staged("h1", "8:16", home="other/h1", driver=driver)
    assert found(mounting.two_claims_one_device, node.scene()) == expected
    assert found(mounting.claim_device_gone, node.scene(sdb={})) == 1 + expected


def test_pods_of_another_driver_say_nothing(node: Node) -> None:
    node.published("h1", "8:16", "u1")
    node._write(f"{CSI}/other.csi/1/vol_data.json", driverName="other.csi", volumeHandle="h1")
    assert found(mounting.two_claims_one_device, node.scene()) == 0


def test_of_a_leftover_the_words_say_what_to_do(node: Node) -> None:
    node.staged("h1", "8:16")
    assert "unmount it" in only(mounting.claim_device_gone, node.scene(sdb={})).message


def test_a_serial_is_not_asked_for(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """virtio asks the device for it, which can hang."""
    read: list[str] = []
    real = rbd_sysfs.text

    def text(path: str) -> str:
        read.append(path)
        return real(path)

    monkeypatch.setattr(rbd_sysfs, "text", text)
    node.staged("h1", "254:16")
    node.scene()
    assert [path for path in read if path.endswith("vdb/wwid")]
    assert not [path for path in read if path.endswith(("/serial", "/cid"))]


def test_one_volume_in_several_pods_is_one_volume(node: Node) -> None:
    node.staged("h1", "8:16", "", "u1", "u2")
    node.staged("h1", "8:16", home="pv/pvc-h1")  # a kubelet before 1.24 had it there
    assert found(mounting.two_claims_one_device, node.scene()) == 0


def test_volumes_that_nobody_staged(node: Node) -> None:
    """Of a driver that only publishes."""
    node.published("h1", "8:16", "u1")
    node.published("h2", "8:16", "u2")
    assert found(mounting.two_claims_one_device, node.scene()) == 1


def test_a_raw_block_volume_and_a_mounted_one(node: Node) -> None:
    node.raw("h1", (8, 16), "u1")
    assert found(mounting.two_claims_one_device, node.scene()) == 0
    node.staged("h2", "8:16")
    trouble = only(mounting.two_claims_one_device, node.scene())
    assert "volumeDevices/publish/pvc-h1/u1" in trouble.message


@pytest.mark.parametrize(("devices", "gone"), [({}, 0), ({"sdb": {}}, 1)])
def test_a_node_that_nobody_mounted_is_not_published(
    node: Node, devices: dict[str, Any], gone: int
) -> None:
    """It is on disk, and outlives a reboot."""
    node.raw("old", (8, 16), "u-old", node=None)
    node.staged("new", "8:16")
    at = node.scene(**devices)
    assert found(mounting.two_claims_one_device, at) == 0
    assert found(mounting.claim_device_gone, at) == gone  # the other one


@pytest.mark.parametrize(("fstype", "node_of"), [("devtmpfs", "/loop0"), ("tmpfs", "/any")])
def test_what_kubelet_left_mounted_of_an_earlier_pod_is_not_published(
    node: Node, fstype: str, node_of: str
) -> None:
    """Such a node outlives its disk, and the number is the next one's."""
    node.raw("old", (8, 16), "u-old", node=node_of, fstype=fstype, over=True)
    node.staged("new", "8:16")
    at = node.scene()
    assert found(mounting.two_claims_one_device, at) == 0
    assert at.inventory and [v.number for v in at.inventory.volumes] == [(8, 16), None]
    node.raw("old", (8, 16), "u-old")  # the pod is there
    assert found(mounting.two_claims_one_device, node.scene()) == 1


def test_btrfs_shows_its_device_as_its_source(node: Node) -> None:
    node.nodes = {"/dev/sdb": (8, 16), "/dev/mapper/b": (8, 16)}
    node.staged("h1", "0:50", "btrfs / rw /dev/sdb")
    node.staged("h2", "0:51", "btrfs / rw /dev/mapper/b")
    assert found(mounting.two_claims_one_device, node.scene()) == 1


def test_a_disk_that_comes_under_a_known_name_is_another(node: Node) -> None:
    """What was read of a device is kept until an uevent names it."""
    node.staged("h1", "8:16")
    node.staged("h2", "253:3")
    other = {**DEVICES["dm-3"], "slaves": ["sdb"]}
    assert found(mounting.two_claims_one_device, node.scene()) == 0
    assert found(mounting.two_claims_one_device, node.scene((), deep=False, **{"dm-3": other})) == 0
    assert (
        found(mounting.two_claims_one_device, node.scene(("dm-3",), deep=False, **{"dm-3": other}))
        == 1
    )


def test_the_setting_names_selects_its_devices_too(node: Node) -> None:
    node.staged("h1", "8:16")
    node.staged("h2", "8:16")
    at = node.scene()
    assert found(mounting.two_claims_one_device, at) == 1
    others = scene(inventory=at.inventory, settings={"names": ["rbd*"]})
    assert found(mounting.two_claims_one_device, others) == 0


# -- claim-device-gone


@pytest.mark.parametrize(("number", "devices", "why"), [
    ("8:16", {"sdb": {}}, "no longer has it"),
    ("8:1", {"sda1": {}, "sda": {}}, "no longer has it"),
    ("8:16", {"sdb": {"dev": "8:16", "size": "0"}}, "size of 0"),
    ("253:3", {"sdc": {}}, "lies on sdc"),  # hetznercloud#1364: LUKS on a disk that is gone
    ("253:3", {"dm-3": {**DEVICES["dm-3"], "slaves": []}}, "no longer has what"),
    ("253:0", {"sda1": {"dev": "8:1", "disk": "sda", "size": "0"}}, "size of 0"),
])  # fmt: skip
def test_a_mounted_volume_whose_device_is_gone(
    node: Node, number: str, devices: dict[str, Any], why: str
) -> None:
    node.staged("h1", number, "", "u1")
    assert found(mounting.claim_device_gone, node.scene()) == 0
    trouble = only(mounting.claim_device_gone, node.scene(**devices))
    assert (trouble.severity or mounting.claim_device_gone.severity) is Severity.CRITICAL
    for said in (why, "PersistentVolume pvc-h1", "volume h1", "pod u1", "globalmount"):
        assert said in trouble.message
    assert trouble.device and trouble.advice and trouble.evidence["driver"] == DRIVER
    node.mounts.clear()
    assert found(mounting.claim_device_gone, node.scene(**devices)) == 0


def test_a_raw_block_volume_whose_node_the_kernel_deleted(node: Node) -> None:
    """Its number is the next disk's."""
    node.raw("h1", (8, 16), "u1", node="/sdx//deleted")
    node.staged("h2", "8:16")
    at = node.scene()
    assert found(mounting.two_claims_one_device, at) == 0
    trouble = only(mounting.claim_device_gone, at)
    assert trouble.device == "sdx" and "volume h1 (pod u1)" in trouble.message
    node.raw("h1", (8, 16), "u2")  # published anew
    assert found(mounting.claim_device_gone, node.scene()) == 0
    assert found(mounting.two_claims_one_device, node.scene()) == 1


def test_of_a_pod_that_is_over_nothing_is_lost(node: Node) -> None:
    node.raw("h1", (8, 16), "u1", node="/sdx//deleted", over=True)
    at = node.scene()
    assert found(mounting.claim_device_gone, at) == 0
    assert at.inventory and at.inventory.volumes[0].publishes == ()


def test_the_kernel_deletes_no_node_in_a_tmpfs(node: Node) -> None:
    """Somebody did, and the device is there."""
    node.raw("h1", (8, 16), "u1", node="/sdb//deleted", fstype="tmpfs")
    at = node.scene()
    assert found(mounting.claim_device_gone, at) == 0
    assert at.inventory and at.inventory.volumes[0].number == (8, 16)


def test_a_loop_device_over_a_disk_that_has_gone(node: Node) -> None:
    """However often it is read again."""
    node.staged("h1", "7:5")
    assert found(mounting.claim_device_gone, node.scene()) == 0
    for changed in (("sdb",), None):
        trouble = only(mounting.claim_device_gone, node.scene(changed, sdb={}))
        assert trouble.device == "loop5"
    assert "loop5 lies on 8:16, which" in trouble.message


def test_the_device_is_called_as_the_mount_table_calls_it(node: Node) -> None:
    node.staged("h1", "8:16", "xfs / rw /dev/sdb")
    assert only(mounting.claim_device_gone, node.scene(sdb={})).device == "sdb"


def test_a_mapping_is_known_while_what_it_lies_on_is_read_again(node: Node) -> None:
    node.staged("h1", "253:3")
    for changed in (None, ("sdc",), ()):
        assert found(mounting.claim_device_gone, node.scene(changed)) == 0


def test_a_deep_scan_finds_a_device_that_shrank_without_an_uevent(node: Node) -> None:
    node.staged("h1", "8:16")
    shrunk = {**DEVICES["sdb"], "size": "0"}
    assert found(mounting.claim_device_gone, node.scene()) == 0
    assert found(mounting.claim_device_gone, node.scene((), sdb=shrunk)) == 0
    assert found(mounting.claim_device_gone, node.scene((), deep=True, sdb=shrunk)) == 1
    assert found(mounting.claim_device_gone, node.scene((), sdb=shrunk)) == 1
    assert found(mounting.claim_device_gone, node.scene((), deep=True)) == 0


def test_where_no_device_is_visible_none_counts_as_gone(node: Node) -> None:
    node.staged("h1", "8:16")
    node.hidden = True
    at = node.scene()
    assert found(mounting.claim_device_gone, at) == 0 and at.inventory
    assert ["/sys/dev/block" in gap for gap in at.inventory.gaps] == [True]


def test_a_raw_block_volume_whose_device_is_gone(node: Node) -> None:
    node.raw("h1", (8, 16), "u1")
    assert found(mounting.claim_device_gone, node.scene()) == 0
    trouble = only(mounting.claim_device_gone, node.scene(sdb={}))
    assert trouble.device == "8:16" and "pod u1" in trouble.message


@pytest.mark.parametrize(("number", "rest", "devices"), [
    ("0:40", "nfs4 /", {}),
    ("253:0", "", {"dm-0": {**DEVICES["dm-0"], "slaves": ["sd0", "sda1"]}}),  # RAID does without
    ("7:0", "", {}),
    ("253:2", "", {"dm-2": {**DEVICES["dm-2"], "slaves": []}}),  # multipath waits for its paths
    ("253:2", "", {"dm-2": {**DEVICES["dm-2"], "slaves": ["sdx", "sdy"]}}),
    ("709:34", "lustre / rw 10.0.0.1@tcp:/fsx", {}),
])  # fmt: skip
def test_a_device_that_works_is_not_gone(
    node: Node, number: str, rest: str, devices: dict[str, Any]
) -> None:
    node.staged("h1", number, rest)
    assert found(mounting.claim_device_gone, node.scene(**devices)) == 0


@pytest.mark.parametrize("rule", [mounting.two_claims_one_device, mounting.claim_device_gone])
def test_without_kubelets_records_nothing_is_known(rule: AuditRule) -> None:
    assert judge(rule, scene(no_records="no kubelet directory")).unknown
