"""How much more fits on the SSD: what budget and reserve leave."""

import os
from typing import TYPE_CHECKING

import kit.units
from cache.fill import protocol
from cache.fill.protocol import Least
from cache.store.subset import NOTHING, Amount

if TYPE_CHECKING:
    from cache.store import probe  # speaks with the agent: too much for a pass to load

# For what grows beside the files: the index's log, directories, preallocation of XFS.
HEADROOM_BYTES = 16 * 1024 * 1024


def balance(disk: os.statvfs_result, limits: protocol.Limits, *, used: int, inodes: int) -> Amount:
    """What budget and reserve leave, negative where more is used. ``used``, ``inodes``: of this
    generation.

    A file system that does not count inodes (f_files is 0, btrfs) has enough of them.
    """
    size = disk.f_blocks * disk.f_frsize
    floor = floors(size, disk.f_files, limits.reserve, limits.least)
    free = disk.f_bavail * disk.f_frsize - floor.bytes - HEADROOM_BYTES
    free_inodes = disk.f_favail - floor.inodes if disk.f_files else 2**62
    if not limits.disk:
        free = free_inodes = 2**62
    return Amount(
        min(limits.budget - limits.others - used, free) - limits.wanted,
        min(limits.inodes - limits.other_inodes - inodes, free_inodes) - limits.wanted_inodes,
    )


def tightest(
    disk: os.statvfs_result, limits: protocol.Limits, *, used: int, inodes: int, lacks: Amount
) -> str:
    """What keeps ``lacks`` more from being stored, for operators. The rest as of ``balance``."""
    size, free = disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
    floor = floors(size, disk.f_files, limits.reserve, limits.least)
    whole, stays, others = (
        kit.units.format_size(each)
        for each in (size, floor.bytes, max(0, size - free - limits.others - used))
    )
    disk_has = f"of the disk's {whole} other files take {others}, and {stays} stay free"
    inodes_are = f"of the disk's {disk.f_files} inodes {disk.f_favail} are free, and {floor.inodes}"
    left = {
        f"{'its own ' if limits.own else 'cache.'}budget is too small":
            (limits.budget - limits.others - used) / max(lacks.bytes, 1),
        f"{'its own ' if limits.own_inodes else 'cache.'}budget_inodes is too small":
            (limits.inodes - limits.other_inodes - inodes) / max(lacks.inodes, 1),
        f"{disk_has} (cache.reserve)":
            (free - floor.bytes - HEADROOM_BYTES) / max(lacks.bytes, 1),
        f"{inodes_are} stay free (cache.reserve)":
            (disk.f_favail - floor.inodes if disk.f_files else 2**62) / max(lacks.inodes, 1),
    }  # fmt: skip
    return min(left, key=left.__getitem__)


def floors(size: int, inodes: int, reserve: float, least: Least) -> Amount:
    """What of a file system is never used. 0 ``inodes``: it does not count them."""
    floor = max(int(size * max(reserve, least.share)), least.bytes)
    of_inodes = max(int(inodes * max(reserve, least.inodes_share)), least.inodes)
    return Amount(floor, of_inodes if inodes else 0)


def short(seen: "probe.Seen", reserve: float, least: Least) -> Amount:
    """What a file system lacks of the reserve; as ``balance`` counts, without the headroom."""
    floor = floors(seen.size, seen.inodes, reserve, least) if seen.size else NOTHING
    return (floor - Amount(seen.free, seen.free_inodes)).at_least(NOTHING)
