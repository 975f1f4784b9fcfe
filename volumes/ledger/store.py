"""The ledger on this node: one small fsynced file per volume."""

import hashlib
from pathlib import Path

import kit.files
from volumes.ledger import entry

MOST_ENTRIES = 20_000
# last_seen alone is no reason to write: a mount a minute would be an fsync a minute.
SEEN_AGAIN_SECONDS = 600.0


class Store:
    """All entries in memory, each change on disk before it counts.

    Invariant: ``put`` returns after the entry would survive a power cut. A file that cannot be
    understood is kept and its volume's knowledge is UNKNOWN, never NONE.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._entries: dict[str, entry.Entry] = {}
        self.unreadable: dict[str, str] = {}  # file name: why

    def load(self) -> None:
        """Read everything. OSError when the folder cannot be made or listed."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._entries.clear()
        self.unreadable.clear()
        for file in sorted(self.folder.glob("*.json")):
            try:
                found = entry.parse(file.read_text(encoding="utf-8"))
                if self._file(found.volume) != file:
                    raise ValueError("its name does not match its content")
            except (OSError, ValueError, TypeError) as error:
                self.unreadable[file.name] = str(error)
            else:
                self._entries[found.volume] = found

    def _file(self, volume: str) -> Path:
        return self.folder / f"{hashlib.sha256(volume.encode()).hexdigest()[:32]}.json"

    def get(self, volume: str) -> entry.Entry | None:
        return self._entries.get(volume)

    def knowledge(self, volume: str) -> entry.Knowledge:
        """What this node knows; UNKNOWN where the file is damaged or nothing names the volume."""
        if not volume or self._file(volume).name in self.unreadable:
            return entry.Knowledge.UNKNOWN
        found = self._entries.get(volume)
        return found.knowledge if found else entry.Knowledge.NONE

    def put(self, new: entry.Entry) -> None:
        """Blocking; OSError when it could not be made durable, and then nothing has changed."""
        file = self._file(new.volume)
        kit.files.save(file, new.dump().encode())
        self.unreadable.pop(file.name, None)
        self._entries[new.volume] = new
        if len(self._entries) > MOST_ENTRIES:
            self._prune()

    def needs(self, new: entry.Entry) -> bool:
        """Whether the difference to what is stored is worth an fsync."""
        old = self._entries.get(new.volume)
        if old is None or new.last_seen - old.last_seen >= SEEN_AGAIN_SECONDS:
            return True
        return (old.type, old.uuid, old.label, old.permitted, old.previous) != (
            *(new.type, new.uuid, new.label, new.permitted, new.previous),
        )

    def _prune(self) -> None:
        """The images' own metadata still know what is forgotten here, the longest unseen first."""
        images = [e for e in self._entries.values() if e.volume.startswith("rbd:")]
        for old in sorted(images, key=lambda e: e.last_seen)[: len(self._entries) - MOST_ENTRIES]:
            self._file(old.volume).unlink(missing_ok=True)
            del self._entries[old.volume]

    def entries(self) -> list[entry.Entry]:
        """Sorted by volume."""
        return [self._entries[volume] for volume in sorted(self._entries)]
