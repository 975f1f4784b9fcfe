"""What tells a directory's entries in place of the source: a published manifest, or the tree.

Messages of workers, as those in ``protocol``.
"""

from dataclasses import dataclass

import msgspec

from cache.store.tree import Entry


@dataclass(frozen=True)
class Manifest:
    """Where a published manifest may be, and what it must be of."""

    folder: str  # an absolute path; symbolic links on the way to it are followed
    path: list[str]  # names below it; no link is followed
    marks: dict[str, str]  # of the source (cache.store.identity)

    def __str__(self) -> str:
        return "/".join((self.folder.rstrip("/"), *self.path))


class Fetch(msgspec.Struct, tag=True, kw_only=True):
    """Read a published manifest into the generation's folder, and compare a sample of it."""

    manifest: Manifest
    allowance: int  # SSD bytes that it may take


class Fetched(msgspec.Struct, tag=True, kw_only=True):
    why: str = ""  # it cannot be used
    remedy: str = ""
    directories: int = 0
    bytes: int = 0  # SSD bytes that it takes


class Relisted(msgspec.Struct, kw_only=True):
    """What the tree has in a directory, for an index that lost it."""

    opaque: bool
    entries: int = 0
    files: int = 0
    bytes: int = 0
    allocated: int = 0  # SSD bytes
    folders: list[Entry] = []
