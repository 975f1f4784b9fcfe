"""fanotify(7): who opens files on a file system, sampled.

It never asks for permission: while a permission listener is dead or slow, readers hang or pass, and
mmap raises no event. FAN_OPEN on an overlay's superblock sees opens from every mount namespace.
"""

import collections
import contextlib
import ctypes
import os
import struct
from collections.abc import Iterator
from pathlib import Path

from linux import syscalls

_CLASS_NOTIF, _CLOEXEC, _NONBLOCK = 0x0, 0x1, 0x2
_MARK_ADD, _MARK_FILESYSTEM = 0x1, 0x100
_OPEN = 0x20
_AT_FDCWD = -100
# event_len u32, vers u8, reserved u8, metadata_len u16, mask u64, fd s32, pid s32
_EVENT = struct.Struct("=IBBHQii")
_VERSION = 3
_BUFFER_BYTES = 64 * 1024


def _events(group: int) -> Iterator[tuple[int, int]]:
    """(descriptor of the file, pid) of the next events. BlockingIOError when there are no more.

    Getting the descriptor opens the file once more and may hang with its file system. The caller
    closes what it is given; what a caller that stops early is not given is closed here.
    """
    found = collections.deque(_parsed(os.read(group, _BUFFER_BYTES)))
    try:
        while found:
            yield found.popleft()
    finally:
        for descriptor, _ in found:
            os.close(descriptor)


def _parsed(data: bytes) -> Iterator[tuple[int, int]]:
    at = 0
    while at + _EVENT.size <= len(data):
        length, version, _, _, _, descriptor, pid = _EVENT.unpack_from(data, at)
        if version != _VERSION:
            raise OSError(f"fanotify event of version {version}")
        if descriptor >= 0:  # negative: the queue overflowed
            yield descriptor, pid
        at += length


class OpenWatch(contextlib.AbstractContextManager["OpenWatch"]):
    """A notification group. Its end discards unread events; then opens cost nothing again."""

    def __init__(self) -> None:
        """OSError EPERM without CAP_SYS_ADMIN, ENOSYS without fanotify."""
        flags = _CLASS_NOTIF | _CLOEXEC | _NONBLOCK
        result = syscalls.libc.fanotify_init(flags, os.O_RDONLY | os.O_CLOEXEC)
        self._group = syscalls.checked(result, "fanotify_init")

    def watch_filesystem(self, path: str | Path) -> None:
        """Opens of any file on the file system that ``path`` lies on."""
        flags, mask = _MARK_ADD | _MARK_FILESYSTEM, ctypes.c_uint64(_OPEN)
        result = syscalls.libc.fanotify_mark(self._group, flags, mask, _AT_FDCWD, os.fsencode(path))
        syscalls.checked(result, f"fanotify_mark {path}")

    def events(self) -> Iterator[tuple[int, int]]:
        """(descriptor of the opened file, pid) until no event waits; the caller closes it."""
        while True:
            try:
                yield from _events(self._group)
            except BlockingIOError:
                return

    def __exit__(self, *_: object) -> None:
        os.close(self._group)
