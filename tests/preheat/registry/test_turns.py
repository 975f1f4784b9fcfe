"""Turns and waits of the running room, on a real containerd."""

import asyncio
import email.utils
import time
from typing import Any

import pytest

from tests.preheat.rig import Clock, Rig, state, until

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(120),
    pytest.mark.parametrize("release", ["sid"], indirect=True),
]


async def test_lookup_waits_for_its_turn_and_an_operator_does_not(rig: Rig) -> None:
    image = rig.push("fw/turn:v1")
    async with rig.running(images=[{"ref": image.ref}], spread=3600, node="n") as room:
        await state(room, image.ref, "waiting")
        for _ in range(3):
            await room.reconciler.cycle()
        row = await state(room, image.ref, "waiting")  # after the first look at the runtime
        before = len(rig.gate.requests())
        await room.resume(image.ref)
        await state(room, image.ref, "ready")

    assert before == 0
    assert "lookup comes in" in row.reason


async def test_window_that_opens_starts_the_turn(rig: Rig, clock: Clock) -> None:
    """The image was looked up long before; still the node does not start with the window."""
    image = rig.push("fw/window:v1")
    now = time.time()
    opening = (now + 3600) // 60 * 60
    begin, end = (time.strftime("%H:%M", time.gmtime(opening + n)) for n in (0, 4 * 3600))
    more: dict[str, Any] = {"images": [{"ref": image.ref}], "windows": [f"{begin}-{end}"]}
    more["node"] = "n7"
    async with rig.running(**more) as room:
        await until(lambda: room.show(image.ref).bytes_total > 0, what="the lookup")
        await room.reconcile(rig.section(**more, spread=3600))
        await room.reconciler.cycle()
        at = room.reconciler.resolver.turns.pull_at(image.ref, now, begun=False)
        clock.advance(opening + 60 - now)
        await room.reconciler.cycle()
        opened = room.show(image.ref)
        fetched = [seen for seen in rig.gate.requests() if seen.agent != "nodeagent"]
        clock.advance(at - opening)
        await room.reconciler.cycle()
        await state(room, image.ref, "ready")

    assert opening + 60 < at < opening + 3600
    assert "its turn comes in" in opened.reason
    assert fetched == []


@pytest.mark.parametrize("form", ["seconds", "date"])
async def test_lookup_obeys_retry_after(rig: Rig, form: str) -> None:
    image = rig.push("fw/limited:v1")
    date = email.utils.formatdate(time.time() + 120, usegmt=True)
    rig.gate.fail_status, rig.gate.retry_after = 429, date if form == "date" else "120"
    began = time.time()
    async with rig.running(images=[{"ref": image.ref}]) as room:
        row = await state(room, image.ref, "failed")
        ended = time.time()
        requests = len(rig.gate.requests())
        await asyncio.sleep(2)
        later = len(rig.gate.requests())

    assert row.failure_kind == "busy"
    assert row.retry_at is not None
    assert began + 118 <= row.retry_at <= ended + 120 * 1.5
    assert later == requests


async def test_pull_that_meets_a_limit_waits(rig: Rig) -> None:
    """containerd does not tell how long; the agent does not come back after a second."""
    image = rig.push("fw/busy:v1")
    rig.gate.fail_status, rig.gate.failed = 429, "containerd"
    began = time.time()
    async with rig.running(images=[{"ref": image.ref}]) as room:
        row = await state(room, image.ref, "failed", seconds=60)
        rig.gate.fail_status = 0
        await room.resume(image.ref)
        await state(room, image.ref, "ready")

    assert row.failure_kind == "busy"
    assert row.retry_at is not None
    assert row.retry_at >= began + 15
