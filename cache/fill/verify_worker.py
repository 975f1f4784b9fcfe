"""What the workers of a verify do more than others: read stored files against their checksums."""

import contextlib
import errno
import fcntl
import mmap
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass

import xxhash

import kit.files
from cache.fill import commit, control, copy, opened, protocol
from cache.store import extents, large, tree
from cache.store.tree import Entry

MOST_NAMED = 20  # uncompared files of one directory that are named; all are counted
# A damaged file system answers so, for what it lost or cannot read.
_BROKEN = (errno.ENOENT, errno.ENOTDIR, errno.EIO, errno.EUCLEAN, errno.EBADMSG, errno.ESTALE)
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True)
class _Directory:
    """One that is verified, and what is found in it."""

    job: protocol.Verify
    directory: int
    source: int | OSError | None  # to compare with, or why it cannot be opened
    found: protocol.Verified
    ahead: list[int]  # of generations whose own scrub reads what is shared
    also: list[tuple[int, int]]  # of generations that may have a bad file, too; by their place


class NotComparedError(Exception):
    """The source's file cannot be read; the stored one agrees with its checksum.

    ``size``: bytes of the stored file.
    """

    def __init__(self, error: OSError, size: int) -> None:
        super().__init__(f"cannot be read in the source: {copy.reason(error)}")
        self.size = size


class Verifier:
    """The part of a worker that verifies."""

    def __init__(self, own: commit.Committer, source: int, throttle: control.Throttle) -> None:
        """``source``: descriptor of its root."""
        self.generation, self.tree = own.generation, own.tree
        self.source = source
        self.throttle = throttle
        self._buffer = memoryview(bytearray(copy.BLOCK))
        self._stored = DiskReader(self.throttle)
        self._others: dict[str, int] = {}  # roots of the trees of other generations

    def verify(self, job: protocol.Verify) -> protocol.Verified:
        found = protocol.Verified()
        with contextlib.ExitStack() as stack:
            try:
                directory = stack.enter_context(tree.opened(self.tree, job.path))
                names, found.folders = _names(directory)
            except OSError as error:
                if error.errno not in _BROKEN:
                    raise
                found.fault = f"cannot be read in the store: {copy.reason(error)}"
                found.unreadable = True
                return found
            source: int | OSError | None = None
            if job.against_source:
                try:
                    source = stack.enter_context(tree.opened(self.source, job.path))
                except OSError as error:
                    if error.errno in (errno.ENOENT, *tree.SOURCE_GONE):
                        raise
                    source = error
            if not job.after:
                self._compare_names(job, names, found)
            if job.relist:
                found.listed = opened.look(directory, names)
            ahead = [each for _, each in self._opened(job.ahead, job.path, stack)]
            also = list(self._opened(job.also, job.path, stack))
            self._verify_names(_Directory(job, directory, source, found, ahead, also), names)
        return found

    def _verify_names(self, place: _Directory, names: list[str]) -> None:
        """Those after ``job.after``, as far as patience goes."""
        job = place.job
        ends = time.monotonic() + job.patience
        last = job.after
        for name in names:
            if name <= job.after:
                continue
            if job.patience and time.monotonic() > ends and last > job.after:
                place.found.left_after = last
                return
            try:
                self._verify_name(place, name)
            except control.Cancelled:
                place.found.left_after = last
                return
            last = name

    def _compare_names(
        self, job: protocol.Verify, names: list[str], found: protocol.Verified
    ) -> None:
        """Names that the source has and the store lost; without a source only their number."""
        right = job.entries is not None and len(names) == job.entries
        if right or (job.entries is None and not job.relist):
            return
        lost = 0
        if job.reachable:
            missing = tree.entries_beside(self.source, job.path, set(names))
            found.bad += [(item, "is missing in the store") for item in missing]
            lost = len(missing)
        if job.entries is not None and len(names) + lost != job.entries:
            found.fault = f"has {len(names)} names in the store, {job.entries} were stored"

    def _verify_name(self, place: _Directory, name: str) -> None:
        found = place.found
        try:
            status = os.stat(name, dir_fd=place.directory, follow_symlinks=False)
        except OSError as error:
            if error.errno not in _BROKEN:
                raise
            fault = f"cannot be looked up in the store: {copy.reason(error)}"
            found.bad.append((self._entry_of(place, name), fault))
            return
        if not stat.S_ISREG(status.st_mode):
            return
        if any(tree.is_link(each, name, status) for each in place.ahead):
            found.checked_files += 1
            found.shared_files += 1
            self.throttle.step(1, 0)
            return
        try:
            fault, size = self._verify_file(place, name)
            found.cached += self._stored.cached
        except NotComparedError as error:
            fault, size = "", error.size
            found.uncompared += 1
            if found.uncompared <= MOST_NAMED:
                found.named.append((name, str(error)))
        found.checked_files += 1
        found.checked_bytes += size
        if fault:
            found.bad.append((self._entry_of(place, name), fault))
            found.also += [
                (at, name) for at, each in place.also if tree.is_link(each, name, status)
            ]

    def _opened(
        self, folders: list[str], path: list[str], stack: contextlib.ExitStack
    ) -> Iterator[tuple[int, int]]:
        """The directory ``path`` of each generation that has it, with its place in ``folders``."""
        for at, folder in enumerate(folders):
            with contextlib.suppress(OSError):  # it has gone, or has no such directory
                if folder not in self._others:
                    self._others[folder] = tree.open_root(f"{folder}/tree")
                yield at, stack.enter_context(tree.opened(self._others[folder], path))

    def _entry_of(self, place: _Directory, name: str) -> Entry:
        """As the source has it now, else as the store has it."""
        try:
            with tree.opened(self.source, place.job.path) as source:
                return tree.entry_of(name, os.stat(name, dir_fd=source, follow_symlinks=False))
        except OSError:
            pass
        try:
            return tree.entry_of(name, os.stat(name, dir_fd=place.directory, follow_symlinks=False))
        except OSError:  # neither can be read: only the name counts
            return Entry(name, stat.S_IFREG, 0, 0, 0, 0, 0, 1, True)

    def _verify_file(self, place: _Directory, name: str) -> tuple[str, int]:
        """What is wrong with a stored file ('' for a good one), and its size.

        NotComparedError when the file is good and the source's cannot be read.
        """
        try:
            stored = os.open(name, _FLAGS, dir_fd=place.directory)
        except OSError as error:
            return f"cannot be opened in the store: {copy.reason(error)}", 0
        with kit.files.closing(stored):
            size = os.fstat(stored).st_size
            try:
                kept = os.getxattr(stored, tree.CHECKSUM).decode()
            except OSError:
                return "has no checksum in the store", size
            try:
                if place.job.afresh:  # jobs read their sources now: no page is missed
                    os.posix_fadvise(stored, 0, 0, os.POSIX_FADV_DONTNEED)
                if large.is_stored_so(stored):
                    if fault := self._verify_large(place, name, kept):
                        return fault, size
                elif self._stored.checksum(stored) != kept:
                    return "its bytes are not those that were stored", size
            except OSError as error:
                tree.raise_if_gone(error)
                return f"cannot be read in the store: {copy.reason(error)}", size
            if place.source is not None:
                return self._compare(stored, kept, name, place.source), size
            return "", size

    def _verify_large(self, place: _Directory, name: str, kept: str) -> str:
        """The fault, '' when its bytes are those that were stored."""
        with contextlib.ExitStack() as stack:
            source = None
            if place.job.reachable:
                try:
                    source = stack.enter_context(tree.opened(self.source, place.job.path))
                except OSError as error:  # the store's file is not to blame
                    tree.raise_if_gone(error)
            return self._check_large(place, name, kept, source)

    def _check_large(self, place: _Directory, name: str, kept: str, source: int | None) -> str:
        """``kept``: its checksum. ``source``: its directory there, to fetch bad extents from.

        OSError when it cannot be read in the store, or the whole source has gone.
        """
        flags = os.O_RDWR if source is not None else os.O_RDONLY
        with (
            kit.files.closing(os.open(name, flags | _FLAGS, dir_fd=place.directory)) as stored,
            large.records_of(self.generation, stored) as held,
        ):
            self.throttle.step(1, 0)
            if held is None or held.checksum() != kept:
                # The records are lost: the file's checksum still tells whether all of it is good.
                return _without_records(self.generation, stored, kept, self.throttle)
            bad = []
            for extent in range(held.count):
                try:
                    good = held.is_good(extent)
                except OSError as error:  # a bad sector
                    if error.errno != errno.EIO:
                        raise
                    good = False
                if not good:
                    bad.append(extent)
                self.throttle.step(0, held.span(extent)[1])
            if not bad:
                return ""
            first = held.span(bad[0])[0]
            fault = f"{len(bad)} extents are not what was stored, the first at {first}"
            if source is None:
                return fault
            if not _repair(held, bad, name, source, self.throttle):
                return f"{fault}; the source has other bytes there"
            place.found.repaired.append((name, len(bad)))
            return ""

    def _compare(self, stored: int, kept: str, name: str, source: int | OSError) -> str:
        """How a stored file differs from the source's, '' when it does not.

        An unreadable source file is not a difference: a good copy would be withdrawn for it.
        """
        here = os.fstat(stored)
        try:
            xattrs = tree.xattrs_of(stored)
        except OSError as error:
            return f"its xattrs cannot be read in the store: {copy.reason(error)}"
        try:
            if isinstance(source, OSError):
                raise source
            return self._difference(stored, here, xattrs, kept, name, source)
        except FileNotFoundError:
            return "is not in the source"
        except OSError as error:
            if error.errno == errno.ELOOP:
                return "is a symbolic link in the source"
            tree.raise_if_gone(error)
            raise NotComparedError(error, here.st_size) from error

    def _difference(
        self, stored: int, here: os.stat_result, xattrs: dict[str, bytes], kept: str, name: str,
        source: int,
    ) -> str:  # fmt: skip
        """OSError of the source's file only."""
        with kit.files.closing(os.open(name, _FLAGS, dir_fd=source)) as origin:
            there = os.fstat(origin)
            for what in ("st_size", "st_mode", "st_uid", "st_gid", "st_mtime_ns"):
                if getattr(here, what) != getattr(there, what):
                    return f"differs from the source in {what.removeprefix('st_')}"
            if xattrs != tree.xattrs_of(origin):
                return "differs from the source in its xattrs"
            if large.is_stored_so(stored):
                self.throttle.step(1, 0)
                records = b"".join(_records(origin, self.throttle))
                summed = xxhash.xxh3_128_hexdigest(records)
            else:
                summed = _checksum(origin, self.throttle, self._buffer)
            if summed != kept:
                return "differs from the source in its bytes"
        return ""


def _names(directory: int) -> tuple[list[str], int]:
    """The names in order, and how many of them are directories. OSError."""
    names, folders = [], 0
    with os.scandir(directory) as found:
        for item in found:
            names.append(item.name)
            folders += item.is_dir(follow_symlinks=False)
    return sorted(names), folders


# --- stored files from the disk itself, past the page cache
#
# A verify wants to know what the disk has, not what memory remembers, and the pages of running jobs
# are worth more than those of files that are read once a month. ext4 and XFS read directly
# (O_DIRECT); where a file system refuses that, the page cache is used and the worker says so.

_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP)


class DiskReader:
    """For one worker, through one buffer that is aligned to pages."""

    def __init__(self, throttle: control.Throttle) -> None:
        self._throttle = throttle
        self._buffer = memoryview(mmap.mmap(-1, copy.BLOCK))
        self.cached = False  # the last file was read through the page cache

    def checksum(self, descriptor: int) -> str:
        """Of an open stored file, in hex. OSError of the disk; Cancelled."""
        self.cached = False
        try:
            _set_direct(descriptor, on=True)
        except OSError as error:
            self._use_cache(descriptor, error)
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
            if size < copy.BLOCK:
                break
        if not counted:
            self._throttle.step(1, 0)
        return summed.hexdigest()

    def _read(self, descriptor: int, offset: int) -> int:
        """A whole block unless the file ends before: direct reads begin at whole blocks."""
        size = 0
        while size < copy.BLOCK:
            count = self._read_some(descriptor, self._buffer[size:], offset + size)
            size += count
            if not count or size % 4096:
                break
        return size

    def _read_some(self, descriptor: int, into: memoryview, offset: int) -> int:
        try:
            return os.preadv(descriptor, [into], offset)
        except OSError as error:
            if self.cached:
                raise
            self._use_cache(descriptor, error)
        _set_direct(descriptor, on=False)
        return os.preadv(descriptor, [into], offset)

    def _use_cache(self, descriptor: int, error: OSError) -> None:
        """Unless ``error`` says more than that direct reads are refused."""
        if error.errno not in _REFUSED:
            raise error
        self.cached = True
        # At least the disk is asked, unless a job has the pages mapped.
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _set_direct(descriptor: int, *, on: bool) -> None:
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)


# --- files of the source


def _checksum(origin: int, throttle: control.Throttle, buffer: memoryview) -> str:
    """From the cluster or disk unless pages stay in the page cache."""
    os.posix_fadvise(origin, 0, 0, os.POSIX_FADV_DONTNEED)
    summed = xxhash.xxh3_128()
    files = 1
    while count := os.readv(origin, [buffer]):
        summed.update(buffer[:count])
        throttle.step(files, count)
        files = 0
    if files:
        throttle.step(1, 0)
    return summed.hexdigest()


def _records(descriptor: int, throttle: control.Throttle) -> Iterator[bytes]:
    """Of each extent; ``cache.store.large`` makes the checksum of a large file of them."""
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    size = os.fstat(descriptor).st_size
    for extent in range(extents.count_of(size)):
        yield extents.record_of(extents.read(descriptor, size, extent))
        throttle.step(0, extents.EXTENT_BYTES)


# --- of a stored large file only what is bad is fetched again
#
# A bad extent is written over in place, which no other file of a tree ever is: the bytes are those
# that were stored, by their checksum, so no reader sees anything but right bytes come back. A
# source whose bytes have another checksum is no help: then the file is bad as a whole.

_SYNCED_EXTENTS = 64


def _repair(
    held: extents.Extents, bad: list[int], name: str, source: int, throttle: control.Throttle
) -> bool:
    """Whether all of them are good again."""
    try:
        origin = os.open(name, _FLAGS | os.O_NONBLOCK, dir_fd=source)
    except OSError as error:
        tree.raise_if_gone(error)
        return False
    with kit.files.closing(origin):
        if os.fstat(origin).st_size != held.size:
            return False
        for number, extent in enumerate(bad, 1):
            try:
                data = extents.read(origin, held.size, extent)
            except OSError as error:
                tree.raise_if_gone(error)
                return False
            if extents.record_of(data) != held.record(extent):
                return False
            times = os.fstat(held.data)
            extents.write_all(held.data, memoryview(data), held.span(extent)[0])
            os.utime(held.data, ns=(times.st_atime_ns, times.st_mtime_ns))
            if not number % _SYNCED_EXTENTS:  # the last sync has little to wait for
                os.fdatasync(held.data)
            throttle.beat()
    os.fdatasync(held.data)
    for extent in bad:
        throttle.beat()
        if not held.is_good(extent):
            return False
    return True


def _without_records(generation: int, stored: int, kept: str, throttle: control.Throttle) -> str:
    """The fault, '' when there is none; then the records are made again."""
    records = b"".join(_records(stored, throttle))
    if xxhash.xxh3_128_hexdigest(records) != kept:
        return "its bytes are not those that were stored"
    large.make_records(generation, stored, records)
    return ""
