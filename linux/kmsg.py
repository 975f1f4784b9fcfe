"""The kernel's log, /dev/kmsg (Documentation/ABI/testing/dev-kmsg)."""

import errno
import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Record:
    time: float  # CLOCK_MONOTONIC seconds, nearly: the kernel's own clock since boot
    text: str


class Kmsg:
    """Reads records as they come, what is still in the buffer first. OSError when not allowed.

    ``lost`` counts the times that records were overwritten before they were read.
    """

    def __init__(self) -> None:
        self.fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self.lost = 0

    def read(self, most: int = 1000) -> list[Record]:
        """Records that wait, at most ``most``."""
        found = []
        for _ in range(most):
            try:
                data = os.read(self.fd, 8192)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno == errno.EPIPE:
                    self.lost += 1
                    continue
                raise
            record = parse(data)
            if record is not None:
                found.append(record)
        return found

    def close(self) -> None:
        os.close(self.fd)


def parse(data: bytes) -> Record | None:
    """One record: ``prio,seq,microseconds,flags;text``. None for one of user space."""
    head, _, rest = data.decode(errors="replace").partition(";")
    fields = head.split(",")
    if len(fields) < 3 or not (fields[0].isdigit() and fields[2].isdigit()):
        return None
    if int(fields[0]) >> 3:  # a facility other than the kernel's: anyone can write those
        return None
    return Record(int(fields[2]) / 1e6, rest.split("\n")[0])
