"""Mount namespaces: every one the kernel can list, what is mounted in them, and detaching there.

Three ways lead into a namespace, and each shows something the others do not:

- ``walk`` lists all namespaces, also those without a process (ioctl_nsfs(2), Linux 6.12).
- ``Visitor`` enters one and reads mountinfo there (setns(2)): quick, every mount below its root.
- ``mounts`` asks by the namespace's id without entering (listmount(2), statmount(2), Linux 6.11):
  two calls for each mount, but it also shows what another mount on the root hides.

All need CAP_SYS_ADMIN in the initial user namespace. Whoever holds a namespace open keeps
everything mounted in it busy, so descriptors are closed as soon as possible.
"""

import ctypes
import errno
import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import kit.files
from linux import mountinfo, syscalls
from linux import mounts as kernel_mounts

_CLONE_NEWNS = 0x20000
_INFO = struct.Struct("=IIQ")  # struct mnt_ns_info: size, number of mounts, id
_STATMOUNT, _LISTMOUNT = 457, 458
_ROOT = 0xFFFFFFFFFFFFFFFF
_REQUEST = struct.Struct("=IIQQQ")  # size, spare, mount id, parameter, namespace id
_BASIC, _MOUNT, _POINT, _TYPE = 1, 2, 0x10, 0x20
_HEAD = struct.Struct("=IIQIIQIIQQIIQQQQQII")
_STRINGS = 512  # where the strings begin in struct statmount
_BATCH = 512
_PROPAGATION = {1 << 17: "unbindable", 1 << 18: "private", 1 << 19: "slave", 1 << 20: "shared"}
# Ends a walk that the kernel would continue for ever, and one on a node out of control.
_MOST_NAMESPACES = 20_000


_GET_INFO, _GET_NEXT, _GET_PREV = (2 << 30 | _INFO.size << 16 | 0xB7 << 8 | n for n in (10, 11, 12))


@dataclass(frozen=True)
class Listed:
    """One mount namespace held open by ``descriptor``; closed when the walk continues.

    While it is open the namespace continues to exist and its mounts stay busy, so read quickly.
    """

    descriptor: int
    inode: int
    id: int  # 64 bit, unique while the kernel runs; 0 when unknown
    mounts: int


def _listed(descriptor: int) -> Listed:
    buffer = bytearray(_INFO.pack(_INFO.size, 0, 0))
    fcntl.ioctl(descriptor, _GET_INFO, buffer)
    _, mounts, identity = _INFO.unpack(buffer)
    return Listed(descriptor, os.fstat(descriptor).st_ino, identity, mounts)


def _step(descriptor: int, request: int) -> int | None:
    try:
        return int(fcntl.ioctl(descriptor, request, bytearray(_INFO.pack(_INFO.size, 0, 0))))
    except OSError as error:
        if error.errno == errno.ENOENT:
            return None  # the last one
        raise


def opened(path: str, dir_fd: int | None = None) -> AbstractContextManager[int]:
    """``path`` open while the block runs. OSError when the process has ended."""
    return kit.files.closing(os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=dir_fd))


def walk() -> Iterator[Listed]:
    """Every mount namespace once: our own, the ones before it, the ones after it.

    OSError (ENOTTY) before Linux 6.12.
    """
    with opened("/proc/self/ns/mnt") as own:
        yield _listed(own)
        for request in (_GET_PREV, _GET_NEXT):
            current = os.dup(own)
            try:
                for _ in range(_MOST_NAMESPACES):
                    following = _step(current, request)
                    if following is None:
                        break
                    os.close(current)
                    current = following
                    yield _listed(current)
            finally:
                os.close(current)


class Visitor:
    """Enters a namespace, reads its mount table and returns.

    For a process with a single thread and no other task: its root and working directory change.
    Inside, /proc/self/mountinfo is read through a descriptor of our own /proc. It shows everything
    below the namespace's own root, wherever its processes are chrooted, and needs no process there.
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
        """mountinfo of the namespace behind ``descriptor``. OSError, also when that is denied."""
        enter(descriptor)
        try:
            with opened("self/mountinfo", self._proc) as table:
                chunks = []
                while chunk := os.read(table, 1 << 18):
                    chunks.append(chunk)
                return b"".join(chunks)
        finally:
            self._return()

    def _return(self) -> None:
        """setns moves the root to the namespace's own root; ours may be another (a chroot)."""
        enter(self._home)
        os.fchdir(self._root)
        os.chroot(".")


def enter(descriptor: int) -> None:
    """Move this process into the mount namespace behind ``descriptor`` (setns). OSError."""
    syscalls.checked(syscalls.libc.setns(descriptor, _CLONE_NEWNS), "setns")


@dataclass(frozen=True)
class MountedIn:
    device: tuple[int, int]
    target: str
    fstype: str
    propagation: str  # private, slave, shared, unbindable
    read_only: bool


def _mount_ids(namespace: int) -> Iterator[int]:
    last = 0
    while True:
        request = ctypes.create_string_buffer(
            _REQUEST.pack(_REQUEST.size, 0, _ROOT, last, namespace), _REQUEST.size
        )
        found = (ctypes.c_uint64 * _BATCH)()
        count = syscalls.syscall(_LISTMOUNT, "listmount", request, found, _BATCH, 0)
        yield from found[:count]
        if count < _BATCH:
            return
        last = found[count - 1]


def _statmount(mount: int, namespace: int) -> MountedIn | None:
    wanted = _BASIC | _MOUNT | _POINT | _TYPE
    request = ctypes.create_string_buffer(
        _REQUEST.pack(_REQUEST.size, 0, mount, wanted, namespace), _REQUEST.size
    )
    answer = ctypes.create_string_buffer(16384)
    try:
        syscalls.syscall(_STATMOUNT, "statmount", request, answer, len(answer), 0)
    except OSError:
        return None  # unmounted since it was listed
    raw = answer.raw
    head = _HEAD.unpack_from(raw)

    def text(offset: int) -> str:
        begin = _STRINGS + offset
        return os.fsdecode(raw[begin : raw.index(b"\0", begin)])

    return MountedIn(
        device=(head[3], head[4]),
        target=text(head[18]),
        fstype=text(head[7]),
        propagation=_PROPAGATION.get(head[13], "private"),
        read_only=bool(head[12] & 1),
    )


def mounts(namespace: int) -> Iterator[MountedIn]:
    """Every mount of the namespace with this id. OSError when the kernel is older or refuses."""
    for identity in _mount_ids(namespace):
        found = _statmount(identity, namespace)
        if found is not None:
            yield found


@dataclass(frozen=True)
class MountCopy:
    """A copy of a mount that is to be detached."""

    device: tuple[int, int]
    target: str


def detach(namespace_path: str, inode: int, copies: list[MountCopy]) -> int:
    """Lazily unmount ``copies`` in one namespace; returns how many were detached. OSError.

    For a child process: it moves into the namespace and stays there. Nothing happens unless the
    namespace still has this ``inode``. A mount is detached only when it is the topmost one on its
    target, of the same device, and private: a shared one would be unmounted elsewhere, too.
    """
    visitor = Visitor()
    with opened(namespace_path) as descriptor:
        if os.fstat(descriptor).st_ino != inode:
            return 0  # the path leads to another namespace now
        table = mountinfo.parse(visitor.table(descriptor))
        enter(descriptor)
    return _detach_here(table, copies)


def detach_by_id(namespace: int, inode: int, copies: list[MountCopy]) -> int:
    """``detach`` in a namespace without processes, found by its id (Linux 6.12)."""
    visitor = Visitor()
    for listed in walk():
        if listed.id == namespace and listed.inode == inode:
            table = mountinfo.parse(visitor.table(listed.descriptor))
            enter(listed.descriptor)
            return _detach_here(table, copies)
    return 0


def _detach_here(table: list[mountinfo.Mount], copies: list[MountCopy]) -> int:
    done = 0
    # The deepest first. Only the topmost mount of each target is considered.
    for copy in sorted(set(copies), key=lambda copy: len(copy.target), reverse=True):
        stack = mountinfo.at(copy.target, table)
        if not stack or stack[-1].device != copy.device or not stack[-1].is_private:
            continue
        kernel_mounts.detach(copy.target)
        done += 1
    return done
