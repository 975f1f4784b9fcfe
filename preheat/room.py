"""Image preheating as the process registers it."""

import kit.traces
from kit.room import Command, Intent, Report, Room, calls, named
from preheat import node_status, settings


def _traces() -> kit.traces.Traces:
    from preheat import uninstall

    return kit.traces.Traces(uninstall.find, uninstall.remove)


_IMAGES = Intent(
    kind="ImageSet",
    plural="imagesets",
    short=("ims",),
    summary="Container images that nodes pull before a job asks for them, and keep.",
    field="images",
    model=settings.ImageSettings,
    key="ref",
    many="images",
    without=("nodes",),  # the object's nodeSelector
)

ROOM = Room(
    name="preheat",
    summary="Container images kept ready; absent: no image is pulled or pinned on this node.",
    settings=settings.PreheatSettings,
    build=calls("preheat.component:Preheat"),
    routes=named("preheat.api:ROUTES"),
    openapi="preheat:openapi.yaml",
    commands=(Command("image", "Container images kept ready.", named("preheat.commands:image")),),
    page=calls("preheat.page:sections"),
    checks=calls("preheat.doctor:checks"),
    traces=_traces,
    intents=(_IMAGES,),
    state_files={
        "preheat-boot.json": "layers that are not known to be on the disk are doubted, and "
        "unpacked again",
    },
    report=Report(
        "images",
        node_status.ImageStatus,
        many=True,
        read=node_status.of,
        brief=node_status.brief,
        key="ref",
        told=("state", "pinned", "digest"),
    ),
)
