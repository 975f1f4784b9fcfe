"""What a generation takes of the SSD, also while its directories are listed again.

The index forgets the figures of a directory until it is listed again, but its files are still
there. So until all are listed, what was known before counts, plus what was added since.
"""

import os
from pathlib import Path

from cache.store import index


def _size(path: str) -> int:
    """0 when there is no such file."""
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0


class Usage:
    """Of one pass. Bytes and inodes of the tree and the index."""

    def __init__(self, generation: Path) -> None:
        # As text: it is asked several times for each directory, and a Path costs more than a stat.
        self._index = [str(generation / f"{index.NAME}{end}") for end in ("", "-wal", "-shm")]
        self._before = self._added = 0
        self._inodes_before = self._inodes_added = 0

    def bytes(self, totals: index.Totals) -> int:
        """SSD bytes. ``totals``: as the index knows them now."""
        of_index = sum(_size(file) for file in self._index)
        return max(totals.used + of_index, self._before + self._added)

    def inodes(self, totals: index.Totals) -> int:
        """Of its files and directories."""
        return max(totals.inodes, self._inodes_before + self._inodes_added)

    def at_least(self, totals: index.Totals, used: int = 0, inodes: int = 0) -> None:
        """From now on it takes no less than now, nor than this, whatever the index knows of it."""
        self._before, self._inodes_before = (
            max(self.bytes(totals), used), max(self.inodes(totals), inodes)
        )  # fmt: skip
        self._added = self._inodes_added = 0

    def add(self, size: int, inodes: int = 0) -> None:
        """Something was stored since."""
        self._added += size
        self._inodes_added += inodes

    def all_listed(self) -> None:
        """The totals of the index are complete again."""
        self._before = self._added = 0
        self._inodes_before = self._inodes_added = 0
