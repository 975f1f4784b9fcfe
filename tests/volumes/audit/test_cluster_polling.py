"""When clusters are asked, and where their monitors are. Pure; test_ceph.py has a real cluster."""

import asyncio
import collections
import contextlib
import json
import random
from pathlib import Path

import pytest

from ceph import client, worker
from ceph.protocol import CephCredentials, ClusterView
from tests.testbed import waiting
from tests.volumes.audit.world import INVENTORY, view
from volumes.audit import cluster_polling
from volumes.settings import AuditSettings, ClusterSettings

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
    monkeypatch.setattr(cluster_polling, "first", lambda interval: 0.0)
    monkeypatch.setattr(cluster_polling.Poller, "ask", ask)
    settings = AuditSettings()
    poller = cluster_polling.Poller(lambda: None)
    task = asyncio.create_task(poller.run(lambda: settings, lambda: (CLUSTER,)))
    try:
        async with asyncio.timeout(waiting.limit(60)):
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
                return view(min_client="luminous", denied=("features", "mon dump"))
            return view(blocklist=("10.0.0.5:0/1",), denied=("mon dump",))

        async def close(self) -> None:
            pass

    monkeypatch.setattr(client, "ClusterClient", lambda *_, **__: Stand())
    poller = cluster_polling.Poller(lambda: None)
    for _ in range(3):
        await poller.ask((CLUSTER,), 1.0, 3600.0)
    assert asked == [True, False, False]
    seen = poller.views["c1"]
    assert isinstance(seen, ClusterView)
    assert (seen.min_client, seen.blocklist) == ("luminous", ("10.0.0.5:0/1",))
    assert sorted(seen.denied) == ["features", "mon dump"]
    await poller.ask((CLUSTER,), 1.0, 0.0)
    assert asked[-1]


# --- the load of many nodes, as docs/audit.md says it

NODES = 7500
HOURS = 6


class _Monitors:
    """Notes the commands of one question."""

    def __init__(self) -> None:
        self.commands: list[str] = []

    def mon_command(self, request: str, _: bytes, timeout: int) -> tuple[int, bytes, str]:
        self.commands.append(json.loads(request)["prefix"])
        return 0, b"", ""


def _commands(wide: bool) -> int:
    """Commands to the monitors for one question."""
    connection = object.__new__(worker._Connection)
    connection._cluster = monitors = _Monitors()
    connection.credentials = CephCredentials("c1", (), "", "admin", "", 1.0)
    connection._limit, connection._thing, connection._fsid = 1, "cluster c1", "f1"
    connection._view((), wide)
    return len(monitors.commands)


def _load(seed: int, *, mapped: bool) -> tuple[float, float, int]:
    """Questions and commands in a second, on average after the first hour, and the most commands in
    a second of all. All nodes start in the same second and, if ``mapped``, find new images in the
    middle of the time. The waits are the poller's own."""
    settings, narrow, all_of_it = AuditSettings(), _commands(False), _commands(True)
    random.seed(seed)
    asked, seconds = collections.Counter[int](), collections.Counter[int]()
    job = HOURS * 1800.0
    for _ in range(NODES):
        now, wide, woken = cluster_polling.first(settings.cluster_interval), None, not mapped
        while now < HOURS * 3600:
            due = wide is None or wide.is_due(now, settings.cluster_wide_interval)
            if due:
                wide = cluster_polling.Wide(view(), now)
            asked[int(now)] += 1
            seconds[int(now)] += all_of_it if due else narrow
            after = now + cluster_polling.pause(settings.cluster_interval)
            if not woken and after > job:
                after, woken = job + cluster_polling.soon(settings.cluster_interval), True
            now = after
    span = range(3600, HOURS * 3600)
    average = [sum(each[second] for second in span) / len(span) for each in (asked, seconds)]
    return average[0], average[1], max(seconds.values())


def test_the_load_of_7500_nodes_is_as_documented() -> None:
    """The table in docs/audit.md, computed from the intervals of the settings and of the code."""
    questions, commands, most = _load(1, mapped=False)
    job = _load(1, mapped=True)[2]
    row = (
        f"| {NODES:,} | {questions:.0f} | {commands:.0f} | {round(most, -1):,} | "
        f"{round(job, -1):,} |"
    )
    assert row in (Path(__file__).parents[3] / "docs/audit.md").read_text(), row
