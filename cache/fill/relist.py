"""Makes an index that was lost again from the tree, while a verify reads it.

What a scan knew of a directory, its names, can only be taken from what is there now. So the names
are compared with the source's where it answers, and the totals with those that generation.json has
kept: an index that was made again never hides a loss.

The root is marked as sealed last. Until then the index counts as lost, and a verify that was cut
short begins again.
"""

import contextlib
import os
import stat

from cache.fill import opened, protocol
from cache.store import generations, index, tree


def is_lost(run: opened.OpenGeneration) -> bool:
    """Whether the index lacks what a complete generation has."""
    if run.index.totals().directories == 0:
        return True
    kept = generations.load(str(run.generation)) or {}
    whole = run.index.directory(index.ROOT).state == index.SEALED
    return kept.get("state") == "complete" and not whole


def look(directory: int, names: list[str]) -> protocol.Relisted:
    """What the tree has in a directory. Names that cannot be looked up are left out."""
    found = protocol.Relisted(opaque=False, entries=len(names))
    with contextlib.suppress(OSError):
        # What is closed may lack files further down.
        found.opaque = tree.hides(directory) and not tree.is_closed(directory)
    for name in names:
        try:
            status = os.stat(name, dir_fd=directory, follow_symlinks=False)
        except OSError:
            continue  # the verify reports it
        item = tree.entry_of(name, status)
        if item.is_directory:
            found.folders.append(item)
            found.allocated += max(0, status.st_blocks * 512 - 4096) + item.name_bytes
            continue
        found.files += 1
        found.bytes += item.size if stat.S_ISREG(status.st_mode) else 0
        found.allocated += status.st_blocks * 512 + item.name_bytes
    return found


class Relisting:
    """The coordinator's part. Only directories with a mark count as listed: others may lack files,
    and the next fill lists them."""

    def __init__(self, run: opened.OpenGeneration) -> None:
        self._run = run
        self._index = run.index
        self._kept = generations.load(str(run.generation)) or {}
        self._complete = self._kept.get("state") == "complete"
        self._files = 0
        run.note("the index was lost; it is made again from the tree")
        with tree.opened_root(run.generation / "tree") as root:
            self._index.add_root(tree.entry_of("", os.fstat(root)))

    def take(self, number: int, found: protocol.Relisted) -> str:
        """What is wrong with the directory, '' for a good one."""
        self._files += found.files
        root = number == index.ROOT
        with self._index.transaction():
            self._index.add_directories(number, found.folders)
            if not found.opaque and not (root and self._complete):
                return "has lost its mark in the store" if self._complete else ""
            self._index.restart_listing(number)
            self._index.listed(
                number, entries=found.entries, files=found.files, size=found.bytes,
                stored=(found.files, found.bytes, found.allocated), skipped=0,
            )  # fmt: skip
            if not root:
                self._index.sealed(number)
        return ""

    def finish(self) -> None:
        """Everything was read: the index counts as whole from now on."""
        if self._complete:
            with self._index.transaction():
                self._index.sealed(index.ROOT)
            self._run.totals = self._index.totals()

    def lost(self) -> int:
        """Files that were stored and that the tree lacks; which ones is not known."""
        return max(0, int(self._kept.get("done_files", 0)) - self._files) if self._complete else 0
