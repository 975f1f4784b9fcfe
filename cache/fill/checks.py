"""The jobs of a worker that only look: stored files against their checksums and the source."""

import contextlib
import errno
import os
import stat
from typing import Any

from cache.fill import control, copying, entry, messages, tree
from cache.fill.entry import Entry

MOST_NAMED = 20  # of one directory's files that were not compared; all are counted


class NotComparedError(Exception):
    """The source's file cannot be read, which says nothing about the stored one.

    ``size``: bytes of the stored file, which is as its checksum says.
    """

    def __init__(self, error: OSError, size: int) -> None:
        super().__init__(f"cannot be read in the source: {copying.reason(error)}")
        self.size = size


class Checks:
    """Nothing here changes a file; recheck takes the mark from a directory that lacks entries."""

    def __init__(self, source: int, stored: int, throttle: control.Throttle) -> None:
        """``source`` and ``stored``: descriptors of the roots, which stay the worker's."""
        self.source = source
        self.tree = stored
        self.throttle = throttle
        self._buffer = memoryview(bytearray(copying.BLOCK))

    def recheck(self, job: dict[str, Any]) -> None:
        """Answer which of the directories that are said to be sealed lack entries or the mark."""
        missing = []
        for number, path, entries in job["directories"]:
            self.throttle.beat()
            try:
                with tree.opened(self.tree, path) as directory:
                    if path:
                        os.getxattr(directory, tree.OPAQUE)
                    if len(os.listdir(directory)) == entries:
                        continue
            except OSError:
                pass  # without its mark, or not there at all
            for depth in range(1, len(path) + 1):
                # Readers get what is missing from the source again, through every directory above.
                with contextlib.suppress(OSError), tree.opened(self.tree, path[:depth]) as above:
                    os.removexattr(above, tree.OPAQUE)
            missing.append(number)
        messages.answer({"did": "recheck", "missing": missing})

    def verify(self, job: dict[str, Any]) -> None:
        """Read a directory of the tree against its checksums, on request against the source."""
        bad: list[list[Any]] = []
        uncompared: list[list[str]] = []
        checked = [0, 0]
        stopped = False
        with contextlib.ExitStack() as stack:
            directory = stack.enter_context(tree.opened(self.tree, job["path"]))
            source: int | OSError | None = None
            if job["source"]:
                try:
                    source = stack.enter_context(tree.opened(self.source, job["path"]))
                except OSError as error:
                    if error.errno in (errno.ENOENT, *tree.SOURCE_GONE):
                        raise
                    source = error
            names = os.listdir(directory)
            if job["entries"] is not None and len(names) != job["entries"]:
                lost = tree.missing(self.source, job["path"], set(names))
                bad += [[item, "is missing in the store"] for item in lost]
            try:
                for name in names:
                    if stat.S_ISREG(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
                        try:
                            fault, size = self._verify_file(directory, name, source)
                        except NotComparedError as error:
                            fault, size = "", error.size
                            uncompared.append([name, str(error)])
                        checked[0] += 1
                        checked[1] += size
                        if fault:
                            bad.append([self._entry_of(name, job["path"], directory), fault])
            except control.Cancelled:
                stopped = True
        answer = {"bad": bad, "checked": checked, "stopped": stopped}
        answer |= {"uncompared": len(uncompared), "named": uncompared[:MOST_NAMED]}
        messages.answer({"did": "verify", "directory": job["directory"], **answer})

    def _entry_of(self, name: str, path: list[str], directory: int) -> Entry:
        """As the source has it now, else as the store has it."""
        try:
            with tree.opened(self.source, path) as source:
                return entry.of(name, os.stat(name, dir_fd=source, follow_symlinks=False))
        except OSError:
            return entry.of(name, os.stat(name, dir_fd=directory, follow_symlinks=False))

    def _verify_file(
        self, directory: int, name: str, source: int | OSError | None
    ) -> tuple[str, int]:
        """What is wrong with a stored file ('' when nothing is), and its size.

        ``source``: the source's directory to compare with, or why it cannot be had.
        NotComparedError when nothing is wrong but the source's file cannot be read.
        """
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        size = 0
        try:
            stored = os.open(name, flags, dir_fd=directory)
        except OSError as error:
            return f"cannot be opened in the store: {copying.reason(error)}", 0
        try:
            size = os.fstat(stored).st_size
            try:
                kept = os.getxattr(stored, tree.CHECKSUM).decode()
            except OSError:
                return "has no checksum in the store", size
            try:
                if copying.checksum(stored, self.throttle, self._buffer) != kept:
                    return "its bytes are not those that were stored", size
            except OSError as error:
                return f"cannot be read in the store: {copying.reason(error)}", size
            if source is not None:
                return self._compare(stored, kept, name, source), size
            return "", size
        finally:
            os.close(stored)

    def _compare(self, stored: int, kept: str, name: str, source: int | OSError) -> str:
        """What differs between a stored file and the source's; '' when nothing does.

        Only a file that is known to be another one, or known to be gone, is a difference: to
        replace or withdraw a good copy because its source cannot be read would lose it.
        """
        here = os.fstat(stored)
        try:
            xattrs = tree.xattrs_of(stored)
        except OSError as error:
            return f"its xattrs cannot be read in the store: {copying.reason(error)}"
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
            if copying.checksum(origin, self.throttle, self._buffer) != kept:
                return "differs from the source in its bytes"
        finally:
            os.close(origin)
        return ""
