"""What statx(2) tells of a path without asking a server: devices, inode, kind, mount.

AT_STATX_DONT_SYNC keeps the call from waiting for a network file system that is dead.
"""

import ctypes
import os
import stat
import struct
from typing import NamedTuple

from linux import syscalls

TYPE = 1  # STATX_TYPE: the cheapest request; devices come with each answer
PLACE = 0x17FF  # STATX_BASIC_STATS and STATX_MNT_ID
_AT_FDCWD = -100
_FLAGS = 0x4000 | 0x800  # AT_STATX_DONT_SYNC, AT_NO_AUTOMOUNT
# struct statx: mode u16 at 28, inode u64 at 32; rdev and dev, u32 each, at 128; mount u64 at 144.
_FIELDS = struct.Struct("=28xHxxQ88xIIIIQ")
_BYTES = 256


class Answer(NamedTuple):
    mode: int
    inode: int
    node: tuple[int, int]  # of a device node: what it stands for
    device: tuple[int, int]  # of the file system
    mount: int  # the mount's id, 0 unless asked for

    @property
    def is_block(self) -> bool:
        return stat.S_ISBLK(self.mode)


class Statx:
    """statx with one buffer for all calls of one thread."""

    def __init__(self, mask: int) -> None:
        """``mask``: TYPE or PLACE."""
        self._buffer = ctypes.create_string_buffer(_BYTES)
        self._mask = ctypes.c_uint(mask)
        self._call = syscalls.libc.statx

    def __call__(self, path: str) -> Answer | None:
        """None where the path is gone or may not be read."""
        if self._call(_AT_FDCWD, os.fsencode(path), _FLAGS, self._mask, self._buffer) < 0:
            return None
        mode, inode, rmajor, rminor, major, minor, mount = _FIELDS.unpack_from(self._buffer)
        return Answer(mode, inode, (rmajor, rminor), (major, minor), mount)
