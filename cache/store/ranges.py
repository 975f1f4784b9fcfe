"""Which ranges of a block image jobs read from the local copy, and which from its source. Pure.

One device shows both (``cache.store.mixed``): its table has a line for each range. Positions count
chunks, unless they are called sectors.
"""

import heapq
import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass

from cache.store import extents
from linux.devmapper import SECTOR, Line

# The kernel searches them as a tree for each read and holds them in memory.
MOST_LINES = 2048
# Each change of the table makes readers wait a moment: at most so many while an image fills.
RELOADS = 128
# One of so many parts of the room is left free by an image of which only a part fits.
SPARE = 16
_STORED = bytes([extents.State.STORED])
_CHUNK_SECTORS = extents.EXTENT_BYTES // SECTOR
_KNOWN = re.compile(rb"[\x01\x02]+")


@dataclass(frozen=True)
class Local:
    """A range that is read from the copy."""

    start: int
    end: int

    @property
    def count(self) -> int:
        return self.end - self.start


def plan(states: bytes, most_lines: int = MOST_LINES) -> list[Local]:
    """The ranges to read from the copy, in order; all else is read from the source.

    ``states``: a byte for each chunk, as ``extents.State``. The longest ranges win where there are
    too many.
    """
    if states and 0 not in states:
        return [Local(0, len(states))]
    # A run of chunks that are all zeros gets no line of its own.
    every = [Local(*each.span()) for each in _KNOWN.finditer(states) if _STORED in each[0]]
    most = (most_lines - 1) // 2  # each lies between two of the source
    if len(every) > most:
        longest = heapq.nlargest(most, every, key=operator.attrgetter("count"))
        every = sorted(longest, key=operator.attrgetter("start"))
    return every


def fitting(wanted: Sequence[int], used: int, room: int) -> Sequence[int]:
    """Those of the chunks ``wanted``, in order, to store where not all of them fit.

    Always the first ones of the image: so the same ones stay whatever was tried before, and the
    table has one line for them. ``used``, ``room``: SSD bytes that the copy takes and that are left
    for it; a part of both stays free, because a copy that comes to lack room goes as a whole.
    """
    most = (used + max(0, room)) * (SPARE - 1) // SPARE - used
    return wanted[: max(0, most) // extents.EXTENT_BYTES]


def is_worth(states: bytes, shown: Sequence[Local], wanted: Sequence[Local]) -> bool:
    """Whether to change a table that has ``shown`` to one that has ``wanted``."""
    gained = sum(each.count for each in wanted) - sum(each.count for each in shown)
    # Nothing is read from the copy that is not known to be good there any more.
    bad = any(0 in states[each.start : each.end] for each in shown)
    return bad or gained >= max(1, len(states) // RELOADS)


def lines(local: Sequence[Local], sectors: int, shift: int, copy: str, source: str) -> list[Line]:
    """The table of a device of so many ``sectors``, which begins ``shift`` sectors into the image.

    ``copy``, ``source``: major:minor.
    """
    found: list[Line] = []

    def add(end: int, device: str) -> None:
        """Up to sector ``end`` of the image."""
        start = found[-1].start + found[-1].length if found else 0
        length = min(end - shift, sectors) - start
        if length > 0:
            found.append(Line(start, length, device, start + shift))

    for each in local:
        add(each.start * _CHUNK_SECTORS, source)
        add(each.end * _CHUNK_SECTORS, copy)
    add(shift + sectors, source)
    return found


def shown_by(table: Sequence[Line], copy: str) -> list[Local]:
    """The chunks of which a table shows any part from ``copy``."""
    return [
        Local(line.offset // _CHUNK_SECTORS, -(-(line.offset + line.length) // _CHUNK_SECTORS))
        for line in table
        if line.device == copy
    ]
