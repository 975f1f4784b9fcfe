"""The log child and its follower in a test, and a flood of lines through them."""

import asyncio
import contextlib
import dataclasses
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from tests.testbed import constants
from tests.testbed.waiting import until_async
from volumes.audit.logs import follower as followers
from volumes.audit.logs import matcher, patterns
from volumes.settings import LogSettings

LINE = (
    b'2026-01-01T00:00:00Z stderr F I1121 kubelet.go:2463] "SyncLoop UPDATE" source="api" n=%07d\n'
)
BLOCK = 5000


@contextlib.asynccontextmanager
async def following(
    settings: LogSettings, found: list[matcher.Hit], **changes: Any
) -> AsyncIterator[followers.LogFollower]:
    """The log child running. ``changes`` of its configuration."""
    configuration = followers.configuration(settings, patterns.built_in(), ("rbd", "nbd"))
    follower = followers.LogFollower(dataclasses.replace(configuration, **changes), found.extend)
    task = asyncio.create_task(follower.run())
    try:
        yield follower
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def readable(follower: followers.LogFollower, source: str = "kubelet") -> None:
    """The running child has opened the source: what is written from now on is read."""

    def opened() -> bool:
        return source in follower._now and follower._now[source].state == ""

    await until_async(opened, what=f"source {source} readable", detail=follower.states)


def sources(path: Path, **changes: Any) -> LogSettings:
    data = {"kernel": False, "sources": [{"name": "kubelet", "files": str(path)}]}
    made: LogSettings = constants.made(LogSettings, **data | changes)
    return made


def accounted(follower: followers.LogFollower) -> int:
    counts = follower.counters().get("kubelet", matcher.Counters())
    return counts.seen + counts.dropped


async def flood(folder: Path, lines: int, **changes: Any) -> dict[str, Any]:
    """Write ``lines`` lines as fast as possible; every line must be accounted for. ``changes``: of
    the settings."""
    path = folder / "kubelet.log"
    path.touch()
    found: list[matcher.Hit] = []
    longest = 0.0
    async with following(sources(path, **changes), found) as follower:
        await readable(follower)
        stop = asyncio.Event()

        async def heartbeat() -> None:
            nonlocal longest
            while not stop.is_set():
                before = time.monotonic()
                await asyncio.sleep(0.01)
                longest = max(longest, time.monotonic() - before - 0.01)

        beating = asyncio.create_task(heartbeat())
        began = time.monotonic()
        await asyncio.to_thread(_write, path, lines)
        written = time.monotonic() - began
        await until_async(lambda: accounted(follower) >= lines, 60.0, "every line accounted for")
        took = time.monotonic() - began
        stop.set()
        await beating
        counts = follower.counters()["kubelet"]
    return {
        "lines": lines,
        "written_per_second": round(lines / written),
        "accounted_per_second": round(lines / took),
        "longest_stall_of_the_loop_ms": round(longest * 1000, 1),
        **dataclasses.asdict(counts),
    }


def _write(path: Path, lines: int) -> None:
    with path.open("ab", buffering=0) as stream:
        for first in range(0, lines, BLOCK):
            count = min(BLOCK, lines - first)
            stream.write(b"".join(LINE % n for n in range(first, first + count)))
        os.fsync(stream.fileno())
