"""The index's part about files that a generation shares with the one before it."""

import sqlite3


class Sharing:
    """Two columns of ``directories``: SSD bytes and number of the files that are shared."""

    _db: sqlite3.Connection

    def shares(self, directory: int, size: int, files: int) -> None:
        """What a listing of the directory took over; a new listing forgets it."""
        self._db.execute(
            "UPDATE directories SET shared = ?, shared_files = ? WHERE id = ?",
            (size, files, directory),
        )

    def shared(self, directory: int | None = None) -> tuple[int, int]:
        """As ``shares`` kept it, of one directory or of all."""
        which = "" if directory is None else f" WHERE id = {int(directory)}"
        query = f"SELECT sum(shared), sum(shared_files) FROM directories{which}"
        row = self._db.execute(query).fetchone()
        return int(row[0] or 0), int(row[1] or 0)
