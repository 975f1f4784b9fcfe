"""The generation that a pass works on: locked, its index open, and what it takes of the SSD."""

import contextlib
import os
import sqlite3
import stat
from collections.abc import Callable
from pathlib import Path

import kit.files
from cache.fill import agent, protocol, space
from cache.store import disk, index, large, subset, tree
from cache.store.subset import NOTHING, Amount

LOCK_SECONDS = 10.0
MOST_NOTES = 20

# What a generation takes of the SSD, also while its directories are listed again.
#
# The index forgets the figures of a directory until it is listed again, but its files are still
# there. So until all are listed, what was known before counts, plus what was added since.


def _size(path: str) -> int:
    """0 when there is no such file."""
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0


class Usage:
    """Of one pass. Bytes and inodes of the tree and the index."""

    def __init__(self, generation: Path) -> None:
        # As text: it is asked several times for each directory, and a Path costs more than a stat.
        self._index = [str(generation / f"{index.NAME}{end}") for end in ("", "-wal", "-shm")]
        self._before = self._added = NOTHING

    def now(self, totals: index.Totals) -> Amount:
        """SSD bytes and inodes. ``totals``: as the index knows them now."""
        known = Amount(totals.used + sum(map(_size, self._index)), totals.inodes)
        return known.at_least(self._before + self._added)

    def at_least(self, totals: index.Totals, least: Amount = NOTHING) -> None:
        """From now on it takes no less than now, nor than this, whatever the index knows of it."""
        self._before, self._added = self.now(totals).at_least(least), NOTHING

    def add(self, stored: Amount) -> None:
        """Something was stored since."""
        self._added += stored

    def all_listed(self) -> None:
        """The totals of the index are complete again."""
        self._before = self._added = NOTHING


class OpenGeneration:
    """Of one process: whoever has the lock of a generation works on it alone."""

    def __init__(self, task: protocol.Task) -> None:
        """OSError."""
        self.agent = agent.AgentChannel(task.limits)
        self.page = self.agent.page
        self.generation = Path(task.generation)
        # The coordinator of an agent that was killed may need a moment to end.
        self._lock = kit.files.lock(self.generation / "lock", LOCK_SECONDS)
        before = task.before if isinstance(task, protocol.FillTask) else ""
        self.tree_was_empty = self._prepare(fills=isinstance(task, protocol.FillTask))
        if self.tree_was_empty:
            index.Index.discard(self.generation / index.NAME)  # it describes another tree
        self.index = index.Index.open(self.generation / index.NAME)
        self.totals = self.index.totals()
        # Of what is used, what the generation before has too; nothing when that has gone.
        self.shared = self.index.shared() if task.beside or before else NOTHING
        self.usage = Usage(self.generation)
        # SSD bytes of what is copied in parts, and of records beside the tree.
        self.unplaced: Callable[[], int] = lambda: 0
        self._notes: set[str] = set()  # what the log has of this pass

    def _prepare(self, *, fills: bool) -> bool:
        """Make the folders, empty the staging folder; whether the tree is empty.

        Only a fill keeps the spare links. Another pass looks for bad files, and the fill after it
        must not give an inode that was found bad a name again.
        """
        with tree.opened_root(self.generation) as directory:
            tree.remove(directory, "staging")
            if not fills:
                tree.remove(directory, "links")
        for name in ("staging", "links", "tree", large.PARTS, large.RECORDS):
            (self.generation / name).mkdir(mode=0o700, exist_ok=True)
        with os.scandir(self.generation / "tree") as found:
            return next(found, None) is None

    # --- space

    def balance(self) -> Amount:
        """What is left, or negative, beside what is committed."""
        own = self._takes() - self.shared
        system = os.statvfs(self.generation)
        return space.balance(system, self.agent.limits, used=own.bytes, inodes=own.inodes)

    def tightest(self, lacks: Amount) -> str:
        """Why there is no room for ``lacks``, for operators."""
        own, system = self._takes() - self.shared, os.statvfs(self.generation)
        limits = self.agent.limits
        return space.tightest(system, limits, used=own.bytes, inodes=own.inodes, lacks=lacks)

    def left(self, *, room: int = 0, short: bool = False) -> protocol.FillEnd:
        """What the pass leaves behind. ``room``, ``short``: as in ``FillEnd``."""
        (files, size), takes, shared = self.index.left(), self._takes(), self.shared
        return protocol.FillEnd(
            takes.bytes, files, size, shared.bytes, shared.inodes, takes.inodes, room, short,
            *index.outside(self.index),
        )  # fmt: skip

    def _takes(self) -> Amount:
        """This generation, its directories, index and what it shares included."""
        return self.usage.now(self.totals) + Amount(self.unplaced())

    def used(self) -> int:
        """Its SSD bytes."""
        return self._takes().bytes

    def list_again(self, number: int) -> None:
        """Forget the figures of a directory until it is listed; its space still counts."""
        self.usage.at_least(self.totals)
        self.shares_less(self.index.directory(number).shared)
        self.index.restart_listing(number)

    def found_shared(self, number: int, stored: protocol.Stored) -> None:
        """What the listing of a directory took over from the generation before."""
        if stored.shared_files:
            taken = Amount(stored.shared, stored.shared_files)
            self.index.shares(number, taken)
            self.shared += taken

    def shares_less(self, gone: Amount) -> None:
        self.shared = (self.shared - gone).at_least(NOTHING)

    def all_listed(self) -> None:
        """Every directory is listed: the totals of the index are complete again."""
        self.totals = self.index.totals()
        self.usage.all_listed()

    def positions(self) -> subset.Positions:
        """Where its files stand among those that are kept; all directories are listed."""
        store, dataset = self.generation.parents[1], self.generation.parent.name
        key = subset.key_of(disk.uuid_of(str(store)), dataset)
        return subset.Positions(key, Amount(self.totals.bytes, self.totals.files))

    def note(self, text: str) -> None:
        """Have the agent log this."""
        agent.note(text)

    def note_once(self, text: str) -> None:
        """Each worker finds the same; the log has it once."""
        if text and text not in self._notes and len(self._notes) < MOST_NOTES:
            self._notes.add(text)
            self.note(text)


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


def serve(kind: type[agent.TaskT], run: Callable[[agent.TaskT], protocol.End]) -> None:
    """``agent.serve`` of a pass that has an index."""

    def guarded(task: agent.TaskT) -> protocol.End:
        try:
            return run(task)
        except sqlite3.DatabaseError as error:
            why = f"the index is damaged ({error}); the next pass makes it again"
            if error.sqlite_errorcode == sqlite3.SQLITE_FULL:
                why = "the disk is full, not even the index can grow"
            raise agent.Ended("failed", why) from error

    agent.serve(kind, guarded)
