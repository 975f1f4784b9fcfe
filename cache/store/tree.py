"""Entries and directories of a source and of a store, by descriptors.

A path may be longer than the 4096 bytes that the kernel takes at once, and a name may be any bytes.
So a path is a list of names, walked by ``openat`` one name at a time without following links, and a
name is a str by ``os.fsdecode``: bytes that are not UTF-8 become lone surrogates, which every
message and the index must keep.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import ParamSpec, TypeVar

import kit.files
from cache.store import extents
from ceph import protocol
from linux import mounts, syscalls

# The checksum of a stored file is kept with the file, invisible to jobs.
CHECKSUM = "trusted.nodeagent.xxh3-128"
OPAQUE = "trusted.overlay.opaque"
# Where an overlay looks for the source's side of a directory whose parent is opaque.
REDIRECT = "trusted.overlay.redirect"
_SPARE = "trusted.nodeagent.is.so"  # as long as OPAQUE, at least
# Beside OPAQUE: the mark speaks for the names of this directory, not for what is below them.
CLOSED = "trusted.nodeagent.closed"
# What CephFS tells of a directory, by both clients.
FSID = "ceph.cluster_fsid"
SNAPSHOT_MADE = "ceph.snap.btime"
# Kept beside user xattrs: without these lists a job could be refused what the source allows.
_ACLS = ("system.posix_acl_access", "system.posix_acl_default")

# These errors mean that the whole mount failed, not one file: its FUSE daemon died, the cluster
# shut this client out, or another directory is mounted there now (open_source).
SOURCE_GONE = (errno.ENOTCONN, errno.ESHUTDOWN)

P = ParamSpec("P")
T = TypeVar("T")

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_BLOCK = 4096
_FEW_BLOCKS = 64  # a disk with fewer is full: other writers leave some for a moment
_ZFS = 0x2FC12FC1  # as statfs(2) has it
_SPARSE = 2**20  # a file whose blocks are so many bytes short is asked for its holes
# The bits that tell inodes of CephFS apart: ceph-fuse puts a number of its own for the snapshot
# above them.
INODE_BITS = 2**48 - 1


def raise_if_gone(error: OSError) -> None:
    """Raise an error of the whole source; what concerns one file is the caller's."""
    if error.errno in SOURCE_GONE:
        raise error


class SourceRefusedError(PermissionError):
    """The source does not let root open or read something. Jobs of others may."""


def asked(call: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """A call on a source. OSError, RefusedError."""
    try:
        return call(*arguments, **named)
    except PermissionError as error:
        raise SourceRefusedError(error.errno, error.strerror) from error


class Entry(protocol.Entry):
    """One directory entry, and what it means for the store. The index keeps some of it as JSON."""

    __slots__ = ()

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.mode)

    @property
    def is_file(self) -> bool:
        return stat.S_ISREG(self.mode)

    @property
    def is_link(self) -> bool:
        return stat.S_ISLNK(self.mode)

    @property
    def allocated(self) -> int:
        """The most SSD bytes that it will take: whole blocks, one for long xattrs, its name."""
        blocks = -(-(self.size - self.holes) // _BLOCK) + self.xattrs
        return blocks * _BLOCK + self.name_bytes

    @property
    def name_bytes(self) -> int:
        """What the name takes in its directory, whose blocks may be half empty."""
        return 2 * (8 + len(os.fsencode(self.name)))


def entry_of(name: str, status: os.stat_result) -> Entry:
    """From a stat result, which does not tell whether there are xattrs."""
    return Entry(
        name, status.st_mode, status.st_uid, status.st_gid, status.st_size, status.st_mtime_ns,
        status.st_ino, status.st_nlink, True, status.st_ctime_ns,
    )  # fmt: skip


def same_content(entry: Entry, stored: os.stat_result) -> bool:
    """Whether the stored file is this version of the entry, judged by type, size and time."""
    if stat.S_IFMT(entry.mode) != stat.S_IFMT(stored.st_mode):
        return False
    if entry.is_directory:
        return True
    return entry.size == stored.st_size and entry.mtime_ns == stored.st_mtime_ns


# --- marks


def hides(directory: int) -> bool:
    """Whether it is opaque: readers see nothing of the source at its names."""
    return _marked(os.getxattr, directory, OPAQUE)


def is_closed(directory: int) -> bool:
    """Whether its mark, if it has one, speaks for its own names only."""
    return _marked(os.getxattr, directory, CLOSED)


def remove_mark(directory: int, mark: str) -> bool:
    """Whether there was one."""
    return _marked(os.removexattr, directory, mark)


def _marked(call: Callable[[int, str], object], directory: int, mark: str) -> bool:
    """Whether the call found the mark."""
    try:
        call(directory, mark)
    except OSError as error:
        if error.errno != errno.ENODATA:
            raise
        return False
    return True


# --- opening


def is_link(directory: int, name: str, stored: os.stat_result) -> bool:
    """Whether a stored file is a link of the one by that name in another generation's directory."""
    if stored.st_nlink < 2:
        return False
    try:
        other = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except OSError:
        return False
    return (other.st_dev, other.st_ino) == (stored.st_dev, stored.st_ino)


def open_root(path: str | Path) -> int:
    """A descriptor of a root directory. Symbolic links on the way to it are followed."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def opened_root(path: str | Path) -> AbstractContextManager[int]:
    return kit.files.closing(open_root(path))


def open_file(directory: int, name: str) -> int:
    """A descriptor of a regular file, for reading; no link is followed. OSError.

    EINVAL for anything else, which is not opened: opening a device may begin what it does.
    """
    flags = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
    with kit.files.closing(os.open(name, flags, dir_fd=directory)) as found:
        if not stat.S_ISREG(os.fstat(found).st_mode):
            raise OSError(errno.EINVAL, "no regular file", name)
        return os.open(f"/proc/self/fd/{found}", os.O_RDONLY | os.O_CLOEXEC)


def virtual(directory: int, name: str) -> str:
    """An xattr that CephFS makes up, '' where there is none. OSError of a source that fails."""
    try:
        return os.getxattr(directory, name).decode("ascii", "replace")
    except OSError as error:
        if error.errno in (errno.ENODATA, errno.EOPNOTSUPP):
            return ""
        raise


def stamp(root: int) -> str:
    """Identifies an open root directory: its mount, its inode and, in CephFS, its snapshot.

    A snapshot that is made again under its name has another time in ``ceph.snap.btime``.
    """
    status = os.fstat(root)
    return f"{status.st_dev}:{status.st_ino} {virtual(root, SNAPSHOT_MADE)}".rstrip()


def open_source(path: str, expected: str) -> int:
    """A descriptor of a source's root, if its ``stamp`` is still the expected one ('' accepts any).

    ESHUTDOWN for another directory. A source that was unmounted shows the empty directory beneath,
    and every stored file would look as if the source had deleted it.
    """
    descriptor = open_root(path)
    try:
        if expected and stamp(descriptor) != expected:
            raise OSError(errno.ESHUTDOWN, "the source is not the one that was reached", path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def apart(root: int) -> tuple[int, int]:
    """The directory ``root`` of a source without what is mounted below it, as a view shows it: a
    descriptor, and one that keeps its mount. Without the right to mount, the same directory.

    It is read-only, so reads move no access time: what deletes by it takes no fill for a use.
    """
    try:
        made = mounts.clone_tree(f"/proc/self/fd/{root}")
    except OSError:
        return os.dup(root), os.dup(root)
    try:
        mounts.make_private(made)  # nor what is mounted there later
        mounts.set_attributes(made, mounts.READ_ONLY_DATA)
        return os.open(".", _DIRECTORY, dir_fd=made), made
    except OSError:
        os.close(made)
        raise


@contextlib.contextmanager
def quiet(root: int) -> Iterator[int]:
    """``apart`` for a while."""
    found, mount = apart(root)
    with kit.files.closing(found), kit.files.closing(mount):
        yield found


def mount_of(descriptor: int) -> str:
    """The id of the mount on which it was opened."""
    lines = Path(f"/proc/self/fdinfo/{descriptor}").read_text().splitlines()
    return next(line for line in lines if line.startswith("mnt_id:"))


def open_below(root: int, path: Sequence[str]) -> int:
    """The directory ``path`` below ``root``. The caller closes it."""
    current = os.dup(root)
    for name in path:
        try:
            below = os.open(name, _DIRECTORY, dir_fd=current)
        finally:
            os.close(current)
        current = below
    return current


def opened(root: int, path: Sequence[str]) -> AbstractContextManager[int]:
    return kit.files.closing(open_below(root, path))


# --- looking


def shown(path: Sequence[str]) -> str:
    """For people: bytes that are not UTF-8 as \\xNN."""
    return "/".join(path).encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def listing(directory: int) -> Iterator[Entry | tuple[str, OSError]]:
    """Its entries in the file system's order; (name, error) for one without a readable status."""
    with os.scandir(directory) as found:
        for item in found:
            try:
                status = os.stat(item.name, dir_fd=directory, follow_symlinks=False)
            except OSError as error:
                yield item.name, error
            else:
                entry = entry_of(item.name, status)
                if entry.is_file and status.st_size - status.st_blocks * 512 >= _SPARSE:
                    entry = entry._replace(holes=_holes(directory, entry))
                yield entry


def _holes(directory: int, item: Entry) -> int:
    """0 where the file system cannot tell, as one that only packs its blocks, or is not trusted:
    OpenZFS before 2.2.2 told holes where bytes waited to be written."""
    with contextlib.suppress(OSError):
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with kit.files.closing(os.open(item.name, flags, dir_fd=directory)) as file:
            if syscalls.file_system(file) != _ZFS:
                return extents.holes(file, item.size)
    return 0


def entries_beside(root: int, path: Sequence[str], names: set[str]) -> list[Entry]:
    """What a source's directory holds beside ``names``, of the kinds that are stored."""
    with opened(root, path) as directory:
        found = [item for item in listing(directory) if isinstance(item, Entry)]
    kept = [item for item in found if item.is_file or item.is_link or item.is_directory]
    return [item for item in kept if item.name not in names]


def checksum_of(directory: int, name: str) -> str:
    """The checksum that is kept with a stored file, in hex; '' when there is none."""
    try:
        return os.getxattr(
            f"/proc/self/fd/{directory}/{name}", CHECKSUM, follow_symlinks=False
        ).decode()
    except OSError:
        return ""


def count(directory: int) -> int:
    """How many names it has; a million of them take no memory."""
    with os.scandir(directory) as found:
        return sum(1 for _ in found)


def status(parent: int, name: str) -> os.stat_result | None:
    """None when there is no such name; no link is followed. OSError."""
    try:
        return os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return None


def has(parent: int, name: str) -> bool:
    return status(parent, name) is not None


def xattrs_of(source: int) -> dict[str, bytes]:
    """The xattrs that are stored; {} where the file system has no xattrs. OSError."""
    try:
        names = os.listxattr(source)
    except OSError as error:
        if error.errno == errno.EOPNOTSUPP:
            return {}
        raise
    return {
        name: os.getxattr(source, name)
        for name in names
        if name.startswith("user.") or name in _ACLS
    }


def leads_out(depth: int, target: str) -> bool:
    """Whether a symbolic link ``depth`` directories below the root leads out of the tree, by its
    names alone. An absolute one does: a pod has another root."""
    for name in target.split("/"):
        if name == "..":
            depth -= 1
        elif name not in ("", "."):
            depth += 1
        if depth < 0:
            break
    return target.startswith("/") or depth < 0


# --- changing


def copy_xattrs(source: int, target: int) -> None:
    """Copy user xattrs and POSIX ACLs. OSError, E2BIG when the store cannot hold them."""
    _set_xattrs(target, xattrs_of(source))


def _set_xattrs(target: int, wanted: dict[str, bytes]) -> None:
    try:
        for name, value in wanted.items():
            os.setxattr(target, name, value)
    except OSError as error:
        # ext4 answers ENOSPC for an xattr above a block, although the disk is not full.
        large = error.errno == errno.ENOSPC and not _is_full(target)
        if large or error.errno in (errno.ERANGE, errno.E2BIG):
            why = "its xattrs are larger than the store's file system takes"
            raise OSError(errno.E2BIG, why) from error
        raise


def _is_full(descriptor: int) -> bool:
    """Whether the file system has no room for a few blocks, or for one inode."""
    space = os.fstatvfs(descriptor)
    return space.f_bfree < _FEW_BLOCKS or (space.f_files > 0 and not space.f_ffree)


def make_directory(parent: int, item: Entry, source: int | None) -> bool:
    """Make ``item`` in a directory of the store; whether it is new. OSError, and then a new one is
    not left: jobs would find it with another owner and mode than the source's. E2BIG as above.

    ``source``: the parent in the source, from which xattrs are read.
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
    with kit.files.closing(os.open(item.name, _DIRECTORY, dir_fd=parent)) as descriptor:
        origin = None
        try:
            if source is not None and item.xattrs:
                origin = asked(os.open, item.name, _DIRECTORY, dir_fd=source)
            set_attributes(descriptor, item, origin)
        except OSError:
            if new:
                os.rmdir(item.name, dir_fd=parent)
            raise
        finally:
            if origin is not None:
                os.close(origin)
    return new


def set_attributes(directory: int, item: Entry, source: int | None) -> None:
    """Set owner, mode, xattrs and times of a directory of the store to those of the source."""
    os.fchown(directory, item.uid, item.gid)
    # Remove xattrs that the source lacks: mkdir inherits the parent's default ACL, which the source
    # directory may not have.
    wanted = xattrs_of(source) if source is not None else {}
    for name in xattrs_of(directory).keys() - wanted.keys():
        os.removexattr(directory, name)
    # And room for the store's own mark, without which nothing above it would be complete.
    _set_xattrs(directory, wanted | ({_SPARE: b"y"} if wanted else {}))
    if wanted:
        os.removexattr(directory, _SPARE)
    os.fchmod(directory, stat.S_IMODE(item.mode))
    os.utime(directory, ns=(item.mtime_ns, item.mtime_ns))


def remove(parent: int, name: str) -> None:
    """Delete a name and everything below it, at any depth, without recursion. OSError."""
    try:
        os.unlink(name, dir_fd=parent)
        return
    except FileNotFoundError:
        return
    except (IsADirectoryError, PermissionError):
        pass  # a directory: Linux answers EISDIR
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
