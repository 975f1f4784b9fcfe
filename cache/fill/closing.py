"""Closes directories of a generation that stays partial.

In a directory that store and source both show, the kernel asks the source for each path that goes
through it, also on the way to a stored file: with a source that hangs or is dead, these fail too.
So what an ended pass leaves in part is closed as far as it can be: a directory all of whose names
are in the tree is opaque from then on, whatever is missing below them. A subdirectory that is not
opaque itself says by ``trusted.overlay.redirect`` where the source has its other side, which
readers would not find below an opaque parent.

Invariant: a directory without a mark, in an opaque one, has that redirect. So who takes a mark away
takes all above it away before, and here subdirectories come first. A redirect is right for ever,
for the tree moves no directory.
"""

import contextlib
import errno
import os
import time

from cache.fill import opened
from cache.store import tree
from cache.store.subset import Amount
from linux import mountinfo, syscalls

AT_ONCE = 64  # directories
STEP_SECONDS = 0.2  # after which answers are looked at again
# What file systems say of an xattr that they cannot hold; ext4 of one above a block ENOSPC.
TOO_LONG = (errno.ENOSPC, errno.EDQUOT, errno.E2BIG, errno.ERANGE)


class Closing:
    """Part of a coordinator, while no worker has anything to do."""

    def __init__(self, run: opened.OpenGeneration) -> None:
        self._run = run
        self._index = run.index
        self._below = self._index.last_number("directories") + 1
        with tree.opened_root(run.generation) as folder:
            self._ordered = mountinfo.keeps_order(folder)
        self._ready: set[int] = set()  # inodes of what is marked next
        self._grew = 0  # SSD bytes of the last mark: most lie in the inode and take none

    def step(self) -> bool:
        """Some of what is left; whether all is done. OSError of the store."""
        until = time.monotonic() + STEP_SECONDS
        with tree.opened_root(self._run.generation / "tree") as root:
            while time.monotonic() < until:
                numbers = self._index.closable(self._below, AT_ONCE)
                if not numbers:
                    self._run.totals = self._index.totals()
                    return True
                self._close(root, numbers)
                self._below = numbers[-1]
        return False

    def _close(self, root: int, numbers: list[int]) -> None:
        self._ready.clear()
        ready = []
        for number in numbers:
            path = self._index.path(number)
            # What the index claims and the tree lacks is found by the next fill.
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                if self._is_ready(root, number, path):
                    ready.append((number, path))
            self._run.page.beat(0)
        if ready and not self._ordered:
            # A mark must not survive a power cut that a name or a redirect below it does not.
            syscalls.checked(syscalls.libc.syncfs(root), "syncfs")
        for number, path in ready:
            parent = self._index.directory(number).parent
            assert parent is not None  # the root is never ready
            with tree.opened(root, path) as directory:
                if self._set(directory, tree.CLOSED, b"y", parent):
                    self._set(directory, tree.OPAQUE, b"y", parent)

    def _is_ready(self, root: int, number: int, path: list[str]) -> bool:
        """Whether it is to be marked: all of its names are there, and all below is found."""
        with tree.opened(root, path) as directory:
            if tree.hides(directory):
                return False
            folders, count = [], 0
            with os.scandir(directory) as found:
                for item in found:
                    count += 1
                    if item.is_dir(follow_symlinks=False):
                        folders.append(item.name)
            if count != self._index.directory(number).entries:
                return False
            if not all(self._redirect(directory, number, [*path, name]) for name in folders):
                return False
            self._ready.add(os.fstat(directory).st_ino)
        return True

    def _redirect(self, parent: int, number: int, path: list[str]) -> bool:
        """Whether the last name of ``path`` is found below an opaque parent from now on."""
        with tree.opened(parent, path[-1:]) as directory:
            if os.fstat(directory).st_ino in self._ready or tree.hides(directory):
                return True
            return self._set(directory, tree.REDIRECT, os.fsencode("/" + "/".join(path)), number)

    def _set(self, directory: int, name: str, value: bytes, parent: int) -> bool:
        """Set an xattr of a directory, which the index counts in ``parent``; False without room."""
        if self._run.balance().bytes < self._grew:
            return False
        before = os.fstat(directory).st_blocks
        try:
            os.setxattr(directory, name, value)
        except OSError as error:
            if error.errno not in TOO_LONG:
                raise
            return False
        self._grew = (os.fstat(directory).st_blocks - before) * 512
        if self._grew > 0:
            with self._index.transaction():
                self._index.grew(parent, self._grew)
            self._run.usage.add(Amount(self._grew))
            self._run.totals = self._index.totals()
        return True
