"""One volume's entry: pure values, their JSON form, and how two copies become one."""

import json
from dataclasses import asdict, dataclass, replace
from enum import StrEnum

VERSION = 1
MOST_PREVIOUS = 5
MOST_BYTES = 4096  # of the JSON form; RBD metadata values are small strings


class Knowledge(StrEnum):
    """What one source of truth says about content."""

    NONE = "none"  # asked, and there is none
    MAYBE = "maybe"  # a format was permitted, and what came of it is not known
    CONTENT = "content"
    UNKNOWN = "unknown"  # could not be asked or understood
    NOT_ASKED = "not_asked"  # nothing to ask: no such source for this volume


@dataclass(frozen=True)
class Entry:
    """Times are Unix seconds. ``type`` is empty while no content was ever seen.

    ``permitted``: when a format was last permitted without its outcome being known; 0: none open.
    """

    volume: str
    title: str = ""
    type: str = ""
    uuid: str = ""
    label: str = ""
    first_seen: float = 0.0
    last_seen: float = 0.0
    node: str = ""
    permitted: float = 0.0
    permitted_by: str = ""
    previous: tuple[str, ...] = ()  # contents before this one, the newest first
    version: int = VERSION

    @property
    def knowledge(self) -> Knowledge:
        if self.type:
            return Knowledge.CONTENT
        return Knowledge.MAYBE if self.permitted else Knowledge.NONE

    def saw(self, type_: str, uuid: str, label: str, now: float, node: str) -> "Entry":
        """With that content seen; another content than before is remembered as previous."""
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
            previous=previous,
        )

    def permit(self, by: str, now: float) -> "Entry":
        """With a permission to format written down before it is given."""
        return replace(self, permitted=now, permitted_by=by[:200])

    def unused(self) -> "Entry":
        """With the permission closed: nothing opened the device for writing under it."""
        return replace(self, permitted=0.0, permitted_by="")

    def dump(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


def parse(text: str) -> Entry:
    """ValueError for anything that is not an entry of a version that we understand."""
    if len(text) > 16 * MOST_BYTES:
        raise ValueError("too long for a ledger entry")
    data = json.loads(text)
    if not isinstance(data, dict) or not isinstance(data.get("version"), int):
        raise ValueError("not a ledger entry")
    if data["version"] > VERSION:
        raise ValueError(f"written by a newer agent (version {data['version']})")
    known = {name: data[name] for name in Entry.__dataclass_fields__ if name in data}
    known["previous"] = tuple(str(p) for p in known.get("previous", ()))
    for name, kind in (("volume", str), ("type", str), ("uuid", str)):
        if not isinstance(known.get(name), kind):
            raise ValueError(f"{name} is missing")
    for name in ("first_seen", "last_seen", "permitted"):
        known[name] = float(known.get(name, 0.0))
    return Entry(**known)


def merge(here: Entry, there: Entry) -> Entry:
    """One entry of two copies: the later sight of content wins, and an open permission of either
    copy stays open unless content was seen after it."""
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
        title=newer.title or older.title,
        permitted=permitted.permitted if permitted else 0.0,
        permitted_by=permitted.permitted_by if permitted else "",
        previous=newer.previous or older.previous,
    )
