"""The index as an eviction uses it: entries move from the manifest back to what is to be copied."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cache.store import index, manifest
from cache.store.tree import Entry


@dataclass(frozen=True)
class Part:
    """Entries of a directory: a part of the manifest, or a chunk that waits to be copied."""

    number: int
    waits: bool
    items: list[manifest.Item]


class EvictIndex(index.Index):
    """Changes only inside ``transaction``."""

    @classmethod
    def of(cls, opened: index.Index) -> "EvictIndex":
        """The same file, by the same connection."""
        return cls(opened._db)

    def parts(self, directory: int) -> Iterator[Part]:
        """What was there at the first one; a part that is deleted meanwhile has no items.

        ValueError for a damaged or newer part of the manifest.
        """
        parts = self._ids("SELECT id FROM manifest WHERE directory = ?", directory)
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
        allocated: int, shared: tuple[int, int] = (0, 0),
    ) -> None:  # fmt: skip
        """Stored entries of a part are gone, and with them ``allocated`` SSD bytes.

        ``shared``: of them, the bytes and files that the generation before has too.
        """
        if keep:
            packed = manifest.pack(keep)
            self._db.execute("UPDATE manifest SET entries = ? WHERE id = ?", (packed, part))
        else:
            self._db.execute("DELETE FROM manifest WHERE id = ?", (part,))
        entries: list[Entry] = [item.entry for item in gone]
        self.add_chunk(directory, entries, index.NO_ROOM)
        size = sum(entry.size for entry in entries if entry.is_file)
        self._update(
            directory,
            "done_files = max(0, done_files - ?), done_bytes = max(0, done_bytes - ?), "
            "allocated = max(0, allocated - ?), waiting = waiting + 1, "
            "shared = max(0, shared - ?), shared_files = max(0, shared_files - ?)",
            *(len(entries), size, allocated, *shared),
        )

    def weighed(self, directory: int, files: int, size: int, allocated: int) -> None:
        """What the tree has in a directory."""
        self._update(
            directory, "done_files = ?, done_bytes = ?, allocated = ?", files, size, allocated
        )

    def make_durable(self) -> None:
        """Everything so far survives a power cut."""
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
