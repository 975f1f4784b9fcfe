"""The jobs of a worker that only look: stored files against their checksums and the source."""

import contextlib
import os
import stat
from typing import Any

from cache.fill import control, copying, entry, messages, tree
from cache.fill.entry import Entry


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
        checked = [0, 0]
        stopped = False
        with contextlib.ExitStack() as stack:
            directory = stack.enter_context(tree.opened(self.tree, job["path"]))
            source = None
            if job["source"]:
                source = stack.enter_context(tree.opened(self.source, job["path"]))
            names = os.listdir(directory)
            if job["entries"] is not None and len(names) != job["entries"]:
                lost = tree.missing(self.source, job["path"], set(names))
                bad += [[item, "is missing in the store"] for item in lost]
            try:
                for name in names:
                    if stat.S_ISREG(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
                        fault, size = self._verify_file(directory, name, source)
                        checked[0] += 1
                        checked[1] += size
                        if fault:
                            bad.append([self._entry_of(name, job["path"], directory), fault])
            except control.Cancelled:
                stopped = True
        answer = {"bad": bad, "checked": checked, "stopped": stopped}
        messages.answer({"did": "verify", "directory": job["directory"], **answer})

    def _entry_of(self, name: str, path: list[str], directory: int) -> Entry:
        """As the source has it now, else as the store has it."""
        try:
            with tree.opened(self.source, path) as source:
                return entry.of(name, os.stat(name, dir_fd=source, follow_symlinks=False))
        except OSError:
            return entry.of(name, os.stat(name, dir_fd=directory, follow_symlinks=False))

    def _verify_file(self, directory: int, name: str, source: int | None) -> tuple[str, int]:
        """What is wrong with a stored file ('' when nothing is), and its size."""
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

    def _compare(self, stored: int, kept: str, name: str, source: int) -> str:
        """What differs between a stored file and the source's; '' when nothing does."""
        try:
            origin = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=source)
        except OSError as error:
            return f"cannot be opened in the source: {copying.reason(error)}"
        try:
            here, there = os.fstat(stored), os.fstat(origin)
            for what in ("st_size", "st_mode", "st_uid", "st_gid", "st_mtime_ns"):
                if getattr(here, what) != getattr(there, what):
                    return f"differs from the source in {what.removeprefix('st_')}"
            if tree.xattrs_of(stored) != tree.xattrs_of(origin):
                return "differs from the source in its xattrs"
            if copying.checksum(origin, self.throttle, self._buffer) != kept:
                return "differs from the source in its bytes"
        except OSError as error:
            return f"cannot be read in the source: {copying.reason(error)}"
        finally:
            os.close(origin)
        return ""
