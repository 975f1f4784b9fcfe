"""What the node's object in the cluster shows of images."""

from typing import TYPE_CHECKING

import kit.settings

if TYPE_CHECKING:
    from preheat.component import Preheat


# States whose reason does not change by itself while nothing happens.
_TOLD = ("failed", "refused", "skipped", "paused", "released")


class ImageStatus(kit.settings.Shown):
    """One image that is requested or pinned on this node."""

    ref: str
    """Its reference."""
    digest: str = ""
    """What the tag names, as far as it is known."""
    state: str
    """ready, pulling, unpacking, waiting, failed, ...: as 'nodeagent image list' shows it."""
    pinned: bool = False
    """Whether garbage collection leaves it alone."""
    bytes: int = 0
    """Compressed bytes, as the registry serves them."""
    percent: int = 0
    """Share of the bytes that is on the node, in steps of 5 while it is pulled; 100 when ready."""
    message: str = ""
    """Why it is not ready."""


def of(component: "Preheat") -> list[ImageStatus]:
    """One for each image, those of high priority first."""
    found = []
    for row in component.images():
        ready, total = row.state == "ready", row.bytes_total
        # Coarse: each step is a write to the API server.
        percent = min(95, row.bytes_done * 20 // total * 5) if total else 0
        told = row.reason if row.state in _TOLD else ""
        found.append(
            ImageStatus(
                ref=row.ref,
                digest=row.digest,
                state=row.state,
                pinned=row.pinned,
                bytes=total,
                percent=100 if ready else percent,
                message=told,
            )
        )
    return found


def brief(shown: list[ImageStatus]) -> str:
    """How many are there in full, of how many."""
    return f"{sum(each.percent == 100 for each in shown)}/{len(shown)}"
