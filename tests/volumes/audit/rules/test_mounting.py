"""leaked-mount, busy-mount, private-propagation, host-mount-options. Pure; test_leaked_mounts.py
has real mounts."""

import dataclasses
from typing import Any

import pytest

from linux.blockdev import DeviceLayer
from tests.volumes.audit.world import (
    COPY,
    DEVICE,
    OWNER,
    device,
    judge,
    log_hit,
    only,
    place,
    scene,
    space,
    volume,
)
from volumes.audit.inventory.model import Owner, Publish, User
from volumes.audit.rules import mappings, mounting
from volumes.audit.rules.base import AuditRule, Outcome
from volumes.audit.types import Severity

PARTITIONED = device(
    active=("ext4",),
    partitions=("rbd0p1", "rbd0p2"),
    layers=(DeviceLayer("rbd0p1", (259, 1), ("ext4",)), DeviceLayer("rbd0p2", (259, 2), ("ext4",))),
)
KUBELET = place("/", device=(8, 1))


def test_leaked_mount_ignores_copies_of_what_the_host_has_mounted() -> None:
    at = scene(devices=(device(active=("ext4",)),), host=(place(),), spaces=(space(),))
    assert judge(mounting.leaked_mount, at).troubles == ()


@pytest.mark.parametrize(
    ("held", "advice"),
    [
        (space(place("/data", namespace=99, propagation="private")), "end the container instead"),
        (space(place(COPY, namespace=99, propagation="slave")), "find the mounts they come from"),
        (
            space(
                place(COPY, namespace=99, propagation="private"),
                owners=(dataclasses.replace(OWNER, pod_uid="uid"),),
            ),
            "pod uid still owns the volume",
        ),
    ],
)
def test_leaked_mount_does_not_advise_what_the_action_refuses(held: Any, advice: str) -> None:
    published = volume(publishes=(Publish("uid", "/p", "pv", False, False),))
    at = scene(spaces=(held,), volumes=(published,), kubelet=KUBELET)
    trouble = only(mounting.leaked_mount, at)
    assert advice in trouble.advice
    assert "volume act" not in trouble.advice and "umount" not in trouble.advice
    assert at.inventory is not None
    assert mounting.why_not_detach(at.inventory, DEVICE, held, list(held.places), frozenset())


def test_leaked_mount_of_a_layer() -> None:
    first = place("/mnt/1", device=(259, 1))
    copies = space(
        place("/host/1", device=(259, 1), propagation="private"),
        place("/host/2", device=(259, 2), propagation="private"),
    )
    both = (first, place("/mnt/2", device=(259, 2)))
    mounted = scene(devices=(PARTITIONED,), host=both, spaces=(copies,))
    assert judge(mounting.leaked_mount, mounted).troubles == ()
    assert judge(mappings.mapped_unmounted, mounted).troubles == ()
    leaked = scene(devices=(PARTITIONED,), host=(first,), spaces=(copies,))
    trouble = only(mounting.leaked_mount, leaked)
    assert (trouble.device, trouble.evidence["on"]) == ("rbd0", "rbd0p2")
    assert trouble.evidence["targets"] == "/host/2"
    unexplained = only(mounting.leaked_mount, scene(devices=(PARTITIONED,), host=(first,)))
    assert unexplained.key == "nobody"


def test_leaked_mount_names_users_of_unmounted_layers_only() -> None:
    host = (place("/mnt/1", device=(259, 1)),)
    on_second = User(OWNER, (259, 2), ("fd 3",), 99)
    at = scene(devices=(PARTITIONED,), host=host, users=(on_second,))
    assert only(mounting.leaked_mount, at).pid == 42
    on_first = User(OWNER, (259, 1), ("fd 3",), 99)
    at = scene(devices=(PARTITIONED,), host=host, users=(on_first,))
    assert only(mounting.leaked_mount, at).key == "nobody"


def test_btrfs_is_neither_leaked_nor_idle() -> None:
    """The number of its mounts belongs to no device."""
    at = scene(devices=(device(active=("btrfs",)),), host=(place(device=(0, 44), fstype="btrfs"),))
    assert judge(mounting.leaked_mount, at).troubles == ()
    assert judge(mappings.mapped_unmounted, at).troubles == ()


def test_leaked_mount_without_holder_is_a_patient_warning() -> None:
    trouble = only(mounting.leaked_mount, scene(devices=(device(active=("ext4",)),)))
    assert trouble.patience == mounting.UNEXPLAINED_SECONDS
    assert trouble.severity is Severity.WARNING


def test_leaked_mount_needs_no_superblock_in_sysfs() -> None:
    assert only(mounting.leaked_mount, scene(spaces=(space(),))).pid == 42


@pytest.mark.parametrize("rule", [mounting.leaked_mount, mounting.private_propagation])
def test_namespace_gaps_make_an_empty_result_unknown(rule: AuditRule) -> None:
    gaps = ("mount namespace 7: Operation not permitted",)
    assert judge(rule, scene(kubelet=KUBELET)) == Outcome()
    assert "namespace 7" in judge(rule, scene(kubelet=KUBELET, space_gaps=gaps)).unknown
    private = space(place("/host", device=(8, 1), propagation="private"), place("/host/v"))
    outcome = judge(rule, scene(kubelet=KUBELET, spaces=(private,), space_gaps=gaps))
    assert outcome.troubles and not outcome.unknown  # what is seen is judged and can clear


def test_busy_mount_of_a_staged_volume_without_pod() -> None:
    user = User(OWNER, DEVICE.number, ("cwd",), 99)
    base: dict[str, Any] = {"host": (place(),), "users": (user,)}
    staged = volume(mounts=("/mnt",))
    assert only(mounting.busy_mount, scene(volumes=(staged,), **base)).pid == 42
    has = Publish("u", "/p", "v", mounted=True, read_only=False)
    owned = volume(mounts=("/mnt",), publishes=(has,))
    assert judge(mounting.busy_mount, scene(volumes=(owned,), **base)).troubles == ()
    by_log = scene(logs=(log_hit(hint="busy", device="rbd0"),), **base)
    assert only(mounting.busy_mount, by_log).pid == 42
    loop = User(Owner(0, 0, "loop3", ""), DEVICE.number, ("/mnt/disk.img",), 0)
    trouble = only(mounting.busy_mount, scene(volumes=(staged,), host=(place(),), users=(loop,)))
    assert trouble.key == "loop3" and "'losetup -d /dev/loop3'" in trouble.advice
    assert "process_started" not in trouble.evidence


def test_busy_mount_and_unmap_failing_end_when_a_pod_has_the_volume_again() -> None:
    """The retried job came back to this node, and kubelet published the volume again."""
    published = volume(mounts=("/mnt",), publishes=(Publish("uid", "/p", "pv", True, False),))
    user = User(OWNER, DEVICE.number, ("fd 3",), 1)
    base: dict[str, Any] = {"host": (place(),), "volumes": (published,), "users": (user,)}
    base["users_of"] = (DEVICE.number,)
    failed = scene(logs=(log_hit(image="rbd/csi-vol-1"),), **base)
    busy = scene(logs=(log_hit(hint="busy", device="rbd0"),), **base)
    assert judge(mappings.unmap_failing, failed).troubles == ()
    assert judge(mounting.busy_mount, busy).troubles == ()


def test_private_propagation_concerns_kubelets_file_system_only() -> None:
    rule = mounting.private_propagation
    other = space(place("/host", device=(9, 1), propagation="private"))
    slave = space(place("/host", device=(8, 1), propagation="slave"))
    private = space(place("/host", device=(8, 1), propagation="private"))
    assert judge(rule, scene(kubelet=KUBELET, spaces=(other,))).troubles == ()
    assert judge(rule, scene(kubelet=KUBELET, spaces=(slave,))).troubles == ()
    trouble = only(rule, scene(kubelet=KUBELET, spaces=(private,)))
    assert trouble.severity is Severity.INFO  # nothing is pinned yet
    pinning = space(
        place("/host", device=(8, 1), propagation="private"),
        place("/host/v", propagation="private"),
    )
    trouble = only(rule, scene(kubelet=KUBELET, spaces=(pinning,)))
    assert (trouble.severity, trouble.device) == (Severity.WARNING, "rbd0")


def test_host_mount_options_names_missing_ones() -> None:
    rule = mounting.host_mount_options
    wanted = {"mount_options": [{"target": "/var/*", "options": ["noatime"], "fstype": "ext4"}]}
    bad = scene(host=(place("/var/x"),), settings=wanted)
    assert only(rule, bad).key == "noatime"
    fine = (
        place("/var/x", options=("rw", "noatime")),
        place("/mnt"),
        place("/var/y", fstype="xfs"),
    )
    assert judge(rule, scene(host=fine, settings=wanted)).troubles == ()


def test_host_mount_options_requires_a_shared_kubelet_mount() -> None:
    rule = mounting.host_mount_options
    assert judge(rule, scene(kubelet=place("/"))).troubles == ()
    assert "shared" in only(rule, scene(kubelet=place("/", propagation="private"))).message
