"""Volumes, the format guard and the volume audit, as the process registers them."""

from typing import TYPE_CHECKING

import kit.settings
from kit.room import Report, Room, calls, named
from volumes import settings

if TYPE_CHECKING:
    from volumes.component import Volumes

# What the node's object in the cluster shows of the format guard.


class GuardStatus(kit.settings.Shown):
    """The format guard of this node."""

    mode: str = "off"  # Wanted mode: off, dry-run or enforce.
    in_force: bool = False  # Whether the kernel applies this mode to each guarded device.
    reasons: tuple[str, ...] = ()  # Why inForce is false; at most 5.
    devices: int = 0  # Number of guarded devices.


def report(component: "Volumes") -> GuardStatus:
    guard = component.guard
    problems = guard.in_force.problems()
    return GuardStatus(
        mode=str(guard.in_force.wanted_mode()),
        in_force=not problems,
        reasons=tuple(problems[:5]),
        devices=len(guard.manager.known),
    )


def brief(shown: GuardStatus) -> str:
    """Its mode, and whether that is only wanted."""
    return shown.mode if shown.in_force or shown.mode == "off" else f"{shown.mode} (not in force)"


ROOM = Room(
    name="volumes",
    summary="Format guard and volume audit. Without this section: off.",
    settings=settings.VolumesSettings,
    build=calls("volumes.component:Volumes"),
    routes=named("volumes.api:ROUTES"),
    heads=("volumes", "audit"),
    page=calls("volumes.api:sections"),
    checks=calls("volumes.doctor:checks"),
    traces=named("volumes.uninstall"),
    condition=("StorageHazard", "NoHazard"),
    state_files=dict.fromkeys(
        (
            "volumes/guard-own.json",
            "volumes/guard-override.json",
            "volumes/guard-override-mode",
            "volumes/guard-wanted.json",
            "volumes/ledger/*.json",
        ),
        "the guard was as strict as it could be; what was written since counts",
    )
    | {"volumes/guard-rehearsal.json": "the rehearsal of the guard's scope began anew"},
    log_lines=calls("volumes.audit.logs.patterns:built_in"),
    report=Report(
        "guard",
        GuardStatus,
        many=False,
        read=report,
        brief=brief,
        told=("mode", "in_force"),
    ),
)
