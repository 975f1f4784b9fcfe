"""What a generation takes over from the one before it: links of files that have not changed.

The manifest of the generation before (``cache.store.manifest``) tells which version of each file it
has. A file is the same when the source shows the same inode, size, mtime and ctime, and the same
change version where both have one: a ``cp -p`` over a file, a chmod or a chown changes the ctime,
so such a file is copied again. Links share one inode with owner, mode, times and xattrs.

What is certain only with a change version: a file whose ctime is no older than the snapshot of the
generation before, less ``MARGIN_NS``. It may have changed again within one tick of a clock.

Invariant: a link is made only of a file that the generation before has stored, so its bytes are
durable already, and that is not on its list of bad files: a fill that replaces a bad file would get
it back.
"""

import contextlib
import os
import sqlite3
from collections.abc import Sequence
from pathlib import Path

from cache.store import generations, index, manifest, tree
from cache.store.tree import Entry

MARGIN_NS = 1_000_000_000
# Names of one directory that are compared, about 250 bytes each; further ones are copied again.
MOST_COMPARED = 200_000


class Shared:
    """The generation before, read only. One worker uses it."""

    def __init__(self, folder: str, made_ns: int) -> None:
        """``made_ns``: when the snapshot that it was filled from was made; 0: not known.

        OSError, sqlite3.Error when it cannot be read.
        """
        self._made_ns = made_ns
        listed = generations.grouped(generations.read_quarantined(Path(folder)))
        self._bad = {path: frozenset(names) for path, names in listed.items()}
        self._tree = tree.open_root(Path(folder) / "tree")
        try:
            self._index = index.Index.read_only(Path(folder) / index.NAME)
        except BaseException:
            os.close(self._tree)
            raise

    def directory(
        self, path: Sequence[str], stack: contextlib.ExitStack
    ) -> "SharedDirectory | None":
        """What it has at ``path``, until the end of ``stack``; None when nothing can be shared."""
        with contextlib.suppress(OSError, ValueError, sqlite3.Error):
            number = self._index.find(list(path))
            if number is None:
                return None
            descriptor = stack.enter_context(tree.opened(self._tree, path))
            found: dict[str, manifest.Item] = {}
            bad = self._bad.get(tuple(path), ())
            for item in self._index.kept(number):
                good = item.state is manifest.State.STORED and item.entry.name not in bad
                if good and len(found) < MOST_COMPARED:
                    found[item.entry.name] = item
            return SharedDirectory(descriptor, found, self._made_ns)
        return None


class SharedDirectory:
    def __init__(self, descriptor: int, items: dict[str, manifest.Item], made_ns: int) -> None:
        self._descriptor = descriptor
        self._items = items
        self._made_ns = made_ns

    def link(self, item: Entry, target: int) -> tuple[str, os.stat_result] | None:
        """Make ``item`` in the directory ``target`` a link of the same version of it.

        Its checksum and status, None when it has to be copied.
        """
        before = self._items.pop(item.name, None)
        if before is None or not same_version(before.entry, item, self._made_ns):
            return None
        try:
            stored = os.stat(item.name, dir_fd=self._descriptor, follow_symlinks=False)
            if not tree.same_content(item, stored) or stored.st_mode != item.mode:
                return None  # it was replaced, or lost its bytes
            os.link(
                item.name, item.name, src_dir_fd=self._descriptor, dst_dir_fd=target,
                follow_symlinks=False,
            )  # fmt: skip
        except OSError:
            return None  # it has gone, or has too many names: it is copied
        return before.checksum, stored

    def is_shared(self, name: str, stored: os.stat_result) -> bool:
        """Whether a file of the new tree is a link of this one's."""
        return tree.is_link(self._descriptor, name, stored)


def same_version(before: Entry, now: Entry, made_ns: int) -> bool:
    """Whether the source shows the version of a file that was stored before. Pure."""
    looks = (before.mode, before.uid, before.gid, before.size, before.mtime_ns, before.ctime_ns)
    if looks != (now.mode, now.uid, now.gid, now.size, now.mtime_ns, now.ctime_ns):
        return False
    if before.ctime_ns == 0 or (before.ino ^ now.ino) & tree.INODE_BITS:
        return False
    if before.change and now.change:
        return before.change == now.change
    return not made_ns or before.ctime_ns < made_ns - MARGIN_NS
