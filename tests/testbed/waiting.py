"""Wait for a condition: poll it, and fail with a name for what was waited for.

Use this only where nothing can be awaited instead (another process, the kernel). A condition may be
any callable; its first true value is returned. ``detail`` is called when the time is over, to say
how things are instead. The seconds of a test are for a quiet machine: a busy one gets ``SLACK``
times as many, because a test that is late has found nothing wrong.
"""

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any

PAUSE_SECONDS = 0.02
GUEST_PAUSE_SECONDS = 0.3  # under emulation, where asking takes long
SLACK = 4.0  # tests/conftest.py stretches the limits of whole tests by it, too


def until(
    condition: Callable[[], Any],
    seconds: float = 30.0,
    what: str = "the condition",
    *,
    pause: float = PAUSE_SECONDS,
    detail: Callable[[], object] | None = None,
) -> Any:
    """The first true value of ``condition``; AssertionError after ``seconds`` times SLACK."""
    seconds *= SLACK
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise _late(seconds, what, detail)
        time.sleep(pause)
    return found


async def until_async(
    condition: Callable[[], Any],
    seconds: float = 30.0,
    what: str = "the condition",
    *,
    pause: float = PAUSE_SECONDS,
    detail: Callable[[], object] | None = None,
) -> Any:
    """``until`` inside an event loop; ``condition`` may return an awaitable."""
    seconds *= SLACK
    try:
        async with asyncio.timeout(seconds) as limit:
            while True:
                found = condition()
                if inspect.isawaitable(found):
                    found = await found
                if found:
                    return found
                await asyncio.sleep(pause)
    except TimeoutError:
        if not limit.expired():
            raise
        raise _late(seconds, what, detail) from None


def _late(seconds: float, what: str, detail: Callable[[], object] | None) -> AssertionError:
    more = "" if detail is None else f"\n{detail()}"
    return AssertionError(f"not within {seconds:g} s: {what}{more}")
