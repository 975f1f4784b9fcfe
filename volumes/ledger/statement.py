"""What a PersistentVolume says of its volume's content, and what that means for a format. Pure."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kube.objects import PersistentVolume
from volumes.ledger.store import Entry, Knowledge

HOLDS_DATA = "nodeagent.io/holds-data"
ALLOW_FORMAT = "nodeagent.io/allow-format"  # its value: the PersistentVolume's uid
_CLOCKS_SECONDS = 300.0  # by which this node's clock may be behind the API server's


@dataclass(frozen=True)
class Statement:
    """What the PersistentVolume says of one volume.

    ``knowledge``: NOT_ASKED without a cluster or a PersistentVolume, UNKNOWN without an answer,
    CONTENT when it is marked, else NONE. ``text``: the mark, or why nothing is known. ``age``:
    seconds since it was created. ``allowed``: an operator wrote that it may be formatted although
    it is old. ``silent_for``: seconds since this volume was first asked about without an answer.
    """

    knowledge: Knowledge
    name: str = ""
    text: str = ""
    age: float = 0.0
    allowed: bool = False
    silent_for: float = 0.0

    def is_old(self, young: float) -> bool:
        """Whether it existed so long that content is to be expected. A clock that is far behind the
        API server's proves no youth."""
        return not -_CLOCKS_SECONDS <= self.age <= young

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name, "says": str(self.knowledge), "text": self.text,
            "age_seconds": round(self.age), "format_allowed": self.allowed,
            "silent_for_seconds": round(self.silent_for),
        }  # fmt: skip


NO_CLUSTER = Statement(Knowledge.NOT_ASKED)


def annotation(part: str) -> str:
    """The mark's key. ``part``: a mapping on the volume (LUKS), which has a mark of its own: the
    volume below holds data as soon as it has a LUKS header."""
    if not part:
        return HOLDS_DATA
    return f"{HOLDS_DATA}-in-{hashlib.sha256(part.encode()).hexdigest()[:12]}"


def read(found: PersistentVolume, part: str, now: float) -> Statement:
    """What one says. ``now``: Unix seconds. Any mark counts, also one that is not understood."""
    mark = found.annotations.get(annotation(part))
    return Statement(
        Knowledge.CONTENT if mark is not None else Knowledge.NONE,
        found.name,
        "" if mark is None else _shown(mark),
        age=now - found.created,
        allowed=bool(found.uid) and found.annotations.get(ALLOW_FORMAT) == found.uid,
    )


def _shown(mark: str) -> str:
    """A mark for people."""
    try:
        said = json.loads(mark)
        return f"{said['type']} {said['uuid']}, seen {said['seen']} on {said['node']}"[:200]
    except (ValueError, LookupError, TypeError):
        return mark[:200]


def is_stale(mark: str | None, new: Entry) -> bool:
    """Whether a mark must be written. One of a mapping or of other software is left as it is."""
    if mark is None:
        return True
    try:
        said = json.loads(mark)
        same = (said["type"], said["uuid"]) == (new.type, new.uuid)
        return bool(said["volume"] == new.volume and not same)
    except (ValueError, LookupError, TypeError):
        return False


def refusals(said: Statement, *, no_extents: bool, outage: float, young: float) -> Iterator[str]:
    """Why the PersistentVolume forbids a format. ``no_extents``: the cluster says that nothing of
    the image is allocated. ``outage``, ``young``: see the settings.

    A mark always counts: a volume that was emptied on purpose is an operator's affair. The other
    two are doubts, which the cluster's answer settles: where nothing is allocated, nothing is lost.
    """
    if said.knowledge is Knowledge.CONTENT:
        yield f"its PersistentVolume {said.name} says that it holds data ({said.text})"
    elif no_extents:
        return
    elif said.knowledge is Knowledge.UNKNOWN and said.silent_for < outage:
        yield (
            f"its PersistentVolume cannot be asked ({said.text}); after {outage:g}s without an "
            f"answer the guard decides without it, {said.silent_for:.0f}s have passed"
        )
    elif said.knowledge is Knowledge.NONE and said.is_old(young) and not said.allowed:
        yield (
            f"its PersistentVolume {said.name} was created {said.age / 3600:.0f}h ago, and so old "
            f"a volume is expected to hold data; the annotation {ALLOW_FORMAT} with its uid "
            "permits the format"
        )
