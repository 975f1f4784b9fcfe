"""Who wants which image here: the settings, an operator, or the use that pods make of it. Pure."""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from preheat import manifest, plan, settings
from preheat.runtimes import base

PRIVATE = (
    "private: it cannot be pulled without credentials, and once here any pod on the node could "
    "run it; allow that with share_private"
)


@dataclass(frozen=True)
class Request:
    """One wanted reference. ``keep``: ``always``, ``never`` or ``for:<seconds>``."""

    ref: str
    by: base.By
    keep: str
    priority: int = 0
    share_private: bool = False
    released: bool = False  # an operator let go of it; neither pulled nor pinned until asked
    paused: bool = False
    done: bool = False  # pulled once with keep never

    def rank(self, last_used: float) -> plan.Rank:
        if self.by == "operator":
            return (plan.OPERATOR, self.priority, 0.0)
        if self.by == "policy":
            return (plan.POLICY, self.priority, 0.0)
        return (plan.RETAINED, 0, last_used)


def keep_text(pin: settings.Pin) -> str:
    return f"for:{pin.duration:.0f}" if isinstance(pin, settings.KeepFor) else pin


def keep_seconds(keep: str) -> float | None:
    """Seconds after the last use; None: not bounded by time."""
    return float(keep.removeprefix("for:")) if keep.startswith("for:") else None


def on_node(wanted: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    return all(labels.get(key) == value for key, value in wanted.items())


def gather(section: settings.PreheatSettings, holds: Iterable[base.Hold]) -> dict[str, Request]:
    """From the settings and what operators asked for (their holds). By reference."""
    found = {
        each.ref: Request(
            each.ref, "policy", keep_text(each.pin), each.priority, each.share_private
        )
        for each in section.images
        if on_node(each.nodes, section.node_labels)
    }
    notes: dict[str, set[str]] = {}
    for hold in sorted(holds, key=lambda h: h.role == "pull"):
        if hold.role == "note":
            notes.setdefault(hold.ref, set()).add(hold.state)
        elif hold.by == "operator":
            known = found.get(hold.ref)
            # By hand is by decision: whoever may ask the agent may share a private image.
            found[hold.ref] = Request(
                hold.ref,
                "operator",
                hold.keep or "always",
                known.priority if known else 0,
                share_private=True,
            )
    for ref, states in notes.items():
        want = found.get(ref)
        if want is not None:
            found[ref] = dataclasses.replace(
                want,
                released="released" in states,
                paused="paused" in states,
                done="done" in states,
            )
    return found


def retained(
    section: settings.PreheatSettings,
    inventory: base.Inventory,
    shapes: Mapping[str, manifest.Shape],
    wanted: Mapping[str, Request],
) -> dict[str, Request]:
    """Images that containers use now and that are worth keeping a while after (by reference)."""
    if section.retain is None:
        return {}
    found: dict[str, Request] = {}
    covered = {inventory.digest_of(ref) for ref in wanted}
    released = {h.ref for h in inventory.holds if h.role == "note" and h.state == "released"}
    keep = f"for:{section.retain.duration:.0f}"
    for record in inventory.records:
        shape = shapes.get(record.target.digest)
        if shape is None or shape.image_id not in inventory.in_use:
            continue
        try:
            ref = manifest.parse(record.name).text
        except ValueError:
            continue  # an image id or a short name: its other record counts
        if ref != record.name or record.target.digest in covered or ref in released:
            continue
        if shape.bytes_total < section.retain.at_least:
            continue
        covered.add(record.target.digest)
        found[ref] = Request(ref, "retained", keep)
    return found


def stale_notes(inventory: base.Inventory, wanted: Mapping[str, Request]) -> list[base.Hold]:
    """Notes that say nothing any more: nobody wants the image, and it is not here."""
    names = {record.name for record in inventory.records}
    return [
        hold
        for hold in inventory.holds
        if hold.role == "note"
        and hold.ref not in wanted
        and not (hold.state == "released" and hold.ref in names)
    ]
