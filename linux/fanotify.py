"""fanotify(7): who opens what on a whole file system, for sampling.

Never for permission or filling: a listener that dies would let readers through, and mmap raises
no event. FAN_OPEN on an overlay's superblock sees opens from every mount namespace.
"""

import ctypes
import os
import struct
from collections.abc import Iterator
from pathlib import Path

from linux import syscalls

_FAN_CLOEXEC, _FAN_NONBLOCK, _FAN_CLASS_NOTIF = 0x1, 0x2, 0x0
_FAN_MARK_ADD, _FAN_MARK_FILESYSTEM = 0x1, 0x100
FAN_OPEN = 0x20
_AT_FDCWD = -100
# event_len u32, vers u8, reserved u8, metadata_len u16, mask u64, fd s32, pid s32
_EVENT = struct.Struct("<IBBHQii")
_VERSION = 3
_BUFFER_BYTES = 64 * 1024


class Group:
    """A notification group. Closing it discards what it has not said; events cost nothing then."""

    def __init__(self) -> None:
        """OSError EPERM without CAP_SYS_ADMIN, ENOSYS without fanotify."""
        flags = _FAN_CLOEXEC | _FAN_NONBLOCK | _FAN_CLASS_NOTIF
        result = syscalls.libc.fanotify_init(flags, os.O_RDONLY | os.O_CLOEXEC)
        self.descriptor = syscalls.checked(result, "fanotify_init")

    def watch_filesystem(self, path: str | Path) -> None:
        """Opens of any file on the file system that ``path`` lies on."""
        result = syscalls.libc.fanotify_mark(
            self.descriptor,
            _FAN_MARK_ADD | _FAN_MARK_FILESYSTEM,
            ctypes.c_uint64(FAN_OPEN),
            _AT_FDCWD,
            os.fsencode(path),
        )
        syscalls.checked(result, f"fanotify_mark {path}")

    def events(self) -> Iterator[tuple[int, int]]:
        """(descriptor of the opened file, pid); the caller closes it. Ends when there are none.

        Getting the descriptor opens the file once more and may hang with its file system.
        """
        while True:
            try:
                data = os.read(self.descriptor, _BUFFER_BYTES)
            except BlockingIOError:
                return
            at = 0
            while at + _EVENT.size <= len(data):
                length, version, _, _, _, descriptor, pid = _EVENT.unpack_from(data, at)
                if version != _VERSION:
                    raise OSError(f"fanotify event of version {version}")
                if descriptor >= 0:  # below: the queue ran over
                    yield descriptor, pid
                at += length

    def close(self) -> None:
        os.close(self.descriptor)

    def __enter__(self) -> "Group":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
