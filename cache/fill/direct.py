"""Reads stored files from the disk itself, past the page cache.

A verify wants to know what the disk has, not what memory remembers, and the pages of running jobs
are worth more than those of files that are read once a month. ext4 and XFS read directly
(O_DIRECT); where a file system refuses that, the kernel's uncached reads are tried (RWF_DONTCACHE,
kernel 6.14), else the page cache is used and the worker says so.
"""

import errno
import fcntl
import mmap
import os

import xxhash

from cache.fill import control

BLOCK = 1024 * 1024  # a multiple of every disk's block
DIRECT, UNCACHED, CACHED = "direct", "uncached", "cached"
_DONTCACHE = 0x80  # RWF_DONTCACHE
_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP)


class Reader:
    """For one worker, through one buffer that is aligned to pages."""

    def __init__(self, throttle: control.Throttle) -> None:
        self._throttle = throttle
        self._buffer = memoryview(mmap.mmap(-1, BLOCK))
        self.way = DIRECT  # of the last file

    def checksum(self, descriptor: int) -> str:
        """Of an open stored file, in hex. OSError of the disk; Cancelled."""
        self.way = _begin(descriptor)
        summed = xxhash.xxh3_128()
        offset = 0
        counted = 0  # files: with the first block
        while True:
            size = self._read(descriptor, offset)
            if size:
                summed.update(self._buffer[:size])
                self._throttle.step(1 - counted, size)
                counted = 1
            offset += size
            if size < BLOCK:
                break
        if not counted:
            self._throttle.step(1, 0)
        return summed.hexdigest()

    def _read(self, descriptor: int, offset: int) -> int:
        """A whole block unless the file ends before: direct reads begin at whole blocks."""
        size = 0
        while size < BLOCK:
            count = self._read_some(descriptor, self._buffer[size:], offset + size)
            size += count
            if not count or size % 4096:
                break
        return size

    def _read_some(self, descriptor: int, into: memoryview, offset: int) -> int:
        if self.way == UNCACHED:
            try:
                return os.preadv(descriptor, [into], offset, _DONTCACHE)
            except OSError as error:
                if error.errno not in _REFUSED:
                    raise
                self.way = CACHED
                # At least the disk is asked, unless a job has the pages mapped.
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        try:
            return os.preadv(descriptor, [into], offset)
        except OSError as error:
            if self.way != DIRECT or error.errno not in _REFUSED:
                raise
        _set_direct(descriptor, on=False)
        self.way = UNCACHED
        return self._read_some(descriptor, into, offset)


def _begin(descriptor: int) -> str:
    try:
        _set_direct(descriptor, on=True)
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        return UNCACHED
    return DIRECT


def _set_direct(descriptor: int, *, on: bool) -> None:
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
