"""The control page: memory that a coordinator shares with its workers. Limits down, counters up.

Workers read it between files and between blocks of a file, so that a limit or a cancel takes effect
at once and costs no message.
"""

import mmap
import os
import time

from kit.pause import Bucket

MOST_WORKERS = 65  # as many as settings allow, and the one that commits
_SLOT = 8  # numbers of 8 bytes for each worker; the first slot is the coordinator's
_CANCEL, _NO_ROOM, _BYTES_RATE, _FILES_RATE = range(4)
_FILES, _BYTES, _BEATS, _AT = range(4)
_SIZE = 8 * _SLOT * (1 + MOST_WORKERS)

# Instead of an entry: the worker waits for the disk, and must not be killed for that.
FLUSHING = 2**32

_NAP_SECONDS = 0.05
# What a worker may copy at once after a rest, in seconds of its rate.
_BURST_SECONDS = 0.5


class Cancelled(Exception):
    """The pass is cancelled; what was copied so far is kept."""


class Control:
    """The control page. Each number has one writer: the coordinator, or the worker of a slot.

    The first slot holds cancel, no_room (no room for more directories), and the bytes and files per
    second of one worker (0: no limit, as f64); slot 1 + n holds worker n's files copied, bytes
    copied, signs of life, and which entry of its job it has begun.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        page = memoryview(mmap.mmap(descriptor, _SIZE))
        self._numbers, self._rates = page.cast("Q"), page.cast("d")

    @classmethod
    def create(cls) -> "Control":
        descriptor = os.memfd_create("nodeagent-control", 0)
        os.ftruncate(descriptor, _SIZE)
        return cls(descriptor)

    def set_limits(self, bytes_per_second: float, files_per_second: float) -> None:
        """Of each worker; 0 means no limit."""
        self._rates[_BYTES_RATE] = bytes_per_second
        self._rates[_FILES_RATE] = files_per_second

    def limits(self) -> tuple[float, float]:
        return self._rates[_BYTES_RATE], self._rates[_FILES_RATE]

    def cancel(self) -> None:
        self._numbers[_CANCEL] = 1

    @property
    def cancelled(self) -> bool:
        return bool(self._numbers[_CANCEL])

    def set_no_room(self, no_room: bool) -> None:
        """While it is set, a scan that would make a directory ends with ENOSPC."""
        self._numbers[_NO_ROOM] = int(no_room)

    @property
    def no_room(self) -> bool:
        return bool(self._numbers[_NO_ROOM])

    def count(self, worker: int, files: int, size: int) -> None:
        """Add to the counters of a worker; only that worker may."""
        slot = _SLOT * (1 + worker)
        self._numbers[slot + _FILES] += files
        self._numbers[slot + _BYTES] += size

    def beat(self, worker: int) -> None:
        """A sign of life where nothing is counted: an entry was listed, a limit delays it."""
        self._numbers[_SLOT * (1 + worker) + _BEATS] += 1

    def begin(self, worker: int, entry: int) -> None:
        """The worker begins with this entry of its job (from 0) and may hang in it."""
        self._numbers[_SLOT * (1 + worker) + _AT] = entry

    def at(self, worker: int) -> int:
        """The entry of its job that the worker began last."""
        return self._numbers[_SLOT * (1 + worker) + _AT]

    def signs(self, worker: int) -> tuple[int, ...]:
        """What changes while the worker works."""
        slot = _SLOT * (1 + worker)
        return tuple(self._numbers[slot : slot + _AT + 1].tolist())

    def beats(self) -> int:
        return self._sum(_BEATS)

    def counted(self) -> tuple[int, int]:
        """Files and bytes that all workers copied, uncommitted ones included."""
        return self._sum(_FILES), self._sum(_BYTES)

    def _sum(self, field: int) -> int:
        return sum(self._numbers[_SLOT + field :: _SLOT].tolist())


class Throttle:
    """The pace of one worker, which calls ``step`` with what it has just read."""

    def __init__(self, control: Control, worker: int) -> None:
        self._control = control
        self._worker = worker
        self._rates = 0.0, 0.0  # bytes and files per second
        self._buckets: list[Bucket | None] = [None, None]
        self.directories = 0  # that the scan may still make

    def step(self, files: int, size: int) -> None:
        """Count, and wait as the limits demand. Raises Cancelled."""
        self._control.count(self._worker, files, size)
        rates = self._control.limits()
        if rates != self._rates:
            self._rates = rates
            self._buckets = [Bucket(r, r * _BURST_SECONDS) if r > 0 else None for r in rates]
        pairs = zip(self._buckets, (size, files), strict=True)
        waits = [bucket.owe(amount) for bucket, amount in pairs if bucket is not None]
        if any(waits):
            self._wait(max(waits))
        self.check()

    def skip(self, size: int) -> None:
        """Count what need not be read, which no limit is for. Raises Cancelled."""
        self._control.count(self._worker, 0, size)
        self.check()

    def _wait(self, seconds: float) -> None:
        """Ends early when the limits change."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if self._control.cancelled or self._control.limits() != self._rates:
                return
            self.beat()
            time.sleep(min(left, _NAP_SECONDS))

    def beat(self) -> None:
        self._control.beat(self._worker)

    def begin(self, entry: int) -> None:
        """As ``Control.begin``."""
        self._control.begin(self._worker, entry)

    def idle(self) -> None:
        """While something is waited for. Raises Cancelled."""
        self.beat()
        self.check()

    @property
    def no_room(self) -> bool:
        """As ``Control.no_room``."""
        return self._control.no_room

    def check(self) -> None:
        """Raises Cancelled."""
        if self._control.cancelled:
            raise Cancelled
