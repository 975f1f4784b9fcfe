"""The manifest: what a generation has, entry by entry, for its whole life.

The index keeps it in parts of up to 256 entries of one directory. Differences between snapshots,
eviction, scrub and status read it; the tree and its xattrs stay the truth, and a new listing makes
it again.

A part is one byte of format and zlib of columns, each of them a run of little-endian numbers, so
that equal modes and nearby times cost little: 35 to 50 bytes an entry, 16 of them the checksum. An
agent that meets a newer format leaves the part alone.
"""

import array
import dataclasses
import enum
import os
import struct
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from cache.store.tree import Entry

FORMAT, SPARSE = 1, 2  # SPARSE: one more column, of a part in which a file has holes
CHECKSUM_BYTES = 16
LARGEST = 2**20  # bytes of the columns of a part; 256 entries with the longest names take a third
_NONE = bytes(CHECKSUM_BYTES)
_COUNT = struct.Struct("<II")  # entries, bytes of the names


class State(enum.IntEnum):
    AT_SOURCE = 0  # not stored: it waits, failed, or does not fit
    STORED = 1
    EVICTED = 2
    BAD = 3  # its stored copy was bad, and taken out


@dataclass(frozen=True)
class Item:
    """One entry. Names with the same inode and ``nlink`` above 1 are links of one file."""

    entry: Entry  # with ctime and change version of the source
    state: State
    checksum: str = ""  # xxh3-128 in hex, of a stored regular file


@dataclass(frozen=True)
class Counts:
    """How much there is and what became of it.

    Files are all entries but directories; bytes are of regular files.
    """

    files: int = 0
    bytes: int = 0
    done_files: int = 0
    done_bytes: int = 0
    failed: int = 0
    skipped: int = 0

    def counts(self) -> dict[str, int]:
        """Only these figures, without those that a subclass adds."""
        return {each.name: getattr(self, each.name) for each in dataclasses.fields(Counts)}


# (type code, field of the entry); differences to the entry before, which are small.
_COLUMNS = (
    ("I", "mode"),
    ("I", "uid"),
    ("I", "gid"),
    ("Q", "size"),
    ("I", "nlink"),
    ("B", "xattrs"),
)
_DIFFERENCES = ("ino", "mtime_ns", "change")


def _columns(form: int) -> tuple[tuple[str, str], ...]:
    return (*_COLUMNS, ("Q", "holes")) if form == SPARSE else _COLUMNS


def pack(items: Sequence[Item]) -> bytes:
    entries = [item.entry for item in items]
    names = b"\0".join(os.fsencode(entry.name) for entry in entries)
    body = [_COUNT.pack(len(items), len(names)), names]
    form = SPARSE if any(entry.holes for entry in entries) else FORMAT
    for code, field in _columns(form):
        body.append(_bytes(array.array(code, [int(getattr(entry, field)) for entry in entries])))
    for field in _DIFFERENCES:
        before, differences = 0, []
        for entry in entries:
            value = getattr(entry, field)
            differences.append(_wrapped(value - before))
            before = value
        body.append(_planes(array.array("q", differences)))
    # Most files were last changed when they were written.
    changed = [_wrapped(entry.ctime_ns - entry.mtime_ns) for entry in entries]
    body.append(_planes(array.array("q", changed)))
    body.append(bytes(item.state for item in items))
    packed = zlib.compress(b"".join(body), 1)
    # Checksums do not shrink.
    sums = b"".join(bytes.fromhex(item.checksum) or _NONE for item in items)
    return bytes([form]) + struct.pack("<I", len(packed)) + packed + sums


def unpack(part: bytes) -> list[Item]:
    """ValueError when it is damaged, or this agent does not know its format."""
    if not part or part[0] > SPARSE:
        raise ValueError(f"a part of the manifest has format {part[:1]!r}")
    try:
        return _unpack(part)
    except (struct.error, zlib.error, IndexError, OverflowError) as error:
        raise ValueError(f"a part of the manifest is damaged: {error}") from error


def _unpack(part: bytes) -> list[Item]:
    end = 5 + int(struct.unpack_from("<I", part, 1)[0])
    unpacked = zlib.decompressobj()
    body = memoryview(unpacked.decompress(part[5:end], LARGEST))
    if not unpacked.eof:
        raise ValueError("a part of the manifest is damaged: it is cut off, or far too large")
    count, length = _COUNT.unpack_from(body)
    at = _COUNT.size + length
    names = bytes(body[_COUNT.size : at]).split(b"\0") if count else []
    columns: dict[str, Sequence[int]] = {}
    for code, field in _columns(part[0]):
        size = count * array.array(code).itemsize
        columns[field] = _array(code, bytes(body[at : at + size]))
        at += size
    for field in (*_DIFFERENCES, "changed"):
        columns[field] = _from_planes(bytes(body[at : at + 8 * count]))
        at += 8 * count
    for field in _DIFFERENCES:
        total, values = 0, []
        for difference in columns[field]:
            total = _wrapped(total + difference) if field == "mtime_ns" else total + difference
            values.append(total if field == "mtime_ns" else total % 2**64)
        columns[field] = values
    states = body[at : at + count]
    sums = part[end:]
    if len(names) != count or len(states) != count or len(sums) != count * CHECKSUM_BYTES:
        raise ValueError("a part of the manifest is damaged: its columns differ in length")
    items = []
    for i, name in enumerate(names):
        mtime_ns = columns["mtime_ns"][i]
        entry = Entry(
            os.fsdecode(name), columns["mode"][i], columns["uid"][i], columns["gid"][i],
            columns["size"][i], mtime_ns, columns["ino"][i], columns["nlink"][i],
            bool(columns["xattrs"][i]), mtime_ns + columns["changed"][i], columns["change"][i],
            columns["holes"][i] if "holes" in columns else 0,
        )  # fmt: skip
        checksum = sums[i * CHECKSUM_BYTES : (i + 1) * CHECKSUM_BYTES]
        items.append(Item(entry, State(states[i]), "" if checksum == _NONE else checksum.hex()))
    return items


def _wrapped(value: int) -> int:
    """As a signed number of 64 bits."""
    return (value + 2**63) % 2**64 - 2**63


def _bytes(numbers: "array.array[int]") -> bytes:
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def _array(code: str, data: bytes) -> "array.array[int]":
    numbers = array.array(code, data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def _planes(numbers: "array.array[int]") -> bytes:
    """All first bytes, then all second bytes, ...: the high ones are equal and shrink well."""
    data = _bytes(numbers)
    return b"".join(data[plane::8] for plane in range(8))


def _from_planes(data: bytes) -> "array.array[int]":
    count = len(data) // 8
    mixed = bytearray(len(data))
    for plane in range(8):
        mixed[plane::8] = data[plane * count : (plane + 1) * count]
    return _array("q", bytes(mixed))
