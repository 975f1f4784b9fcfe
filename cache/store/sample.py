"""A sample of what a generation has, compared with its source by status alone; no bytes are read.

For a source that is promised not to change. Each round goes on where the one before ended. Its
units are parts of the manifest (up to 256 files and links of one directory) and directories, whose
time changes when a name comes or goes. They come in steps of the golden section: a few rounds are
spread over the whole dataset, and as many as there are units see each of them once.

A unit that differed is looked at again in each round, so a source that was put right is no longer
accused. All that is remembered lies in the folder of the generation and is lost with it.
"""

import contextlib
import errno
import math
import os
import stat
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

import kit.errors
import kit.files
import kit.formats
from cache.store import index, manifest, tree
from cache.store.tree import Entry

NAME = "sample.json"
FORMAT = 1
# Units that are remembered because they differ, and that each round looks at again.
MOST_DIFFERING = 16
# After this long a round ends with the unit that it is at: a slow source is not to be asked longer.
ROUND_SECONDS = 20.0
_GOLDEN = (math.sqrt(5) - 1) / 2
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
_PARTS, _DIRECTORIES = "manifest", "directories"


@dataclass(frozen=True)
class Unit:
    """One that differed when it was looked at last."""

    table: str  # of the index
    number: int
    entries: int  # that differ
    path: str  # the first of them, for operators
    what: str  # differs


@dataclass(frozen=True)
class Seen:
    """``parts`` and ``directories``: how many were looked at, which is where it goes on."""

    parts: int = 0
    directories: int = 0
    at: float = 0.0  # Unix time of the last round
    entries: int = 0  # that it compared
    units: tuple[Unit, ...] = field(default=())

    @property
    def differing(self) -> int:
        """Entries that are known to differ."""
        return sum(unit.entries for unit in self.units)


def place(number: int, of: int) -> int:
    """Which of ``of`` places comes at ``number``; any ``of`` in a row are all of them. Pure."""
    step = max(1, round(of * _GOLDEN))
    while math.gcd(step, of) != 1:
        step += 1
    return number * step % of


def difference(kept: Entry, now: os.stat_result | None) -> str:
    """What the source shows otherwise than when it was listed, '' when nothing. Pure.

    ``now``: None when the name has gone. Inode numbers do not count: not every file system keeps
    them.
    """
    if now is None:
        return "it has gone"
    if stat.S_IFMT(kept.mode) != stat.S_IFMT(now.st_mode):
        return "it is of another type"
    if kept.size != now.st_size:
        return f"it has {now.st_size} bytes, and had {kept.size}"
    if kept.mtime_ns != now.st_mtime_ns:
        return "it was modified"
    if kept.ctime_ns != now.st_ctime_ns:
        return "its ctime is another one: content, owner, mode or links were changed"
    return ""


def seen_of(fields: dict[str, Any]) -> Seen:
    """From what ``look`` or ``load_all`` gave; what is of another version counts as nothing."""
    try:
        return msgspec.convert(fields, Seen)
    except msgspec.ValidationError:
        return Seen()


def load_all(folders: list[str]) -> list[dict[str, Any]]:
    """What is remembered of each generation. In a child process: the disk may hang."""
    return [_load(folder) for folder in folders]


def _load(folder: str) -> dict[str, Any]:
    try:
        return kit.formats.load(Path(folder) / NAME, FORMAT)
    except kit.errors.HostError:
        return {}  # a newer agent's: nothing of it is needed


def _save(folder: str, seen: Seen) -> None:
    kit.formats.save(str(Path(folder) / NAME), asdict(seen), FORMAT)


def look(folder: str, source: str, stamp: str, entries: int) -> dict[str, Any]:
    """One round over about ``entries`` of them; the fields of ``Seen``. OSError, sqlite3.Error.

    In a child process: the source may hang. So where the next round goes on is written before the
    source is asked: that round does not meet what hung in this one.
    """
    seen = seen_of(_load(folder))
    with (
        contextlib.closing(index.Index.read_only(Path(folder) / index.NAME)) as opened,
        tree.opened_root(Path(folder) / "tree") as stored,
        kit.files.closing(tree.open_source(source, stamp)) as origin,
    ):
        comparing = _Comparing(opened, stored, origin, time.monotonic() + ROUND_SECONDS)
        parts = coming(opened, _PARTS, seen.parts, entries)
        folders = coming(opened, _DIRECTORIES, seen.directories, max(16, entries // 8))
        ahead = seen.parts + len(parts), seen.directories + len(folders)
        _save(folder, replace(seen, parts=ahead[0], directories=ahead[1]))
        looked = comparing.take(_PARTS, parts, lambda: comparing.entries >= entries)
        listed = comparing.take(_DIRECTORIES, folders, lambda: False)
        compared = comparing.entries
        for unit in seen.units:
            comparing.take(unit.table, [unit.number], lambda: False)
    units = tuple(comparing.units[key] for key in sorted(comparing.units))[:MOST_DIFFERING]
    # What could not be looked at again stays as it was known.
    left = [unit for unit in seen.units if (unit.table, unit.number) not in comparing.looked]
    now = Seen(
        parts=seen.parts + max(1, looked), directories=seen.directories + max(1, listed),
        at=time.time(), entries=compared, units=(*units, *left)[:MOST_DIFFERING],
    )  # fmt: skip
    _save(folder, now)
    return asdict(now)


def coming(opened: index.Index, table: str, done: int, most: int) -> list[int]:
    """Numbers of the next units; at most ``most``, and none twice."""
    last = opened.last_number(table)
    places = (place(done + each, last) for each in range(min(most, last)))
    return list(dict.fromkeys(opened.number_from(table, 1 + each) for each in places))


class _Comparing:
    """One round. ``units``: those that differ; ``looked``: all that were looked at."""

    def __init__(self, opened: index.Index, stored: int, origin: int, until: float) -> None:
        self._index = opened
        self._stored = stored
        self._origin = origin
        self._until = until
        self.entries = 0
        self.units: dict[tuple[str, int], Unit] = {}
        self.looked: set[tuple[str, int]] = set()

    def take(self, table: str, numbers: list[int], enough: Callable[[], bool]) -> int:
        """Look at these until it is enough or too late; how many."""
        for count, number in enumerate(numbers):
            if enough() or time.monotonic() >= self._until:
                return count
            if (table, number) in self.looked:
                continue
            try:
                found = self._part(number) if table == _PARTS else self._directory(number)
            except OSError as error:
                tree.raise_if_gone(error)
                continue  # it cannot be read now, which is no difference
            except ValueError:
                continue  # a damaged part, or a newer agent's
            self.looked.add((table, number))
            if found:
                path, what = found[0]
                self.units[table, number] = Unit(table, number, len(found), path, what)
        return len(numbers)

    def _part(self, number: int) -> list[tuple[str, str]]:
        """(path, what) of each entry that differs. OSError of the source, ValueError."""
        part = self._index.part(number)
        if part is None:
            return []  # its directory was listed again
        above, items = self._index.path(part[0]), manifest.unpack(part[1])
        self.entries += len(items)
        found = []
        with contextlib.ExitStack() as stack:
            try:
                directory = stack.enter_context(tree.opened(self._origin, above))
            except OSError as error:
                if error.errno not in _GONE:
                    raise
                return [(_shown([*above, item.entry.name]), "it has gone") for item in items]
            for item in items:
                what = difference(item.entry, tree.status(directory, item.entry.name))
                found += [(_shown([*above, item.entry.name]), what)] if what else []
        return found

    def _directory(self, number: int) -> list[tuple[str, str]]:
        """The tree has the time that the source's directory had when it was listed."""
        path = self._index.path(number)
        if not path and number != index.ROOT:
            return []  # it was listed again
        with tree.opened(self._stored, path) as kept:
            was = os.fstat(kept).st_mtime_ns
        try:
            with tree.opened(self._origin, path) as directory:
                now = os.fstat(directory).st_mtime_ns
        except OSError as error:
            if error.errno not in _GONE:
                raise
            return [(_shown(path), "it has gone")]
        return [(_shown(path), "names in it have come or gone")] if now != was else []


def _shown(path: list[str]) -> str:
    return tree.shown(path) or "."
