"""The local copy of a block image, and its manifest: a state and a checksum for each chunk.

<store>/<dataset>/<generation>/image    sparse file, as large as the image
                               chunks   one page of JSON, then a record of 17 bytes for each chunk
                               replay   "begun" or "done", when its journal had to be replayed

Invariant: a record says STORED only when the bytes of its chunk are durable, so what a killed pass
left is as good as it says. A chunk that holds nothing but zeros is a hole of the file.

Everything here runs in a child process: the disk may hang.
"""

import contextlib
import errno
import fcntl
import json
import mmap
import os
import struct
import threading
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import kit.errors
import kit.files
import kit.formats
from cache.store import extents
from ceph.protocol import SnapshotFacts

FORMAT = 1
IMAGE, CHUNKS, REPLAY = "image", "chunks", "replay"
INODES = 2  # that a copy takes: the image and its records
CHUNK_BYTES = extents.EXTENT_BYTES  # a chunk of an image is an extent
State = extents.State
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_EXISTING = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_CLONE_RANGE = 0x4020940D  # FICLONERANGE of linux/fs.h
_DIRECT_FLAGS = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_DIRECT
_BLOCK = 4096  # a multiple of what disks want of direct writes
_NOT_SHARED = (errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL, errno.ENOSYS)


def chunks_of(touched: Iterable[tuple[int, int]]) -> Iterator[int]:
    """The chunks that (offset, length) touch; a chunk may come twice."""
    for offset, length in touched:
        yield from range(offset // CHUNK_BYTES, (offset + length - 1) // CHUNK_BYTES + 1)


class Chunks(extents.Extents):
    """The open copy. OSError from every method.

    It is written past the page cache where its file system can do that (O_DIRECT): jobs need the
    memory, the view has a cache of its own, and a sync has little left to do. Several threads may
    ``put`` different chunks.
    """

    def __init__(self, facts: SnapshotFacts, image: int, records: int, direct: int = -1) -> None:
        """``direct``: a descriptor of the image for direct writes; -1 for none."""
        super().__init__(facts.size, image, records)
        self.facts = facts
        self._direct = direct
        self._local = threading.local()
        self._with_data: set[int] = set()  # chunks that are no holes, known or not
        if direct >= 0:
            self._look_for_data()

    def _look_for_data(self) -> None:
        """Once: later the file system would answer behind the writes that are under way."""
        chunk = 0
        while chunk < self.count:
            try:
                at = os.lseek(self.data, chunk * CHUNK_BYTES, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:  # nothing up to the end
                    return
                raise
            chunk = at // CHUNK_BYTES
            self._with_data.add(chunk)
            chunk += 1

    def _is_hole(self, extent: int, offset: int, length: int) -> bool:
        if self._direct < 0:
            return super()._is_hole(extent, offset, length)
        fresh = extent not in self._with_data
        self._with_data.add(extent)
        return fresh

    def _write(self, data: bytes | memoryview, offset: int, *, sparse: bool) -> None:
        if self._direct >= 0 and len(data) % _BLOCK == 0:
            try:
                self._write_direct(data, offset, sparse=sparse)
                return
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._direct = -1  # blocks that are larger than ours
        super()._write(data, offset, sparse=sparse)

    def _write_direct(self, data: bytes | memoryview, offset: int, *, sparse: bool) -> None:
        """Through a buffer of this thread, which begins at a page as the disk wants it."""
        buffer: memoryview | None = getattr(self._local, "buffer", None)
        if buffer is None:
            pages = mmap.mmap(-1, CHUNK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            buffer = self._local.buffer = memoryview(pages)
        block = buffer[: len(data)]
        block[:] = data
        if sparse:
            extents.write_sparse(self._direct, block, offset)
        else:
            extents.write_all(self._direct, block, offset)

    def shares(self, earlier: "Chunks", chunk: int) -> bool:
        """Whether the disk can give a chunk of another copy to this one without copying it."""
        offset, length = self.span(chunk)
        wanted = struct.pack("qQQQ", earlier.data, offset, length, offset)
        try:
            fcntl.ioctl(self.data, _CLONE_RANGE, wanted)
        except OSError as error:
            if error.errno in _NOT_SHARED:
                return False
            raise
        self._with_data.add(chunk)
        return True

    def take_from(self, earlier: "Chunks", chunk: int, *, share: bool) -> bool:
        """A chunk and its record, from another copy where it is stored or known as zeros.

        Shared it keeps the checksum that it had, for a verify to tell. Copied it is compared: False
        when it is bad, and stays unknown here.
        """
        record = earlier.record(chunk)
        if record[0] == State.STORED and not (share and self.shares(earlier, chunk)):
            data = extents.read(earlier.data, self.size, chunk)
            if extents.record_of(data) != record:
                return False
            self.put(chunk, data)
            return True
        self.know(chunk, record)
        return True


def _header(folder: Path) -> dict[str, Any]:
    with (folder / CHUNKS).open("rb") as stream:
        fields: dict[str, Any] = json.loads(stream.read(extents.HEADER_BYTES).rstrip(b"\0"))
        return fields


def partition_of(folder: Path) -> int:
    """Where the file system of the copy in ``folder`` lies; 0 for all of it. OSError."""
    return int(_header(folder).get("partition", 0))


def facts_of(folder: Path) -> SnapshotFacts | None:
    """What the copy in ``folder`` is of; None when there is none. HostError for a newer format."""
    try:
        fields = _header(folder)
        kit.formats.check(str(folder / CHUNKS), fields, FORMAT)
        return SnapshotFacts(**{key: fields[key] for key in SnapshotFacts.__dataclass_fields__})
    except (OSError, ValueError, KeyError, TypeError):
        return None


@contextlib.contextmanager
def opened(folder: Path, facts: SnapshotFacts, partition: int = 0) -> Iterator[Chunks]:
    """The copy of ``facts`` in ``folder``; what is there of another snapshot is deleted first.

    ``partition``: where its file system lies; it is only kept.
    """
    if facts_of(folder) != facts:
        discard(folder)
        fields = {kit.formats.KEY: FORMAT, **asdict(facts), "partition": partition}
        kit.files.save(folder / CHUNKS, extents.header(fields))
    with (
        kit.files.closing(os.open(folder / IMAGE, _FLAGS, 0o600)) as image,
        kit.files.closing(os.open(folder / CHUNKS, _FLAGS, 0o600)) as records,
    ):
        os.ftruncate(image, facts.size)
        with _direct(folder / IMAGE) as direct:
            yield Chunks(facts, image, records, direct)


@contextlib.contextmanager
def _direct(image: Path) -> Iterator[int]:
    """A descriptor for direct writes; -1 where the file system has none."""
    try:
        descriptor = os.open(image, _DIRECT_FLAGS)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        yield -1
        return
    with kit.files.closing(descriptor):
        yield descriptor


@contextlib.contextmanager
def existing_copy(folder: Path, facts: SnapshotFacts | None = None) -> Iterator[Chunks]:
    """A copy that is there, to be read only. HostError, OSError."""
    with (
        kit.files.closing(os.open(folder / IMAGE, _EXISTING)) as image,
        kit.files.closing(os.open(folder / CHUNKS, _EXISTING)) as records,
    ):
        yield Chunks(facts or existing(folder), image, records)


def existing(folder: Path) -> SnapshotFacts:
    """``facts_of`` where there must be a copy. HostError."""
    facts = facts_of(folder)
    if facts is None:
        raise kit.errors.HostError(
            f"copy in {folder}", "its manifest is lost", "warm it again; it is filled anew"
        )
    return facts


def used(folder: Path) -> int:
    """SSD bytes of the copy in ``folder``; 0 when there is none."""
    blocks = 0
    for name in (IMAGE, CHUNKS):
        with contextlib.suppress(FileNotFoundError):
            blocks += (folder / name).stat().st_blocks
    return blocks * 512


def discard(folder: Path) -> None:
    """Delete the copy. The manifest goes first: without it the image counts for nothing."""
    for name in (CHUNKS, REPLAY, IMAGE):
        (folder / name).unlink(missing_ok=True)


def replayed(folder: Path) -> str:
    """``begun`` or ``done`` when the journal of the copy had to be replayed, else ''. OSError."""
    try:
        return (folder / REPLAY).read_text(encoding="ascii")
    except FileNotFoundError:
        return ""


def set_replayed(folder: Path, state: str) -> None:
    kit.files.save(folder / REPLAY, state.encode("ascii"))
