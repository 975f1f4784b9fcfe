"""System calls through ctypes: one C library handle, errors as OSError; files and the clock."""

import contextlib
import ctypes
import os
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

libc = ctypes.CDLL(None, use_errno=True)

_STA_UNSYNC = 0x40
_TIME_ERROR = 5


def checked(result: int, what: str) -> int:
    """``result`` of a call that returns -1 on error; OSError naming ``what`` then."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)
    return result


def syscall(number: int, what: str, *arguments: Any) -> int:
    """A system call without a wrapper in the C library. Integers are passed as C longs."""
    passed = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return checked(int(libc.syscall(ctypes.c_long(number), *passed)), what)


_OPENAT2 = 437
_AT_FDCWD = -100
_RESOLVE_NO_MAGICLINKS, _RESOLVE_NO_SYMLINKS = 0x02, 0x04


class _OpenHow(ctypes.Structure):
    _fields_ = (
        ("flags", ctypes.c_uint64),
        ("mode", ctypes.c_uint64),
        ("resolve", ctypes.c_uint64),
    )


def open_without_links(path: str, flags: int) -> int:
    """A descriptor; ELOOP when any part of ``path`` is a symbolic link (openat2(2)). OSError."""
    how = _OpenHow(flags | os.O_CLOEXEC, 0, _RESOLVE_NO_MAGICLINKS | _RESOLVE_NO_SYMLINKS)
    return syscall(
        _OPENAT2, f"openat2 {path}", _AT_FDCWD, ctypes.c_char_p(os.fsencode(path)),
        ctypes.byref(how), ctypes.sizeof(how),
    )  # fmt: skip


# What statx(2) tells of a path without asking a server: AT_STATX_DONT_SYNC keeps the call from
# waiting for a network file system that is dead.

TYPE = 1  # STATX_TYPE: the cheapest request; devices come with each answer
PLACE = 0x17FF  # STATX_BASIC_STATS and STATX_MNT_ID
_STATX_FLAGS = 0x4000 | 0x800  # AT_STATX_DONT_SYNC, AT_NO_AUTOMOUNT
# struct statx: mode u16 at 28, inode u64 at 32; rdev and dev, u32 each, at 128; mount u64 at 144.
_STATX = struct.Struct("=28xHxxQ88xIIIIQ")
_STATX_BYTES = 256


class FileStatus(NamedTuple):
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
        self._buffer = ctypes.create_string_buffer(_STATX_BYTES)
        self._mask = ctypes.c_uint(mask)
        self._call = libc.statx

    def __call__(self, path: str) -> FileStatus | None:
        """None where the path is gone or may not be read."""
        if self._call(_AT_FDCWD, os.fsencode(path), _STATX_FLAGS, self._mask, self._buffer) < 0:
            return None
        mode, inode, rmajor, rminor, major, minor, mount = _STATX.unpack_from(self._buffer)
        return FileStatus(mode, inode, (rmajor, rminor), (major, minor), mount)


@contextlib.contextmanager
def device_node(path: str, kind: int, number: int) -> Iterator[str]:
    """``path`` where it is the node of that device; else one of ours while the block runs, for a
    container's /dev does not get the nodes of new devices. ``kind``: S_IFBLK or S_IFCHR. OSError.
    """
    import tempfile  # few need it

    try:
        there = os.stat(path).st_rdev == number
    except OSError:
        there = False
    if there:
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        made = os.path.join(folder, os.path.basename(path))
        os.mknod(made, kind | 0o600, number)
        yield made


def file_system(descriptor: int) -> int:
    """The magic number of the file system of an open file (statfs(2)). OSError."""
    space = (ctypes.c_long * 32)()  # struct statfs has 120 bytes; f_type is the first long
    checked(libc.fstatfs(descriptor, ctypes.byref(space)), "fstatfs")
    return int(space[0])


def syncfs(path: str) -> None:
    """Write out the file system of ``path``; returns when it is durable. May hang. OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        checked(libc.syncfs(descriptor), "syncfs")
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class ClockState:
    synchronised: bool
    max_error_seconds: float  # the kernel's estimate


class _Timex(ctypes.Structure):
    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 256),
    )


def clock_state() -> ClockState:
    """Whether the kernel's clock is synchronised (adjtimex(2)); adjusts nothing. OSError."""
    timex = _Timex()
    result = checked(libc.adjtimex(ctypes.byref(timex)), "adjtimex")
    return ClockState(
        synchronised=result != _TIME_ERROR and not timex.status & _STA_UNSYNC,
        max_error_seconds=timex.maxerror / 1e6,
    )
