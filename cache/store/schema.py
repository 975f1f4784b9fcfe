"""The tables of an index, and opening its file."""

import contextlib
import errno
import sqlite3
from pathlib import Path

import kit.formats

FORMAT = 1
NAME = "index.sqlite"

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
# As the fields of ``index.Totals``.
TOTALS = (
    "SELECT files, bytes, done_files, done_bytes, (SELECT count(*) FROM failures), skipped, "
    "directories, sealed, allocated FROM totals"
)


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
    except BaseException:
        db.close()
        raise
    return db


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


def _newer(path: Path, found: int) -> OSError:
    why = f"{NAME} was written by a newer agent (format {found}, this agent knows {FORMAT})"
    remedy = "run that version, or remove the dataset and fill it again"
    return OSError(errno.EPROTONOSUPPORT, f"{why}: {remedy}", str(path))
