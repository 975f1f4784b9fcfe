"""Directories and entries by descriptors: paths may be longer than 4096 bytes, names any bytes."""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Sequence

from cache.fill import entry
from cache.fill.entry import Entry

# Where the checksum of a stored file is kept: with the entry, invisible to jobs.
CHECKSUM = "trusted.nodeagent.xxh3-128"
OPAQUE = "trusted.overlay.opaque"
# Kept beside user xattrs: without the lists a job could be refused what the source allows.
_ACLS = ("system.posix_acl_access", "system.posix_acl_default")

# Not one file but the whole mount: its FUSE daemon died, the cluster shut this client out, or
# something else is mounted there now (open_source).
SOURCE_GONE = (errno.ENOTCONN, errno.ESHUTDOWN)

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LONGEST_STEP = 3000


def open_root(path: str) -> int:
    """A descriptor of a root directory; links on the way to it are followed."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def stamp(status: os.stat_result) -> str:
    """Which directory of which mount a root is."""
    return f"{status.st_dev}:{status.st_ino}"


def open_source(path: str, expected: str) -> int:
    """A descriptor of a source's root if it is the one that was looked at (its ``stamp``).

    ESHUTDOWN when it is another one: unmounted since then, it shows the empty directory beneath,
    and whatever the store has would look as if the source had lost it. '' expects nothing.
    """
    descriptor = open_root(path)
    if expected and stamp(os.fstat(descriptor)) != expected:
        os.close(descriptor)
        raise OSError(errno.ESHUTDOWN, "the source is not the one that was looked at", path)
    return descriptor


def open_below(root: int, path: Sequence[str]) -> int:
    """The directory ``path`` (names) below ``root``; no link is followed. The caller closes it."""
    current = os.dup(root)
    for name in path:
        try:
            below = os.open(name, _DIRECTORY, dir_fd=current)
        finally:
            os.close(current)
        current = below
    return current


@contextlib.contextmanager
def opened(root: int, path: Sequence[str]) -> Iterator[int]:
    descriptor = open_below(root, path)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def listing(directory: int) -> Iterator[Entry | tuple[str, OSError]]:
    """Its entries in the file system's order; (name, error) for one that cannot be looked at."""
    with os.scandir(directory) as found:
        for item in found:
            try:
                status = os.stat(item.name, dir_fd=directory, follow_symlinks=False)
            except OSError as error:
                yield item.name, error
            else:
                yield entry.of(item.name, status)


def missing(root: int, path: Sequence[str], names: set[str]) -> list[Entry]:
    """What the directory ``path`` of a source has, of what is kept, beside ``names``."""
    with opened(root, path) as directory:
        found = [item for item in listing(directory) if isinstance(item, Entry)]
    kept = [item for item in found if item.is_file or item.is_link or item.is_directory]
    return [item for item in kept if item.name not in names]


def copy_xattrs(source: int | str, target: int | str, *, links: bool = True) -> bool:
    """User xattrs and POSIX ACLs from one file to another; whether there were any."""
    try:
        names = os.listxattr(source, follow_symlinks=links) if links else []
    except OSError as error:
        if error.errno == errno.EOPNOTSUPP:
            return False
        raise
    kept = [name for name in names if name.startswith("user.") or name in _ACLS]
    for name in kept:
        try:
            os.setxattr(target, name, os.getxattr(source, name))
        except OSError as error:
            # ext4 says ENOSPC of an xattr above a block; the disk is not full.
            if error.errno in (errno.ENOSPC, errno.ERANGE):
                raise OSError(
                    errno.E2BIG, "its xattrs are larger than the store's file system takes"
                ) from error
            raise
    return bool(kept)


def xattrs_of(source: int) -> dict[str, bytes]:
    """The xattrs that are kept; none where the file system has none. OSError."""
    try:
        names = os.listxattr(source)
    except OSError as error:
        if error.errno == 95:  # EOPNOTSUPP
            return {}
        raise
    return {
        name: os.getxattr(source, name)
        for name in names
        if name.startswith("user.") or name in _ACLS
    }


def has(parent: int, name: str) -> bool:
    """Whether there is such a name in a directory of the store."""
    try:
        os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def make_directory(parent: int, item: Entry, source: int | None) -> bool:
    """``item`` as a directory of the store; whether there was none before.

    ``source``: its parent in the source, for xattrs.
    """
    new = True
    try:
        os.mkdir(item.name, 0o700, dir_fd=parent)
    except FileExistsError:
        status = os.stat(item.name, dir_fd=parent, follow_symlinks=False)
        if not stat.S_ISDIR(status.st_mode):  # the source had a file there before
            os.unlink(item.name, dir_fd=parent)
            os.mkdir(item.name, 0o700, dir_fd=parent)
        else:
            new = False
    descriptor = os.open(item.name, _DIRECTORY, dir_fd=parent)
    try:
        origin = None
        if source is not None and item.xattrs:
            origin = os.open(item.name, _DIRECTORY, dir_fd=source)
        try:
            dress_directory(descriptor, item, origin)
        finally:
            if origin is not None:
                os.close(origin)
    finally:
        os.close(descriptor)
    return new


def dress_directory(directory: int, item: Entry, source: int | None) -> None:
    """Owner, mode, xattrs and times of a directory of the store."""
    os.fchown(directory, item.uid, item.gid)
    # What it has and its origin has not goes: mkdir gives it the default ACL of its parent, which
    # the origin's may have got later.
    wanted = xattrs_of(source) if source is not None else {}
    for name in xattrs_of(directory).keys() - wanted.keys():
        os.removexattr(directory, name)
    for name, value in wanted.items():
        os.setxattr(directory, name, value)
    os.fchmod(directory, stat.S_IMODE(item.mode))
    os.utime(directory, ns=(item.mtime_ns, item.mtime_ns))


def remove(parent: int, name: str) -> None:
    """A whole tree, whatever its depth, without recursion and by descriptors."""
    try:
        os.unlink(name, dir_fd=parent)
        return
    except FileNotFoundError:
        return
    except (IsADirectoryError, PermissionError):
        pass  # a directory: Linux says EISDIR
    stack = [(os.open(name, _DIRECTORY, dir_fd=parent), name)]
    try:
        while stack:
            directory, _ = stack[-1]
            below = None
            with os.scandir(directory) as found:
                for item in found:
                    if item.is_dir(follow_symlinks=False):
                        below = item.name
                        break
                    os.unlink(item.name, dir_fd=directory)
            if below is not None:
                stack.append((os.open(below, _DIRECTORY, dir_fd=directory), below))
            else:
                _, gone = stack.pop()
                os.close(directory)
                os.rmdir(gone, dir_fd=stack[-1][0] if stack else parent)
    finally:
        for descriptor, _ in stack:
            os.close(descriptor)
