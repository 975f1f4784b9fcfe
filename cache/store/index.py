"""The index of a generation: its directories, and the files that are still to copy.

A dataset may have ten million files, too many for the memory of a coordinator and too many to list
again after each restart. So what a scan found is kept in a sqlite file beside the tree.

It is only an index; the tree and its opaque marks are the truth. After a power cut a row may claim
more than the disk has, so the entries of a directory are counted in the tree before it is sealed.
A lost or damaged index is made again by a scan.

    directories  state: 0 found, 1 listed, 2 sealed (opaque). ``waiting`` counts the chunks that are
                 not committed and the subdirectories that are not sealed.
    chunks       up to CHUNK_ENTRIES entries of one directory that are to be copied (zlib of JSON)
    failures     entries that could not be copied, with the reason
    outside      directories with symbolic links that lead out of the tree: how many, and one
"""

import contextlib
import errno
import json
import sqlite3
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kit.formats
from cache.store import manifest, subset, tree
from cache.store.tree import Entry

FORMAT = 1
NAME = "index.sqlite"
CHUNK_ENTRIES = 256
ROOT = 1

SEALED = 2

# Priorities of chunks. Those below SILENT are not copied in turn.
NORMAL, SILENT, NO_ROOM, LARGE = 0, -1, -2, -3

_COLUMNS = (
    "files", "bytes", "done_files", "done_bytes", "skipped", "allocated",
)  # fmt: skip


def _counting(sign: str, row: str) -> str:
    changes = ", ".join(f"{name} = {name} {sign} {row}.{name}" for name in _COLUMNS)
    return (
        f"{changes}, directories = directories {sign} 1, sealed = sealed {sign} ({row}.state > 1)"
    )


def _moving() -> str:
    changes = ", ".join(f"{name} = {name} + NEW.{name} - OLD.{name}" for name in _COLUMNS)
    return f"{changes}, sealed = sealed + (NEW.state > 1) - (OLD.state > 1)"


# ``seen``: the listing that saw a directory last. ``shared``, ``shared_files``: of its files, what
# the generation before has too, in SSD bytes and files. Triggers count what changes, and forget
# parts of the manifest that a new listing makes again.
_SCHEMA = f"""
CREATE TABLE directories (
    id INTEGER PRIMARY KEY, parent INTEGER, name TEXT NOT NULL, attributes TEXT NOT NULL,
    state INTEGER NOT NULL DEFAULT 0, waiting INTEGER NOT NULL DEFAULT 0,
    entries INTEGER NOT NULL DEFAULT 0, files INTEGER NOT NULL DEFAULT 0,
    bytes INTEGER NOT NULL DEFAULT 0, done_files INTEGER NOT NULL DEFAULT 0,
    done_bytes INTEGER NOT NULL DEFAULT 0, allocated INTEGER NOT NULL DEFAULT 0,
    skipped INTEGER NOT NULL DEFAULT 0, failed INTEGER NOT NULL DEFAULT 0,
    rescans INTEGER NOT NULL DEFAULT 0, location TEXT, seen INTEGER NOT NULL DEFAULT 0,
    shared INTEGER NOT NULL DEFAULT 0, shared_files INTEGER NOT NULL DEFAULT 0,
    UNIQUE (parent, name));
CREATE INDEX directories_found ON directories (id) WHERE state = 0;
CREATE INDEX directories_sealable ON directories (id)
    WHERE state = 1 AND waiting = 0 AND failed = 0;
CREATE INDEX directories_rescans ON directories (id) WHERE rescans > 0;
CREATE TABLE chunks (
    id INTEGER PRIMARY KEY AUTOINCREMENT, directory INTEGER NOT NULL,
    priority INTEGER NOT NULL DEFAULT 0, files INTEGER NOT NULL, bytes INTEGER NOT NULL,
    allocated INTEGER NOT NULL, entries BLOB NOT NULL);
CREATE INDEX chunks_order ON chunks (priority DESC, id);
CREATE INDEX chunks_directory ON chunks (directory);
CREATE TABLE failures (
    directory INTEGER NOT NULL, name TEXT NOT NULL, reason TEXT NOT NULL, lasting INTEGER NOT NULL,
    PRIMARY KEY (directory, name)) WITHOUT ROWID;
CREATE TABLE manifest (
    id INTEGER PRIMARY KEY, directory INTEGER NOT NULL, entries BLOB NOT NULL);
CREATE INDEX manifest_directory ON manifest (directory);
CREATE TABLE totals (
    files INTEGER, bytes INTEGER, done_files INTEGER, done_bytes INTEGER, skipped INTEGER,
    allocated INTEGER, directories INTEGER, sealed INTEGER);
INSERT INTO totals VALUES (0, 0, 0, 0, 0, 0, 0, 0);
CREATE TRIGGER counted_new AFTER INSERT ON directories BEGIN
    UPDATE totals SET {_counting("+", "NEW")}; END;
CREATE TRIGGER counted_gone AFTER DELETE ON directories BEGIN
    UPDATE totals SET {_counting("-", "OLD")};
    DELETE FROM manifest WHERE directory = OLD.id; END;
CREATE TRIGGER counted_change
    AFTER UPDATE OF state, {", ".join(_COLUMNS)} ON directories BEGIN
    UPDATE totals SET {_moving()}; END;
CREATE TRIGGER listed_again AFTER UPDATE OF state ON directories WHEN NEW.state = 0
    BEGIN DELETE FROM manifest WHERE directory = NEW.id; END;
"""
# Added to an index that lacks it: an earlier agent does not miss it.
_LATER = (
    "CREATE TABLE IF NOT EXISTS outside (directory INTEGER PRIMARY KEY, links INTEGER NOT NULL, "
    "name TEXT NOT NULL)"
)
# As the fields of ``Totals``.
TOTALS = (
    "SELECT files, bytes, done_files, done_bytes, (SELECT count(*) FROM failures), skipped, "
    "directories, sealed, allocated FROM totals"
)


@dataclass(frozen=True)
class Totals(manifest.Counts):
    directories: int = 0
    sealed: int = 0
    allocated: int = 0  # SSD bytes of the stored files

    @property
    def used(self) -> int:
        """SSD bytes of the generation without its index."""
        return self.allocated + self.directories * 4096

    @property
    def inodes(self) -> int:
        """Of files and directories."""
        return self.done_files + self.directories


@dataclass(frozen=True)
class Chunk:
    id: int
    directory: int
    entries: list[Entry]
    priority: int = NORMAL


@dataclass(frozen=True)
class DirectoryRow:
    id: int
    parent: int | None
    attributes: Entry
    state: int
    entries: int
    rescans: int
    skipped: int  # sockets, fifos and devices
    bytes: int  # of the files directly in it, stored or not, as ``files``
    files: int
    location: tuple[str, int] | None  # where the objects of its files are, for reads past the mount
    shared: subset.Amount  # of its files, what the generation before has too

    @property
    def inside(self) -> subset.Amount:
        """Its files, stored or not."""
        return subset.Amount(self.bytes, self.files)


@dataclass(frozen=True)
class Part:
    """Entries of a directory: a part of the manifest, or a chunk that waits to be copied."""

    number: int
    waits: bool
    items: list[manifest.Item]


def encode(text: str) -> str:
    """A name as sqlite can store it: it refuses lone surrogates, JSON's escapes express them."""
    return json.dumps(text)[1:-1] if not text.isprintable() or "\\" in text else text


class Index:
    """One coordinator writes at a time. ``open`` replaces a damaged file, and never one of a
    newer format."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._db = connection

    @classmethod
    def open(cls, path: Path) -> "Index":
        try:
            return cls(connect(path))
        except sqlite3.DatabaseError as error:
            code = getattr(error, "sqlite_errorcode", None)
            if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_BUSY):
                raise  # it is not damaged
            cls.discard(path)
            return cls(connect(path))

    @staticmethod
    def discard(path: Path) -> None:
        """Delete it; the next scan makes another. OSError when a newer agent wrote it."""
        if path.exists():
            with (
                contextlib.suppress(sqlite3.Error),
                contextlib.closing(
                    sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
                ) as db,
            ):
                version = db.execute("PRAGMA user_version").fetchone()[0]
                if version > FORMAT:
                    raise _newer(path, version)
        for suffix in ("", "-wal", "-shm"):
            kit.formats.forget(path.with_name(path.name + suffix))

    @classmethod
    def read_only(cls, path: Path) -> "Index":
        """For reading, also while a coordinator writes. FileNotFoundError when there is none."""
        if not path.exists() or path.is_symlink():
            raise FileNotFoundError(2, "no index", str(path))
        return cls(sqlite3.connect(path, isolation_level=None, timeout=10.0))

    def close(self) -> None:
        self._db.close()

    def transaction(self) -> "sqlite3.Connection":
        """``with index.transaction():`` commits at the end, rolls back on an error."""
        self._db.execute("BEGIN")
        return self._db

    def _ids(self, query: str, *values: int) -> list[int]:
        return [int(row[0]) for row in self._db.execute(query, values)]

    def _update(self, directory: int, changes: str, *values: Any) -> None:
        self._db.execute(f"UPDATE directories SET {changes} WHERE id = ?", (*values, directory))

    def _row(self, query: str, *values: Any) -> Any:
        """The first row, or None when nothing matches."""
        return self._db.execute(query, values).fetchone()

    def add_root(self, root: Entry) -> None:
        self._db.execute(
            "INSERT OR IGNORE INTO directories (id, parent, name, attributes) "
            "VALUES (?, NULL, '', ?)",
            (ROOT, json.dumps(_fields(root))),
        )

    def add_directories(self, parent: int, entries: Iterable[Entry], listing: int = 0) -> None:
        """Add subdirectories that ``listing`` saw; a known one only gets its new attributes."""
        self._db.executemany(
            "INSERT INTO directories (parent, name, attributes, seen) VALUES (?, ?, ?, ?) "
            "ON CONFLICT (parent, name) DO UPDATE SET attributes = excluded.attributes,"
            " seen = excluded.seen",
            [
                (parent, encode(entry.name), json.dumps(_fields(entry)), listing)
                for entry in entries
            ],
        )

    def saw(self, parent: int, names: Iterable[str], listing: int) -> None:
        """``listing`` saw these subdirectories, which could not be made."""
        self._db.executemany(
            "UPDATE directories SET seen = ? WHERE parent = ? AND name = ?",
            [(listing, parent, encode(name)) for name in names],
        )

    def add_chunk(self, directory: int, entries: list[Entry], priority: int = NORMAL) -> None:
        self._db.execute(
            "INSERT INTO chunks (directory, priority, files, bytes, allocated, entries) "
            "VALUES (?, ?, ?, ?, ?, ?)",
            (directory, priority, *_packed(entries)),
        )

    def locate(self, directory: int, location: tuple[str, int]) -> None:
        """Remember where the objects of its files are, for reads past the mount."""
        self._update(directory, "location = ?", json.dumps(location))

    def restart_listing(self, directory: int) -> None:
        """Forget an unfinished or outdated listing of the directory."""
        self._db.execute("DELETE FROM chunks WHERE directory = ?", (directory,))
        self._db.execute("DELETE FROM failures WHERE directory = ?", (directory,))
        self._db.execute("DELETE FROM outside WHERE directory = ?", (directory,))
        self._update(
            directory,
            "state = 0, waiting = 0, entries = 0, files = 0, bytes = 0, done_files = 0, "
            "done_bytes = 0, allocated = 0, skipped = 0, failed = 0, shared = 0, shared_files = 0",
        )

    def listed(
        self, directory: int, *, entries: int, files: int, size: int, stored: tuple[int, int, int],
        skipped: int, outside: tuple[int, str] = (0, ""),
    ) -> None:  # fmt: skip
        """Its listing ended. ``stored``: files, bytes and SSD bytes that the tree had already.
        ``outside``: how many of its symbolic links lead out of the tree, and the name of one."""
        self._update(
            directory,
            "state = 1, entries = ?, files = ?, bytes = ?, "
            "done_files = done_files + ?, done_bytes = done_bytes + ?, "
            "allocated = allocated + ?, skipped = ?, failed = "
            "(SELECT count(*) FROM failures WHERE directory = directories.id), waiting = "
            "(SELECT count(*) FROM chunks WHERE directory = directories.id) + "
            "(SELECT count(*) FROM directories AS d "
            "WHERE d.parent = directories.id AND d.state < 2)",
            *(entries, files, size, *stored, skipped),
        )
        if outside[0]:
            row = (directory, outside[0], encode(outside[1]))
            self._db.execute("INSERT OR REPLACE INTO outside VALUES (?, ?, ?)", row)

    def committed(
        self, chunk: Chunk, files: int, size: int, allocated: int, failed: int, left: list[Entry]
    ) -> None:
        """A chunk is in the tree, except for what failed and what is ``left`` to copy."""
        if left:
            self._replace_chunk(chunk.id, left)
        else:
            self._db.execute("DELETE FROM chunks WHERE id = ?", (chunk.id,))
        self._update(
            chunk.directory,
            "done_files = done_files + ?, done_bytes = done_bytes + ?, "
            "allocated = allocated + ?, failed = failed + ?, waiting = waiting - ?",
            *(files, size, allocated, failed, 0 if left else 1),
        )

    def sealed(self, directory: int) -> None:
        """The directory is opaque; its parent waits for one less."""
        self._update(directory, "state = 2")
        self._db.execute(
            "UPDATE directories SET waiting = waiting - 1 "
            "WHERE id = (SELECT parent FROM directories WHERE id = ?)",
            (directory,),
        )

    def unseal(self, directory: int) -> None:
        """Take the seal from it and from every directory above."""
        current: int | None = directory
        while current is not None:
            row = self._row("SELECT state, parent FROM directories WHERE id = ?", current)
            if row is None or row[0] != SEALED:
                break
            self._update(current, "state = 1")
            current = row[1]
            if current is not None:
                self._update(current, "waiting = waiting + 1")

    def drop_vanished(self, directory: int, listing: int) -> None:
        """Delete the subdirectories that ``listing`` did not see, with all below."""
        query = "SELECT id FROM directories WHERE parent = ? AND seen != ?"
        for number in self._ids(query, directory, listing):
            below = (
                "WITH RECURSIVE below(id) AS (SELECT ? UNION ALL SELECT d.id FROM directories d "
                "JOIN below ON d.parent = below.id) "
            )
            for table in ("chunks", "failures", "outside", "directories"):
                key = "id" if table == "directories" else "directory"
                self._db.execute(
                    f"{below} DELETE FROM {table} WHERE {key} IN (SELECT id FROM below)", (number,)
                )

    def fail(self, directory: int, name: str, reason: str, *, lasting: bool) -> None:
        self._db.execute(
            "INSERT OR REPLACE INTO failures VALUES (?, ?, ?, ?)",
            (directory, encode(name), reason, int(lasting)),
        )

    def failures(self, limit: int, after: tuple[int, str] = (0, "")) -> list[tuple[int, str, str]]:
        """(directory, name, reason) in order, those after ``after``."""
        rows = self._db.execute(
            "SELECT directory, name, reason FROM failures WHERE (directory, name) > (?, ?) "
            "ORDER BY directory, name LIMIT ?",
            (after[0], encode(after[1]), limit),
        )
        return [(int(d), _decode(n), str(r)) for d, n, r in rows]

    def retriable(self, most_rescans: int) -> list[int]:
        """Directories with a failure that may be temporary, and with rescans left."""
        return self._ids(
            "SELECT DISTINCT d.id FROM directories d JOIN failures f ON f.directory = d.id "
            "WHERE f.lasting = 0 AND d.rescans < ?",
            most_rescans,
        )

    def try_again(self) -> list[int]:
        """For a new pass: there may be room again, what was silent may answer, and what failed in
        the directories that are returned may be there."""
        self._db.execute("UPDATE directories SET rescans = 0 WHERE rescans > 0")
        self._db.execute("UPDATE chunks SET priority = ? WHERE priority < ?", (NORMAL, NORMAL))
        return self._ids("SELECT DISTINCT directory FROM failures")

    def count_rescan(self, directory: int) -> None:
        self._update(directory, "rescans = rescans + 1")

    def count_failure(self, directory: int) -> None:
        """One more failure in it: it cannot be sealed."""
        self._update(directory, "failed = failed + 1")

    def directory(self, number: int) -> DirectoryRow:
        id, parent, attributes, *figures, location, size, files = self._row(
            "SELECT id, parent, attributes, state, entries, rescans, skipped, bytes, files,"
            " location, shared, shared_files FROM directories WHERE id = ?",
            number,
        )
        where = None if location is None else tuple(json.loads(location))
        entry, shared = Entry(*json.loads(attributes)), subset.Amount(size, files)
        return DirectoryRow(*(id, parent, entry, *figures, where, shared))

    def subdirectories(self, number: int) -> Iterator[Entry]:
        query = "SELECT attributes FROM directories WHERE parent = ?"
        return (Entry(*json.loads(row[0])) for row in self._db.execute(query, (number,)))

    def path(self, directory: int) -> list[str]:
        """The names from the root to it."""
        rows = self._db.execute(
            "WITH RECURSIVE up(id, parent, name, depth) AS ("
            "SELECT id, parent, name, 0 FROM directories WHERE id = ? UNION ALL "
            "SELECT d.id, d.parent, d.name, depth + 1 FROM directories d "
            "JOIN up ON d.id = up.parent) "
            "SELECT name FROM up WHERE parent IS NOT NULL ORDER BY depth DESC",
            (directory,),
        )
        return [_decode(row[0]) for row in rows]

    def find(self, path: list[str]) -> int | None:
        """The directory at ``path``, None when the index does not have it."""
        current = ROOT
        for name in path:
            query = "SELECT id FROM directories WHERE parent = ? AND name = ?"
            row = self._row(query, current, encode(name))
            if row is None:
                return None
            current = int(row[0])
        return current

    def found(self, limit: int) -> list[int]:
        """Directories that are not listed yet, in the order in which they were found."""
        return self._ids("SELECT id FROM directories WHERE state = 0 LIMIT ?", limit)

    def sealable(self, limit: int) -> list[int]:
        """Listed directories that wait for nothing and have no failure."""
        return self._ids(
            "SELECT id FROM directories WHERE state = 1 AND waiting = 0 AND failed = 0 LIMIT ?",
            limit,
        )

    def closable(self, below: int, limit: int) -> list[int]:
        """Listed directories beside the root all of whose own entries are stored, with a number
        less than ``below``, the highest first: a directory comes before the one that it is in."""
        return self._ids(
            "SELECT id FROM directories AS d WHERE id < ? AND id > ? AND state = 1 AND failed = 0 "
            "AND NOT EXISTS (SELECT 1 FROM chunks WHERE directory = d.id) ORDER BY id DESC LIMIT ?",
            below, ROOT, limit,
        )  # fmt: skip

    def grew(self, directory: int, size: int) -> None:
        """It takes ``size`` SSD bytes more."""
        self._update(directory, "allocated = allocated + ?", size)

    def known_directories(self, after: int, limit: int, *, listed: bool = False) -> list[int]:
        """With a number above ``after``, in order: a directory comes after the one that it is in.

        ``listed``: without those that are only found.
        """
        return self._ids(
            "SELECT id FROM directories WHERE id > ? AND state >= ? ORDER BY id LIMIT ?",
            after, int(listed), limit,
        )  # fmt: skip

    def every_directory(self) -> Iterator[int]:
        """As ``known_directories``; what is added meanwhile, too."""
        after = 0
        while numbers := self.known_directories(after, 256):
            yield from numbers
            after = numbers[-1]

    def next_chunks(self, limit: int) -> list[int]:
        """In the order in which they are copied, without those that do not fit."""
        return self._ids(
            "SELECT id FROM chunks WHERE priority > ? ORDER BY priority DESC, id LIMIT ?",
            NO_ROOM, limit,
        )  # fmt: skip

    def split(self, chunk: Chunk, apart: Callable[[Entry], bool]) -> None:
        """Have each entry that is to be ``apart`` in a chunk of its own."""
        alone = [entry for entry in chunk.entries if apart(entry)]
        rest = [entry for entry in chunk.entries if not apart(entry)]
        if rest:
            self._replace_chunk(chunk.id, rest)
        else:
            self._db.execute("DELETE FROM chunks WHERE id = ?", (chunk.id,))
        for entry in alone:
            self.add_chunk(chunk.directory, [entry], chunk.priority)
        more = len(alone) - (0 if rest else 1)
        self._update(chunk.directory, "waiting = waiting + ?", more)

    def set_priority(self, chunk: int, priority: int) -> None:
        self._db.execute("UPDATE chunks SET priority = ? WHERE id = ?", (priority, chunk))

    def large(self, limit: int) -> list[int]:
        return self._ids(
            "SELECT id FROM chunks WHERE priority = ? ORDER BY id LIMIT ?", LARGE, limit
        )

    def put_off(self, directory: int, entries: list[Entry], busy: set[int]) -> None:
        """Copy these entries, which a chunk had, when everything else is copied.

        They join others of their directory, for each chunk is waited for once. ``busy``: chunks
        that are being copied.
        """
        query = "SELECT id FROM chunks WHERE directory = ? AND priority = ? AND files <= ?"
        most = CHUNK_ENTRIES - len(entries)
        for number in self._ids(query, directory, SILENT, most):
            chunk = self.chunk(number)
            if chunk is not None and number not in busy:
                self._replace_chunk(number, chunk.entries + entries)
                return
        self.add_chunk(directory, entries, SILENT)
        self._update(directory, "waiting = waiting + 1")

    def _replace_chunk(self, number: int, entries: list[Entry]) -> None:
        self._db.execute(
            "UPDATE chunks SET files = ?, bytes = ?, allocated = ?, entries = ? WHERE id = ?",
            (*_packed(entries), number),
        )

    def lacking_room(
        self, limit: int, after: tuple[int, str] = (0, "")
    ) -> list[tuple[Chunk, Entry]]:
        """(chunk, entry) of what does not fit, those after (number of a chunk, name)."""
        found: list[tuple[Chunk, Entry]] = []
        query = "SELECT id FROM chunks WHERE priority = ? AND id >= ? ORDER BY id LIMIT ?"
        for number in self._ids(query, NO_ROOM, after[0], limit + 1):
            chunk = self.chunk(number)
            if chunk is None:  # copied or listed again meanwhile
                continue
            names = [entry.name for entry in chunk.entries]
            known = number == after[0] and after[1] in names
            rest = chunk.entries[names.index(after[1]) + 1 :] if known else chunk.entries
            found += [(chunk, entry) for entry in rest[: limit - len(found)]]
            if len(found) >= limit:
                break
        return found

    def chunk(self, number: int) -> Chunk | None:
        """None when it is committed, or its directory is listed again."""
        query = "SELECT id, directory, entries, priority FROM chunks WHERE id = ?"
        row = self._row(query, number)
        if row is None:
            return None
        entries = [Entry(*fields) for fields in json.loads(zlib.decompress(row[2]))]
        return Chunk(row[0], row[1], entries, row[3])

    # --- the manifest

    def keep(self, directory: int, items: list[manifest.Item]) -> None:
        """Add to the manifest what became of these entries of a directory."""
        if items:
            self._db.execute(
                "INSERT INTO manifest (directory, entries) VALUES (?, ?)",
                (directory, manifest.pack(items)),
            )

    def kept(self, directory: int) -> Iterator[manifest.Item]:
        """Its files and links: those of the manifest, and those that wait to be copied.

        ValueError for a damaged or newer part.
        """
        return (item for part in self.parts(directory) for item in part.items)

    def part(self, number: int) -> tuple[int, bytes] | None:
        """The directory of a part of the manifest, and its entries as ``manifest.unpack`` reads."""
        row = self._row("SELECT directory, entries FROM manifest WHERE id = ?", number)
        return None if row is None else (int(row[0]), bytes(row[1]))

    def last_number(self, table: str) -> int:
        """The highest number of a part or directory, 0 when the table is empty."""
        return int(self._row(f"SELECT coalesce(max(id), 0) FROM {table}")[0])

    def number_from(self, table: str, least: int) -> int:
        """The first one that is not below ``least``, which is at most the highest."""
        return self._ids(f"SELECT id FROM {table} WHERE id >= ? ORDER BY id LIMIT 1", least)[0]

    def left(self) -> tuple[int, int]:
        """Files and bytes that are still to copy."""
        files, size = self._row("SELECT sum(files), sum(bytes) FROM chunks")
        return files or 0, size or 0

    def totals(self) -> Totals:
        return Totals(*self._row(TOTALS))

    # --- what is shared with the generation before

    def shares(self, directory: int, taken: subset.Amount) -> None:
        """What a listing of the directory took over; a new listing forgets it."""
        self._update(directory, "shared = ?, shared_files = ?", taken.bytes, taken.inodes)

    def shared(self) -> subset.Amount:
        """SSD bytes and number of the files that are."""
        size, files = self._row("SELECT sum(shared), sum(shared_files) FROM directories")
        return subset.Amount(size or 0, files or 0)

    # --- evicting: entries move from the manifest back to what is to be copied

    def parts(self, directory: int) -> Iterator[Part]:
        """What was there at the first one; a part that is deleted meanwhile has no items.

        ValueError for a damaged or newer part of the manifest.
        """
        parts = self._ids("SELECT id FROM manifest WHERE directory = ? ORDER BY id", directory)
        waiting = self._ids("SELECT id FROM chunks WHERE directory = ?", directory)
        for number in parts:
            row = self._row("SELECT entries FROM manifest WHERE id = ?", number)
            yield Part(number, False, manifest.unpack(row[0]) if row is not None else [])
        for number in waiting:
            chunk = self.chunk(number)
            entries = chunk.entries if chunk is not None else []
            at_source = manifest.State.AT_SOURCE
            yield Part(number, True, [manifest.Item(entry, at_source) for entry in entries])

    def evict(
        self, directory: int, part: int, keep: list[manifest.Item], gone: Sequence[manifest.Item],
        allocated: int, shared: subset.Amount = subset.NOTHING,
    ) -> None:  # fmt: skip
        """Stored entries of a part are gone, and with them ``allocated`` SSD bytes.

        ``shared``: of them, what the generation before has too.
        """
        if keep:
            packed = manifest.pack(keep)
            self._db.execute("UPDATE manifest SET entries = ? WHERE id = ?", (packed, part))
        else:
            self._db.execute("DELETE FROM manifest WHERE id = ?", (part,))
        entries: list[Entry] = [item.entry for item in gone]
        self.add_chunk(directory, entries, NO_ROOM)
        size = sum(entry.size for entry in entries if entry.is_file)
        self._update(
            directory,
            "done_files = max(0, done_files - ?), done_bytes = max(0, done_bytes - ?), "
            "allocated = max(0, allocated - ?), waiting = waiting + 1, "
            "shared = max(0, shared - ?), shared_files = max(0, shared_files - ?)",
            *(len(entries), size, allocated, shared.bytes, shared.inodes),
        )

    def weighed(self, directory: int, files: int, size: int, allocated: int) -> None:
        """What the tree has in a directory."""
        self._update(
            directory, "done_files = ?, done_bytes = ?, allocated = ?", files, size, allocated
        )

    def make_durable(self) -> None:
        """Everything so far survives a power cut."""
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def outside(known: Index) -> tuple[int, str]:
    """How many links lead out of the tree, and the path of one, for people."""
    # sqlite gives the name of the row that has the least.
    links, first, name = known._row("SELECT sum(links), min(directory), name FROM outside")
    return (links, tree.shown([*known.path(first), _decode(name)])) if links else (0, "")


def connect(path: Path) -> sqlite3.Connection:
    """Open it for writing; makes a new one. DatabaseError when it is damaged."""
    if path.is_symlink():
        raise sqlite3.DatabaseError("it is a link")
    db = sqlite3.connect(path, isolation_level=None, timeout=10.0)
    try:
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")
        db.execute("PRAGMA cache_size=-8192")
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version == 0:
            db.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version={FORMAT}; COMMIT;")
        elif version > FORMAT:
            raise _newer(path, version)
        elif version != FORMAT:
            raise sqlite3.DatabaseError(f"index of format {version}")
        elif (said := db.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
            raise sqlite3.DatabaseError(said)
        db.execute(_LATER)
    except BaseException:
        db.close()
        raise
    return db


def _newer(path: Path, found: int) -> OSError:
    why = f"{NAME} was written by a newer agent (format {found}, this agent knows {FORMAT})"
    remedy = "run that version, or remove the dataset and fill it again"
    return OSError(errno.EPROTONOSUPPORT, f"{why}: {remedy}", str(path))


def _packed(entries: list[Entry]) -> tuple[int, int, int, bytes]:
    """Their number, bytes and SSD bytes, and the column that keeps them."""
    return (
        len(entries),
        sum(entry.size for entry in entries if entry.is_file),
        sum(entry.allocated for entry in entries),
        zlib.compress(json.dumps([_fields(entry) for entry in entries]).encode(), 1),
    )


def _fields(entry: Entry) -> tuple[Any, ...]:
    """Without holes as an earlier agent knows them."""
    return entry if entry.holes else entry[:-1]


def _decode(text: str) -> str:
    return str(json.loads(f'"{text}"')) if "\\" in text else text
