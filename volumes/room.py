"""Volumes, the format guard and the volume audit, as the process registers them."""

import kit.traces
from kit.room import Command, Report, Room, calls, named
from volumes import node_status, settings


def _traces() -> kit.traces.Traces:
    from volumes import uninstall

    return kit.traces.Traces(uninstall.find, uninstall.remove)


ROOM = Room(
    name="volumes",
    summary="Format guard and volume audit; absent: neither on this node.",
    settings=settings.VolumesSettings,
    build=calls("volumes.component:Volumes"),
    routes=named("volumes.api:ROUTES"),
    openapi="volumes:openapi.yaml",
    commands=(
        Command(
            "volume",
            "Volumes: format guard, probes, ledger, audit.",
            named("volumes.commands:volume"),
        ),
    ),
    page=calls("volumes.page:sections"),
    checks=calls("volumes.doctor:checks"),
    traces=_traces,
    condition=("StorageHazard", "NoHazard"),
    state_files=dict.fromkeys(
        (
            "volumes/guard-override.json",
            "volumes/guard-override-mode",
            "volumes/guard-wanted.json",
            "volumes/ledger/*.json",
        ),
        "the guard was as strict as it could be; what was written since counts",
    ),
    report=Report(
        "guard",
        node_status.GuardStatus,
        many=False,
        read=node_status.of,
        brief=node_status.brief,
        told=("mode", "in_force"),
    ),
)
