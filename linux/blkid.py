"""libblkid's low-level probe (Debian: libblkid1), which distinguishes "unreadable" from "empty".

The command blkid does not: it ends with 2 for both. Imports little, because it runs in a
short-lived child.
"""

import contextlib
import ctypes
import errno
import json
import mmap
import os
import struct
from collections.abc import Iterator

# Where the data of a LUKS device begins. Layouts: the LUKS1 and LUKS2 on-disk formats.

_LUKS_MAGIC = b"LUKS\xba\xbe"
_HEADER_BYTES = 4096
_LARGEST_HEADER = 4 * 2**20
SECTOR_BYTES = 512  # of LUKS1's and of libblkid's figures


def luks_data_offset(descriptor: int) -> int:
    """Bytes before the data of the LUKS device open as ``descriptor`` (O_DIRECT does). OSError when
    it cannot be read, or is none whose data is one piece at a place of its own."""
    head = _read_luks(descriptor, _HEADER_BYTES)
    magic, version, size = struct.unpack_from(">6sHQ", head)
    if magic == _LUKS_MAGIC and version == 1:
        return int(struct.unpack_from(">I", head, 104)[0]) * SECTOR_BYTES
    try:
        if magic != _LUKS_MAGIC or version != 2 or size > _LARGEST_HEADER:
            raise ValueError("no LUKS2 header")
        text = _read_luks(descriptor, size)[_HEADER_BYTES:].split(b"\0")[0]
        (segment,) = json.loads(text)["segments"].values()
        return int(segment["offset"])
    except (ValueError, KeyError, TypeError) as error:
        raise OSError(errno.EUCLEAN, f"LUKS header: {error}") from error


def _read_luks(descriptor: int, size: int) -> bytes:
    with mmap.mmap(-1, size) as buffer:
        got = os.preadv(descriptor, [buffer], 0)
        if got < size:
            raise OSError(errno.EIO, "short read")
        return buffer[:]


FOUND, NOTHING, AMBIVALENT = 0, 1, -2  # results of blkid_do_safeprobe; any other is an error
# BLKID_SUBLKS_*: label, uuid, type, usage, version, magic, and superblocks with a bad checksum.
_SUPERBLOCKS = 1 << 1 | 1 << 3 | 1 << 5 | 1 << 7 | 1 << 8 | 1 << 9 | 1 << 10
_MAGIC_OF_TABLES = 1 << 3  # BLKID_PARTS_MAGIC


def _library() -> ctypes.CDLL:
    lib = ctypes.CDLL("libblkid.so.1", use_errno=True)
    pointer, number = ctypes.c_void_p, ctypes.c_int
    lib.blkid_new_probe.restype = pointer
    lib.blkid_free_probe.argtypes = [pointer]
    lib.blkid_probe_set_device.argtypes = [pointer, number, ctypes.c_int64, ctypes.c_int64]
    for name in (
        "blkid_probe_enable_superblocks",
        "blkid_probe_set_superblocks_flags",
        "blkid_probe_enable_partitions",
        "blkid_probe_set_partitions_flags",
    ):
        getattr(lib, name).argtypes = [pointer, number]
    lib.blkid_do_safeprobe.argtypes = [pointer]
    lib.blkid_probe_get_partitions.argtypes = [pointer]
    lib.blkid_probe_get_partitions.restype = pointer
    lib.blkid_partlist_get_partition_by_partno.argtypes = [pointer, number]
    lib.blkid_partlist_get_partition_by_partno.restype = pointer
    for name in ("blkid_partition_get_start", "blkid_partition_get_size"):
        getattr(lib, name).argtypes = [pointer]
        getattr(lib, name).restype = ctypes.c_int64
    lib.blkid_probe_numof_values.argtypes = [pointer]
    text = ctypes.POINTER(ctypes.c_char_p)
    lib.blkid_probe_get_value.argtypes = [
        *(pointer, number, text),
        *(ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_size_t)),
    ]
    return lib


@contextlib.contextmanager
def _opened(descriptor: int, offset: int, size: int) -> Iterator[tuple[ctypes.CDLL, int]]:
    """The library and a probe of the open device. OSError when the device cannot be set up."""
    lib = _library()
    handle = lib.blkid_new_probe()
    if not handle:
        raise MemoryError("blkid_new_probe")
    try:
        ctypes.set_errno(0)
        if lib.blkid_probe_set_device(handle, descriptor, offset, size):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), "libblkid")
        yield lib, handle
    finally:
        lib.blkid_free_probe(handle)


def partition(descriptor: int, number: int) -> tuple[int, int] | None:
    """Offset and size in bytes of partition ``number`` (from 1) of the open device, or None."""
    with _opened(descriptor, 0, 0) as (lib, handle):
        table = lib.blkid_probe_get_partitions(handle)
        found = table and lib.blkid_partlist_get_partition_by_partno(table, number)
        if not found:
            return None
        sectors = lib.blkid_partition_get_start(found), lib.blkid_partition_get_size(found)
        return int(sectors[0]) * SECTOR_BYTES, int(sectors[1]) * SECTOR_BYTES


def probe(descriptor: int, offset: int = 0, size: int = 0) -> tuple[int, dict[str, str]]:
    """(result, values) for the open device. values: TYPE, UUID, LABEL, USAGE, PTTYPE, ...

    ``offset`` and ``size`` in bytes: of the part that is looked at; 0 and 0: all of it.

    result is FOUND, NOTHING, AMBIVALENT (signatures of several contents), else a negative errno: a
    part could not be read, so the content is unknown. OSError when the device cannot be set up.
    """
    with _opened(descriptor, offset, size) as (lib, handle):
        lib.blkid_probe_enable_superblocks(handle, 1)
        lib.blkid_probe_set_superblocks_flags(handle, _SUPERBLOCKS)
        lib.blkid_probe_enable_partitions(handle, 1)
        lib.blkid_probe_set_partitions_flags(handle, _MAGIC_OF_TABLES)
        ctypes.set_errno(0)
        result = int(lib.blkid_do_safeprobe(handle))
        if result == -1 and ctypes.get_errno():  # the documented error; some versions give -errno
            result = -ctypes.get_errno()
        return result, _values(lib, handle)


def _values(lib: ctypes.CDLL, handle: int) -> dict[str, str]:
    found = {}
    for index in range(max(0, lib.blkid_probe_numof_values(handle))):
        name, data, size = ctypes.c_char_p(), ctypes.c_void_p(), ctypes.c_size_t()
        if lib.blkid_probe_get_value(handle, index, name, data, size) == 0 and name.value:
            raw = ctypes.string_at(data, size.value) if data.value else b""
            found[name.value.decode()] = raw.split(b"\0")[0].decode(errors="replace")
    return found
