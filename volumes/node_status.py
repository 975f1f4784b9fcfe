"""What the node's object in the cluster shows of the format guard."""

from typing import TYPE_CHECKING

import kit.settings

if TYPE_CHECKING:
    from volumes.component import Volumes


class GuardStatus(kit.settings.Shown):
    """The format guard of this node."""

    mode: str = "off"
    """off, dry-run or enforce: what is wanted."""
    in_force: bool = False
    """Whether the kernel does it, on every device."""
    reasons: tuple[str, ...] = ()
    """Why not; at most 5."""
    devices: int = 0
    """Guarded devices."""


def of(component: "Volumes") -> GuardStatus:
    guard = component.guard
    problems = guard.problems()
    return GuardStatus(
        mode=str(guard.wanted_mode()),
        in_force=not problems,
        reasons=tuple(problems[:5]),
        devices=len(guard.manager.known),
    )


def brief(shown: GuardStatus) -> str:
    """Its mode, and whether that is only wanted."""
    return shown.mode if shown.in_force or shown.mode == "off" else f"{shown.mode} (not in force)"
