"""One entry of a directory as a scan saw it."""

import os
import stat
from typing import NamedTuple


class Entry(NamedTuple):
    """Travels as a JSON list in this order, and is kept so in the index."""

    name: str  # os.fsdecode of the name's bytes
    mode: int  # st_mode, type included
    uid: int
    gid: int
    size: int  # bytes
    mtime_ns: int
    ino: int
    nlink: int
    xattrs: bool  # False only where it is known that there are none

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.mode)

    @property
    def is_file(self) -> bool:
        return stat.S_ISREG(self.mode)

    @property
    def is_link(self) -> bool:
        return stat.S_ISLNK(self.mode)

    @property
    def allocated(self) -> int:
        """Bytes it will at most take on the SSD: whole blocks, one for long xattrs, its name."""
        return -(-self.size // 4096) * 4096 + (4096 if self.xattrs else 0) + self.name_bytes

    @property
    def name_bytes(self) -> int:
        """What its name takes in its directory, whose blocks may be half empty."""
        return 2 * (8 + len(os.fsencode(self.name)))


def of(name: str, status: os.stat_result) -> Entry:
    """From a stat result; xattrs are not known then."""
    return Entry(
        name,
        status.st_mode,
        status.st_uid,
        status.st_gid,
        status.st_size,
        status.st_mtime_ns,
        status.st_ino,
        status.st_nlink,
        True,
    )


def same_content(entry: Entry, stored: os.stat_result) -> bool:
    """Whether what is stored is this entry's version, judged by type, size and time."""
    if stat.S_IFMT(entry.mode) != stat.S_IFMT(stored.st_mode):
        return False
    if entry.is_directory:
        return True
    return entry.size == stored.st_size and entry.mtime_ns == stored.st_mtime_ns
