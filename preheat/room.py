"""Image preheating as the process registers it."""

from typing import TYPE_CHECKING

import kit.settings
from kit.room import Intent, Report, Room, calls, named, whole
from preheat import settings

if TYPE_CHECKING:
    from preheat.component import Preheat

# What the node's object in the cluster shows of images.

# States whose reason does not change by itself while nothing happens.
_TOLD = ("failed", "refused", "skipped", "paused", "released")


class ImageStatus(kit.settings.Shown):
    """An image that is requested or pinned on this node."""

    ref: str  # Its reference.
    digest: str = ""  # Digest of the tag, if known.
    state: str  # ready, pulling, unpacking, waiting, failed, ...: as in 'nodeagent image list'.
    pinned: bool = False  # Whether garbage collection keeps it.
    bytes: int = 0  # Compressed bytes.
    percent: int = 0  # Share on the node. During a pull, in steps of 5. 100: ready.
    message: str = ""  # Why it is not ready.


def report(component: "Preheat") -> list[ImageStatus]:
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


_IMAGES = Intent(
    kind="ImageSet",
    plural="imagesets",
    short=("ims",),
    summary="Container images that nodes pull before a job needs them, and keep.",
    field="images",
    model=settings.ImageSettings,
    key="ref",
    many="images",
    without=("nodes",),  # the object's nodeSelector
)

ROOM = Room(
    name="preheat",
    summary="Container images kept ready. Without this section: off.",
    settings=settings.PreheatSettings,
    build=calls("preheat.component:Preheat"),
    routes=named("preheat.api:ROUTES"),
    heads=("images",),
    page=calls("preheat.api:sections"),
    checks=calls("preheat.doctor:checks"),
    traces=named("preheat.uninstall"),
    intents=(_IMAGES,),
    state_files={
        "preheat-boot.json": "layers that are not known to be on the disk are doubted, and "
        "unpacked again",
    },
    report=Report(
        "images",
        ImageStatus,
        many=True,
        read=report,
        brief=whole,
        key="ref",
        told=("state", "pinned", "digest"),
    ),
)
