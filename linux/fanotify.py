"""fanotify(7): who opens files on a file system, and permission before a program is executed.

``OpenWatch`` only samples. It never asks for permission: while a permission listener is dead or
slow, readers hang or pass, and mmap raises no event. FAN_OPEN on an overlay's superblock sees opens
from every mount namespace.

``ExecPermission`` does ask for permission (FAN_OPEN_EXEC_PERM), on single files. When its process
dies, the kernel allows what waits and everything after it.
"""

import collections
import ctypes
import os
import platform
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from linux import syscalls

_CLASS_NOTIF, _CLOEXEC, _NONBLOCK, _CLASS_CONTENT, _REPORT_TID = 0x0, 0x1, 0x2, 0x4, 0x100
_MARK_ADD, _MARK_FILESYSTEM = 0x1, 0x100
_OPEN, _OPEN_EXEC_PERM = 0x20, 0x40000
_ALLOW, _DENY = 1, 2
_O_LARGEFILE = 0o100000
_AT_FDCWD = -100
# event_len u32, vers u8, reserved u8, metadata_len u16, mask u64, fd s32, pid s32
_EVENT = struct.Struct("=IBBHQii")
_VERSION = 3
_BUFFER_BYTES = 64 * 1024
_EXECVE, _EXECVEAT = {"x86_64": (59, 322), "aarch64": (221, 281)}.get(platform.machine(), (-1, -1))
_MOST_WORDS, _MOST_BYTES = 64, 4096


def _group(flags: int, open_flags: int) -> int:
    """A descriptor. OSError EPERM without CAP_SYS_ADMIN, ENOSYS without fanotify."""
    flags |= _CLOEXEC | _NONBLOCK
    result = syscalls.libc.fanotify_init(flags, os.O_RDONLY | os.O_CLOEXEC | open_flags)
    return syscalls.checked(result, "fanotify_init")


def _mark(group: int, flags: int, mask: int, path: str | Path) -> None:
    result = syscalls.libc.fanotify_mark(
        group, _MARK_ADD | flags, ctypes.c_uint64(mask), _AT_FDCWD, os.fsencode(path)
    )
    syscalls.checked(result, f"fanotify_mark {path}")


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


class OpenWatch:
    """A notification group. Closing it discards unread events; then opens cost nothing again."""

    def __init__(self) -> None:
        self._group = _group(_CLASS_NOTIF, 0)

    def watch_filesystem(self, path: str | Path) -> None:
        """Opens of any file on the file system that ``path`` lies on."""
        _mark(self._group, _MARK_FILESYSTEM, _OPEN, path)

    def events(self) -> Iterator[tuple[int, int]]:
        """(descriptor of the opened file, pid) until no event waits; the caller closes it."""
        while True:
            try:
                yield from _events(self._group)
            except BlockingIOError:
                return

    def close(self) -> None:
        os.close(self._group)

    def __enter__(self) -> "OpenWatch":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class ExecRequest:
    """A task that waits for an answer. ``fd``: the file, open; answer() closes it."""

    fd: int
    tid: int


class ExecPermission:
    """Invariant: every request that was read is answered; closing allows all that still wait."""

    def __init__(self) -> None:
        self.fd = _group(_CLASS_CONTENT | _REPORT_TID, _O_LARGEFILE)

    def mark(self, path: str) -> None:
        """Ask before the file (this inode) is executed. OSError."""
        _mark(self.fd, 0, _OPEN_EXEC_PERM, path)

    def read(self) -> list[ExecRequest]:
        try:
            return [ExecRequest(fd, tid) for fd, tid in _events(self.fd)]
        except BlockingIOError:
            return []

    def answer(self, request: ExecRequest, allow: bool) -> None:
        try:
            os.write(self.fd, struct.pack("=iI", request.fd, _ALLOW if allow else _DENY))
        finally:
            os.close(request.fd)


def exec_arguments(tid: int) -> list[str]:
    """The arguments of the program that a task, stopped in execve, is about to become.

    /proc/<tid>/cmdline still has the old ones, so they are read from the task's memory. Empty when
    that fails.
    """
    try:
        fields = Path(f"/proc/{tid}/syscall").read_text().split()
        number = int(fields[0])
        if number not in (_EXECVE, _EXECVEAT):
            return []
        pointer = int(fields[2 if number == _EXECVE else 3], 16)
        found = []
        with Path(f"/proc/{tid}/mem").open("rb", buffering=0) as memory:
            for index in range(_MOST_WORDS):
                memory.seek(pointer + 8 * index)
                (word,) = struct.unpack("=Q", memory.read(8))
                if not word:
                    break
                memory.seek(word)
                # A read stops at the end of a mapping; an argument near it is shorter than asked.
                found.append(memory.read(_MOST_BYTES).split(b"\0")[0].decode(errors="replace"))
        return found
    except (OSError, ValueError, IndexError, struct.error):
        return []
