"""A thread of one's own: what hangs there stays there."""

import asyncio
import errno
import gc
import math
import threading
from collections.abc import Callable

import pytest

import kit.tasks
from tests.testbed import waiting


def hanging(
    fails: Exception | None = None,
) -> tuple[threading.Event, threading.Event, Callable[[], None]]:
    """Work that has begun, and may be over; ``fails``: how it ends then."""
    begun, over = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        over.wait()
        if fails is not None:
            raise fails

    return begun, over, work


async def test_a_call_that_was_given_up_and_ends_soon_is_no_hanging_disk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kit.tasks, "PATIENCE_SECONDS", 60.0)
    apart = kit.tasks.Apart("a disk")
    begun, over, work = hanging()
    stopped = asyncio.create_task(apart.call(work))
    try:
        assert await asyncio.to_thread(begun.wait, 60)
        stopped.cancel()
        await asyncio.gather(stopped, return_exceptions=True)
        following = asyncio.create_task(apart.call(threading.get_ident))
        await asyncio.sleep(0)
    finally:
        over.set()
    assert await following != threading.get_ident()


async def test_who_waits_for_a_hanging_call_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A disk may hang for days and then fail: one error, and not one for each who has waited."""
    monkeypatch.setattr(kit.tasks, "PATIENCE_SECONDS", 0.01)
    apart = kit.tasks.Apart("a disk")
    begun, over, work = hanging(OSError(errno.EIO, "a disk that fails at last"))
    unheard = list[str]()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: unheard.append(context["message"]))
    stopped = asyncio.create_task(apart.call(work))
    try:
        assert await asyncio.to_thread(begun.wait, 60)
        stopped.cancel()
        await asyncio.gather(stopped, return_exceptions=True)
        for _ in range(3):
            with pytest.raises(TimeoutError, match="hangs"):
                await apart.call(threading.get_ident)
        apart._patient_until = math.inf
    finally:
        over.set()
    await apart.call(threading.get_ident)
    del apart, stopped  # what it keeps of the call is told of when it goes
    await asyncio.sleep(0)
    gc.collect()
    assert not unheard


async def test_a_call_that_hangs_is_met_by_nobody_else() -> None:
    apart = kit.tasks.Apart("a disk")
    begun, over, work = hanging()
    try:
        stopped = asyncio.create_task(apart.call(work))
        queued = asyncio.create_task(apart.call(threading.get_ident))
        assert await asyncio.to_thread(begun.wait, 60)
        queued.cancel()  # had not begun: it is taken back, and says nothing of the disk
        await asyncio.gather(queued, return_exceptions=True)
        stopped.cancel()
        await asyncio.gather(stopped, return_exceptions=True)
        for _ in range(3):
            with pytest.raises(TimeoutError, match="a disk: an earlier call hangs"):
                await apart.call(threading.get_ident)
    finally:
        over.set()
    async with asyncio.timeout(waiting.limit(60)):
        while True:
            try:
                assert await apart.call(threading.get_ident) != threading.get_ident()
                return
            except TimeoutError:
                await asyncio.sleep(0)
