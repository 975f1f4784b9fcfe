"""Where the data of a LUKS device begins. Layouts: the LUKS1 and LUKS2 on-disk formats."""

import errno
import json
import mmap
import os
import struct

_MAGIC = b"LUKS\xba\xbe"
_HEADER_BYTES = 4096
_LARGEST_HEADER = 4 * 2**20
_SECTOR = 512


def data_offset(descriptor: int) -> int:
    """Bytes before the data of the LUKS device open as ``descriptor`` (O_DIRECT does). OSError when
    it cannot be read, or is none whose data is one piece at a place of its own."""
    head = _read(descriptor, _HEADER_BYTES)
    magic, version, size = struct.unpack_from(">6sHQ", head)
    if magic == _MAGIC and version == 1:
        return int(struct.unpack_from(">I", head, 104)[0]) * _SECTOR
    try:
        if magic != _MAGIC or version != 2 or size > _LARGEST_HEADER:
            raise ValueError("no LUKS2 header")
        text = _read(descriptor, size)[_HEADER_BYTES:].split(b"\0")[0]
        (segment,) = json.loads(text)["segments"].values()
        return int(segment["offset"])
    except (ValueError, KeyError, TypeError) as error:
        raise OSError(errno.EUCLEAN, f"LUKS header: {error}") from error


def _read(descriptor: int, size: int) -> bytes:
    with mmap.mmap(-1, size) as buffer:
        got = os.preadv(descriptor, [buffer], 0)
        if got < size:
            raise OSError(errno.EIO, "short read")
        return buffer[:]
