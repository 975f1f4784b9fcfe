"""The evict pass: takes files out of the tree until what is left fits.

Which files stay follows from their paths (``cache.store.subset``). Three parts, because the agent
acts between them:

* *choose* reads the manifest and says which share fits budget and reserve, and how many stored
  files that takes out. It changes nothing.
* *marks* removes every opaque mark, so that what is taken out is read from the source. The agent
  then publishes a new overlay: the old one may have looked up directories with their marks.
* *files* deletes the files from the share on, and moves their entries from the manifest to what is
  left to copy.

A killed pass is done again from its beginning. A file that is gone already is found missing, and
its directory is weighed anew; one that came back with a power cut is deleted again. So the index is
exact afterwards, and no space is lost. The agent keeps in generation.json that an eviction is under
way.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

from cache.fill import closing, opened, protocol
from cache.fill.agent import Ended
from cache.store import index, large, manifest, subset, tree
from linux import syscalls

BLOCK = 4096  # SSD bytes that the index counts for a directory without names
# At most so many times what is lacking is taken out at once, where generations share files.
MOST_SHARED = 8
STORED = manifest.State.STORED


@dataclass(frozen=True, kw_only=True)
class EvictTask(protocol.Task):
    part: str  # choose, marks or files
    share: int = subset.ALL  # choose: what is kept now; files: what is to be kept


class Evict:
    """One part, in one process: deleting takes no workers."""

    def __init__(self, task: EvictTask) -> None:
        self._task = task
        self._run = opened.OpenGeneration(task)
        self._index = self._run.index
        self._run.agent.phase = "evicting"
        self._top = tree.open_root(self._run.generation)
        self._run.unplaced = lambda: large.used(self._top)
        self._positions = self._run.positions()
        self._files = 0  # files, or marks, that were taken out

    def run(self) -> protocol.End:
        try:
            match self._task.part:
                case "choose":
                    return protocol.End("chosen", evict=self._end(*self._choose()))
                case "marks":
                    self._unmark()
                case _:
                    self._delete()
            return protocol.End("evicted", evict=self._end())
        except ValueError as error:
            raise Ended("failed", f"the index cannot be used ({error})") from error
        finally:
            self._index.close()
            os.close(self._top)

    def _end(self, share: int = subset.ALL, beyond: int = 0) -> protocol.EvictEnd:
        self._report()
        return protocol.EvictEnd(self._run.left(), share, beyond, self._files)

    def _directories(self) -> Iterator[int]:
        for number in self._index.every_directory():
            yield number
            self._obey()

    # --- choose

    def _choose(self) -> tuple[int, int]:
        """The share that fits, and how many stored files it takes out."""
        histogram = subset.Histogram()
        for number in self._directories():
            path, inside = self._index.path(number), self._index.directory(number).inside
            for part in self._index.parts(number):
                positions = self._positions.of(path, inside, [item.entry for item in part.items])
                for at, item in zip(positions, part.items, strict=True):
                    stored = item.state is STORED
                    if stored or part.waits:
                        histogram.add(at, item.entry.allocated, stored=stored)
        totals = self._run.totals
        # What another generation has too frees nothing, so that more files must go to free as much.
        taken = max(totals.allocated - self._run.shared.bytes, totals.allocated // MOST_SHARED)
        share = histogram.share(self._run.balance(), taken)
        return share, histogram.stored_from(share)

    # --- marks

    def _unmark(self) -> None:
        """A directory comes after the one that it is in."""
        with tree.opened(self._top, ["tree"]) as root:
            for number in self._directories():
                # Of all directories: after a power cut the index may not know of a mark.
                self._files += _remove_mark(root, self._index.path(number))
                if self._index.directory(number).state == index.SEALED:
                    with self._index.transaction():
                        self._index.unseal(number)

    # --- files

    def _delete(self) -> None:
        with tree.opened(self._top, ["tree"]) as root:
            for number in self._directories():
                # A directory that is not in the tree is found by the next fill.
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    self._delete_in(root, number)
        rest = closing.Closing(self._run)
        while not rest.step():
            self._obey()
        self._report(syncing=True)
        syscalls.checked(syscalls.libc.syncfs(self._top), "syncfs")
        self._index.make_durable()
        self._run.totals = self._index.totals()

    def _delete_in(self, root: int, number: int) -> None:
        path, weigh, before = self._index.path(number), False, self._files
        inside = self._index.directory(number).inside
        with tree.opened(root, path) as directory:
            mtime_ns = os.fstat(directory).st_mtime_ns
            for part in self._index.parts(number):
                positions = self._positions.of(path, inside, [item.entry for item in part.items])
                pairs = zip(part.items, positions, strict=True)
                out = [item for item, at in pairs if at >= self._task.share]
                if part.waits:
                    self._delete_waiting(directory, path, out)
                elif gone := [item for item in out if item.state is STORED]:
                    weigh |= self._delete_stored(directory, number, part, gone)
                self._obey()
            if weigh or (self._files > before and _blocks(directory) > BLOCK):
                self._weigh(directory, number)
            os.utime(directory, ns=(mtime_ns, mtime_ns))

    def _delete_stored(
        self, directory: int, number: int, part: index.Part, gone: list[manifest.Item]
    ) -> bool:
        """Delete stored files of one part of the manifest; whether one was missing."""
        found = [self._unlink(directory, item.entry) for item in gone]
        freed = [each for each in found if each is not None]
        links = [size for _, size in freed if size is not None]
        shared = subset.Amount(sum(links), len(links))
        names = {item.entry.name for item in gone}
        keep = [item for item in part.items if item.entry.name not in names]
        with self._index.transaction():
            allocated = sum(size for size, _ in freed)
            self._index.evict(number, part.number, keep, gone, allocated, shared)
        self._run.shares_less(shared)
        self._files += len(gone)
        return None in found

    def _delete_waiting(self, directory: int, path: list[str], out: list[manifest.Item]) -> None:
        """What came back with a power cut, and what there is of large files that are not whole."""
        self._files += sum(self._unlink(directory, item.entry) is not None for item in out)
        for item in out:
            if large.is_large(item.entry):
                large.discard(self._top, large.key_of(path, item.entry))

    def _unlink(self, directory: int, entry: tree.Entry) -> tuple[int, int | None] | None:
        """Its SSD bytes as the index counts them, and those that another generation may have too;
        None when it is not there."""
        try:
            status = os.stat(entry.name, dir_fd=directory, follow_symlinks=False)
            if large.is_large(entry):
                large.forget(self._top, directory, entry.name)  # while the file tells which
            os.unlink(entry.name, dir_fd=directory)
        except FileNotFoundError:
            return None
        size = status.st_blocks * 512
        return size + entry.name_bytes, size if status.st_nlink > 1 else None

    def _weigh(self, directory: int, number: int) -> None:
        """Count what the tree really has in a directory. ext4 gives none of its blocks back."""
        names = os.listdir(directory)
        found = opened.look(directory, names)
        taken = sum(2 * (8 + len(os.fsencode(name))) for name in names)
        emptied = max(0, _blocks(directory) - BLOCK - taken)
        with self._index.transaction():
            self._index.weighed(number, found.files, found.bytes, found.allocated + emptied)

    # --- the agent

    def _obey(self) -> None:
        if self._run.agent.heed():
            self._report()

    def _report(self, *, syncing: bool = False) -> None:
        totals = self._run.totals = self._index.totals()
        self._run.agent.report(totals, self._run.used(), sealed=totals.sealed, syncing=syncing)


def _remove_mark(root: int, path: list[str]) -> bool:
    """Whether there was one. OSError when it stays: a file deleted below it would be ENOENT."""
    try:
        with tree.opened(root, path) as directory:
            # CLOSED alone: a fill took the other one away, which the overlay may remember.
            was, closed = tree.remove_mark(directory, tree.OPAQUE), tree.is_closed(directory)
            return (closed and tree.remove_mark(directory, tree.CLOSED)) or was
    except (FileNotFoundError, NotADirectoryError):
        return False


def _blocks(directory: int) -> int:
    return os.fstat(directory).st_blocks * 512


def main() -> None:
    opened.serve(EvictTask, lambda task: Evict(task).run())
