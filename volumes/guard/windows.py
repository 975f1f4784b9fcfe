"""Which denials are told in the log at once, and which are joined to one line with a count.

A program may try a thousand times a second. What one caller is denied on one attachment is told
when it begins, and then once in ``WINDOW_SECONDS`` while it goes on. Only the telling is joined:
each denial asks for a look at its device (``pace``) and waits for the decision (``denials``).
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import structlog

from volumes.guard.denials import Denial

log = structlog.get_logger("volumes")

WINDOW_SECONDS = 10.0
MOST_WINDOWS = 128  # callers that are told apart; the others share one window
MOST_COUNTED = 1024  # as the kernel's map of callers


@dataclass
class Window:
    """``first``: what was told when it was opened. ``joined``: denials since then that were not."""

    first: Denial
    caller: bytes
    timer: asyncio.TimerHandle
    joined: int = 0


class Windows:
    """``held_back``: the kernel's count for a caller. ``more``: called at a window's end with how
    many denials the kernel kept to itself, when any followed the first."""

    def __init__(
        self, held_back: Callable[[bytes], int], more: Callable[[Denial, int], None]
    ) -> None:
        self._held_back = held_back
        self._more = more
        self._open: dict[Hashable, Window] = {}
        # What was told of the kernel's count, which goes on from one agent to the next: a new agent
        # tells all of it, because its findings begin anew.
        self._counted: OrderedDict[bytes, int] = OrderedDict()

    def joined(self, key: Hashable) -> Denial | None:
        """The denial that was told, when this one joins it; None: ``open`` a window with it."""
        window = self._open.get(self._key(key))
        if window is None:
            return None
        window.joined += 1
        return window.first

    def open(self, key: Hashable, first: Denial, caller: bytes) -> None:
        """Tell it now. ``key``: equal for denials that are told together."""
        _tell(first)
        self._start(self._key(key), first, caller)

    def _start(self, key: Hashable, first: Denial, caller: bytes) -> None:
        timer = asyncio.get_running_loop().call_later(WINDOW_SECONDS, self._end, key)
        self._open[key] = Window(first, caller, timer)

    def _end(self, key: Hashable) -> None:
        """Where denials joined it, another window follows."""
        window = self._open.pop(key)
        held_back = self._count(window.caller)
        if window.joined or held_back:
            _tell(window.first, window.joined + held_back)
            self._start(key, window.first, window.caller)
            self._more(window.first, held_back)

    def _count(self, caller: bytes) -> int:
        """Denials that the kernel kept to itself since they were counted last."""
        now = self._held_back(caller)
        before = self._counted.pop(caller, 0)
        self._counted[caller] = now
        if len(self._counted) > MOST_COUNTED:
            self._counted.popitem(last=False)
        return max(0, now - before)

    def _key(self, key: Hashable) -> Hashable:
        return key if key in self._open or len(self._open) < MOST_WINDOWS else None

    def close(self) -> None:
        for window in self._open.values():
            window.timer.cancel()
        self._open.clear()


def _tell(denial: Denial, more: int = 0) -> None:
    did = "write open denied" if denial.denied else "write open would be denied"
    log.warning(
        f"{did} again" if more else did,
        device=denial.device, program=denial.program, pid=denial.pid, pod=denial.pod,
        command=denial.command, **({"times": more} if more else {}),
    )  # fmt: skip
