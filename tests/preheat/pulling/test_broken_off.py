"""Registries that break off again and again: a pull ends, whatever they are able to do."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.preheat.rig import MB, Rig, idle, state, until
from tests.testbed import front, registry

HOST = "reg.example"
pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(120),
    pytest.mark.parametrize("release", ["sid"], indirect=True),
]


@pytest.fixture
def server(images: registry.Registry, rig: Rig) -> Iterator[front.Front]:
    made = front.Front(images.port)
    made.start()
    rig.daemon.trust(HOST, made.url)
    try:
        yield made
    finally:
        made.stop()


def push(rig: Rig, name: str, size: int) -> str:
    layer = registry.layer(name, size, 900 + len(name))
    rig.images.push(f"fw/{name}", "v1", [layer])
    return f"{HOST}/fw/{name}:v1"


async def test_our_own_partial_layer_of_a_registry_without_ranges_is_completed(
    rig: Rig, server: front.Front
) -> None:
    """Under a limit the agent fetches layers itself, and it had begun this one."""
    ref = push(rig, "noranges", 6 * MB)
    server.ranges, server.dies_after, server.deaths = False, 3 * MB, 1
    more: dict[str, Any] = {"images": [{"ref": ref}], "bytes_per_second": 16 * MB}
    async with rig.running(**more) as room:
        await until(
            lambda: room.reconciler.pulls.totals.failed["network"] > 0, what="it to break off"
        )
        begun = max(
            each.ours or 0 for each in (await room.reconciler.runtime.content.ingests()).values()
        )
        await state(room, ref, "ready")
        failed = dict(room.reconciler.pulls.totals.failed)

    assert 0 < begun < 6 * MB
    assert {kind: count for kind, count in failed.items() if count} == {"network": 1}


async def test_waits_do_not_grow_while_each_attempt_brings_something(
    rig: Rig, server: front.Front
) -> None:
    ref = push(rig, "dying", 16 * MB)
    server.dies_after, server.deaths = 3 * MB, 5
    more: dict[str, Any] = {"images": [{"ref": ref}], "bytes_per_second": 64 * MB}
    async with rig.running(**more) as room:
        seen = set()

        def ready() -> bool:
            failed = room.reconciler.pulls.failures.get(ref)
            seen.add(failed.attempts if failed is not None else 0)
            return room.show(ref).state == "ready"

        await until(ready, 60, what="the image")
        await idle(room)
        failures = room.reconciler.pulls.totals.failed["network"]
        fetched = room.reconciler.pulls.totals.fetched_bytes

    assert failures >= 3
    assert fetched > 15 * MB  # what attempts that failed brought counts too
    assert seen <= {0, 1}
    assert server.blob_bytes <= 1.5 * 16 * MB
