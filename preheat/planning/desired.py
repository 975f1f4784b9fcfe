"""Which images are requested on this node, by whom and on what terms. Pure.

There are three sources: the settings (policy), operators (their holds in the runtime) and, with
``retain``, the containers that use an image now. What the settings asked for once stays for
``drop_after``, so that a slip in them deletes nothing. One ``Request`` goes the whole way: this
module says who wants the image, the reconciler adds what it costs here, the plan decides.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import kit.units
from preheat import settings
from preheat.image import manifest
from preheat.runtimes import base

PRIVATE = (
    "private: it cannot be pulled without credentials, and once it is on the node any pod could "
    "run it; allow that with share_private"
)

# Class, priority, last use. The plan releases the lowest rank first: retained images, then those
# that the policy dropped, those of the policy, and what an operator asked for.
Rank = tuple[int, int, float]
_CLASSES: dict[base.By, int] = {"retained": 0, "policy": 2, "operator": 3}
_DROPPED_CLASS = 1
# How long an operator's request stays when the runtime lost what it had pinned.
REQUEST_SECONDS = 86400.0
# Clocks are set by less than this without a reason.
AHEAD_SECONDS = 60.0


@dataclass(frozen=True)
class Request:
    """One requested image. ``keep``: ``always``, ``never`` or ``for:<seconds>``.

    The fields from ``digest`` on are what the reconciler found out; ``measured`` says whether it
    knows the image's layers, and so its costs.
    """

    ref: str
    by: base.By
    keep: str = "always"
    priority: int = 0
    share_private: bool = False
    released: bool = False  # an operator released it: not pulled or pinned until asked for again
    paused: bool = False
    done: bool = False  # pulled once with keep ``never``
    expired: str = ""  # the digest whose ``for`` was over
    expired_at: float = 0.0  # Unix time
    dropped_until: float | None = None  # Unix time: the settings ask for it no longer
    digest: str = ""
    last_used: float = 0.0  # Unix time
    present: bool = False
    unconfirmed: bool = False  # the tag moved on the node since the registry was asked
    measured: bool = False
    fetch: int = 0  # bytes to fetch
    remote: int = 0  # bytes that a container's reads fetch: the snapshotter mounts them
    unpack: int = 0  # bytes that it takes unpacked beyond what is there
    inodes: int = 0  # that it took once, when they became scarce
    parts: Mapping[str, int] = field(default_factory=dict)  # what it keeps on disk (estimate)
    running: bool = False  # a pull of it is in progress
    blocked: str = ""  # why it must not be pulled now

    @property
    def rank(self) -> Rank:
        retained = self.by == "retained"
        dropped = self.dropped_until is not None and not retained
        return (
            _DROPPED_CLASS if dropped else _CLASSES[self.by],
            0 if retained else self.priority,
            self.last_used if retained else 0.0,
        )

    @property
    def is_over(self) -> bool:
        """Whether its time ended and nothing has used it since. A moved tag starts anew."""
        return (
            self.keep.startswith("for:")
            and self.expired == self.digest != ""
            and self.last_used <= self.expired_at
        )

    @property
    def pins(self) -> bool:
        """Whether it must be pinned once it is present. What was dropped only keeps its pin."""
        ended = self.released or self.is_over or self.dropped_until is not None
        return self.measured and self.keep != "never" and not ended

    @property
    def is_looked_up(self) -> bool:
        """Whether a registry is asked about it."""
        return self.by != "retained" and self.dropped_until is None

    @property
    def dropped_text(self) -> str:
        """What to tell about a dropped image; empty for another."""
        if self.dropped_until is None:
            return ""
        return f"dropped from policy; released at {kit.units.format_time(self.dropped_until)}"

    def is_ended(self, now: float) -> bool:
        """Whether nothing of it is to be kept any more."""
        return self.released or (self.dropped_until is not None and self.dropped_until <= now)

    @property
    def need(self) -> int:
        """How far the disk use grows at most."""
        return self.fetch + self.unpack


def untold(request: Request, least: base.DiskUse, running: bool, blocked: str) -> Request:
    """The request for an image that the agent could not look up: what it takes is assumed."""
    return dataclasses.replace(
        request,
        measured=True,
        unpack=least.bytes,
        inodes=least.inodes,
        parts={f"? {request.ref}": least.bytes},
        running=running,
        blocked=blocked,
    )


def keep_text(pin: settings.Pin) -> str:
    return f"for:{pin.duration:.0f}" if isinstance(pin, settings.KeepFor) else pin


def keep_seconds(keep: str) -> float | None:
    """Seconds after the last use; None without a time limit."""
    return float(keep.removeprefix("for:")) if keep.startswith("for:") else None


def gather(section: settings.PreheatSettings, holds: Iterable[base.Hold]) -> dict[str, Request]:
    """The requests of the settings and of operators, by reference."""
    found = {
        each.ref: Request(
            each.ref, "policy", keep_text(each.pin), each.priority, each.share_private
        )
        for each in section.images
        if each.nodes.items() <= section.node_labels.items()
    }
    notes: dict[str, dict[str, base.Hold]] = {}
    for hold in sorted(holds, key=lambda h: h.role == "pull"):
        if hold.role == "note":
            notes.setdefault(hold.ref, {})[hold.state] = hold
        elif hold.by == "operator":
            known = found.get(hold.ref)
            # Whoever may ask the agent may share a private image.
            found[hold.ref] = Request(
                hold.ref,
                "operator",
                hold.keep or "always",
                known.priority if known else 0,
                share_private=True,
            )
    for ref, states in notes.items():
        if ref in found:
            expired = states.get("expired")
            found[ref] = dataclasses.replace(
                found[ref],
                released="released" in states,
                paused="paused" in states,
                done="done" in states,
                expired=expired.digest if expired else "",
                expired_at=expired.created if expired else 0.0,
            )
    return found


def retained(
    section: settings.PreheatSettings,
    inventory: base.ImageInventory,
    requested: Mapping[str, Request],
) -> dict[str, Request]:
    """Requests for images that containers use now and nobody else asks for, by reference."""
    if section.retain is None:
        return {}
    found: dict[str, Request] = {}
    covered = {inventory.digest_of(ref) for ref in requested}
    released = {hold.ref for hold in inventory.notes("released")}
    keep = f"for:{section.retain.duration:.0f}"
    for record in inventory.records:
        shape = inventory.shapes.get(record.target.digest)
        if shape is None or shape.image_id not in inventory.in_use:
            continue
        try:
            ref = manifest.parse(record.name).text
        except ValueError:
            continue  # an image id or a short name; the image has another record
        if ref != record.name or record.target.digest in covered or ref in released:
            continue
        if shape.bytes_total < section.retain.at_least:
            continue
        covered.add(record.target.digest)
        found[ref] = Request(ref, "retained", keep)
    return found


def lingering(
    section: settings.PreheatSettings,
    inventory: base.ImageInventory,
    requested: Mapping[str, Request],
    now: float,
) -> dict[str, Request]:
    """Requests for what holds keep although nobody asks for it now, by reference.

    With ``retain`` that is an image whose last container ended; else the settings dropped it. One
    that an operator released is no longer kept.
    """
    since = {hold.ref: hold.created for hold in inventory.notes("dropped")}
    released = {hold.ref for hold in inventory.notes("released")}
    found: dict[str, Request] = {}
    for hold in sorted(inventory.holds, key=lambda each: each.created):
        if hold.role == "note" or hold.by == "operator" or hold.ref in requested:
            continue
        if hold.by == "retained" and section.retain is not None:
            keep = f"for:{section.retain.duration:.0f}"
            found[hold.ref] = Request(hold.ref, "retained", keep, released=hold.ref in released)
        else:
            found[hold.ref] = Request(
                *(hold.ref, hold.by, hold.keep),
                released=hold.ref in released,
                dropped_until=since.get(hold.ref, now) + section.drop_after,
            )
    return found


def newly_dropped(inventory: base.ImageInventory, requested: Mapping[str, Request]) -> list[str]:
    """References of dropped images about which there is no note yet."""
    noted = {hold.ref for hold in inventory.notes("dropped")}
    dropped = (each for each in requested.values() if each.dropped_until is not None)
    return [each.ref for each in dropped if each.ref not in noted]


def stale_notes(
    inventory: base.ImageInventory, requested: Mapping[str, Request]
) -> list[base.Hold]:
    """Notes about images that nobody requests and the node does not have, and notes that an image
    was dropped which is requested again or no longer held.
    """
    names = {record.name for record in inventory.records}
    dropped = {each.ref for each in requested.values() if each.dropped_until is not None}

    def is_stale(hold: base.Hold) -> bool:
        if hold.state == "dropped":
            return hold.ref not in dropped
        return hold.ref not in requested and not (hold.state == "released" and hold.ref in names)

    return [hold for hold in inventory.held("note") if is_stale(hold)]


def notes_ahead(inventory: base.ImageInventory, now: float) -> list[base.Hold]:
    """Notes that a time was over at one that is still to come, after which no use would count: the
    clock was ahead, or is behind."""
    return [each for each in inventory.notes("expired") if each.created > now + AHEAD_SECONDS]
