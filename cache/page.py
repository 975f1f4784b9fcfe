"""The cache's part of the status page: each dataset, what serves it, and the store."""

from collections.abc import Sequence

import kit.units
from cache import status
from cache.component import Cache
from kit.room import Cell, Json, PageSection

MOST_ROWS = 200
_TONES = {"complete": "good", "failed": "bad", "partial": "mid"}
_SERVES = {
    "none": "nothing serves it",
    "source": "jobs read the source",
    "overlay": "jobs read SSD and source",
    "store": "jobs read the SSD",
}
_UNKNOWN = {"overlay": "no job was seen to open a file in the last 15 min"}
BLOCKS = "of an image, parts of a file may lie on either side"
_EMPTY = (
    "No dataset yet. Name one in the settings (cache.datasets) or make a CachedDataset in the "
    "cluster; it then shows here while it is warmed."
)


def sections(cache: Cache) -> Sequence[PageSection]:
    """Datasets by name, those that need a person first."""
    size = kit.units.format_size
    shown = [status.of_dataset(cache.datasets[name]) for name in sorted(cache.datasets)]
    shown.sort(key=lambda each: _TONES.get(each["state"]) != "bad")
    summary = f"The store takes {size(cache.used())} of {size(cache.settings.budget)}; "
    summary += f"its disk is {cache.store_state()}."
    if len(shown) > MOST_ROWS:
        summary += f" {len(shown) - MOST_ROWS} more are not shown: nodeagent dataset list."
    head = ("Dataset", "State", "Read by", "SSD hits", "Stored", "On SSD", "Version", "Why")
    rows = [_row(each) for each in shown[:MOST_ROWS]]
    return [PageSection("Datasets", summary, head, rows, _EMPTY)]


def _row(shown: Json) -> Sequence[Cell]:
    size = kit.units.format_size
    files, data, update = shown["files"], shown["bytes"], shown["update"]
    served = str(shown["served_by"])
    version = [Cell(shown["snapshot"] or shown["freshness"])]
    if update is not None:
        version.append(Cell(f"{update['snapshot'] or 'the next'} comes: {update['state']}", "mid"))
    return (
        Cell(shown["name"], style="strong", below=[Cell(shown["view"], style="code")]),
        Cell(
            shown["state"],
            tone=_TONES.get(shown["state"], "mid"),
            below=[Cell(_SERVES.get(served, served), "bad" if served == "none" else "")],
        ),
        _reader(shown["used_by"]),
        hits_cell(shown),
        Cell(
            f"{size(data['done'])} of {size(data['total'])}",
            progress=(data["done"], max(data["total"], 1)),
            spark=shown["rate"]["history"],
            below=_below(shown, f"{files['done']:,} of {_about(shown)}{files['total']:,} files"),
        ),
        Cell(size(shown["store_bytes"]), number=True),
        Cell(shown["generation"], style="code", below=version),
        Cell(below=[Cell(shown["why"])] if shown["why"] else []),
    )


def _reader(used_by: str) -> Cell:
    """Who, and smaller what of the view that one has."""
    who, _, what = used_by.partition(": ")
    return Cell(who or "nobody now", below=[Cell(what, style="code")] if what else [])


def hits_cell(shown: Json) -> Cell:
    """Which share of what jobs open is on the SSD. A sample says between what it may be."""
    share, hits, history = kit.units.format_share, shown["hits"], shown["hits_history"]
    if hits is None:
        why = _UNKNOWN.get(str(shown["served_by"]), "")
        why = BLOCKS if why and shown["source"]["kind"] == "rbd" else why
        told, below = ("not known" if why else ""), ([Cell(why)] if why else [])
    else:
        told, below = share(hits["ratio"]), []
        if hits["opens"]:
            below = [
                Cell(f"{share(hits['low'])} to {share(hits['high'])}"),
                Cell(f"{hits['opens']:,} opens seen"),
            ]
    # A line that never moved says no more than the number.
    moved = len(set(history)) > 1
    return Cell(told, below=below, spark=history if moved else (), spark_top=1.0)


def _about(shown: Json) -> str:
    return "about " if shown["estimated"] else ""


def _below(shown: Json, counted: str) -> list[Cell]:
    """What is stored in files, how fast more comes, and what could not be."""
    rate, left = shown["rate"], shown["eta_seconds"]
    found = [Cell(counted)]
    if shown["phase"]:
        eta = "" if left is None else f", {kit.units.format_duration(left)} left"
        found.append(
            Cell(f"{rate['files']:,.0f} files/s, {kit.units.format_size(rate['bytes'])}/s{eta}")
        )
    if failed := shown["files"]["failed"]:
        found.append(Cell(f"{failed:,} could not be copied", tone="bad"))
    return found
