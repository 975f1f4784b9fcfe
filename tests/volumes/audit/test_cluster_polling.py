"""When clusters are asked, and where their monitors are. Pure; test_ceph.py has a real cluster."""

import asyncio
import collections
import contextlib

import pytest

from ceph import client
from ceph.protocol import ClusterView
from tests.volumes.audit.world import INVENTORY, view
from volumes.audit import cluster_polling
from volumes.audit.settings import AuditSettings, ClusterSettings

CLUSTER = ClusterSettings.model_validate(
    {"name": "c1", "monitors": ["10.0.0.1:6789"], "secret_file": "/k"}
)


def test_soon_spreads_the_questions_of_many_nodes() -> None:
    waits = [cluster_polling.soon(300.0) for _ in range(1000)]
    assert min(waits) >= 5.0
    assert max(waits) <= 30.0
    seconds = collections.Counter(int(wait) for wait in waits)
    assert max(seconds.values()) < 100  # 40 are even
    assert cluster_polling.soon(1.0) == 1.0


async def test_poller_asks_soon_about_new_mappings(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[float] = []

    def soon(interval: float) -> float:
        drawn.append(interval)
        return 0.0

    asked = asyncio.Queue[bool]()

    async def ask(*_: object) -> None:
        asked.put_nowait(True)

    monkeypatch.setattr(cluster_polling, "soon", soon)
    monkeypatch.setattr(cluster_polling.Poller, "ask", ask)
    settings = AuditSettings()
    poller = cluster_polling.Poller(lambda: None)
    task = asyncio.create_task(poller.run(lambda: settings, lambda: (CLUSTER,)))
    try:
        async with asyncio.timeout(20):
            await asked.get()
            assert drawn == []
            poller.want(INVENTORY)
            await asked.get()
            assert drawn == [settings.cluster_interval]
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_poller_forgets_clusters_that_left_the_settings() -> None:
    changes: list[None] = []
    poller = cluster_polling.Poller(lambda: changes.append(None))
    poller.views = {"gone": "no answer"}
    await poller.ask((), 1.0)
    assert poller.views == {}
    assert len(changes) == 1


def test_addresses_come_from_settings_and_cluster() -> None:
    by_conf = ClusterSettings.model_validate({"name": "c1", "conf": "/etc/ceph/ceph.conf"})
    named = view(monitors_v1=("10.0.0.1:6789",), monitors_v2=("10.0.0.1:3300", "[fd00::1]:3300"))
    assert cluster_polling.addresses(by_conf, named) == ["10.0.0.1", "fd00::1"]
    assert cluster_polling.addresses(by_conf, "no answer") == []
    by_name = CLUSTER.model_copy(update={"monitors": ("mon-a:6789",)})
    assert cluster_polling.addresses(by_name, named) == ["10.0.0.1", "fd00::1"]


async def test_what_is_the_same_for_every_node_is_asked_rarely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[bool] = []

    class Stand:
        async def view(self, images: object, *, wide: bool) -> ClusterView:
            asked.append(wide)
            if wide:
                return view(used=0.9, min_client="luminous", denied=("df", "mon dump"))
            return view(blocklist=("10.0.0.5:0/1",), denied=("mon dump",))

        async def close(self) -> None:
            pass

    monkeypatch.setattr(client, "Cluster", lambda *_, **__: Stand())
    poller = cluster_polling.Poller(lambda: None)
    for _ in range(3):
        await poller.ask((CLUSTER,), 1.0, 3600.0)
    assert asked == [True, False, False]
    seen = poller.views["c1"]
    assert isinstance(seen, ClusterView)
    assert (seen.used, seen.min_client, seen.blocklist) == (0.9, "luminous", ("10.0.0.5:0/1",))
    assert sorted(seen.denied) == ["df", "mon dump"]
    await poller.ask((CLUSTER,), 1.0, 0.0)
    assert asked[-1]
