"""What a verify has its workers do, and what they find. Messages, as those in ``protocol``."""

import msgspec

from cache.fill.listings import Relisted
from cache.store.tree import Entry


class Verify(msgspec.Struct, tag=True, kw_only=True):
    """Read the files of a directory against their checksums, on request against the source."""

    directory: int
    path: list[str]
    entries: int | None  # that it must have, when it is sealed
    against_source: bool
    reachable: bool = False  # lost names can be told from the source
    relist: bool = False  # the index lost it: tell what the tree has
    after: str = ""  # names up to this one were read
    patience: float = 0.0  # seconds until the rest is left for another job; 0: none
    afresh: bool = False  # nothing that memory has of the files is believed
    ahead: list[str] = []  # as in the task
    also: list[str] = []


class Verified(msgspec.Struct, tag=True, kw_only=True):
    checked_files: int = 0
    checked_bytes: int = 0
    shared_files: int = 0  # those that another generation's scrub reads
    fault: str = ""  # of the directory itself: it cannot be read, or names are lost
    unreadable: bool = False  # nothing of the directory could be read
    listed: Relisted | None = None
    bad: list[tuple[Entry, str]] = []
    also: list[tuple[int, str]] = []  # bad ones that others have, too: which one, and the name
    repaired: list[tuple[str, int]] = []  # large files; how many extents were bad
    uncompared: int = 0
    named: list[tuple[str, str]] = []  # some of the uncompared, with the reason
    folders: int = 0  # subdirectories that the tree has
    left_after: str | None = None  # names after this one were left
    cached: int = 0  # files that could be read through the page cache only
