"""Examine one block device: what does it hold, and could all of it be read?

A failed read must never pass for "empty": that is how data is formatted away. So the verdict
``blank_verified`` needs libblkid to find nothing *without an error* and every place where a file
system, RAID, LVM, LUKS or partition table leaves a mark (``marks``) to read as zeros.
All reads bypass the page cache, which may hold what an earlier attachment or fault left there.

This runs in a child process that the agent abandons when the device hangs (``prober``).
"""

import errno
import fcntl
import mmap
import os
import random
import struct
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

import kit.files
import kit.messages
from linux import blkid, blockdev

_BLKGETSIZE64 = 0x80081272
_BLKGETDISKSEQ = 0x80081280
_CHUNK = 2**20
_READERS = 32  # a network device answers many small reads at once
K, M, G, T = 2**10, 2**20, 2**30, 2**40
PAGE = 4 * K
SAMPLES = 256
_GONE = (errno.ENOMEDIUM, errno.ENXIO, errno.ENODEV, errno.ENOENT)


class Kind(StrEnum):
    HAS_FS = "has_fs"
    PARTITIONED = "partitioned"
    ENCRYPTED = "encrypted"
    BLANK_VERIFIED = "blank_verified"
    UNKNOWN_CONTENT = "unknown_content"
    AMBIVALENT = "ambivalent"
    UNREADABLE = "unreadable"
    NO_MEDIA = "no_media"
    TIMEOUT = "timeout"


@dataclass(frozen=True)
class Request:
    """``seed`` chooses the sampled pages: another seed, other pages. ``below``: where ``device`` is
    a LUKS mapping, the device it lies on. What was never written reads as noise through the mapping
    and as zeros below it."""

    device: str
    seed: int
    below: str = ""


CONTENT = frozenset({Kind.HAS_FS, Kind.PARTITIONED, Kind.ENCRYPTED})


@dataclass(frozen=True)
class Verdict:
    """The answer. Fields that do not belong to ``verdict`` are empty or zero."""

    verdict: Kind
    device: str = ""
    type: str = ""  # has_fs, encrypted: libblkid's TYPE; partitioned: its PTTYPE
    uuid: str = ""
    label: str = ""
    offset: int = 0  # unknown_content: the first byte found that is not zero
    where: str = ""  # unreadable, no_media: what failed
    errno: int = 0
    size: int = 0  # bytes
    diskseq: int | None = None  # the kernel's number of this attachment; None before Linux 5.15
    bytes_read: int = 0
    content_at: int | None = None  # unreadable: a byte found there that is not zero
    seconds: float = 0.0
    seed: int = 0  # of the sampled pages
    start: int = 0  # blank_verified of a LUKS mapping: where its data begins on the device below

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": str(self.verdict)}

    @property
    def has_content(self) -> bool:
        """libblkid recognised what is on it."""
        return self.verdict in CONTENT

    def __str__(self) -> str:
        match self.verdict:
            case Kind.HAS_FS | Kind.ENCRYPTED | Kind.PARTITIONED:
                return f"{self.verdict} {self.type} {self.uuid}".strip()
            case Kind.UNKNOWN_CONTENT:
                return f"{self.verdict} at offset {self.offset}"
            case Kind.UNREADABLE:
                code = errno.errorcode.get(self.errno, str(self.errno))
                return f"{self.verdict} ({self.where}: {code}, {os.strerror(self.errno)})"
            case _:
                return str(self.verdict)


def _long(descriptor: int, request: int) -> int:
    return int(struct.unpack("=Q", fcntl.ioctl(descriptor, request, bytes(8)))[0])


def main() -> None:
    """The child process of a probe: answer requests until the agent closes the pipe."""
    kit.messages.serve(Request, examine)


def examine(request: Request) -> Verdict:
    """The verdict on a block device. An OSError becomes a verdict too."""
    began = time.monotonic()
    found = _examine(request.device, request.seed, request.below)
    seconds = round(time.monotonic() - began, 4)
    return replace(found, device=request.device, seed=request.seed, seconds=seconds)


def _examine(path: str, seed: int, below: str) -> Verdict:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        kind = Kind.NO_MEDIA if error.errno in _GONE else Kind.UNREADABLE
        return Verdict(kind, where="open", errno=error.errno or 0)
    size, diskseq = 0, None
    try:
        size = _long(descriptor, _BLKGETSIZE64)
        try:
            diskseq = _long(descriptor, _BLKGETDISKSEQ)
        except OSError:
            pass  # before Linux 5.15
        found = _content(path, descriptor, size, seed, below)
    except OSError as error:
        found = Verdict(Kind.UNREADABLE, where="device", errno=error.errno or 0)
    finally:
        os.close(descriptor)
    return replace(found, size=size, diskseq=diskseq)


def _content(path: str, descriptor: int, size: int, seed: int, below: str) -> Verdict:
    if size == 0:
        return Verdict(Kind.NO_MEDIA, where="size")
    # libblkid reads through the page cache. Of a device in use the cache is its file system's, and
    # dropping it makes that slow; what can be read is asked past the cache.
    device = blockdev.identify(os.path.basename(path))
    in_use = device is not None and blockdev.in_use(device)
    if in_use:
        there = _Reads(descriptor)
        there.run([(0, min(size, _CHUNK))])
        if there.failed is not None:
            return Verdict(Kind.UNREADABLE, where="offset 0", errno=there.failed[1])
    buffered = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if not in_use:
            os.posix_fadvise(buffered, 0, 0, os.POSIX_FADV_DONTNEED)
        result, values = blkid.probe(buffered)
    finally:
        os.close(buffered)
    if result == blkid.AMBIVALENT:
        return Verdict(Kind.AMBIVALENT)
    if result == blkid.FOUND and values and not (below and _is_noise(below, values)):
        return _recognised(values)
    start, lower = 0, descriptor
    if below:
        lower = os.open(below, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    try:
        start = blkid.luks_data_offset(lower) if below else 0
        reads = _Reads(lower)
        for places in (marks(size), samples(size, seed)):
            if reads.failed is None and reads.content is None:
                reads.run([(start + at, length) for at, length in places])
    finally:
        if below:
            os.close(lower)
    if reads.failed is not None:
        where, code = reads.failed
        found = Verdict(Kind.UNREADABLE, where=f"offset {where}", errno=code)
    elif result < 0:
        found = Verdict(Kind.UNREADABLE, where="libblkid", errno=-result)
    elif reads.content is not None:
        found = Verdict(Kind.UNKNOWN_CONTENT, offset=reads.content)
    else:
        found = Verdict(Kind.BLANK_VERIFIED, start=start)
    return replace(found, bytes_read=reads.total, content_at=reads.content)


def _is_noise(below: str, values: Mapping[str, str]) -> bool:
    """Whether the mark that libblkid found in a LUKS mapping was never written: there are zeros
    below it. What was never written reads as noise, and two bytes of it are soon a magic."""
    at = values.get("SBMAGIC_OFFSET") or values.get("PTMAGIC_OFFSET")
    if at is None:
        return False
    try:
        with kit.files.closing(os.open(below, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)) as lower:
            there = _Reads(lower)
            start = blkid.luks_data_offset(lower)
            there.run([(start + int(at) // PAGE * PAGE, PAGE)])
    except OSError:
        return False
    return there.failed is None and there.content is None


def _recognised(values: Mapping[str, str]) -> Verdict:
    kind = Kind.HAS_FS
    if values.get("USAGE") == "crypto":
        kind = Kind.ENCRYPTED
    elif "TYPE" not in values:
        kind = Kind.PARTITIONED
    return Verdict(
        kind,
        type=values.get("TYPE") or values.get("PTTYPE") or "unknown",
        uuid=values.get("UUID") or values.get("PTUUID") or "",
        label=values.get("LABEL", ""),
    )


class _Reads:
    """Reads past the page cache. ``failed``: the lowest (offset, errno) of a failed read;
    ``content``: the lowest offset that is not zero."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self.failed: tuple[int, int] | None = None
        self.content: int | None = None
        self.total = 0

    def run(self, wanted: list[tuple[int, int]]) -> None:
        pieces = [
            (at, min(_CHUNK, start + length - at))
            for start, length in wanted
            for at in range(start, start + length, _CHUNK)
        ]
        pieces.reverse()
        threads = [threading.Thread(target=self._work, args=(pieces,)) for _ in range(_READERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _work(self, pieces: list[tuple[int, int]]) -> None:
        with mmap.mmap(-1, _CHUNK) as buffer, memoryview(buffer) as view:
            while True:
                try:
                    offset, length = pieces.pop()
                except IndexError:
                    return
                self._one(view, offset, length)

    def _one(self, view: memoryview, offset: int, length: int) -> None:
        fault = None
        data = b""
        try:
            with view[:length] as part:
                got = os.preadv(self._descriptor, [part], offset)
                data = bytes(part[:got])
            if got < length:  # a short read inside the device is a failure too
                fault = (offset + got, errno.EIO)
        except OSError as error:
            fault = (offset, error.errno or errno.EIO)
        content = offset + len(data) - len(data.lstrip(b"\0")) if data.strip(b"\0") else None
        with self._lock:
            self.total += len(data)
            if fault is not None and (self.failed is None or fault < self.failed):
                self.failed = fault
            if content is not None and (self.content is None or content < self.content):
                self.content = content


# --- where content leaves marks on a device: arithmetic on its size
#
# When the front of a device cannot be trusted (it reads as zeros after a fault), backups elsewhere
# still show what it holds: backup superblocks of ext4, xfs and btrfs, partition tables at the end,
# RAID labels.


# Where a first partition and LVM's first volume begin, and the data behind a LUKS2 header.
_STARTS = (M, 16 * M)


def marks(size: int) -> list[tuple[int, int]]:
    """(offset, length) of every fixed mark, in bytes, multiples of 4 KiB inside the device.

    The front holds the primary marks of all file systems, LVM, LUKS (second header up to 4 MiB),
    md 1.1 and 1.2, ZFS labels 0 and 1 and partition tables; the end those of GPT's backup, md 0.90
    and 1.0, DDF and IMSM, ZFS labels 2 and 3, NILFS2, NTFS, HFS+ and bcachefs. Copies of ext and
    XFS lie all over the device, also where they begin in a partition, in LVM or behind LUKS2.
    """
    wanted = [(0, 4 * M + 64 * K), (size - 2 * M, 2 * M)]
    wanted += [(at, 64 * K) for at in (64 * M, 256 * G, 1024 * T)]  # btrfs mirrors
    wanted += [(at * G, 64 * K) for at in (1, 10, 100, 1000)]  # copies of BlueStore's label
    wanted += [(at, PAGE) for at in _ext_backups(size)]
    wanted += [(at, PAGE) for at in _xfs_groups(size, (*range(2, 9), 16, 32))]
    for start in _STARTS:
        rest = size - start
        wanted += [(start + at, PAGE) for at in _ext_backups(rest)]
        # to the end of the device, to that of a GPT, or whole extents of LVM
        for inner in {rest, rest - M, rest // (4 * M) * (4 * M)}:
            groups = _xfs_groups(inner, (2, 4, 8, 16, 32), most=2)
            wanted += [(start + at, PAGE) for at in groups]
    return _inside(wanted, size)


def marks_from(start: int, size: int) -> tuple[tuple[int, int], ...]:
    """The marks of a device whose data begins at ``start`` of what lies below it."""
    return tuple((start + at, length) for at, length in marks(size))


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


def _xfs_groups(size: int, counts: tuple[int, ...], most: int = 64) -> list[int]:
    """Superblock copies at the head of XFS allocation groups, for the group ``counts`` and stripe
    alignments that mkfs.xfs chooses by itself; of each layout the first ``most``."""
    found = []
    for unit in (PAGE, 64 * K, M, 4 * M):
        for count in counts:
            for group in (-(-size // (count * unit)) * unit, size // (count * unit) * unit):
                found += [group * number for number in range(1, min(count, most + 1))]
    for group in (T, T - PAGE):
        found += [group * number for number in range(1, most + 1)]
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
