"""The worker's checks: are seals true, and are stored files as their checksums and the source say?

Nothing here changes a file. A recheck removes the marks above a directory that lacks entries, so
that readers get them from the source again.
"""

import contextlib
import errno
import os
import stat

from cache.fill import copy, messages
from cache.store import tree
from cache.store.tree import Entry

MOST_NAMED = 20  # uncompared files of one directory that are named; all are counted


class NotComparedError(Exception):
    """The source's file cannot be read; the stored one agrees with its checksum.

    ``size``: bytes of the stored file.
    """

    def __init__(self, error: OSError, size: int) -> None:
        super().__init__(f"cannot be read in the source: {copy.reason(error)}")
        self.size = size


class Checks:
    """``source`` and ``stored``: descriptors of the roots, owned by the worker."""

    def __init__(self, source: int, stored: int, throttle: messages.Throttle) -> None:
        self.source = source
        self.tree = stored
        self.throttle = throttle
        self._buffer = memoryview(bytearray(copy.BLOCK))

    def recheck(self, job: messages.Recheck) -> None:
        missing = []
        for number, path, entries in job.directories:
            self.throttle.beat()
            try:
                with tree.opened(self.tree, path) as directory:
                    if path:
                        os.getxattr(directory, tree.OPAQUE)
                    if len(os.listdir(directory)) == entries:
                        continue
            except OSError:
                pass  # it has no mark, or does not exist
            for depth in range(1, len(path) + 1):
                # Every mark above it would hide the source's entries from readers too.
                with contextlib.suppress(OSError), tree.opened(self.tree, path[:depth]) as above:
                    os.removexattr(above, tree.OPAQUE)
            missing.append(number)
        messages.answer(messages.Rechecked(missing=missing))

    def verify(self, job: messages.Verify) -> None:
        bad: list[tuple[Entry, str]] = []
        uncompared: list[tuple[str, str]] = []
        checked_files = checked_bytes = 0
        with contextlib.ExitStack() as stack:
            directory = stack.enter_context(tree.opened(self.tree, job.path))
            source: int | OSError | None = None
            if job.against_source:
                try:
                    source = stack.enter_context(tree.opened(self.source, job.path))
                except OSError as error:
                    if error.errno in (errno.ENOENT, *tree.SOURCE_GONE):
                        raise
                    source = error
            names = os.listdir(directory)
            if job.entries is not None and len(names) != job.entries:
                lost = tree.entries_beside(self.source, job.path, set(names))
                bad += [(item, "is missing in the store") for item in lost]
            with contextlib.suppress(messages.Cancelled):
                for name in names:
                    if stat.S_ISREG(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
                        try:
                            fault, size = self._verify_file(directory, name, source)
                        except NotComparedError as error:
                            fault, size = "", error.size
                            uncompared.append((name, str(error)))
                        checked_files += 1
                        checked_bytes += size
                        if fault:
                            bad.append((self._entry_of(name, job.path, directory), fault))
        messages.answer(
            messages.Verified(
                checked_files=checked_files,
                checked_bytes=checked_bytes,
                bad=bad,
                uncompared=len(uncompared),
                named=uncompared[:MOST_NAMED],
            )
        )

    def _entry_of(self, name: str, path: list[str], directory: int) -> Entry:
        """As the source has it now, else as the store has it."""
        try:
            with tree.opened(self.source, path) as source:
                return tree.entry_of(name, os.stat(name, dir_fd=source, follow_symlinks=False))
        except OSError:
            return tree.entry_of(name, os.stat(name, dir_fd=directory, follow_symlinks=False))

    def _verify_file(
        self, directory: int, name: str, source: int | OSError | None
    ) -> tuple[str, int]:
        """What is wrong with a stored file ('' for a good one), and its size.

        ``source``: the source's directory to compare with, or why it cannot be opened.
        NotComparedError when the file is good and the source's cannot be read.
        """
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        size = 0
        try:
            stored = os.open(name, flags, dir_fd=directory)
        except OSError as error:
            return f"cannot be opened in the store: {copy.reason(error)}", 0
        try:
            size = os.fstat(stored).st_size
            try:
                kept = os.getxattr(stored, tree.CHECKSUM).decode()
            except OSError:
                return "has no checksum in the store", size
            try:
                if copy.checksum(stored, self.throttle, self._buffer) != kept:
                    return "its bytes are not those that were stored", size
            except OSError as error:
                return f"cannot be read in the store: {copy.reason(error)}", size
            if source is not None:
                return self._compare(stored, kept, name, source), size
            return "", size
        finally:
            os.close(stored)

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
            return self._difference(here, xattrs, kept, name, source)
        except FileNotFoundError:
            return "is not in the source"
        except OSError as error:
            if error.errno == errno.ELOOP:
                return "is a symbolic link in the source"
            if error.errno in tree.SOURCE_GONE:
                raise
            raise NotComparedError(error, here.st_size) from error

    def _difference(
        self, here: os.stat_result, xattrs: dict[str, bytes], kept: str, name: str, source: int
    ) -> str:
        """OSError of the source's file only."""
        origin = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=source)
        try:
            there = os.fstat(origin)
            for what in ("st_size", "st_mode", "st_uid", "st_gid", "st_mtime_ns"):
                if getattr(here, what) != getattr(there, what):
                    return f"differs from the source in {what.removeprefix('st_')}"
            if xattrs != tree.xattrs_of(origin):
                return "differs from the source in its xattrs"
            if copy.checksum(origin, self.throttle, self._buffer) != kept:
                return "differs from the source in its bytes"
        finally:
            os.close(origin)
        return ""
