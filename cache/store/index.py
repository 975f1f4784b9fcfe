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
    ahead        files that a hint stored before the commit of their chunk, with their bytes on the
                 SSD. The commit of the chunk counts them and deletes the rows.
"""

import contextlib
import dataclasses
import errno
import json
import sqlite3
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cache.store.tree import Entry

FORMAT = 1
NAME = "index.sqlite"
CHUNK_ENTRIES = 256
ROOT = 1

SEALED = 2

_SCHEMA = """
CREATE TABLE directories (
    id INTEGER PRIMARY KEY, parent INTEGER, name TEXT NOT NULL, attributes TEXT NOT NULL,
    state INTEGER NOT NULL DEFAULT 0, waiting INTEGER NOT NULL DEFAULT 0,
    entries INTEGER NOT NULL DEFAULT 0, files INTEGER NOT NULL DEFAULT 0,
    bytes INTEGER NOT NULL DEFAULT 0, done_files INTEGER NOT NULL DEFAULT 0,
    done_bytes INTEGER NOT NULL DEFAULT 0, allocated INTEGER NOT NULL DEFAULT 0,
    skipped INTEGER NOT NULL DEFAULT 0, failed INTEGER NOT NULL DEFAULT 0,
    rescans INTEGER NOT NULL DEFAULT 0, location TEXT, UNIQUE (parent, name));
CREATE INDEX directories_found ON directories (id) WHERE state = 0;
CREATE TABLE chunks (
    id INTEGER PRIMARY KEY AUTOINCREMENT, directory INTEGER NOT NULL,
    priority INTEGER NOT NULL DEFAULT 0, files INTEGER NOT NULL, bytes INTEGER NOT NULL,
    allocated INTEGER NOT NULL, entries BLOB NOT NULL);
CREATE INDEX chunks_order ON chunks (priority DESC, id);
CREATE INDEX chunks_directory ON chunks (directory);
CREATE TABLE failures (
    directory INTEGER NOT NULL, name TEXT NOT NULL, reason TEXT NOT NULL, lasting INTEGER NOT NULL,
    PRIMARY KEY (directory, name)) WITHOUT ROWID;
"""
# Added after the first indexes of this format, which also have an unused table `meta`.
_AHEAD = """
CREATE TABLE IF NOT EXISTS ahead (
    directory INTEGER NOT NULL, name TEXT NOT NULL, bytes INTEGER NOT NULL,
    PRIMARY KEY (directory, name)) WITHOUT ROWID;
"""


@dataclass(frozen=True)
class Counts:
    """How much there is and what became of it.

    Files are all entries but directories; bytes are of regular files.
    """

    files: int = 0
    bytes: int = 0
    done_files: int = 0
    done_bytes: int = 0
    failed: int = 0
    skipped: int = 0

    def counts(self) -> dict[str, int]:
        """Only these figures, without those that a subclass adds."""
        return {each.name: getattr(self, each.name) for each in dataclasses.fields(Counts)}


@dataclass(frozen=True)
class Totals(Counts):
    directories: int = 0
    sealed: int = 0
    allocated: int = 0  # SSD bytes of the stored files, those ahead of their chunk included

    @property
    def used(self) -> int:
        """SSD bytes of the generation without its index."""
        return self.allocated + self.directories * 4096


@dataclass(frozen=True)
class Chunk:
    id: int
    directory: int
    entries: list[Entry]


@dataclass(frozen=True)
class Directory:
    id: int
    parent: int | None
    attributes: Entry
    state: int
    entries: int
    rescans: int


def _encode(text: str) -> str:
    """As sqlite can store it: it refuses lone surrogates, JSON's escapes express them."""
    return json.dumps(text)[1:-1] if not text.isprintable() or "\\" in text else text


class Index:
    """One coordinator writes at a time. ``open`` replaces a damaged or outdated file, and never
    one of a newer format."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._db = connection

    @classmethod
    def open(cls, path: Path) -> "Index":
        try:
            return cls(cls._connect(path))
        except sqlite3.DatabaseError:
            cls.discard(path)
            return cls(cls._connect(path))

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
            path.with_name(path.name + suffix).unlink(missing_ok=True)

    @classmethod
    def read_only(cls, path: Path) -> "Index":
        """For reading, also while a coordinator writes. FileNotFoundError when there is none."""
        if not path.exists():
            raise FileNotFoundError(2, "no index", str(path))
        return cls(sqlite3.connect(path, isolation_level=None, timeout=10.0))

    @staticmethod
    def _connect(path: Path) -> sqlite3.Connection:
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
            db.execute(_AHEAD)
        except BaseException:
            db.close()
            raise
        return db

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
            (ROOT, json.dumps(root)),
        )

    def add_directories(self, parent: int, entries: Iterable[Entry]) -> None:
        """Add subdirectories; a known one only gets its new attributes."""
        self._db.executemany(
            "INSERT INTO directories (parent, name, attributes) VALUES (?, ?, ?) "
            "ON CONFLICT (parent, name) DO UPDATE SET attributes = excluded.attributes",
            [(parent, _encode(entry.name), json.dumps(entry)) for entry in entries],
        )

    def add_chunk(self, directory: int, entries: list[Entry]) -> None:
        self._db.execute(
            "INSERT INTO chunks (directory, files, bytes, allocated, entries) "
            "VALUES (?, ?, ?, ?, ?)",
            (directory, *_packed(entries)),
        )

    def locate(self, directory: int, location: tuple[str, int]) -> None:
        """Remember where the objects of its files are, for reads past the mount."""
        self._update(directory, "location = ?", json.dumps(location))

    def location(self, directory: int) -> tuple[str, int] | None:
        row = self._row("SELECT location FROM directories WHERE id = ?", directory)
        return None if row is None or row[0] is None else tuple(json.loads(row[0]))

    def restart_listing(self, directory: int) -> None:
        """Forget an unfinished or outdated listing of the directory."""
        self._db.execute("DELETE FROM chunks WHERE directory = ?", (directory,))
        self._db.execute("DELETE FROM failures WHERE directory = ?", (directory,))
        self._update(
            directory,
            "state = 0, waiting = 0, entries = 0, files = 0, bytes = 0, done_files = 0, "
            "done_bytes = 0, allocated = 0, skipped = 0, failed = 0",
        )

    def listed(
        self, directory: int, *, entries: int, files: int, size: int, stored: tuple[int, int, int],
        skipped: int,
    ) -> None:  # fmt: skip
        """Its listing ended. ``stored``: files, bytes and SSD bytes that the tree had already."""
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

    def committed(
        self, chunk: Chunk, files: int, size: int, allocated: int, failed: int, left: list[Entry]
    ) -> None:
        """A chunk is in the tree, except for what failed and what is ``left`` to copy."""
        if left:
            self._db.execute(
                "UPDATE chunks SET files = ?, bytes = ?, allocated = ?, entries = ? WHERE id = ?",
                (*_packed(left), chunk.id),
            )
        else:
            self._db.execute("DELETE FROM chunks WHERE id = ?", (chunk.id,))
        self._update(
            chunk.directory,
            "done_files = done_files + ?, done_bytes = done_bytes + ?, "
            "allocated = allocated + ?, failed = failed + ?, waiting = waiting - ?",
            *(files, size, allocated, failed, 0 if left else 1),
        )
        stays = {entry.name for entry in left}
        self._db.executemany(
            "DELETE FROM ahead WHERE directory = ? AND name = ?",
            [
                (chunk.directory, _encode(entry.name))
                for entry in chunk.entries
                if entry.name not in stays
            ],
        )

    def brought_ahead(self, directory: int, taken: dict[str, int]) -> None:
        """Files that a hint stored before their chunk: names and SSD bytes."""
        self._db.executemany(
            "INSERT OR REPLACE INTO ahead VALUES (?, ?, ?)",
            [(directory, _encode(name), size) for name, size in taken.items()],
        )

    def ahead(self, directory: int) -> dict[str, int]:
        rows = self._db.execute("SELECT name, bytes FROM ahead WHERE directory = ?", (directory,))
        return {_decode(row[0]): int(row[1]) for row in rows}

    def any_ahead(self) -> bool:
        return self._row("SELECT 1 FROM ahead LIMIT 1") is not None

    def none_ahead(self, directory: int) -> None:
        """Forget its files ahead: another row counts them now."""
        self._db.execute("DELETE FROM ahead WHERE directory = ?", (directory,))

    def sealed(self, directory: int) -> None:
        """The directory is opaque; its parent waits for one less."""
        self._update(directory, "state = 2")
        self.none_ahead(directory)
        self._db.execute(
            "UPDATE directories SET waiting = waiting - 1 "
            "WHERE id = (SELECT parent FROM directories WHERE id = ?)",
            (directory,),
        )

    def unseal(self, directory: int) -> list[int]:
        """Take the seal from it and from every directory above; returns them, deepest first."""
        changed = []
        current: int | None = directory
        while current is not None:
            row = self._row("SELECT state, parent FROM directories WHERE id = ?", current)
            if row is None or row[0] != SEALED:
                break
            self._update(current, "state = 1")
            changed.append(current)
            current = row[1]
            if current is not None:
                self._update(current, "waiting = waiting + 1")
        return changed

    def drop_vanished(self, directory: int, seen: set[str]) -> list[str]:
        """Delete the subdirectories that a new listing lacks, with all below; their names."""
        gone = [
            (int(row[0]), _decode(row[1]))
            for row in self._db.execute(
                "SELECT id, name FROM directories WHERE parent = ?", (directory,)
            )
            if _decode(row[1]) not in seen
        ]
        for number, _ in gone:
            below = (
                "WITH RECURSIVE below(id) AS (SELECT ? UNION ALL SELECT d.id FROM directories d "
                "JOIN below ON d.parent = below.id) "
            )
            for table, key in (
                ("chunks", "directory"), ("failures", "directory"), ("ahead", "directory"),
                ("directories", "id"),
            ):  # fmt: skip
                self._db.execute(
                    f"{below} DELETE FROM {table} WHERE {key} IN (SELECT id FROM below)", (number,)
                )
        return [name for _, name in gone]

    def fail(self, directory: int, name: str, reason: str, *, lasting: bool) -> None:
        self._db.execute(
            "INSERT OR REPLACE INTO failures VALUES (?, ?, ?, ?)",
            (directory, _encode(name), reason, int(lasting)),
        )

    def failures(self, limit: int, after: tuple[int, str] = (0, "")) -> list[tuple[int, str, str]]:
        """(directory, name, reason) in order, those after ``after``."""
        rows = self._db.execute(
            "SELECT directory, name, reason FROM failures WHERE (directory, name) > (?, ?) "
            "ORDER BY directory, name LIMIT ?",
            (after[0], _encode(after[1]), limit),
        )
        return [(int(d), _decode(n), str(r)) for d, n, r in rows]

    def retriable(self, most_rescans: int) -> list[int]:
        """Directories with a failure that may be temporary, and with rescans left."""
        return self._ids(
            "SELECT DISTINCT d.id FROM directories d JOIN failures f ON f.directory = d.id "
            "WHERE f.lasting = 0 AND d.rescans < ?",
            most_rescans,
        )

    def failing(self) -> list[int]:
        """Directories with failures."""
        return self._ids("SELECT DISTINCT directory FROM failures")

    def count_rescan(self, directory: int) -> None:
        self._update(directory, "rescans = rescans + 1")

    def count_failure(self, directory: int) -> None:
        """One more failure in it: it cannot be sealed."""
        self._update(directory, "failed = failed + 1")

    def reset_rescans(self) -> None:
        self._db.execute("UPDATE directories SET rescans = 0")

    def directory(self, number: int) -> Directory:
        row = self._row(
            "SELECT id, parent, attributes, state, entries, rescans FROM directories WHERE id = ?",
            number,
        )
        return Directory(row[0], row[1], Entry(*json.loads(row[2])), *row[3:])

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
            row = self._row(query, current, _encode(name))
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

    def listed_directories(self, after: int, limit: int) -> list[int]:
        """Listed and sealed directories with a number above ``after``, in order."""
        return self._ids(
            "SELECT id FROM directories WHERE id > ? AND state > 0 ORDER BY id LIMIT ?",
            after, limit,
        )  # fmt: skip

    def next_chunks(self, limit: int) -> list[int]:
        return self._ids("SELECT id FROM chunks ORDER BY priority DESC, id LIMIT ?", limit)

    def chunk(self, number: int) -> Chunk | None:
        """None when it is committed, or its directory is listed again."""
        row = self._row("SELECT id, directory, entries FROM chunks WHERE id = ?", number)
        if row is None:
            return None
        entries = [Entry(*fields) for fields in json.loads(zlib.decompress(row[2]))]
        return Chunk(row[0], row[1], entries)

    def left(self) -> tuple[int, int]:
        """Files and bytes that are still to copy."""
        files, size = self._row("SELECT sum(files), sum(bytes) FROM chunks")
        return files or 0, size or 0

    def prefer(self, directory: int, priority: int) -> None:
        """Copy what is left of a directory sooner."""
        self._db.execute(
            "UPDATE chunks SET priority = ? WHERE directory = ? AND priority < ?",
            (priority, directory, priority),
        )

    def totals(self) -> Totals:
        row = self._row(
            "SELECT sum(files), sum(bytes), sum(done_files), sum(done_bytes),"
            " (SELECT count(*) FROM failures), sum(skipped), count(*), sum(state > 1),"
            " sum(allocated) + (SELECT coalesce(sum(bytes), 0) FROM ahead) FROM directories"
        )
        return Totals(*(value or 0 for value in row))  # sums over no rows are NULL


def _newer(path: Path, found: int) -> OSError:
    why = f"{NAME} was written by a newer agent (format {found}, this agent knows {FORMAT})"
    remedy = "run that version, or remove the dataset and fill it again"
    return OSError(errno.EPROTONOSUPPORT, f"{why}: {remedy}", str(path))


def _packed(entries: list[Entry]) -> tuple[int, int, int, bytes]:
    return (
        len(entries),
        sum(entry.size for entry in entries if entry.is_file),
        sum(entry.allocated for entry in entries),
        zlib.compress(json.dumps(entries).encode(), 1),
    )


def _decode(text: str) -> str:
    return str(json.loads(f'"{text}"')) if "\\" in text else text
