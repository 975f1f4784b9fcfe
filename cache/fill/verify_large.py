"""Verifies stored large files, extent by extent, and fetches again only what is bad.

A bad extent is written over in place, which no other file of a tree ever is: the bytes are those
that were stored, by their checksum, so no reader sees anything but right bytes come back. A source
whose bytes have another checksum is no help: then the file is bad as a whole.
"""

import errno
import os
from typing import NamedTuple

import xxhash

import kit.files
from cache.fill import control
from cache.store import extents, large, tree

_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC
_SYNCED_EXTENTS = 64


class Checked(NamedTuple):
    fault: str  # '' when its bytes are those that were stored
    repaired: int = 0  # extents that were fetched again


def check(
    generation: int, directory: int, name: str, kept: str, throttle: control.Throttle,
    source: int | None,
) -> Checked:  # fmt: skip
    """``kept``: its checksum. ``source``: its directory there, to fetch bad extents from.

    OSError when it cannot be read in the store, or the whole source has gone.
    """
    flags = os.O_RDWR if source is not None else os.O_RDONLY
    with (
        kit.files.closing(os.open(name, flags | _FLAGS, dir_fd=directory)) as stored,
        large.records_of(generation, stored) as held,
    ):
        throttle.step(1, 0)
        if held is None or held.checksum() != kept:
            # The records are lost: the file's checksum still tells whether all of it is good.
            return Checked(_without_records(generation, stored, kept, throttle))
        bad = []
        for extent in range(held.count):
            try:
                good = held.is_good(extent)
            except OSError as error:  # a bad sector
                if error.errno != errno.EIO:
                    raise
                good = False
            if not good:
                bad.append(extent)
            throttle.step(0, held.span(extent)[1])
        if not bad:
            return Checked("")
        fault = f"{len(bad)} extents are not what was stored, the first at {held.span(bad[0])[0]}"
        if source is None:
            return Checked(fault)
        if _repair(held, bad, name, source, throttle):
            return Checked("", len(bad))
        return Checked(f"{fault}; the source has other bytes there")


def _repair(
    held: extents.Extents, bad: list[int], name: str, source: int, throttle: control.Throttle
) -> bool:
    """Whether all of them are good again."""
    try:
        origin = os.open(name, os.O_RDONLY | os.O_NONBLOCK | _FLAGS, dir_fd=source)
    except OSError as error:
        if error.errno in tree.SOURCE_GONE:
            raise
        return False
    with kit.files.closing(origin):
        if os.fstat(origin).st_size != held.size:
            return False
        for number, extent in enumerate(bad, 1):
            try:
                data = extents.read(origin, held.size, extent)
            except OSError as error:
                if error.errno in tree.SOURCE_GONE:
                    raise
                return False
            if extents.record_of(data) != held.record(extent):
                return False
            times = os.fstat(held.data)
            extents.write_all(held.data, memoryview(data), held.span(extent)[0])
            os.utime(held.data, ns=(times.st_atime_ns, times.st_mtime_ns))
            if not number % _SYNCED_EXTENTS:  # the last sync has little to wait for
                os.fdatasync(held.data)
            throttle.beat()
    os.fdatasync(held.data)
    for extent in bad:
        throttle.beat()
        if not held.is_good(extent):
            return False
    return True


def _without_records(generation: int, stored: int, kept: str, throttle: control.Throttle) -> str:
    """The fault, '' when there is none; then the records are made again."""
    summed = xxhash.xxh3_128()
    records = []
    size = os.fstat(stored).st_size
    os.posix_fadvise(stored, 0, 0, os.POSIX_FADV_DONTNEED)
    for extent in range(extents.count_of(size)):
        record = extents.record_of(extents.read(stored, size, extent))
        summed.update(record)
        records.append(record)
        throttle.step(0, extents.EXTENT_BYTES)
    if summed.hexdigest() != kept:
        return "its bytes are not those that were stored"
    large.make_records(generation, stored, b"".join(records))
    return ""
