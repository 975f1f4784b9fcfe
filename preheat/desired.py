"""Which images are requested on this node, by whom and on what terms. Pure.

There are three sources: the settings (policy), operators (their holds in the runtime) and, with
``retain``, the containers that use an image now. One ``Request`` goes the whole way: this module
says who wants the image, the reconciler adds what it costs here, the plan decides.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from preheat import manifest, settings
from preheat.runtimes import base

PRIVATE = (
    "private: it cannot be pulled without credentials, and once it is on the node any pod could "
    "run it; allow that with share_private"
)

# Class, priority, last use. The plan releases the lowest rank first: retained images, then those of
# the policy, then what an operator asked for.
Rank = tuple[int, int, float]
_CLASSES: dict[base.By, int] = {"retained": 0, "policy": 1, "operator": 2}


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
    digest: str = ""
    last_used: float = 0.0  # Unix time
    present: bool = False
    measured: bool = False
    fetch: int = 0  # bytes to fetch
    unpack: int = 0  # bytes that it takes unpacked beyond what is there
    parts: Mapping[str, int] = field(default_factory=dict)  # what it keeps on disk (estimate)
    running: bool = False  # a pull of it is in progress
    blocked: str = ""  # why it must not be pulled now

    @property
    def rank(self) -> Rank:
        retained = self.by == "retained"
        return (
            _CLASSES[self.by],
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
        """Whether it must be pinned once it is present."""
        return self.measured and self.keep != "never" and not self.released and not self.is_over

    @property
    def need(self) -> int:
        """How far the disk use grows at most."""
        return self.fetch + self.unpack


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
                expired=expired.target.digest if expired and expired.target else "",
                expired_at=expired.created if expired else 0.0,
            )
    return found


def retained(
    section: settings.PreheatSettings,
    inventory: base.Inventory,
    shapes: Mapping[str, manifest.Shape],
    requested: Mapping[str, Request],
) -> dict[str, Request]:
    """Requests for images that containers use now and nobody else asks for, by reference."""
    if section.retain is None:
        return {}
    found: dict[str, Request] = {}
    covered = {inventory.digest_of(ref) for ref in requested}
    released = {h.ref for h in inventory.holds if h.role == "note" and h.state == "released"}
    keep = f"for:{section.retain.duration:.0f}"
    for record in inventory.records:
        shape = shapes.get(record.target.digest)
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


def stale_notes(inventory: base.Inventory, requested: Mapping[str, Request]) -> list[base.Hold]:
    """Notes about images that nobody requests and the node does not have."""
    names = {record.name for record in inventory.records}
    return [
        hold
        for hold in inventory.held("note")
        if hold.ref not in requested and not (hold.state == "released" and hold.ref in names)
    ]
