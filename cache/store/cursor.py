"""How far the scrub of a generation has come: kept in its index, so that both are lost together.

All directories up to ``after`` were read, and of the one that follows (``directory``) the names up
to ``name``, in order. The numbers of directories are those of this index.
"""

import json
import sqlite3
from dataclasses import asdict, dataclass

_TABLE = "CREATE TABLE IF NOT EXISTS scrub (id INTEGER PRIMARY KEY, cursor TEXT NOT NULL)"


@dataclass(frozen=True)
class Cursor:
    round: str = ""  # what the round is for; another one begins at the start
    after: int = 0
    directory: int = 0
    name: str = ""
    checked_files: int = 0
    checked_bytes: int = 0
    bad: int = 0
    replaced: int = 0


def load(db: sqlite3.Connection, wanted: str) -> Cursor:
    """Of the round ``wanted``, or a new one."""
    db.execute(_TABLE)
    row = db.execute("SELECT cursor FROM scrub").fetchone()
    try:
        found = Cursor(**json.loads(row[0])) if row is not None else Cursor()
    except (ValueError, TypeError):  # of another version
        found = Cursor()
    return found if found.round == wanted else Cursor(round=wanted)


def save(db: sqlite3.Connection, cursor: Cursor) -> None:
    text = json.dumps(asdict(cursor))  # escapes lone surrogates, which sqlite refuses
    db.execute("INSERT OR REPLACE INTO scrub VALUES (1, ?)", (text,))


def forget(db: sqlite3.Connection) -> None:
    """The round is over. An index that was made again in this round has no cursor yet."""
    db.execute(_TABLE)
    db.execute("DELETE FROM scrub")
