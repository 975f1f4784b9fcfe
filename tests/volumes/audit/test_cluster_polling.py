"""When clusters are asked and how answers are read. Pure; test_ceph.py has a real cluster."""

import asyncio
import collections
import contextlib

import pytest

from tests.volumes.audit.world import INVENTORY
from volumes.audit import cluster_polling
from volumes.audit.inventory import ceph
from volumes.audit.settings import AuditSettings

# Ceph 16.2.15's exact answers to 'osd blocklist ls' in JSON; 15 says 'blacklist' and one array.
BOTH = (
    '[{"addr":"10.9.9.9:0/123","until":"2026-11-21T16:45:37.579343+0000"}]'
    '[{"range":"10.1.0.0:0/24","until":"2026-11-21T16:45:39.453176+0000"}]'
)
ONE = '\n[{"addr":"10.9.9.9:0/123","until":"2026-11-21T16:45:37.579343+0000"}]\n'


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        (BOTH, ("cidr:10.1.0.0:0/24", "10.9.9.9:0/123")),
        (ONE, ("10.9.9.9:0/123",)),
        ("[][]", ()),
        ("", ()),  # this key may not ask
    ],
)
def test_a_blocklist_is_read_with_its_ranges(text: str, entries: tuple[str, ...]) -> None:
    assert ceph.blocklist(text) == entries


def test_a_thousand_nodes_that_map_at_one_moment_do_not_ask_at_one_moment() -> None:
    waits = [cluster_polling.soon(300.0) for _ in range(1000)]
    assert min(waits) >= 5.0
    assert max(waits) <= 30.0
    seconds = collections.Counter(int(wait) for wait in waits)
    assert max(seconds.values()) < 100  # 40 are even
    assert cluster_polling.soon(1.0) == 1.0


async def test_a_new_mapping_is_asked_about_after_the_drawn_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn: list[float] = []

    def soon(interval: float) -> float:
        drawn.append(interval)
        return 0.0

    asked = asyncio.Queue[bool]()

    async def ask(self: cluster_polling.Poller, settings: AuditSettings) -> None:
        asked.put_nowait(True)

    monkeypatch.setattr(cluster_polling, "soon", soon)
    monkeypatch.setattr(cluster_polling.Poller, "ask", ask)
    cluster = {"name": "c1", "monitors": ["10.0.0.1:6789"], "secret_file": "/k"}
    settings = AuditSettings.model_validate({"clusters": [cluster]})
    each = cluster_polling.Poller(lambda: None)
    task = asyncio.create_task(each.run(lambda: settings))
    try:
        async with asyncio.timeout(20):
            await asked.get()
            assert drawn == []
            each.want(INVENTORY)
            await asked.get()
            assert drawn == [settings.cluster_interval]
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
