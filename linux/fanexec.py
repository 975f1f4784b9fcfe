"""fanotify's permission to execute a file (fanotify(7), FAN_OPEN_EXEC_PERM), and what is about to
be executed. Imports little: it runs in a process of its own."""

import ctypes
import os
import platform
import struct
from dataclasses import dataclass
from pathlib import Path

_CLASS_CONTENT, _CLOEXEC, _NONBLOCK, _REPORT_TID = 0x4, 0x1, 0x2, 0x100
_MARK_ADD = 1
_OPEN_EXEC_PERM = 0x40000
_ALLOW, _DENY = 1, 2
_O_LARGEFILE = 0o100000
_AT_FDCWD = -100
_EVENT = struct.Struct("=IBBHQii")
_EXECVE, _EXECVEAT = {"x86_64": (59, 322), "aarch64": (221, 281)}.get(platform.machine(), (-1, -1))
_MOST_WORDS, _MOST_BYTES = 64, 4096


@dataclass(frozen=True)
class Request:
    """A task waits for an answer. ``fd``: the file, open; answer() closes it."""

    fd: int
    tid: int


class ExecPermission:
    """Invariant: every request that was read is answered; closing lets all that wait go on."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        flags = _CLASS_CONTENT | _CLOEXEC | _NONBLOCK | _REPORT_TID
        self.fd = int(self._libc.fanotify_init(flags, os.O_RDONLY | os.O_CLOEXEC | _O_LARGEFILE))
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "fanotify_init")
        self._libc.fanotify_mark.argtypes = [
            *(ctypes.c_int, ctypes.c_uint, ctypes.c_uint64, ctypes.c_int, ctypes.c_char_p),
        ]

    def mark(self, path: str) -> None:
        """Ask us before the file (this inode) is executed. Raises OSError."""
        if self._libc.fanotify_mark(
            self.fd, _MARK_ADD, _OPEN_EXEC_PERM, _AT_FDCWD, os.fsencode(path)
        ):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), path)

    def read(self) -> list[Request]:
        try:
            data = os.read(self.fd, 4096)
        except BlockingIOError:
            return []
        found = []
        at = 0
        while at + _EVENT.size <= len(data):
            length, _, _, _, _, fd, tid = _EVENT.unpack_from(data, at)
            if fd >= 0:
                found.append(Request(fd, tid))
            at += length
        return found

    def answer(self, request: Request, allow: bool) -> None:
        try:
            os.write(self.fd, struct.pack("=iI", request.fd, _ALLOW if allow else _DENY))
        finally:
            os.close(request.fd)


def arguments(tid: int) -> list[str]:
    """The argument list that the task, stopped in execve, is about to run with. /proc/<tid>/cmdline
    still has the old one, so it is read from the task's memory. Empty when it cannot be."""
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
