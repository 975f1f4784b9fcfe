"""Offsets at which content leaves marks on a block device: pure arithmetic on its size.

When the front of a device cannot be trusted (it reads as zeros after a fault), backups elsewhere
still show what the device holds: backup superblocks of ext4, xfs and btrfs, partition tables at the
end, RAID labels. ``examine`` reads all of them before it calls a device blank.
"""

import random

K, M, G, T = 2**10, 2**20, 2**30, 2**40
PAGE = 4 * K
SAMPLES = 256


def marks(size: int) -> list[tuple[int, int]]:
    """(offset, length) of every fixed mark, in bytes, multiples of 4 KiB inside the device.

    The front holds the primary marks of all file systems, LVM, LUKS (second header up to 4 MiB),
    md 1.1 and 1.2, ZFS labels 0 and 1 and partition tables; the end those of GPT's backup, md 0.90
    and 1.0, DDF and IMSM, ZFS labels 2 and 3, NILFS2, NTFS, HFS+ and bcachefs.
    """
    wanted = [(0, 4 * M + 64 * K), (size - 2 * M, 2 * M)]
    wanted += [(at, 64 * K) for at in (64 * M, 256 * G, 1024 * T)]  # btrfs mirrors
    wanted += [(at * G, 64 * K) for at in (1, 10, 100, 1000)]  # copies of BlueStore's label
    wanted += [(at, PAGE) for at in _ext_backups(size)]
    wanted += [(at, PAGE) for at in _xfs_groups(size)]
    return _inside(wanted, size)


def _ext_backups(size: int) -> list[int]:
    """Backup superblocks of ext2/3/4 with 1, 2, 4 and 64 KiB blocks: sparse_super's groups
    (1 and the powers of 3, 5 and 7) and the last one (sparse_super2)."""
    found = []
    for block in (K, 2 * K, 4 * K, 64 * K):
        group = 8 * block * block
        first = block if block == K else 0  # with 1 KiB blocks, block 0 is outside the groups
        numbers = {1, max(0, (size // block - 1) // (8 * block))}
        for base in (3, 5, 7):
            power = base
            while power * group < size:
                numbers.add(power)
                power *= base
        found += [number * group + first for number in numbers if number]
    return found


def _xfs_groups(size: int) -> list[int]:
    """Superblock copies at the head of XFS allocation groups, for the group counts and stripe
    alignments that mkfs.xfs chooses by itself."""
    found = []
    for unit in (PAGE, 64 * K, M, 4 * M):
        for count in (*range(2, 9), 16, 32):
            for group in (-(-size // (count * unit)) * unit, size // (count * unit) * unit):
                found += [group * number for number in range(1, count)]
    for group in (T, T - PAGE):
        found += [group * number for number in range(1, 65)]
    return found


def samples(size: int, seed: int) -> list[tuple[int, int]]:
    """Random pages over the whole device, chosen by ``seed``."""
    source = random.Random(seed)
    pages = max(1, size // PAGE)
    return _inside([(source.randrange(pages) * PAGE, PAGE) for _ in range(SAMPLES)], size)


def _inside(wanted: list[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    """Sorted, merged where they touch, cut to the device."""
    merged: list[tuple[int, int]] = []
    for offset, length in sorted(wanted):
        end = min(offset + length, size)
        start = max(0, offset) // PAGE * PAGE
        if start >= end:
            continue
        if merged and start <= merged[-1][0] + merged[-1][1]:
            first, before = merged[-1]
            merged[-1] = (first, max(before, end - first))
        else:
            merged.append((start, end - start))
    return merged
