"""Image preheating as the process registers it."""

import kit.traces
from kit.room import Command, Room, calls, named
from preheat import settings


def _traces() -> kit.traces.Traces:
    from preheat import uninstall

    return kit.traces.Traces(uninstall.find, uninstall.remove)


ROOM = Room(
    name="preheat",
    summary="Container images kept ready; absent: no image is pulled or pinned on this node.",
    settings=settings.PreheatSettings,
    build=calls("preheat.component:Preheat"),
    routes=named("preheat.api:ROUTES"),
    openapi="preheat:openapi.yaml",
    commands=(Command("image", "Container images kept ready.", named("preheat.commands:image")),),
    checks=calls("preheat.doctor:checks"),
    traces=_traces,
)
