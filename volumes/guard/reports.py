"""Reads what the guard program reports of denials, and brings each where it belongs: to the log
(``Windows``), to the findings (``denials``) and to a look at its device (``LeaseManager``).

Whoever is denied may try again as fast as he can, on many devices and under many names. The kernel
reports a bounded number of that, and the event loop takes a few reports at a time. In the log, what
one caller is denied on one attachment is told when it begins, and then once in ``WINDOW_SECONDS``
while it goes on. Only the telling is joined: each denial asks for a look at its device (``pace``)
and waits for the decision (``denials``).
"""

import asyncio
import contextlib
import dataclasses
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import structlog

from linux import blockdev, bpf
from volumes.guard import denials, kernel, lease_manager
from volumes.guard import rehearsal as rehearsals
from volumes.guard.denials import Denial

log = structlog.get_logger("volumes")

FRESH_SECONDS = 0.1  # what stands behind a number is read from sysfs once in that time
_MOST_NAMED = 256
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
            caller: self._count(caller) + self._count(kernel.whole_device(caller))
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


class Reports:
    """``is_watched``: whether a device gets automatic leases. ``whose``: what the scope says of a
    device that only it judges (``InForce.whose``); ``rehearsal`` is told of writes to those."""

    def __init__(
        self,
        manager: lease_manager.LeaseManager,
        *,
        is_watched: Callable[[blockdev.BlockDevice], bool],
        whose: Callable[[kernel.Number, str, blockdev.BlockDevice | None], str] = lambda *_: "",
        rehearsal: rehearsals.Rehearsal,
        changed: Callable[[], None],
    ) -> None:
        self._manager = manager
        self._is_watched = is_watched
        self._whose = whose
        self._rehearsal = rehearsal
        self._changed = changed
        self._windows = Windows(self._held_back, self._more)
        self._named: dict[kernel.Number, tuple[float, str, blockdev.BlockDevice | None]] = {}
        self._guard: kernel.Kernel | None = None
        self._ring: bpf.Ring | None = None
        self._ring_map = 0
        self._mount: int | None = None

    def take(self, guard: kernel.Kernel) -> None:
        """Read the buffer of the program that is attached now; what came while no agent listened,
        too."""
        self._guard = guard
        buffer = guard.maps["events"]
        if self._ring is not None and self._ring_map == buffer.info.id:
            return
        self.drop()
        self._ring = bpf.Ring(buffer, self._on_record)
        self._ring_map = buffer.info.id
        asyncio.get_running_loop().add_reader(self._ring.fd, self._ring.consume)

    def drop(self) -> None:
        if self._ring is not None:
            asyncio.get_running_loop().remove_reader(self._ring.fd)
            self._ring.close()
            self._ring = None

    def close(self) -> None:
        self.drop()
        self._windows.close()
        if self._mount is not None:
            os.close(self._mount)
            self._mount = None

    def _on_record(self, raw: bytes) -> None:
        if self._mount is None and self._guard is not None:
            with contextlib.suppress(OSError):
                self._mount = os.open(self._guard.cgroup, os.O_RDONLY | os.O_DIRECTORY)
        self.denied(kernel.Event.unpack(raw), self._mount)

    def denied(self, event: kernel.Event, mount: int | None) -> None:
        """``mount``: the cgroup hierarchy, open; None where only /proc tells who it was."""
        name, device = self._behind(event.number)
        known = self._manager.known.get(name)
        if known is not None and (device is None or known.device.attachment != device.attachment):
            # One of both is of an earlier attachment. Where it is ours, a check of it would give
            # the new volume's content to the old one.
            name, device = self._behind(event.number, anew=True)
            known = self._manager.known.get(name)
        volume, title = (device.volume, device.title) if device else ("", "")
        undecided = known is None or known.reasons is None
        remembered = self._manager.executor.ledger.get(volume)
        watched = device is not None and not device.parent and self._is_watched(device)
        # Of what the scope judges: no decision follows.
        said = "" if watched or event.denied else self._whose(event.number, name, device)
        early = undecided and not said and not (remembered and remembered.type)
        attachment = device.attachment if device else None
        key = event.caller, event.denied, early, attachment
        denial = self._windows.joined(key)
        if denial is None:
            found = denials.resolve(event, mount, name, volume, title)
            denial = dataclasses.replace(found, early=early, whose=said)
            self._windows.open(key, denial, event.caller)
        else:
            denial = dataclasses.replace(denial, at=time.time(), pid=event.pid)
        if said:
            self._rehearsal.wrote(denial, device)
            self._changed()
            return
        self._manager.denials.add(denial)
        if device is None or not watched:
            why = "this device never gets an automatic lease"
            self._manager.denials.decided(name, "", (why,))
            self._changed()
        else:
            if known is not None and known.device.attachment != attachment:
                self._manager.schedule(name, device)
            self._manager.denied(name, device if event.denied else None)

    def _behind(
        self, number: kernel.Number, *, anew: bool = False
    ) -> tuple[str, blockdev.BlockDevice | None]:
        """The name of the device with this number, and what it is. ``anew``: now, and not a moment
        ago."""
        now = time.monotonic()
        at, name, device = self._named.get(number, (-1e9, "", None))
        if anew or now - at >= FRESH_SECONDS:
            name = blockdev.name_of(number) or f"{number[0]}:{number[1]}"
            device = blockdev.identify(name)
            if len(self._named) >= _MOST_NAMED:
                self._named.clear()
            self._named[number] = now, name, device
        return name, device

    def _held_back(self, caller: bytes) -> int:
        try:
            return self._guard.held_back(caller) if self._guard is not None else 0
        except OSError:  # the program was detached
            return 0

    def _more(self, denial: Denial, count: int) -> None:
        kept = self._rehearsal.denials if denial.whose else self._manager.denials
        kept.more(denial, count)
        self._changed()
