"""Copies one entry into the staging folder, with its checksum and everything that is kept of it.

A copy must be one version of the file. The status of the source's file is read before and after its
bytes; a difference means that it changed meanwhile, and nothing is kept. A snapshot cannot change,
so there the second status is left out.

Invariant: a file in staging has the bytes that the source had between two equal readings of its
status. A copy that fails any check is unlinked before the error is raised.
"""

import errno
import os
import stat
import time

import xxhash

import kit.files
from cache.fill import control, protocol
from cache.store import extents, tree
from cache.store.tree import Entry

BLOCK = 1024 * 1024
TICK_NS = 20_000_000
_SOURCE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_STAGED_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def settled(origin: int, immutable: bool) -> os.stat_result:
    """The status of an open source file, from which a later change can be told.

    A change within the same tick of the kernel's clock would not change the times: a file that was
    changed just now is looked at again after the tick.
    """
    status = os.fstat(origin)
    if not immutable and abs(time.time_ns() - status.st_ctime_ns) < TICK_NS:
        time.sleep(TICK_NS / 1e9)
        status = os.fstat(origin)
    return status


def open_origin(source: int, name: str) -> int:
    """A file of a directory of the source, for reading. OSError, RefusedError."""
    return tree.asked(os.open, name, _SOURCE_FLAGS, dir_fd=source)


class ChangedError(OSError):
    """The source changed while it was read; nothing was kept."""


def reason(error: OSError) -> str:
    """For operators, without the paths of descriptors."""
    if isinstance(error, ChangedError):
        return str(error)
    return error.strerror or str(error)


def link_key(item: Entry, checksum: str) -> str:
    """Equal for two names only when they are links of one file with the same bytes."""
    return f"{item.ino:x}-{checksum}-{item.mode:o}-{item.uid}-{item.gid}-{item.mtime_ns}"


def failure(name: str, error: OSError, *, asked: bool = False) -> protocol.Failure:
    """``asked``: of the source, by the error itself."""
    refused = isinstance(error, PermissionError if asked else tree.SourceRefusedError)
    lasting = error.errno in (errno.EPERM, errno.EACCES, errno.ENAMETOOLONG, errno.E2BIG)
    return protocol.Failure(name, reason(error), lasting, refused)


class Copier:
    """Copies for one worker, through one buffer."""

    def __init__(self, throttle: control.Throttle, *, immutable: bool) -> None:
        self._throttle = throttle
        self._immutable = immutable
        self._buffer = memoryview(bytearray(BLOCK))
        self.checksum = ""  # of the last copy, in hex
        self.read: os.stat_result | None = (
            None  # status of the source's file; None: as it was given
        )

    def copy(self, source: int, item: Entry, staging: int) -> int:
        """Copy ``item`` of the directory ``source``; the SSD bytes of the copy.

        ``checksum`` is that of this copy then, '' of a symbolic link.

        Raises OSError when it cannot be read or written, ChangedError when it changed meanwhile,
        Cancelled; nothing is left in staging then.
        """
        self.checksum, self.read = "", None
        try:
            if item.is_link:
                self._copy_link(source, item, staging)
                self._throttle.step(1, 0)
                return 0
            return self._copy_file(source, item, staging)
        except BaseException:
            try:
                os.unlink(item.name, dir_fd=staging)
            except FileNotFoundError:
                pass  # it failed before the file was made
            raise

    def keep(self, item: Entry, data: bytes, staging: int) -> int:
        """As ``copy``, of a file whose bytes were read already."""
        copy = os.open(item.name, _STAGED_FLAGS, stat.S_IMODE(item.mode), dir_fd=staging)
        try:
            if extents.write_sparse(copy, memoryview(data), 0):
                os.ftruncate(copy, item.size)
            self.checksum, self.read = xxhash.xxh3_128_hexdigest(data), None
            os.setxattr(copy, tree.CHECKSUM, self.checksum.encode())
            return set_attributes(copy, item.uid, item.gid, item.mode, item.mtime_ns)
        except BaseException:
            os.unlink(item.name, dir_fd=staging)
            raise
        finally:
            os.close(copy)

    def _copy_link(self, source: int, item: Entry, staging: int) -> None:
        os.symlink(os.readlink(item.name, dir_fd=source), item.name, dir_fd=staging)
        os.chown(item.name, item.uid, item.gid, dir_fd=staging, follow_symlinks=False)
        times = (item.mtime_ns, item.mtime_ns)
        os.utime(item.name, ns=times, dir_fd=staging, follow_symlinks=False)

    def _copy_file(self, source: int, item: Entry, staging: int) -> int:
        with kit.files.closing(open_origin(source, item.name)) as origin:
            before = settled(origin, self._immutable)
            if not stat.S_ISREG(before.st_mode):
                raise ChangedError(f"{item.name} is no longer a regular file")
            mode = stat.S_IMODE(before.st_mode)
            with kit.files.closing(os.open(item.name, _STAGED_FLAGS, mode, dir_fd=staging)) as copy:
                checksum = self._copy_bytes(origin, copy, before.st_size)
                if item.xattrs:
                    tree.copy_xattrs(origin, copy)
                if not self._immutable and _version(before) != _version(os.fstat(origin)):
                    raise ChangedError(f"{item.name} changed while it was copied")
                self.checksum = checksum.decode()
                self.read = None if self._immutable else before
                os.setxattr(copy, tree.CHECKSUM, checksum)
                return set_attributes(
                    copy, before.st_uid, before.st_gid, before.st_mode, before.st_mtime_ns
                )

    def _copy_bytes(self, origin: int, copy: int, size: int) -> bytes:
        """Copy all bytes except holes; the checksum. ChangedError unless there are ``size``."""
        checksum = xxhash.xxh3_128()
        offset = 0
        files = 1  # the file is counted with its first block
        ends_in_hole = False
        while count := tree.asked(os.readv, origin, [self._buffer]):
            block = self._buffer[:count]
            checksum.update(block)
            ends_in_hole = extents.write_sparse(copy, block, offset)
            offset += count
            self._throttle.step(files, count)
            files = 0
            if offset >= size and (self._immutable or count < BLOCK):
                break  # bytes appended meanwhile change the second status
        if offset != size:
            raise ChangedError(f"{offset} bytes were read of a file of {size}")
        if files:
            self._throttle.step(1, 0)
        if ends_in_hole:
            os.ftruncate(copy, size)
        return checksum.hexdigest().encode()


def set_attributes(copy: int, uid: int, gid: int, mode: int, mtime_ns: int) -> int:
    """Set owner, mode and times of a staged file; its SSD bytes.

    The file was created with its mode, but a change of the owner clears mode bits. The mode is set
    again only where that happened, which saves most files a journal entry.
    """
    if uid or gid:
        os.fchown(copy, uid, gid)
    os.utime(copy, ns=(mtime_ns, mtime_ns))
    status = os.fstat(copy)
    if stat.S_IMODE(status.st_mode) != stat.S_IMODE(mode):
        os.fchmod(copy, stat.S_IMODE(mode))
    return status.st_blocks * 512


def _version(status: os.stat_result) -> tuple[int, ...]:
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
