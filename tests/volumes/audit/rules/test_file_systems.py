"""Rules about the state of mounted file systems, and of volumes that kubelet forgot. Pure."""

from typing import Any

import pytest

from linux.blockdev import DeviceLayer
from tests.volumes.audit.world import device, judge, only, place, scene, volume
from volumes.audit.inventory.model import FsErrors, Publish
from volumes.audit.rules import mounting
from volumes.audit.types import Severity

STAGING = "/var/lib/kubelet/plugins/kubernetes.io/csi/rbd.csi.ceph.com/1/globalmount"
RW, RO = {"read_only": False}, {"read_only": True}


@pytest.mark.parametrize(("mounted", "errors", "severity", "said"), [
    # ext4 since Linux 6.15, of errors=remount-ro and of a shutdown
    ({"super_options": ("rw", "errors=remount-ro", "emergency_ro")}, None, Severity.CRITICAL,
     "emergency_ro"),
    ({"super_options": ("rw", "shutdown")}, None, Severity.CRITICAL, "shutdown"),
    # btrfs, f2fs, and ext4 of older kernels
    ({"fstype": "btrfs", "super_read_only": True}, None, Severity.CRITICAL, "read-only"),
    ({"super_read_only": True}, None, Severity.CRITICAL, "read-only"),
    # ext4 between them shows nothing in the mount table
    ({}, FsErrors(1, 990.0, True), Severity.CRITICAL, "1 error"),
    ({}, FsErrors(3, 990.0, False), Severity.WARNING, "3 errors"),
])  # fmt: skip
def test_a_file_system_that_failed_is_found_as_long_as_it_is_so(
    mounted: dict[str, Any], errors: FsErrors | None, severity: Severity, said: str
) -> None:
    at = scene(host=(place(STAGING, **mounted),), fs_errors={"rbd0": errors} if errors else {})
    trouble = only(mounting.file_system_errors, at)
    assert trouble.severity is severity and said in trouble.message
    assert trouble.device == "rbd0" and STAGING in trouble.evidence["targets"]


@pytest.mark.parametrize("mounted", [
    {},
    {"read_only": True, "super_read_only": True},  # somebody wanted it so
    {"read_only": True},  # a read-only bind mount of a writable file system
    {"fstype": "squashfs", "super_read_only": True},  # never was writable
    {"super_options": ("rw", "errors=remount-ro")},
])  # fmt: skip
def test_a_well_file_system_is_no_trouble(mounted: dict[str, Any]) -> None:
    assert judge(mounting.file_system_errors, scene(host=(place(**mounted),))).troubles == ()


FAILED = {"super_read_only": True, "read_only": False}
WANTED = {"super_read_only": True, "read_only": True}


@pytest.mark.parametrize(("staging", "pod", "changes", "expected"), [
    # ceph-csi stages a ReadOnlyMany with ro; its 'mount -o bind,remount' for the pod clears that
    # of the pod's mount. A read-only file system is as the staging mount says it.
    (WANTED, FAILED, {}, False),
    (FAILED, WANTED, {}, True),
    (FAILED, FAILED, {}, True),
    (None, FAILED, {}, True),
    # mount(8) makes a super block read-only whose device is
    (FAILED, FAILED, {"read_only": True}, False),
])  # fmt: skip
def test_the_staging_mount_says_whether_somebody_wanted_it_read_only(
    staging: dict[str, Any] | None, pod: dict[str, Any], changes: dict[str, Any], expected: bool
) -> None:
    staged = () if staging is None else (place(STAGING, **staging),)
    at = scene(
        devices=(device(**changes),),
        host=(*staged, place("/pods/u1/mount", **pod)),
        volumes=(volume(staging=STAGING, mounts=(STAGING,) if staged else ()),),
    )
    assert bool(judge(mounting.file_system_errors, at).troubles) is expected


@pytest.mark.parametrize(("mounts", "expected"), [((WANTED, FAILED), False), ((FAILED,), True)])
def test_without_a_staging_mount_all_mounts_must_be_writable(
    mounts: tuple[dict[str, Any], ...], expected: bool
) -> None:
    host = tuple(place(f"/mnt/{number}", **each) for number, each in enumerate(mounts))
    assert bool(judge(mounting.file_system_errors, scene(host=host)).troubles) is expected


@pytest.mark.parametrize("changes", [{}, {"read_only": True}])
def test_old_errors_of_what_somebody_wanted_read_only_are_a_warning(
    changes: dict[str, Any],
) -> None:
    at = scene(
        devices=(device(**changes),),
        host=(place(STAGING, **(FAILED if changes else WANTED)),),
        fs_errors={"rbd0": FsErrors(1, 990.0, True)},
    )
    trouble = only(mounting.file_system_errors, at)
    assert trouble.severity is Severity.WARNING and "damaged" in trouble.message


def test_a_file_system_on_a_mapping_is_named_by_its_device() -> None:
    """LUKS over rbd: the errors are dm-3's, the volume is rbd0's."""
    encrypted = device(layers=(DeviceLayer("dm-3", (253, 3), ("ext4",)),))
    at = scene(
        devices=(encrypted,),
        host=(place(STAGING, device=(253, 3)),),
        fs_errors={"dm-3": FsErrors(1, 990.0, True)},
    )
    trouble = only(mounting.file_system_errors, at)
    assert trouble.device == "rbd0" and trouble.evidence["on"] == "dm-3"


# -- staged, in no pod


FORGOTTEN = volume(staging=STAGING, mounts=(STAGING,))
IN_A_POD = Publish("u1", "/pods/u1/mount", "pvc-1", mounted=True, read_only=False)
STARTING = Publish("u1", "/pods/u1/mount", "pvc-1", mounted=False, read_only=False)


def test_a_staged_volume_in_no_pod_is_a_warning_after_ten_minutes() -> None:
    """kubernetes#121937, #85476: a restarted kubelet forgets it, and never unstages it."""
    at = scene(volumes=(FORGOTTEN,), host=(place(STAGING),))
    trouble = only(mounting.staged_unused, at)
    assert (trouble.severity or mounting.staged_unused.severity) is Severity.WARNING
    assert mounting.staged_unused.patience == 600.0
    assert STAGING in trouble.message and trouble.evidence["volume"] == "h1"


def test_it_is_critical_when_the_cluster_has_taken_it_away() -> None:
    """Then another node may have it attached, and two write."""
    at = scene(volumes=(FORGOTTEN,), host=(place(STAGING),), detached=frozenset({"h1"}))
    trouble = only(mounting.staged_unused, at)
    assert trouble.severity is Severity.CRITICAL and trouble.patience == 0.0
    assert "VolumeAttachment" in trouble.message


@pytest.mark.parametrize("changes", [
    {"publishes": (IN_A_POD,)},
    {"publishes": (STARTING,)},  # its pod waits for it
    {"mounts": ()},
    {"device": ""},  # of a driver that nobody watches
    {"handle": ""},  # its record cannot be read, so its pods are not known
])  # fmt: skip
def test_a_volume_that_kubelet_works_with_is_no_trouble(changes: dict[str, Any]) -> None:
    known = volume(**{"staging": STAGING, "mounts": (STAGING,), **changes})
    at = scene(volumes=(known,), host=(place(STAGING),), detached=frozenset({"h1"}))
    assert judge(mounting.staged_unused, at).troubles == ()


def test_without_kubelets_records_nothing_is_known() -> None:
    assert judge(mounting.staged_unused, scene(no_records="no kubelet directory")).unknown
