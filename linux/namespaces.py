"""Mount namespaces: every one the kernel can list, and what is mounted in them.

Source: ioctl_nsfs(2), setns(2). NS_MNT_GET_NEXT and NS_MNT_GET_PREV walk all mount namespaces,
also those that no process is in (Linux 6.12). Needs CAP_SYS_ADMIN in the initial user namespace.
"""

import contextlib
import errno
import fcntl
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from linux import syscalls

CLONE_NEWNS = 0x20000
_INFO = struct.Struct("=IIQ")  # struct mnt_ns_info: size, number of mounts, id
# A kernel that lists without end, or a node gone wrong, must not keep the walk going.
MOST_NAMESPACES = 20_000


def _ioctl_number(number: int) -> int:
    return (2 << 30) | (_INFO.size << 16) | (0xB7 << 8) | number


_GET_INFO, _GET_NEXT, _GET_PREV = (_ioctl_number(n) for n in (10, 11, 12))


@dataclass(frozen=True)
class Listed:
    """One mount namespace held open by ``descriptor``; closed when the walk goes on.

    While it is open the namespace cannot go away, and what is mounted in it stays busy: look
    quickly.
    """

    descriptor: int
    inode: int
    id: int  # 64 bit, never used again while the kernel runs; 0 when not known
    mounts: int


def _info(descriptor: int) -> tuple[int, int]:
    buffer = bytearray(_INFO.pack(_INFO.size, 0, 0))
    fcntl.ioctl(descriptor, _GET_INFO, buffer)
    _, mounts, identity = _INFO.unpack(buffer)
    return identity, mounts


def _step(descriptor: int, request: int) -> int | None:
    try:
        return int(fcntl.ioctl(descriptor, request, bytearray(_INFO.pack(_INFO.size, 0, 0))))
    except OSError as error:
        if error.errno == errno.ENOENT:
            return None  # the last one
        raise


def can_walk() -> bool:
    """Whether this kernel lists mount namespaces (6.12)."""
    with opened("/proc/self/ns/mnt") as own:
        try:
            _info(own)
        except OSError:
            return False
    return True


@contextlib.contextmanager
def opened(path: str, dir_fd: int | None = None) -> Iterator[int]:
    """A descriptor while the block runs. OSError when the process has gone."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=dir_fd)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def walk(start: str = "/proc/self/ns/mnt") -> Iterator[Listed]:
    """Every mount namespace once, from ``start`` to both sides. OSError (ENOTTY) before 6.12."""
    with opened(start) as own:
        identity, mounts = _info(own)
        yield Listed(own, os.fstat(own).st_ino, identity, mounts)
        for request in (_GET_PREV, _GET_NEXT):
            current = os.dup(own)
            try:
                for _ in range(MOST_NAMESPACES):
                    following = _step(current, request)
                    if following is None:
                        break
                    os.close(current)
                    current = following
                    identity, mounts = _info(current)
                    yield Listed(current, os.fstat(current).st_ino, identity, mounts)
            finally:
                os.close(current)


class Visitor:
    """Reads mount tables from inside each namespace and comes back.

    Only for a process with one thread that nothing else runs in: its root and working directory
    move. Reading inside (setns, then /proc/self/mountinfo through a descriptor of the own /proc)
    shows everything below the namespace's own root, whatever its processes are chrooted to, and
    needs no process there.
    """

    def __init__(self, proc: str = "/proc") -> None:
        self._proc = os.open(proc, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._home = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        self._root = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    def close(self) -> None:
        os.close(self._proc)
        os.close(self._home)
        os.close(self._root)

    def table(self, descriptor: int) -> bytes:
        """mountinfo of the namespace behind ``descriptor``. OSError, also when it may not."""
        enter(descriptor)
        try:
            with opened("self/mountinfo", self._proc) as table:
                chunks = []
                while chunk := os.read(table, 1 << 18):
                    chunks.append(chunk)
                return b"".join(chunks)
        finally:
            self._come_back()

    def _come_back(self) -> None:
        """setns moves the root to the namespace's own; ours may be another (a chroot)."""
        enter(self._home)
        os.fchdir(self._root)
        os.chroot(".")


def enter(descriptor: int) -> None:
    """Move this process into the mount namespace behind ``descriptor`` (setns). OSError."""
    syscalls.checked(syscalls.libc.setns(descriptor, CLONE_NEWNS), "setns")
