"""Reads what the guard program reports of denials, and brings each where it belongs: to the log
(``windows``), to the findings (``denials``) and to a look at its device (``LeaseManager``).

Whoever is denied may try again as fast as he can, on many devices and under many names. The kernel
reports a bounded number of that, and the event loop takes a few reports at a time.
"""

import asyncio
import contextlib
import dataclasses
import os
import time
from collections.abc import Callable

from linux import blockdev, bpf
from volumes.guard import denials, events, kernel, lease_manager, windows
from volumes.ledger import store

FRESH_SECONDS = 0.1  # what stands behind a number is read from sysfs once in that time
_MOST_NAMED = 256


class Reports:
    """``is_watched``: whether a device gets automatic leases."""

    def __init__(
        self,
        manager: lease_manager.LeaseManager,
        refused: denials.Denials,
        ledger: store.LedgerStore,
        *,
        is_watched: Callable[[blockdev.BlockDevice], bool],
        changed: Callable[[], None],
    ) -> None:
        self._manager = manager
        self._denials = refused
        self._ledger = ledger
        self._is_watched = is_watched
        self._changed = changed
        self._windows = windows.Windows(self._held_back, self._more)
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
        self.denied(events.Event.unpack(raw), self._mount)

    def denied(self, event: events.Event, mount: int | None) -> None:
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
        remembered = self._ledger.get(volume)
        early = undecided and not (remembered and remembered.type)
        attachment = device.attachment if device else None
        key = event.caller, event.denied, early, attachment
        denial = self._windows.joined(key)
        if denial is None:
            found = denials.resolve(event, mount, name, volume, title)
            denial = dataclasses.replace(found, early=early)
            self._windows.open(key, denial, event.caller)
        else:
            denial = dataclasses.replace(denial, at=time.time(), pid=event.pid)
        self._denials.add(denial)
        if device is None or device.parent or not self._is_watched(device):
            self._denials.decided(name, "", ("this device never gets an automatic lease",))
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

    def _more(self, denial: denials.Denial, count: int) -> None:
        self._denials.more(denial, count)
        self._changed()
