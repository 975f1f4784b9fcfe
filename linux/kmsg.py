"""The kernel's log, /dev/kmsg (Documentation/ABI/testing/dev-kmsg)."""

import errno
import os
from dataclasses import dataclass

# What the kernel prints when a device's reads or writes fail, by name: regular expressions with the
# group ``device``. From Linux 5.15 to 6.12: block/blk-core.c, fs/buffer.c, fs/ext4/page-io.c.
# "operation not supported" is left out: mkfs causes it on a healthy device. The kernel writes a new
# line within a record as its number.
IO_ERRORS = {
    "block-io-error": r"(?:(?<!not supported) error, dev |Buffer I/O error on dev(?:ice)? )"
    r"(?P<device>[\w-]+), (?:sector|logical block) \d+",
    "beyond-end-of-device": r"attempt to access beyond end of device\\x0a(?P<device>[\w-]+): rw=",
}


@dataclass(frozen=True)
class Record:
    time: float  # seconds since boot by the kernel's own clock, close to CLOCK_MONOTONIC
    text: str
    level: int = 6  # 0 emergency ... 7 debug
    sequence: int = 0
    user: bool = False  # of another facility than the kernel's: root wrote it


class Kmsg:
    """Reads records in order, beginning with those in the kernel's buffer. OSError when refused.

    Invariant: the records read plus ``lost`` are all records written since the first one read.
    """

    def __init__(
        self, *, from_now: bool = False, user: bool = False, after: int | None = None
    ) -> None:
        """``from_now``: skip what the buffer holds. ``user``: also records that processes wrote,
        which prove nothing about the kernel. ``after``: the sequence number of a record that was
        read before; go on behind it."""
        self.fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        if from_now:
            os.lseek(self.fd, 0, os.SEEK_END)
        self._user = user
        self._next = None if after is None else after + 1
        self.lost = 0  # records that were overwritten before they were read

    @property
    def last(self) -> int | None:
        """The sequence number of the last record read; None before the first."""
        return None if self._next is None else self._next - 1

    def read(self, most: int = 1000) -> list[Record]:
        """The waiting records, at most ``most``."""
        found = []
        for _ in range(most):
            try:
                data = os.read(self.fd, 8192)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno == errno.EPIPE:
                    continue  # records were overwritten; the gap in the sequence counts them
                raise
            record = parse(data)
            if record is None:
                continue
            if self._next is not None and record.sequence < self._next:
                continue  # read before
            if self._next is not None and record.sequence > self._next:
                self.lost += record.sequence - self._next
            self._next = record.sequence + 1
            if self._user or not record.user:
                found.append(record)
        return found

    def close(self) -> None:
        os.close(self.fd)


def parse(data: bytes) -> Record | None:
    """One record: ``prio,seq,microseconds,flags;text``."""
    head, _, rest = data.decode(errors="replace").partition(";")
    fields = head.split(",")
    if len(fields) < 3 or not all(field.isdigit() for field in fields[:3]):
        return None
    return Record(
        time=int(fields[2]) / 1e6,
        text=rest.split("\n")[0],
        level=int(fields[0]) & 7,
        sequence=int(fields[1]),
        user=int(fields[0]) >> 3 != 0,
    )
