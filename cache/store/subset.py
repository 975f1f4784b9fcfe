"""Which files of a dataset stay in the store when not all of them fit.

Training reads each file once in an epoch, in another order each time: what was read last is what is
read last again, so a cache that keeps the most recent files has hardly a hit. A subset that does
not change has as many hits as it has files. So each file has a *position* from 0 to SHARES - 1 that
follows from its path, and the files whose position is below the dataset's *share* are kept. A
smaller share takes exactly the files from there on out, a larger one adds to what is there.

The position is a keyed hash of the path, first of the directory's, then of the name: the files of a
directory lie side by side, in as much of the range as its part of the dataset is, so that few
directories are kept in part. What is kept whole needs no source, not even one that answers
(``cache.fill.closing``). The key is the store's own, so that the nodes of a cluster
keep different subsets, and the source is asked for each file by some of them and not for some files
by all. All names of a hard-linked file have one position. A file that is large beside the whole
dataset comes late: the smaller ones must not wait for it, whatever its hash is.

Everything here is pure.
"""

import hashlib
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from cache.store.tree import Entry

SHARES = 4096
ALL = SHARES  # the share of a dataset that fits
# A file waits until the share holds this many times its bytes.
_BESIDE = 8
_LATEST = 63 / 64
_SMALL = 1 / 1024  # of the dataset: the hash alone decides
_WHOLE = float(2**64)
_ENTRY, _PAGES = 128, 16 * 1024

T = TypeVar("T")


@dataclass(frozen=True)
class Amount:
    """Bytes and inodes. Negative ones are missing."""

    bytes: int = 0
    inodes: int = 0

    def __add__(self, other: "Amount") -> "Amount":
        return Amount(self.bytes + other.bytes, self.inodes + other.inodes)

    def __sub__(self, other: "Amount") -> "Amount":
        return Amount(self.bytes - other.bytes, self.inodes - other.inodes)

    def at_least(self, other: "Amount") -> "Amount":
        """Of each the larger one."""
        return Amount(max(self.bytes, other.bytes), max(self.inodes, other.inodes))

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


NOTHING = Amount()


def key_of(store: str, dataset: str) -> bytes:
    """The key of a dataset. ``store``: its UUID, '' for one that has none."""
    return hashlib.blake2b(f"{store}/{dataset}".encode(), digest_size=32).digest()


def _span(size: int, total: int) -> float:
    """How much of the range a directory's files lie in, from 0 to 1: their part of the dataset, in
    steps of 2^(1/4) for each of the two, so that what changes a little moves no file."""
    if size <= 0 or total <= 0:
        return 0.0
    steps = math.ceil(4 * math.log2(size)) - math.floor(4 * math.log2(total))
    return min(1.0, math.pow(2.0, steps / 4))


def position(hashed: float, size: int, total: int) -> int:
    """``hashed``: from 0 to 1. ``size``, ``total``: bytes of the file and of its dataset.

    Sizes count in powers of two, so that a total that changes a little moves no file.
    """
    first = 0.0
    if total > 0 and size > 0 and _BESIDE * size / total > _SMALL:
        exponent = math.ceil(math.log2(_BESIDE * size)) - math.floor(math.log2(total))
        first = 1.0 if 2 * size > total else min(_LATEST, 2.0**exponent)
    return min(SHARES - 1, int((first + hashed * (1.0 - first)) * (SHARES - 1)))


class Positions:
    """Positions of the entries of one dataset."""

    def __init__(self, key: bytes, total: Amount) -> None:
        """``total``: bytes and number of all files of the dataset."""
        self._key = key
        self._total = total

    def of(self, path: Sequence[str], inside: Amount, entries: Iterable[Entry]) -> list[int]:
        """Of entries of the directory ``path``, in their order. ``inside``: bytes and number of all
        files directly in it."""
        directory = hashlib.blake2b(key=self._key, digest_size=8)
        directory.update(os.fsencode("".join(f"{name}/" for name in path)))
        span = max(_span(inside.bytes, self._total.bytes), _span(inside.inodes, self._total.inodes))
        first = _hashed(directory.digest()) * (1.0 - span)
        found = []
        for entry in entries:
            if entry.nlink > 1 and entry.is_file:
                named = hashlib.blake2b(b"%d" % entry.ino, key=self._key, digest_size=8)
                hashed = _hashed(named.digest())
            else:
                named = directory.copy()
                named.update(os.fsencode(entry.name))
                hashed = first + _hashed(named.digest()) * span
            found.append(position(hashed, entry.size, self._total.bytes))
        return found


def _hashed(digest: bytes) -> float:
    """From 0 to 1."""
    return int.from_bytes(digest, "big") / _WHOLE


class Histogram:
    """What a dataset's files take, by their position: known or stored. Memory does not grow."""

    def __init__(self) -> None:
        self._bytes = [0] * SHARES
        self._inodes = [0] * SHARES
        self._stored_inodes = [0] * SHARES
        self.stored = Amount()

    def add(self, at: int, size: int, *, stored: bool) -> None:
        """A file at a position. ``size``: the most SSD bytes that it takes."""
        self._bytes[at] += size
        self._inodes[at] += 1
        if stored:
            self._stored_inodes[at] += 1
            self.stored += Amount(size, 1)

    def stored_from(self, share: int) -> int:
        """Stored files that a share takes out."""
        return sum(self._stored_inodes[share:])

    def share(self, balance: Amount, taken: int) -> int:
        """The largest share that fits.

        ``balance``: what is left beside what is stored now, negative when too much is stored.
        ``taken``: SSD bytes that the stored files really take, at most as much as was added.
        """
        size = balance.bytes
        if size < 0 and 0 < taken < self.stored.bytes:
            # Files take less than their most: more of them must go to free as much.
            size = -math.ceil(-size * self.stored.bytes / taken)
        if size < 0:
            size -= self.stored.bytes // _ENTRY + _PAGES  # what the index needs to note them
        most = self.stored + Amount(size, balance.inodes)
        used_bytes = used_inodes = 0
        for at in range(SHARES):
            used_bytes += self._bytes[at]
            used_inodes += self._inodes[at]
            if used_bytes > most.bytes or used_inodes > most.inodes:
                return at
        return ALL
