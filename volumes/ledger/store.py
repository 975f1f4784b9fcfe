"""The ledger: what each volume was last seen to hold, kept on this node.

A device that reads as zeros may be new, or may be a volume whose backend fails. The device cannot
tell; a memory of the volume can. So the agent writes down what it saw on each volume, and, before
it permits a format, that it permitted one. One small fsynced file per volume; ``mirror`` keeps a
copy in the image's own metadata, for other nodes.

Invariants: ``LedgerStore.put`` returns only when the entry would survive a power cut. A file that
cannot be understood is kept, and its volume's knowledge is UNKNOWN, never NONE. What a newer agent
wrote is never replaced.
"""

import errno
import functools
import hashlib
import json
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import kit.files
import kit.formats

VERSION = 1
MOST_PREVIOUS = 5
MOST_BYTES = 4096  # of an entry's JSON; RBD metadata values are small strings
MOST_ENTRIES = 20_000
# A later last_seen alone is not worth an fsync: that would be one for each mount.
SEEN_AGAIN_SECONDS = 600.0


class NewerError(ValueError):
    """A newer agent wrote the entry. It is left alone."""


class Knowledge(StrEnum):
    """What one source says about a volume's content."""

    NONE = "none"  # asked: there is no content
    MAYBE = "maybe"  # a format was permitted; its outcome is not known
    CONTENT = "content"
    UNKNOWN = "unknown"  # the source did not answer, or its answer was not understood
    NOT_ASKED = "not_asked"  # this volume has no such source


@dataclass(frozen=True)
class Entry:
    """One volume. Times are Unix times."""

    volume: str
    title: str = ""
    type: str = ""  # empty while no content was seen
    uuid: str = ""
    label: str = ""
    first_seen: float = 0.0
    last_seen: float = 0.0
    node: str = ""
    permitted: float = 0.0  # time of a lease whose outcome is unknown; 0: none
    permitted_by: str = ""  # who gave this lease
    earlier_by: str = ""  # who gave the lease before, if its outcome is unknown too
    previous: tuple[str, ...] = ()  # earlier contents, the newest first
    version: int = VERSION

    @property
    def knowledge(self) -> Knowledge:
        if self.type:
            return Knowledge.CONTENT
        return Knowledge.MAYBE if self.permitted else Knowledge.NONE

    @property
    def content(self) -> str:
        """Type and UUID, for people."""
        return f"{self.type} {self.uuid}".strip()

    def saw(self, type_: str, uuid: str, label: str, now: float, node: str) -> "Entry":
        """After this content was seen. Other content than before moves to ``previous``."""
        same = (self.type, self.uuid) == (type_, uuid)
        previous = self.previous
        if self.type and not same:
            old = f"{self.type} {self.uuid} until {self.last_seen:.0f}"
            previous = (old, *previous)[:MOST_PREVIOUS]
        return replace(
            self,
            type=type_,
            uuid=uuid,
            label=label,
            first_seen=self.first_seen if same and self.first_seen else now,
            last_seen=now,
            node=node,
            permitted=0.0,
            permitted_by="",
            earlier_by="",
            previous=previous,
        )

    def permit(self, by: str, now: float) -> "Entry":
        """With a permission to format, to be saved before the permission is given."""
        earlier = (self.earlier_by or self.permitted_by) if self.permitted else ""
        return replace(self, permitted=now, permitted_by=by[:200], earlier_by=earlier)

    def unused(self) -> "Entry":
        """Without the last permission: nothing opened the device for writing under it. An earlier
        one stays open."""
        permitted = self.permitted if self.earlier_by else 0.0
        return replace(self, permitted=permitted, permitted_by=self.earlier_by, earlier_by="")

    def dump(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


def parse(text: str) -> Entry:
    """ValueError or TypeError for anything but an entry of a version that this agent knows."""
    if len(text) > 16 * MOST_BYTES:
        raise ValueError("too long for a ledger entry")
    try:
        return entry_of(json.loads(text))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def entry_of(data: Any) -> Entry:
    """As ``parse``, of the fields."""
    if not isinstance(data, dict) or not isinstance(data.get("version"), int):
        raise ValueError("not a ledger entry")
    if data["version"] > VERSION:
        raise NewerError(f"written by a newer agent (version {data['version']})")
    known = {name: data[name] for name in Entry.__dataclass_fields__ if name in data}
    known["previous"] = tuple(str(p) for p in known.get("previous", ()))
    for name in ("volume", "type", "uuid"):
        if name not in known:
            raise ValueError(f"{name} is missing")
    for name in ("volume", "type", "uuid", "title", "label", "node", "permitted_by", "earlier_by"):
        if not isinstance(known.get(name, ""), str):
            raise ValueError(f"{name} is no text")
    for name in ("first_seen", "last_seen", "permitted"):
        known[name] = float(known.get(name, 0.0))
    return Entry(**known)


def merge(here: Entry, there: Entry) -> Entry:
    """One entry of ``here``'s volume from two copies: the content seen last wins, and a permission
    of either copy stays open unless content was seen after it."""
    newer, older = (here, there) if here.last_seen >= there.last_seen else (there, here)
    if not newer.type and older.type:
        newer, older = older, newer
    permitted = max(
        (e for e in (here, there) if e.permitted > newer.last_seen),
        key=lambda e: e.permitted,
        default=None,
    )
    return replace(
        newer,
        volume=here.volume,  # librbd copies an image's metadata into its clones
        title=newer.title or older.title,
        permitted=permitted.permitted if permitted else 0.0,
        permitted_by=permitted.permitted_by if permitted else "",
        earlier_by=permitted.earlier_by if permitted else "",
        previous=newer.previous or older.previous,
    )


class LedgerStore:
    """All entries, in memory and on disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._entries: dict[str, Entry] = {}
        self.unreadable: dict[str, str] = {}  # file name -> error
        self._newer: set[str] = set()  # of these files, those that a newer agent wrote

    def load(self) -> None:
        """Read all files. OSError when the folder cannot be made or listed."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._entries.clear()
        self.unreadable.clear()
        self._newer.clear()
        kept = self.folder.glob(f"*.json{kit.formats.SUFFIX}")
        lost = {each.with_name(each.name.removesuffix(kit.formats.SUFFIX)) for each in kept}
        for file in sorted(lost | set(self.folder.glob("*.json"))):
            found = kit.formats.look(file, None, functools.partial(self._checked, file))
            if isinstance(found, Entry):
                self._entries[found.volume] = found
            elif found is not None:
                self.unreadable[file.name] = found.why

    def _checked(self, file: Path, fields: Any) -> Entry:
        try:
            found = entry_of(fields)
        except NewerError:
            self._newer.add(file.name)
            raise
        if self._file(found.volume) != file:
            raise ValueError("its name does not match its content")
        return found

    def _file(self, volume: str) -> Path:
        return self.folder / f"{hashlib.sha256(volume.encode()).hexdigest()[:32]}.json"

    def get(self, volume: str) -> Entry | None:
        return self._entries.get(volume)

    def knowledge(self, volume: str) -> Knowledge:
        """UNKNOWN when the volume's file is damaged or the device has no volume identity."""
        if not volume or self._file(volume).name in self.unreadable:
            return Knowledge.UNKNOWN
        found = self._entries.get(volume)
        return found.knowledge if found else Knowledge.NONE

    def put(self, new: Entry) -> None:
        """Save an entry. Blocks. OSError when it is not durable; then nothing has changed."""
        file = self._file(new.volume)
        if file.name in self._newer:
            raise OSError(errno.EPROTONOSUPPORT, self.unreadable[file.name], str(file))
        if file.name in self.unreadable:
            kit.formats.set_aside(file)
        kit.files.save(file, new.dump().encode())
        self.unreadable.pop(file.name, None)
        self._entries[new.volume] = new
        if len(self._entries) > MOST_ENTRIES:
            self._prune()

    def needs(self, new: Entry) -> bool:
        """Whether ``new`` differs enough from the stored entry to be worth an fsync."""
        old = self._entries.get(new.volume)
        if self._file(new.volume).name in self._newer:
            return False
        if old is None or new.last_seen - old.last_seen >= SEEN_AGAIN_SECONDS:
            return True
        return (old.type, old.uuid, old.label, old.permitted, old.previous) != (
            *(new.type, new.uuid, new.label, new.permitted, new.previous),
        )

    def _prune(self) -> None:
        """Drop the RBD images not seen and not permitted for longest: where a cluster is
        configured, their own metadata keeps their entries."""
        images = [e for e in self._entries.values() if e.volume.startswith("rbd:")]
        for old in sorted(images, key=lambda e: max(e.last_seen, e.permitted))[
            : len(self._entries) - MOST_ENTRIES
        ]:
            kit.formats.forget(self._file(old.volume))
            del self._entries[old.volume]

    def entries(self) -> list[Entry]:
        """Sorted by volume."""
        return [self._entries[volume] for volume in sorted(self._entries)]
