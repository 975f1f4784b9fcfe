"""Image preheating as the process registers it."""

from kit.room import Command, Room, calls, named
from preheat import settings

ROOM = Room(
    name="preheat",
    summary="Container images kept ready; absent: no image is pulled or pinned on this node.",
    settings=settings.PreheatSettings,
    build=calls("preheat.component:Preheat"),
    routes=named("preheat.api:ROUTES"),
    openapi="preheat:openapi.yaml",
    commands=(Command("image", "Container images kept ready.", named("preheat.commands:image")),),
)
