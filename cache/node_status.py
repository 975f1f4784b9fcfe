"""What the node's object in the cluster shows of datasets."""

from pathlib import Path
from typing import TYPE_CHECKING

import kit.settings

if TYPE_CHECKING:
    from cache.component import Cache
    from cache.dataset.dataset import Dataset


class DatasetStatus(kit.settings.Shown):
    """One dataset on this node."""

    name: str
    """Name of the dataset."""
    state: str
    """complete, filling, partial, failed, paused, ...: as 'nodeagent dataset list' shows it."""
    generation: str = ""
    """Which version it is: a digest of what names the source, its snapshot included."""
    served_by: str = ""
    """What jobs read now: none, source, overlay or store."""
    bytes: int = 0
    """Bytes of the dataset, as far as they are counted."""
    done_bytes: int = 0
    """Of these, bytes on the node's SSD; while it fills, in steps of 5 % of the whole."""
    percent: int = 0
    """Share of the bytes on the SSD, in steps of 5 while it fills; 100 only when complete."""
    waits_for: str = ""
    """For whom its fill, which was stopped, waits now: a dataset, its priority, and whether that is
    its verify, its eviction or wanted now. It goes on by itself."""
    message: str = ""
    """Why it is not complete; who uses a deleted one."""


def of(component: "Cache") -> list[DatasetStatus]:
    """One for each dataset of the settings, by name."""
    return [_of(each) for _, each in sorted(component.datasets.items())]


def _of(shown: "Dataset") -> DatasetStatus:
    figures, state = shown.figures, shown.state()
    total = figures.bytes
    if shown.generation.state == "complete":
        done, percent = total, 100
    else:
        # Coarse: each step is a write to the API server.
        percent = min(95, figures.done_bytes * 20 // total * 5) if total else 0
        done = total * percent // 100
    return DatasetStatus(
        name=shown.name,
        state=state,
        generation=Path(shown.folder).name,
        served_by=str(shown.stage),
        bytes=total,
        done_bytes=done,
        percent=percent,
        waits_for=shown.waits_for() if shown.gave_way else "",
        message="" if state == "complete" else shown.why(),
    )


def brief(shown: list[DatasetStatus]) -> str:
    """How many are there in full, of how many."""
    return f"{sum(each.percent == 100 for each in shown)}/{len(shown)}"
