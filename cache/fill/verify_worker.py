"""What the workers of a verify do more than others: read stored files against their checksums."""

import contextlib
import errno
import os
import stat
import time
from collections.abc import Iterator

import kit.files
from cache.fill import commit, control, copy, direct, protocol, relist, verify_large
from cache.store import large, tree
from cache.store.tree import Entry

MOST_NAMED = 20  # uncompared files of one directory that are named; all are counted
# A damaged file system answers so, for what it lost or cannot read.
_BROKEN = (errno.ENOENT, errno.ENOTDIR, errno.EIO, errno.EUCLEAN, errno.EBADMSG, errno.ESTALE)
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC


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
        self._stored = direct.Reader(self.throttle)
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
                found.listed = relist.look(directory, names)
            self._ahead = [each for _, each in self._opened(job.ahead, job.path, stack)]
            self._also = list(self._opened(job.also, job.path, stack))
            self._verify_names(job, directory, names, source, found)
        return found

    def _verify_names(
        self, job: protocol.Verify, directory: int, names: list[str], source: int | OSError | None,
        found: protocol.Verified,
    ) -> None:  # fmt: skip
        """Those after ``job.after``, as far as patience goes."""
        ends = time.monotonic() + job.patience
        last = job.after
        for name in names:
            if name <= job.after:
                continue
            if job.patience and time.monotonic() > ends and last > job.after:
                found.left_after = last
                return
            try:
                self._verify_name(job, directory, name, source, found)
            except control.Cancelled:
                found.left_after = last
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

    def _verify_name(
        self, job: protocol.Verify, directory: int, name: str, source: int | OSError | None,
        found: protocol.Verified,
    ) -> None:  # fmt: skip
        try:
            status = os.stat(name, dir_fd=directory, follow_symlinks=False)
        except OSError as error:
            if error.errno not in _BROKEN:
                raise
            fault = f"cannot be looked up in the store: {copy.reason(error)}"
            found.bad.append((self._entry_of(name, job.path, directory), fault))
            return
        if not stat.S_ISREG(status.st_mode):
            return
        if any(tree.is_link(each, name, status) for each in self._ahead):
            found.checked_files += 1
            found.shared_files += 1
            self.throttle.step(1, 0)
            return
        try:
            fault, size = self._verify_file(job, directory, name, source, found)
            found.cached += self._stored.way == direct.CACHED
        except NotComparedError as error:
            fault, size = "", error.size
            found.uncompared += 1
            if found.uncompared <= MOST_NAMED:
                found.named.append((name, str(error)))
        found.checked_files += 1
        found.checked_bytes += size
        if fault:
            found.bad.append((self._entry_of(name, job.path, directory), fault))
            found.also += [
                (at, name) for at, each in self._also if tree.is_link(each, name, status)
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

    def _entry_of(self, name: str, path: list[str], directory: int) -> Entry:
        """As the source has it now, else as the store has it."""
        try:
            with tree.opened(self.source, path) as source:
                return tree.entry_of(name, os.stat(name, dir_fd=source, follow_symlinks=False))
        except OSError:
            pass
        try:
            return tree.entry_of(name, os.stat(name, dir_fd=directory, follow_symlinks=False))
        except OSError:  # neither can be read: only the name counts
            return Entry(name, stat.S_IFREG, 0, 0, 0, 0, 0, 1, True)

    def _verify_file(
        self, job: protocol.Verify, directory: int, name: str, source: int | OSError | None,
        found: protocol.Verified,
    ) -> tuple[str, int]:  # fmt: skip
        """What is wrong with a stored file ('' for a good one), and its size.

        ``source``: the source's directory to compare with, or why it cannot be opened.
        NotComparedError when the file is good and the source's cannot be read.
        """
        try:
            stored = os.open(name, _FLAGS, dir_fd=directory)
        except OSError as error:
            return f"cannot be opened in the store: {copy.reason(error)}", 0
        with kit.files.closing(stored):
            size = os.fstat(stored).st_size
            try:
                kept = os.getxattr(stored, tree.CHECKSUM).decode()
            except OSError:
                return "has no checksum in the store", size
            try:
                if job.afresh:  # jobs read their sources now: no page is missed
                    os.posix_fadvise(stored, 0, 0, os.POSIX_FADV_DONTNEED)
                if large.is_stored_so(stored):
                    checked = self._verify_large(job, directory, name, kept)
                    if checked.repaired:
                        found.repaired.append((name, checked.repaired))
                    if checked.fault:
                        return checked.fault, size
                elif self._stored.checksum(stored) != kept:
                    return "its bytes are not those that were stored", size
            except OSError as error:
                return f"cannot be read in the store: {copy.reason(error)}", size
            if source is not None:
                return self._compare(stored, kept, name, source), size
            return "", size

    def _verify_large(
        self, job: protocol.Verify, directory: int, name: str, kept: str
    ) -> verify_large.Checked:
        with contextlib.ExitStack() as stack:
            source = None
            if job.reachable:
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    source = stack.enter_context(tree.opened(self.source, job.path))
            return verify_large.check(self.generation, directory, name, kept, self.throttle, source)

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
            if error.errno in tree.SOURCE_GONE:
                raise
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
            by_extents = large.is_stored_so(stored)
            summed = copy.checksum(origin, self.throttle, self._buffer, by_extents=by_extents)
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
