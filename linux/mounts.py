"""The mount interface: detached trees, overlays, swapping one mount for another, refreshing.

Source: mount(2), open_tree(2), fsopen(2), move_mount(2), mount_setattr(2); the new calls have the
same numbers on every architecture. All raise OSError.
"""

import array
import contextlib
import ctypes
import errno
import fcntl
import os
import struct
from collections.abc import Sequence
from pathlib import Path

from linux import syscalls

# Flags of inodes (ioctl_iflags(2)): the one that keeps a directory as it is.

_GET_FLAGS, _SET_FLAGS = 0x80086601, 0x40086602  # FS_IOC_{GET,SET}FLAGS; the kernel uses an int
_IMMUTABLE = 0x10


def set_immutable(descriptor: int, on: bool) -> bool:
    """Set or clear FS_IMMUTABLE_FL; False where the file system has no such flag, or we may not.

    With it nobody makes, renames or removes anything in a directory, nor the directory itself.
    Mounting on it works. Clearing it takes CAP_LINUX_IMMUTABLE, which pods do not have by default.
    """
    flags = array.array("i", [0, 0])  # the ioctls are declared with a long
    try:
        fcntl.ioctl(descriptor, _GET_FLAGS, flags, True)
        wanted = flags[0] | _IMMUTABLE if on else flags[0] & ~_IMMUTABLE
        if wanted != flags[0]:
            flags[0] = wanted
            fcntl.ioctl(descriptor, _SET_FLAGS, flags)
    except OSError:
        return False
    return True


_OPEN_TREE, _MOVE_MOUNT, _FSOPEN, _FSCONFIG, _FSMOUNT, _MOUNT_SETATTR = 428, 429, 430, 431, 432, 442
_AT_FDCWD = -100
_AT_EMPTY_PATH = 0x1000
_OPEN_TREE_CLONE = 1
_AT_RECURSIVE = 0x8000
_CLOEXEC = os.O_CLOEXEC
_MOVE_MOUNT_F_EMPTY_PATH = 0x4
_MOVE_MOUNT_BENEATH = 0x200
_FSCONFIG_SET_FLAG, _FSCONFIG_SET_STRING, _FSCONFIG_CMD_CREATE = 0, 1, 6
_FSOPEN_CLOEXEC = 1

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND = 1, 2, 4, 32, 4096
_MS_PRIVATE, _MS_SLAVE, _MS_SHARED = 1 << 18, 1 << 19, 1 << 20
_MNT_DETACH, _UMOUNT_NOFOLLOW = 2, 8

# Views are for reading data: nothing in them is executed with more rights or opened as a device.
READ_ONLY_DATA = 0x1 | 0x2 | 0x4  # MOUNT_ATTR_RDONLY | NOSUID | NODEV
PLACES = 0x2 | 0x4 | 0x8  # MOUNT_ATTR_NOSUID | NODEV | NOEXEC

# fsconfig(2) takes strings below 256 bytes, mount(2) a page.
_LONGEST_STRING = 255
_LONGEST_OPTIONS = 4095


# xino: one device number for all of a view, and the inode numbers that its directories list. Where
# numbers of a layer are too long for that, it keeps its own.
_OVERLAY = {"redirect_dir": "follow", "xino": "on"}


def clone_tree(path: str | Path, *, recursive: bool = False) -> int:
    """A detached bind mount of ``path``; a descriptor. ``recursive``: with the mounts below it."""
    flags = _OPEN_TREE_CLONE | _CLOEXEC | (_AT_RECURSIVE if recursive else 0)
    return syscalls.syscall(
        _OPEN_TREE, f"open_tree {path}", _AT_FDCWD, ctypes.c_char_p(os.fsencode(path)), flags
    )


def set_attributes(tree: int, attributes: int) -> None:
    """Set MOUNT_ATTR_* bits on the root of a detached tree."""
    _set(tree, attributes, 0, _AT_EMPTY_PATH)


def make_private(tree: int) -> None:
    """A detached tree, with all below it, neither sends nor receives mounts and unmounts."""
    _set(tree, 0, _MS_PRIVATE, _AT_EMPTY_PATH | _AT_RECURSIVE)


def make_follower(tree: int) -> None:
    """A detached tree, with all below it, receives the mounts and unmounts of what it was cloned
    from, and sends it none."""
    _set(tree, 0, _MS_SLAVE, _AT_EMPTY_PATH | _AT_RECURSIVE)


def _set(tree: int, attributes: int, propagation: int, flags: int) -> None:
    buffer = ctypes.create_string_buffer(struct.pack("QQQQ", attributes, 0, propagation, 0), 32)
    syscalls.syscall(_MOUNT_SETATTR, "mount_setattr", tree, ctypes.c_char_p(b""), flags, buffer, 32)


def _messages(context: int) -> str:
    """The kernel's messages about a failed configuration."""
    found = []
    for _ in range(16):
        try:
            found.append(os.read(context, 1024).decode(errors="replace").strip())
        except OSError:
            break
    return "; ".join(found)


def new_filesystem(
    fstype: str, strings: dict[str, str], flags: Sequence[str] = (), attributes: int = 0
) -> int:
    """A detached mount of a new superblock; a descriptor.

    The strings never show on a command line. OSError carries the kernel's own reason.
    """
    context = syscalls.syscall(
        _FSOPEN, f"fsopen {fstype}", ctypes.c_char_p(fstype.encode()), _FSOPEN_CLOEXEC
    )
    try:
        for key, value in strings.items():
            _configure(context, _FSCONFIG_SET_STRING, key, value)
        for flag in flags:
            _configure(context, _FSCONFIG_SET_FLAG, flag, None)
        _configure(context, _FSCONFIG_CMD_CREATE, None, None)
        return syscalls.syscall(_FSMOUNT, f"fsmount {fstype}", context, 1, attributes)
    except OSError as error:
        reason = _messages(context)
        number = error.errno or errno.EINVAL
        raise OSError(number, reason or os.strerror(number), f"mount of {fstype}") from error
    finally:
        os.close(context)


def _configure(context: int, command: int, key: str | None, value: str | None) -> None:
    texts = (None if text is None else os.fsencode(text) for text in (key, value))
    syscalls.syscall(
        _FSCONFIG, f"fsconfig {key}", context, command, *map(ctypes.c_char_p, texts), 0
    )


def escape_layer(path: str) -> str:
    """``path`` as overlayfs reads it in ``lowerdir=``."""
    return path.replace("\\", "\\\\").replace(":", "\\:")


def shows_layer(super_options: str, layer: str) -> bool:
    """Whether an overlay's options, as mountinfo has them, name ``layer`` as its first."""
    first = escape_layer(layer)
    return any(
        f"lowerdir={name}:" in super_options or f"lowerdir+={name}," in f"{super_options},"
        for name in (first, first.replace("\\", "\\\\"), first.replace(",", "\\,"))
    )


def overlay(layers: Sequence[str | Path], scratch: Path) -> int:
    """A detached read-only overlay in which the first layer wins; a descriptor. Directories of a
    layer may be redirected.

    ``scratch``: an empty directory, used only when the options are too long for fsconfig.
    OSError ENAMETOOLONG when they are too long for mount(2) as well.
    """
    lowerdir = ":".join(escape_layer(str(layer)) for layer in layers)
    if len(os.fsencode(lowerdir)) <= _LONGEST_STRING:
        strings = {"source": "nodeagent", "lowerdir": lowerdir, **_OVERLAY}
        return new_filesystem("overlay", strings, ("ro",), READ_ONLY_DATA)
    options = "".join(f"{key}={value}," for key, value in _OVERLAY.items())
    options += "lowerdir=" + lowerdir.replace(",", "\\,")
    if len(os.fsencode(options)) > _LONGEST_OPTIONS:
        raise OSError(errno.ENAMETOOLONG, "the paths of store and source are too long together")
    flags = MS_RDONLY | MS_NOSUID | MS_NODEV
    mount("nodeagent", scratch, "overlay", flags, options)
    try:
        mount(None, scratch, None, _MS_PRIVATE)
        return clone_tree(scratch)
    finally:
        detach(scratch)


def mount(
    source: str | None, target: str | Path, fstype: str | None, flags: int, options: str = ""
) -> None:
    result = syscalls.libc.mount(
        os.fsencode(source) if source else None,
        os.fsencode(target),
        fstype.encode() if fstype else None,
        ctypes.c_ulong(flags),
        os.fsencode(options) if options else None,
    )
    syscalls.checked(result, f"mount {target}")


def attach(tree: int, target: str | Path, *, beneath: bool = False) -> None:
    """Mount a detached tree on ``target``, or beneath the mount there (Linux 6.5)."""
    flags = _MOVE_MOUNT_F_EMPTY_PATH | (_MOVE_MOUNT_BENEATH if beneath else 0)
    to = ctypes.c_char_p(os.fsencode(target))
    syscalls.syscall(
        _MOVE_MOUNT, f"move_mount {target}", tree, ctypes.c_char_p(b""), _AT_FDCWD, to, flags
    )


def swap(tree: int, target: str | Path) -> bool:
    """Replace the mount on ``target`` by ``tree``; at any moment readers see one of the two.

    Open files keep the old mount. Before Linux 6.5, which cannot mount beneath, the new mount goes
    on top and the old one stays below it; returns False then.
    """
    try:
        attach(tree, target, beneath=True)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        attach(tree, target)
        return False
    detach(target)
    return True


def detach(target: str | Path) -> None:
    """Unmount lazily: invisible at once, gone with its last user."""
    unmount(target, _MNT_DETACH)


def unmount(target: str | Path, flags: int = 0) -> None:
    """Unmount. OSError EBUSY while it is used, also in a namespace that follows ours."""
    result = syscalls.libc.umount2(os.fsencode(target), _UMOUNT_NOFOLLOW | flags)
    syscalls.checked(result, f"umount {target}")


def refresh(target: str | Path) -> None:
    """Make the overlay on ``target`` forget the names that nobody holds open.

    The kernel shrinks the superblock's dentry cache on any reconfigure: the next open of each
    name is resolved anew, in every mount namespace. Open files are not affected.
    """
    mount(None, target, None, MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV)


def bind_shared(path: str | Path) -> None:
    """Make ``path`` a mount point of its own whose mounts propagate to other namespaces."""
    mount(str(path), path, None, MS_BIND)
    try:
        make_shared(path)
    except OSError:
        with contextlib.suppress(OSError):
            detach(path)
        raise


def make_shared(path: str | Path) -> None:
    mount(None, path, None, _MS_SHARED)


def kernel_has(fstype: str) -> bool:
    """Whether the kernel has this file system; loads its module if there is one."""
    filesystems = Path("/proc/filesystems")
    if f"\t{fstype}\n" not in filesystems.read_text():
        os.spawnlp(os.P_WAIT, "modprobe", "modprobe", "-q", fstype)
    return f"\t{fstype}\n" in filesystems.read_text()
