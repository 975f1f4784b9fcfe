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

from volumes.guard import events
from volumes.guard.denials import Denial

log = structlog.get_logger("volumes")

WINDOW_SECONDS = 10.0
MOST_WINDOWS = 128  # callers that are told apart; the others share one window
MOST_COUNTED = 1024  # as the kernel's map of callers
MOST_REMEMBERED = 4096  # of which the kernel held something back: more than its map can have


@dataclass
class Window:
    """``first``: what was told when it was opened. ``joined``: denials since then that were not.
    ``callers``: who made them, with a denial of each; many only in the window that others share."""

    first: Denial
    callers: dict[bytes, Denial]
    timer: asyncio.TimerHandle
    joined: int = 0


class Windows:
    """``held_back``: the kernel's count for a caller, or for a whole device. ``more``: called at a
    window's end with how many denials the kernel kept to itself, when any followed the first."""

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
        window = self._open.get(key)
        if window is None:
            return None
        window.joined += 1
        return window.first

    def open(self, key: Hashable, first: Denial, caller: bytes) -> None:
        """Tell it now, or with the others that find no window of their own. ``key``: equal for
        denials that share a window."""
        own = key if len(self._open) < MOST_WINDOWS else None
        if own in self._open:
            shared = self._open[own]
            shared.joined += 1
            if len(shared.callers) < MOST_COUNTED:
                shared.callers[caller] = first
            return
        _tell(first)
        self._start(own, first, {caller: first})

    def _start(self, key: Hashable, first: Denial, callers: dict[bytes, Denial]) -> None:
        timer = asyncio.get_running_loop().call_later(WINDOW_SECONDS, self._end, key)
        self._open[key] = Window(first, callers, timer)

    def _end(self, key: Hashable) -> None:
        """Where denials joined it, another window follows."""
        window = self._open.pop(key)
        held_back = {
            caller: self._count(caller) + self._count(events.whole_device(caller))
            for caller in window.callers
        }
        if window.joined or any(held_back.values()):
            _tell(window.first, window.joined + sum(held_back.values()))
            counted = {caller: window.callers[caller] for caller in held_back if held_back[caller]}
            self._start(key, window.first, counted or window.callers)
            for caller, count in held_back.items():
                self._more(window.callers[caller], count)

    def _count(self, caller: bytes) -> int:
        """Denials that the kernel kept to itself since they were counted last."""
        now = self._held_back(caller)
        before = self._counted.pop(caller, 0)
        # Callers of one attempt, under a name each, must not push out one whose count goes on: all
        # of it would be told anew.
        if now:
            self._counted[caller] = now
        if len(self._counted) > MOST_REMEMBERED:
            self._counted.popitem(last=False)
        return max(0, now - before)

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
