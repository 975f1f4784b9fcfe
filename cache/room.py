"""The cache as the process registers it."""

import kit.traces
from cache import settings
from kit.room import Command, Room, calls, named


def _traces() -> kit.traces.Traces:
    from cache import uninstall

    return kit.traces.Traces(uninstall.find, uninstall.remove)


ROOM = Room(
    name="cache",
    summary="The dataset cache; absent: no cache on this node.",
    settings=settings.CacheSettings,
    build=calls("cache.component:Cache"),
    routes=named("cache.api:ROUTES"),
    openapi="cache:openapi.yaml",
    commands=(
        Command(
            "dataset",
            "Datasets: warmed onto the SSD, served by the kernel.",
            named("cache.commands:dataset"),
        ),
    ),
    page=calls("cache.api:page"),
    checks=calls("cache.doctor:checks"),
    traces=_traces,
)
