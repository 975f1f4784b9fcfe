"""Preheating's part of the status page: each image, what it waits for, and the disk."""

from collections.abc import Sequence

import kit.units
from kit.room import Cell, PageSection
from preheat import status
from preheat.component import Preheat
from preheat.registry import estimate

MOST_ROWS = 200
_TONES = {
    **dict.fromkeys(("ready",), "good"),
    **dict.fromkeys(("failed", "refused", "skipped"), "bad"),
}

_EMPTY = (
    "No image yet. Name one in the settings (preheat.images), make an ImageSet in the cluster, or "
    "say 'nodeagent image preheat REF'."
)


def sections(preheat: Preheat) -> Sequence[PageSection]:
    """Images by priority, then name; those that need a person come first."""
    size = kit.units.format_size
    rows = sorted(preheat.images(), key=lambda row: _TONES.get(row.state) != "bad")
    seen = preheat.reconciler.snapshot
    pinned = estimate.union(pin.parts for pin in seen.pinned)
    summary = preheat.reconciler.trouble
    if not summary and seen.node is not None:
        summary = f"Pins keep {size(pinned)} of {size(seen.node.pin_budget)}, "
        summary += f"{size(seen.node.free)} of the disk are free."
        if seen.decided.pause:
            summary += f" Nothing is pulled: {seen.decided.pause}."
    if len(rows) > MOST_ROWS:
        summary += f" {len(rows) - MOST_ROWS} more are not shown: nodeagent image list."
    head = ("Image", "State", "Fetched", "Plan")
    shown = [_row(row) for row in rows[:MOST_ROWS]]
    return [PageSection("Images", summary, head, shown, _EMPTY)]


def _row(row: status.Status) -> Sequence[Cell]:
    size = kit.units.format_size
    kept = f"pinned, {row.by}" if row.pinned else f"not pinned, {row.by}"
    fetched = [Cell(f"{size(row.bytes_done)} of {size(row.bytes_total)}")]
    if row.bytes_per_second and row.state == "pulling":
        fetched.append(Cell(f"{size(row.bytes_per_second)}/s"))
    return (
        Cell(row.ref, style="strong", below=[Cell(row.digest[:19], style="code")]),
        Cell(row.state, tone=_TONES.get(row.state, "mid"), below=[Cell(kept)]),
        Cell(
            fetched[0].text,
            progress=(row.bytes_done, max(row.bytes_total, 1)),
            below=fetched[1:],
        ),
        Cell(below=[Cell(row.reason)] if row.reason else []),
    )
