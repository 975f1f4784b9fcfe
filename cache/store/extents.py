"""Something large, copied and checked in extents: the engine of block images and of large files.

Two files: the data, and the records, which are one page of JSON that says of what, and then 17
bytes for each extent, a state and a checksum. Several processes may fill one at once; each commits
the extents that it has put.

Invariant: a record says STORED only when the bytes of its extent are durable, so what a killed
process left is as good as it says. An extent of nothing but zeros is a hole of the data.

Everything here runs in a child process: the disk may hang.
"""

import errno
import json
import os
from collections.abc import Iterator, Mapping
from enum import IntEnum
from typing import Any

import xxhash

EXTENT_BYTES = 4 * 2**20
HEADER_BYTES = 4096
_DIGEST_BYTES = 16
RECORD_BYTES = 1 + _DIGEST_BYTES
_RECORDS_AT_ONCE = 16384
_HOLE = 64 * 1024
_NO_BYTES = bytes(_HOLE)
MOST_RUNS = 4096  # of data in one file; what comes after them counts as data


class State(IntEnum):
    UNKNOWN = 0
    ZEROS = 1  # nothing but zeros in the source
    STORED = 2


_STATES = {state.value: state for state in State}
_ZEROS = bytes([State.ZEROS]) + bytes(_DIGEST_BYTES)


def count_of(size: int) -> int:
    """How many extents ``size`` bytes have."""
    return -(-size // EXTENT_BYTES)


def span_of(size: int, extent: int) -> tuple[int, int]:
    """Offset and length of an extent of ``size`` bytes; the last one may be short."""
    start = extent * EXTENT_BYTES
    return start, min(EXTENT_BYTES, size - start)


def record_of(data: bytes | memoryview) -> bytes:
    """Of an extent that holds ``data``."""
    if is_zeros(data):
        return _ZEROS
    return bytes([State.STORED]) + xxhash.xxh3_128_digest(data)


def is_zeros(data: bytes | memoryview) -> bool:
    if not data or data[0] or data[-1]:
        return not data
    view = memoryview(data)
    return all(
        view[at : at + _HOLE] == _NO_BYTES[: len(view) - at] for at in range(0, len(view), _HOLE)
    )


def header(facts: Mapping[str, Any]) -> bytes:
    """The first page of the records. ValueError when the facts are too long."""
    page = json.dumps(facts).encode()
    if len(page) > HEADER_BYTES:
        raise ValueError(f"{len(page)} bytes of facts")
    return page.ljust(HEADER_BYTES, b"\0")


class Extents:
    """The open copy. OSError from every method."""

    def __init__(self, size: int, data: int, records: int) -> None:
        """``data``, ``records``: descriptors, which the caller closes."""
        self.size = size
        self.count = count_of(size)
        self.data, self._records = data, records
        self._waiting: dict[int, bytes] = {}  # records of extents that are not durable yet

    def span(self, extent: int) -> tuple[int, int]:
        """Its offset and length."""
        return span_of(self.size, extent)

    def records(self) -> Iterator[tuple[int, bytes]]:
        """The first extent and the records of some that follow each other, through all of them."""
        for first in range(0, self.count, _RECORDS_AT_ONCE):
            number = min(_RECORDS_AT_ONCE, self.count - first)
            raw = os.pread(
                self._records, number * RECORD_BYTES, HEADER_BYTES + first * RECORD_BYTES
            )
            yield first, raw.ljust(number * RECORD_BYTES, b"\0")

    def states(self) -> Iterator[tuple[int, State]]:
        """Of each extent, in order."""
        for first, raw in self.records():
            for i, value in enumerate(raw[::RECORD_BYTES]):
                yield first + i, _STATES.get(value, State.UNKNOWN)

    def checksum(self) -> str:
        """One checksum of all records, in hex: two copies with the same bytes have the same."""
        summed = xxhash.xxh3_128()
        for _, raw in self.records():
            summed.update(raw)
        return summed.hexdigest()

    def put(self, extent: int, data: bytes | memoryview) -> int:
        """Write an extent; ``commit`` makes it durable and known. The bytes that were stored.

        Long runs of zeros become holes, unless something was written there before.
        """
        record = record_of(data)
        offset = self.span(extent)[0]
        fresh = self._is_hole(extent, offset, len(data))
        if record != _ZEROS or not fresh:
            self._write(data, offset, sparse=fresh)
        self._waiting[extent] = record  # only now: a write that failed must not be committed
        return 0 if record == _ZEROS else len(data)

    def _is_hole(self, extent: int, offset: int, length: int) -> bool:
        return is_hole(self.data, offset, length)

    def _write(self, data: bytes | memoryview, offset: int, *, sparse: bool) -> None:
        if sparse:
            write_sparse(self.data, memoryview(data), offset)
        else:
            write_all(self.data, memoryview(data), offset)
        # The disk begins to write now, while more is read: ``commit`` waits for little then.
        os.posix_fadvise(self.data, offset, len(data), os.POSIX_FADV_DONTNEED)

    def put_hole(self, extent: int) -> None:
        """As ``put``, of an extent in which the source has nothing."""
        offset, length = self.span(extent)
        if self._is_hole(extent, offset, length):
            self.put_zeros(extent)
        else:
            self.put(extent, bytes(length))

    def put_zeros(self, extent: int) -> None:
        """Nothing was ever written there."""
        self._waiting[extent] = _ZEROS

    def know(self, extent: int, record: bytes) -> None:
        """The data has what this record says."""
        self._waiting[extent] = record

    @property
    def waiting(self) -> int:
        """Extents that ``commit`` would make known."""
        return len(self._waiting)

    def commit(self) -> None:
        """First the bytes, then the records that speak of them.

        Others may ``put`` meanwhile; what they put waits for another commit. What waited for one
        that failed is never known: the kernel reports a lost write once, so the next sync would
        succeed without it.
        """
        taken, self._waiting = self._waiting, {}
        os.fdatasync(self.data)
        for extent, record in taken.items():
            os.pwrite(self._records, record, HEADER_BYTES + extent * RECORD_BYTES)
        os.fdatasync(self._records)

    def record(self, extent: int) -> bytes:
        return os.pread(self._records, RECORD_BYTES, HEADER_BYTES + extent * RECORD_BYTES)

    def is_good(self, extent: int) -> bool:
        """Whether the data has what the record says."""
        offset, length = self.span(extent)
        if self.record(extent) == _ZEROS and self._is_hole(extent, offset, length):
            return True
        # Not from the page cache, where the disk allows that: the disk's own bytes are asked for.
        os.posix_fadvise(self.data, offset, length, os.POSIX_FADV_DONTNEED)
        data = read(self.data, self.size, extent)
        return len(data) == length and record_of(data) == self.record(extent)

    def take_over(self, extent: int) -> None:
        """What the data has there now is right; known with the next ``commit``."""
        self._waiting[extent] = record_of(read(self.data, self.size, extent))

    def forget(self, extent: int) -> None:
        """A bad extent is to be filled again; durable with the next ``commit``."""
        self._waiting[extent] = bytes(RECORD_BYTES)


def read(descriptor: int, size: int, extent: int) -> bytes:
    """An extent of a file of ``size`` bytes; fewer bytes at the end of the file."""
    offset, length = span_of(size, extent)
    data = os.pread(descriptor, length, offset)
    while len(data) < length and (
        more := os.pread(descriptor, length - len(data), offset + len(data))
    ):
        data += more
    return data


def is_hole(descriptor: int, offset: int, length: int) -> bool:
    """Whether nothing was ever written there."""
    try:
        return os.lseek(descriptor, offset, os.SEEK_DATA) >= offset + length
    except OSError as error:
        if error.errno == errno.ENXIO:  # nothing up to the end
            return True
        raise


def holes(descriptor: int, size: int) -> int:
    """Bytes of an open file of ``size`` bytes that ``write_sparse`` would leave out, because
    nothing was ever written there. OSError."""
    found = at = 0
    for _ in range(MOST_RUNS):
        try:
            data = min(size, os.lseek(descriptor, at, os.SEEK_DATA))
        except OSError as error:
            if error.errno != errno.ENXIO:  # nothing up to the end
                raise
            data = size
        found += max(0, data // _HOLE - -(-at // _HOLE)) * _HOLE
        if data == size:
            break
        at = os.lseek(descriptor, data, os.SEEK_HOLE)
    return found


def write_sparse(descriptor: int, block: memoryview, offset: int) -> bool:
    """Write without long runs of zeros; whether the block ends in such a run.

    CephFS does not report holes, so zeros are searched for.
    """
    data = 0  # start of the bytes that are not written yet
    for at in range(0, len(block) - _HOLE + 1, _HOLE):
        if (
            block[at] == 0
            and block[at + _HOLE - 1] == 0
            and bytes(block[at : at + _HOLE]) == _NO_BYTES
        ):
            write_all(descriptor, block[data:at], offset + data)
            data = at + _HOLE
    write_all(descriptor, block[data:], offset + data)
    return data == len(block)


def write_all(descriptor: int, block: memoryview, offset: int) -> None:
    while block:
        written = os.pwrite(descriptor, block, offset)
        block, offset = block[written:], offset + written
