"""What the cluster says of volumes that kubelet seems to have forgotten. No real cluster."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.volumes.audit.world import INVENTORY, Cluster, audit, place, scene, volume
from volumes.audit import repairer
from volumes.audit.inventory.model import Inventory, Publish
from volumes.settings import AuditSettings

STAGING = "/var/lib/kubelet/plugins/kubernetes.io/csi/rbd.csi.ceph.com/1/globalmount"
POD = Publish("u1", "/pods/u1/mount", "pvc-1", mounted=True, read_only=False)


def node(*publishes: Publish) -> Inventory:
    staged = volume(staging=STAGING, mounts=(STAGING,), publishes=publishes)
    made = scene(volumes=(staged,), host=(place(STAGING),)).inventory
    assert made is not None
    return made


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[repairer.Repairer, Cluster]:
    monkeypatch.setattr(repairer, "ASK_SECONDS", 0.0)
    cluster = Cluster()
    return audit(AuditSettings(), tmp_path, cluster=cluster).repairer, cluster


async def test_an_attachment_that_was_there_and_is_gone(
    asked: tuple[repairer.Repairer, Cluster],
) -> None:
    repair, cluster = asked
    cluster.claim = "pvc-1"
    assert not await repair.ask_attached(node()) and repair.detached == frozenset()
    cluster.claim = ""
    assert await repair.ask_attached(node()) and repair.detached == {"h1"}
    cluster.silent = True  # who does not answer takes nothing back
    assert not await repair.ask_attached(node()) and repair.detached == {"h1"}
    assert await repair.ask_attached(node(POD)) and repair.detached == frozenset()


async def test_one_that_nobody_saw_is_not_gone(asked: tuple[repairer.Repairer, Cluster]) -> None:
    """The cluster attaches nothing for some drivers (attachRequired: false)."""
    repair, _ = asked
    assert not await repair.ask_attached(node()) and repair.detached == frozenset()


async def test_the_cluster_is_not_asked_about_what_kubelet_works_with(
    asked: tuple[repairer.Repairer, Cluster],
) -> None:
    repair, cluster = asked
    await repair.ask_attached(node(POD))
    await repair.ask_attached(INVENTORY)
    assert cluster.asked == 0


async def test_it_is_asked_at_once_then_each_minute(
    asked: tuple[repairer.Repairer, Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    """kubernetes#121937: kubelet restarts within half a minute, and the cluster then detaches the
    volume within seconds. Only who asked before knows that it was there."""
    repair, cluster = asked
    clock = [1000.0]
    monkeypatch.setattr(repairer, "ASK_SECONDS", 60.0)
    monkeypatch.setattr(repairer, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    cluster.claim = "pvc-1"
    for _ in range(10):  # each volume passes through this state when its last pod ends
        await repair.ask_attached(node())
    assert cluster.asked == 1
    cluster.claim = ""
    clock[0] += 60.0
    assert await repair.ask_attached(node()) and repair.detached == {"h1"}


async def test_a_silent_cluster_delays_a_round_by_one_question(
    asked: tuple[repairer.Repairer, Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    repair, cluster = asked
    monkeypatch.setattr(repairer, "ASK_SECONDS", 60.0)
    staged = [
        volume(handle=f"h{n}", staging=f"{STAGING}/{n}", mounts=(f"{STAGING}/{n}",))
        for n in range(3)
    ]
    seen = scene(volumes=tuple(staged), host=(place(STAGING),)).inventory
    assert seen is not None
    cluster.silent = True
    for asked_by_now in (1, 2, 3, 3):  # and each volume has its turn
        await repair.ask_attached(seen)
        assert cluster.asked == asked_by_now
