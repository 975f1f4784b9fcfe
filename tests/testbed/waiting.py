"""Wait for a condition: poll it, and fail with a name for what was waited for.

Use this only where nothing can be awaited instead (another process, the kernel). A condition may be
any callable; its first true value is returned. ``detail`` is called when the time is over, to say
how things are instead.
"""

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any

PAUSE_SECONDS = 0.02


def until(
    condition: Callable[[], Any],
    seconds: float = 30.0,
    what: str = "the condition",
    *,
    pause: float = PAUSE_SECONDS,
    detail: Callable[[], object] | None = None,
) -> Any:
    """The first true value of ``condition``; AssertionError after ``seconds``."""
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
    detail: Callable[[], object] | None = None,
) -> Any:
    """``until`` inside an event loop; ``condition`` may return an awaitable."""
    try:
        async with asyncio.timeout(seconds) as limit:
            while True:
                found = condition()
                if inspect.isawaitable(found):
                    found = await found
                if found:
                    return found
                await asyncio.sleep(PAUSE_SECONDS)
    except TimeoutError:
        if not limit.expired():
            raise
        raise _late(seconds, what, detail) from None


def _late(seconds: float, what: str, detail: Callable[[], object] | None) -> AssertionError:
    more = "" if detail is None else f"\n{detail()}"
    return AssertionError(f"not within {seconds:g} s: {what}{more}")
