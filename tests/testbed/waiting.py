"""Wait for a condition: poll it, and fail with a name for what was waited for.

Use this only where nothing can be awaited instead (another process, the kernel). A condition may be
any callable; its first true value is returned. ``detail`` is called when the time is over, to say
how things are instead.

The seconds of a test are for a quiet machine. Waits get ``limit`` of them, because a test that is
late has found nothing wrong; so does every other timeout of a test (``bare_timeouts.py``).
Waits count what their own rounds took. A pause of the whole machine counts as one round.
"""

import asyncio
import inspect
import os
import time
from collections.abc import Callable
from typing import Any

from tests.testbed import patience

PAUSE_SECONDS = 0.02
# To ask takes time from what is asked: who has waited for long may be a little late.
LATE, LATE_SECONDS = 0.05, 0.2  # a part of the wait so far, at most so many seconds
GUEST_PAUSE_SECONDS = 0.3  # under emulation, where asking takes long
HEADROOM = 4.0  # the machine may become busy after it was measured
ROUND_SECONDS = 5.0  # the most that one round counts
LONGEST = 3.0  # no pause makes a wait so many times as long


def limit(seconds: float) -> float:
    """How long to wait here for what takes at most ``seconds`` on a quiet machine."""
    return seconds * HEADROOM * patience.check(os.environ.get(patience.NAME, "1"))


def until(
    condition: Callable[[], Any],
    seconds: float = 30.0,
    what: str = "the condition",
    *,
    pause: float = PAUSE_SECONDS,
    detail: Callable[[], object] | None = None,
) -> Any:
    """The first true value of ``condition``; AssertionError after ``limit(seconds)``."""
    clock = _Rounds(limit(seconds))
    while not (found := condition()):
        if clock.over():
            raise _late(clock.seconds, what, detail)
        time.sleep(clock.pause(pause))
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
    clock = _Rounds(limit(seconds))
    while True:
        found = condition()
        if inspect.isawaitable(found):
            try:
                async with asyncio.timeout(clock.seconds) as hanging:
                    found = await found
            except TimeoutError:
                if not hanging.expired():
                    raise
                raise _late(clock.seconds, what, detail) from None
        if found:
            return found
        if clock.over():
            raise _late(clock.seconds, what, detail)
        await asyncio.sleep(clock.pause(pause))


class _Rounds:
    """Time as a loop sees it: of a round that a pause of the machine made long, a part."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self._now = now
        self._begun = self._last = now()
        self._spent = 0.0

    def over(self) -> bool:
        """Called once a round."""
        now = self._now()
        self._spent += min(now - self._last, ROUND_SECONDS)
        self._last = now
        return self._spent > self.seconds or now - self._begun > LONGEST * self.seconds

    def pause(self, least: float) -> float:
        """Until the next round."""
        return max(least, min(self._spent * LATE, LATE_SECONDS))


def _late(seconds: float, what: str, detail: Callable[[], object] | None) -> AssertionError:
    more = "" if detail is None else f"\n{detail()}"
    return AssertionError(f"not within {seconds:g} s: {what}{more}")
