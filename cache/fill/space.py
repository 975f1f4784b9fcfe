"""How much the store may still take. Pure."""

import os
from dataclasses import dataclass

# For what grows beside the files: the index's log, directories, what XFS holds ahead of writes.
HEADROOM_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True)
class Room:
    """Bytes and inodes that may still be used."""

    bytes: int
    inodes: int

    def holds(self, size: int, inodes: int) -> bool:
        return size <= self.bytes and inodes <= self.inodes


def room(disk: os.statvfs_result, *, reserve: float, budget: int, used: int, pending: Room) -> Room:
    """What is left under both promises: the budget, and the reserve of the disk.

    ``used``: bytes that the whole store takes. ``pending``: what was handed out and is neither in
    ``used`` nor surely on the disk yet. A file system that does not count inodes (f_files is 0,
    btrfs) has enough of them.
    """
    floor = int(disk.f_blocks * disk.f_frsize * reserve)
    free = disk.f_bavail * disk.f_frsize - floor - HEADROOM_BYTES
    inodes = disk.f_favail - int(disk.f_files * reserve) if disk.f_files else 2**62
    return Room(max(0, min(budget - used, free) - pending.bytes), max(0, inodes - pending.inodes))
