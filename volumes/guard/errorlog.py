"""When the kernel last logged an I/O error, per device and for the Ceph client as a whole."""

import math
import re

_MOST_DEVICES = 4096

_OF_DEVICE = [
    re.compile(pattern)
    for pattern in (
        r"I/O error, dev (\w+)",
        r"Buffer I/O error on dev(?:ice)? (\w+)",
        r"lost (?:async|sync) page write.* (\w+)",
        r"rbd: (rbd\d+): .*(?:result -\d+|watch error|failed|timed out)",
        r"block (nbd\d+): .*(?:[Ee]rror|[Ff]ailed|timed out|[Dd]ead|Receive control)",
        r"EXT4-fs (?:error|warning) \(device (\w+)\)",
        r"XFS \((\w+)\): .*(?:error|shut down|corruption)",
    )
]
# libceph does not name the device: they count for every RBD device. A connection that closes while
# OPEN is everyday life (idle connections are dropped); one that cannot be made is not.
_OF_CLIENT = re.compile(
    r"libceph: .*(?:mismatch|session lost|osd\d+ down|bad |[Ee]rror|timed out|timeout|blocklist"
    r"|blacklist|socket closed \(con state (?!OPEN))"
)
# The kernel limits how often it prints: an error of any device may be among what it left out.
_SUPPRESSED = re.compile(r"(?:blk_print_req_error|print_req_error|buffer_io_error|rbd).*suppressed")


class ErrorLog:
    """Times are CLOCK_MONOTONIC seconds. ``readable`` False: nothing is known."""

    def __init__(self) -> None:
        self.readable = False
        self._devices: dict[str, float] = {}
        self._client = -math.inf
        self._any = -math.inf

    def note(self, text: str, time: float) -> None:
        """One line of the kernel's log."""
        for pattern in _OF_DEVICE:
            match = pattern.search(text)
            if match:
                self._devices[match[1]] = time
                if len(self._devices) > _MOST_DEVICES:
                    oldest = min(self._devices, key=lambda name: self._devices[name])
                    self._any = max(self._any, self._devices.pop(oldest))
        if _OF_CLIENT.search(text):
            self._client = max(self._client, time)
        if _SUPPRESSED.search(text):
            self._any = max(self._any, time)

    def lost(self, time: float) -> None:
        """Lines were overwritten before they were read."""
        self._any = max(self._any, time)

    def quiet_for(self, device: str, is_rbd: bool, now: float) -> float | None:
        """Seconds since the last error that concerns the device; infinite when there was none."""
        if not self.readable:
            return None
        last = max(self._devices.get(device, -math.inf), self._any)
        if is_rbd:
            last = max(last, self._client)
        return now - last
