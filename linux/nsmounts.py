"""Mounts of any mount namespace by its id (listmount, statmount), and detaching one there.

Source: listmount(2), statmount(2); Linux 6.8, with a namespace id 6.11. Slower than reading
mountinfo (two calls for each mount), but it also lists what is hidden below another mount on the
namespace's root.
"""

import ctypes
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from linux import mountinfo, namespaces, syscalls

_STATMOUNT, _LISTMOUNT = 457, 458
_ROOT = 0xFFFFFFFFFFFFFFFF
_REQUEST = struct.Struct("=IIQQQ")  # size, spare, mount id, parameter, namespace id
_BASIC, _MOUNT, _POINT, _TYPE = 1, 2, 0x10, 0x20
_HEAD = struct.Struct("=IIQIIQIIQQIIQQQQQII")
_STRINGS = 512  # where the strings begin in struct statmount
_BATCH = 512
_PROPAGATION = {1 << 17: "unbindable", 1 << 18: "private", 1 << 19: "slave", 1 << 20: "shared"}
_MNT_DETACH, _UMOUNT_NOFOLLOW = 2, 8


@dataclass(frozen=True)
class Mounted:
    device: tuple[int, int]
    target: str
    fstype: str
    propagation: str  # private, slave, shared, unbindable
    read_only: bool


def _ids(namespace: int) -> Iterator[int]:
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


def _stat(mount: int, namespace: int) -> Mounted | None:
    wanted = _BASIC | _MOUNT | _POINT | _TYPE
    request = ctypes.create_string_buffer(
        _REQUEST.pack(_REQUEST.size, 0, mount, wanted, namespace), _REQUEST.size
    )
    answer = ctypes.create_string_buffer(16384)
    try:
        syscalls.syscall(_STATMOUNT, "statmount", request, answer, len(answer), 0)
    except OSError:
        return None  # gone since it was listed
    raw = answer.raw
    head = _HEAD.unpack_from(raw)

    def text(offset: int) -> str:
        begin = _STRINGS + offset
        return os.fsdecode(raw[begin : raw.index(b"\0", begin)])

    return Mounted(
        device=(head[3], head[4]),
        target=text(head[18]),
        fstype=text(head[7]),
        propagation=_PROPAGATION.get(head[13], "private"),
        read_only=bool(head[12] & 1),
    )


def mounts(namespace: int) -> Iterator[Mounted]:
    """Every mount of the namespace with this id. OSError when the kernel cannot or may not."""
    for identity in _ids(namespace):
        found = _stat(identity, namespace)
        if found is not None:
            yield found


@dataclass(frozen=True)
class Copy:
    """A mount that is to go."""

    device: tuple[int, int]
    target: str


def detach(namespace_path: str, inode: int, copies: list[Copy]) -> int:
    """Lazily unmount ``copies`` in one namespace; how many were detached.

    For a child process: it moves into the namespace. Checked again right there: the namespace has
    this ``inode``, the topmost mount on each target is of its device and private (others would
    be unmounted elsewhere too). What no longer matches is left alone. OSError.
    """
    visitor = namespaces.Visitor()
    with namespaces.opened(namespace_path) as descriptor:
        if os.fstat(descriptor).st_ino != inode:
            return 0  # another namespace by now
        table = mountinfo.parse(visitor.table(descriptor))
        namespaces.enter(descriptor)
    return _detach_here(table, copies)


def detach_by_id(namespace: int, inode: int, copies: list[Copy]) -> int:
    """As ``detach``, for a namespace without processes: found again by its id (6.12)."""
    visitor = namespaces.Visitor()
    for listed in namespaces.walk():
        if listed.id == namespace and listed.inode == inode:
            table = mountinfo.parse(visitor.table(listed.descriptor))
            namespaces.enter(listed.descriptor)
            return _detach_here(table, copies)
    return 0


def _detach_here(table: list[mountinfo.Mount], copies: list[Copy]) -> int:
    done = 0
    # The deepest first; of what is stacked on one target only the topmost is looked at.
    for copy in sorted(set(copies), key=lambda copy: len(copy.target), reverse=True):
        stack = mountinfo.at(copy.target, table)
        if not stack or stack[-1].device != copy.device or not stack[-1].is_private:
            continue
        result = syscalls.libc.umount2(os.fsencode(copy.target), _MNT_DETACH | _UMOUNT_NOFOLLOW)
        syscalls.checked(result, f"umount {copy.target}")
        done += 1
    return done
