"""A page of memory that a pass shares with its workers: limits down, counters up.

Workers look at it between files and between blocks of a file, so that a limit or a cancel takes
effect at once and costs no message.

    offset  0  u64  cancel (1: stop soon)
    offset  8  u64  cramped (1: there is no room for more directories)
    offset 16  f64  bytes per second for one worker, 0: no limit
    offset 24  f64  files per second for one worker, 0: no limit
    offset 64 + 64 * n: worker n's   u64 files copied, u64 bytes copied, u64 signs of life
"""

import mmap
import os
import struct
import time

_U64, _F64 = struct.Struct("<Q"), struct.Struct("<d")
_CANCEL, _CRAMPED, _BYTES_RATE, _FILES_RATE = 0, 8, 16, 24
_SLOT = 64
MOST_WORKERS = 65  # as many as settings allow, and the one that commits

_NAP_SECONDS = 0.05
# What a worker may copy in one go after a time of rest, in seconds of its rate.
_BURST_SECONDS = 0.5


class Cancelled(Exception):
    """The pass is to end; what was copied so far is kept."""


class Control:
    """The page. One writer for each field: the pass for the limits, a worker for its slot."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._page = mmap.mmap(descriptor, _SLOT * (1 + MOST_WORKERS))

    @classmethod
    def create(cls) -> "Control":
        descriptor = os.memfd_create("nodeagent-control", 0)
        os.ftruncate(descriptor, _SLOT * (1 + MOST_WORKERS))
        return cls(descriptor)

    def set_limits(self, bytes_per_second: float, files_per_second: float) -> None:
        """For each worker; 0 is no limit."""
        _F64.pack_into(self._page, _BYTES_RATE, bytes_per_second)
        _F64.pack_into(self._page, _FILES_RATE, files_per_second)

    def limits(self) -> tuple[float, float]:
        return (
            _F64.unpack_from(self._page, _BYTES_RATE)[0],
            _F64.unpack_from(self._page, _FILES_RATE)[0],
        )

    def cancel(self) -> None:
        _U64.pack_into(self._page, _CANCEL, 1)

    @property
    def cancelled(self) -> bool:
        return bool(_U64.unpack_from(self._page, _CANCEL)[0])

    def set_cramped(self, cramped: bool) -> None:
        """Scans make no new directories, and end with ENOSPC where they would."""
        _U64.pack_into(self._page, _CRAMPED, int(cramped))

    @property
    def cramped(self) -> bool:
        return bool(_U64.unpack_from(self._page, _CRAMPED)[0])

    def count(self, worker: int, files: int, size: int) -> None:
        """Add to a worker's counters; only that worker calls it."""
        at = _SLOT * (1 + worker)
        _U64.pack_into(self._page, at, _U64.unpack_from(self._page, at)[0] + files)
        _U64.pack_into(self._page, at + 8, _U64.unpack_from(self._page, at + 8)[0] + size)

    def beat(self, worker: int) -> None:
        """A sign of life where nothing is copied: an entry was listed, a limit was waited for."""
        at = _SLOT * (1 + worker) + 16
        _U64.pack_into(self._page, at, _U64.unpack_from(self._page, at)[0] + 1)

    def beats(self) -> int:
        """Signs of life of all workers of this pass."""
        slots = (_SLOT * (1 + worker) + 16 for worker in range(MOST_WORKERS))
        return sum(int(_U64.unpack_from(self._page, at)[0]) for at in slots)

    def counted(self) -> tuple[int, int]:
        """Files and bytes copied by all workers of this pass, staged ones included."""
        slots = [_SLOT * (1 + worker) for worker in range(MOST_WORKERS)]
        files = sum(_U64.unpack_from(self._page, at)[0] for at in slots)
        return files, sum(_U64.unpack_from(self._page, at + 8)[0] for at in slots)


class Throttle:
    """One worker's pace. ``step`` is called with what was just read, and waits as needed."""

    def __init__(self, control: Control, worker: int) -> None:
        self._control = control
        self._worker = worker
        self._ready = [0.0, 0.0]  # when the next byte, the next file is due

    def step(self, files: int, size: int) -> None:
        """Count and keep the limits. Raises Cancelled."""
        self._control.count(self._worker, files, size)
        rates = self._control.limits()
        if rates != (0.0, 0.0):
            now = time.monotonic()
            for i, (rate, amount) in enumerate(zip(rates, (size, files), strict=True)):
                if rate > 0:
                    # Due times lie at most a burst in the past, so that rest is not hoarded.
                    self._ready[i] = max(self._ready[i], now - _BURST_SECONDS) + amount / rate
                else:
                    self._ready[i] = 0.0
            self._wait(rates)
        self.check()

    def _wait(self, rates: tuple[float, float]) -> None:
        while (left := max(self._ready) - time.monotonic()) > 0:
            if self._control.cancelled:
                return
            if self._control.limits() != rates:
                self._ready = [0.0, 0.0]  # due times of the old limits say nothing
                return
            self._control.beat(self._worker)
            time.sleep(min(left, _NAP_SECONDS))

    def beat(self) -> None:
        """A sign of life where nothing is counted."""
        self._control.beat(self._worker)

    def check(self) -> None:
        """Raises Cancelled."""
        if self._control.cancelled:
            raise Cancelled
