"""What could be done about findings, and what forbids it. Pure."""

import dataclasses

import pytest

from kit.findings import Finding
from linux.blockdev import DeviceLayer
from tests.volumes.audit.world import COPY, device, only, place, scene, space
from volumes.audit import actions
from volumes.audit.rules import mounting
from volumes.audit.types import Scene, Severity

KUBELET = place("/", device=(8, 1))


def detach(at: Scene, **evidence: str) -> actions.ActionPlan:
    """The plan for the leaked mount in ``at``."""
    finding = Finding(
        "leaked-mount/rbd0/mnt-99", "leaked-mount", Severity.CRITICAL, "rbd0", "m", "a",
        {"device": "rbd0", "kind": "mount", "namespace": "99", **evidence},
    )  # fmt: skip
    assert at.inventory is not None
    (step,) = actions.plans([finding], at.inventory, {})
    return step


def test_detach_needs_kubelets_directory() -> None:
    held = space(place(COPY, namespace=99, propagation="private"))
    blind = scene(spaces=(held,), no_records="no kubelet directory at /var/lib/kubelet")
    only(mounting.leaked_mount, blind)
    assert "no kubelet directory at /var/lib/kubelet" in detach(blind).refusal
    assert detach(scene(spaces=(held,), kubelet=KUBELET)).refusal == ""


def test_a_host_without_a_kubelet_has_no_records_to_ask() -> None:
    held = space(place(COPY, namespace=99, propagation="private"))
    assert detach(scene(spaces=(held,))).refusal == ""


@pytest.mark.parametrize("propagation", ["slave", "shared"])
def test_detach_refuses_what_is_not_a_private_copy(propagation: str) -> None:
    held = space(place(COPY, namespace=99, propagation=propagation))
    assert "not a private copy" in detach(scene(spaces=(held,), kubelet=KUBELET)).refusal


def test_detach_names_copies_by_the_numbers_of_their_mounts() -> None:
    layers = (
        DeviceLayer("rbd0p1", (259, 1), ("ext4",)),
        DeviceLayer("rbd0p2", (259, 2), ("ext4",)),
    )
    partitioned = device(active=("ext4",), partitions=("rbd0p1", "rbd0p2"), layers=layers)
    copies = space(
        place("/host/1", device=(259, 1), propagation="private"),
        place(COPY, device=(259, 2), propagation="private"),
    )
    at = scene(
        devices=(partitioned,),
        host=(place("/mnt/1", device=(259, 1)),),
        spaces=(copies,),
        kubelet=KUBELET,
    )
    step = detach(at)
    assert step.refusal == ""
    assert step.arguments == ("/proc/42/ns/mnt", 5, 99, [[259, 2, COPY]])
    assert at.inventory is not None
    host = (*at.inventory.host, place("/mnt/2", device=(259, 2)))
    again = dataclasses.replace(at, inventory=dataclasses.replace(at.inventory, host=host))
    assert "the host has it mounted again" in detach(again).refusal
