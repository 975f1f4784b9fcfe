"""What an index tells: its rows, and what they add up to."""

import dataclasses
from dataclasses import dataclass

from cache.store.tree import Entry

# Priorities of chunks. Those below SILENT are not copied in turn.
NORMAL, SILENT, NO_ROOM, LARGE = 0, -1, -2, -3


@dataclass(frozen=True)
class Counts:
    """How much there is and what became of it.

    Files are all entries but directories; bytes are of regular files.
    """

    files: int = 0
    bytes: int = 0
    done_files: int = 0
    done_bytes: int = 0
    failed: int = 0
    skipped: int = 0

    def counts(self) -> dict[str, int]:
        """Only these figures, without those that a subclass adds."""
        return {each.name: getattr(self, each.name) for each in dataclasses.fields(Counts)}


@dataclass(frozen=True)
class Totals(Counts):
    directories: int = 0
    sealed: int = 0
    allocated: int = 0  # SSD bytes of the stored files

    @property
    def used(self) -> int:
        """SSD bytes of the generation without its index."""
        return self.allocated + self.directories * 4096

    @property
    def inodes(self) -> int:
        """Of files and directories."""
        return self.done_files + self.directories


@dataclass(frozen=True)
class Chunk:
    id: int
    directory: int
    entries: list[Entry]
    priority: int = NORMAL


@dataclass(frozen=True)
class DirectoryRow:
    id: int
    parent: int | None
    attributes: Entry
    state: int
    entries: int
    rescans: int
