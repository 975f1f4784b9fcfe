"""How much more fits on the SSD: what budget and reserve leave."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from cache.fill import protocol
from cache.fill.protocol import Least
from cache.store.subset import Amount

if TYPE_CHECKING:
    from cache.store import probe  # speaks with the agent: too much for a pass to load

T = TypeVar("T")

# For what grows beside the files: the index's log, directories, preallocation of XFS.
HEADROOM_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True)
class SpaceLeft:
    """Bytes and inodes that may still be used."""

    bytes: int
    inodes: int

    def holds(self, size: int, inodes: int) -> bool:
        return size <= self.bytes and inodes <= self.inodes

    def fitting(self, items: Sequence[T], sizes: Sequence[int]) -> tuple[list[T], int]:
        """The items that there is room for, one after the other, and their bytes.

        A large one is skipped: it must not keep the small ones behind it out.
        """
        taken: list[T] = []
        total = 0
        for item, size in zip(items, sizes, strict=True):
            if self.holds(total + size, len(taken) + 1):
                total += size
                taken.append(item)
        return taken, total


@dataclass(frozen=True)
class Balance:
    """As ``SpaceLeft``, but negative when more is used than allowed."""

    bytes: int
    inodes: int

    def room(self, pending: SpaceLeft) -> SpaceLeft:
        """``pending``: what jobs and staged files take, which may or may not be counted yet."""
        return SpaceLeft(max(0, self.bytes - pending.bytes), max(0, self.inodes - pending.inodes))


def balance(disk: os.statvfs_result, limits: protocol.Limits, *, used: int, inodes: int) -> Balance:
    """What budget and reserve leave. ``used``, ``inodes``: of this generation.

    A file system that does not count inodes (f_files is 0, btrfs) has enough of them.
    """
    size = disk.f_blocks * disk.f_frsize
    floor = floors(size, disk.f_files, limits.reserve, limits.least)
    free = disk.f_bavail * disk.f_frsize - floor.bytes - HEADROOM_BYTES
    free_inodes = disk.f_favail - floor.inodes if disk.f_files else 2**62
    if not limits.disk:
        free = free_inodes = 2**62
    return Balance(
        min(limits.budget - limits.others - used, free) - limits.wanted,
        min(limits.inodes - limits.other_inodes - inodes, free_inodes) - limits.wanted_inodes,
    )


def floors(size: int, inodes: int, reserve: float, least: Least) -> Amount:
    """What of a file system is never used. 0 ``inodes``: it does not count them."""
    floor = max(int(size * max(reserve, least.share)), least.bytes)
    of_inodes = max(int(inodes * max(reserve, least.inodes_share)), least.inodes)
    return Amount(floor, of_inodes if inodes else 0)


def short(seen: "probe.Seen", reserve: float, least: Least) -> Amount:
    """What a file system lacks of the reserve; as ``balance`` counts, without the headroom."""
    floor = floors(seen.size, seen.inodes, reserve, least) if seen.size else Amount()
    return Amount(max(0, floor.bytes - seen.free), max(0, floor.inodes - seen.free_inodes))
