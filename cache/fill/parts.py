"""The parts in which the listing of a directory is answered, and what they count."""

import os

from cache.fill import protocol
from cache.store.tree import Entry


def count(item: Entry, status: os.stat_result, stored: protocol.Stored, *, shared: bool) -> None:
    """``item`` is in the tree already, with this status."""
    stored.files += 1
    stored.bytes += item.size if item.is_file else 0
    stored.allocated += status.st_blocks * 512 + item.name_bytes
    if shared:
        stored.shared += status.st_blocks * 512
        stored.shared_files += 1


def size(part: protocol.ScanPart) -> int:
    return len(part.chunk) + len(part.stored) + len(part.folders) + len(part.failed)


def flush(part: protocol.ScanPart) -> None:
    """Answer it, and empty it."""
    protocol.answer(part)
    part.chunk, part.stored, part.folders, part.failed, part.made = [], [], [], [], 0
    part.unmade = []
