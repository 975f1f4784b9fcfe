"""The health of the store's disk: normal, unstable or down. Pure.

The kernel serves the store, so a reader gets the disk's error before the agent knows of it. What
the agent can do is to be quick: with the first sign of trouble the views show their sources, and
they come back when the disk has been quiet for a while. A disk that fails again soon has to be
quiet for longer each time, or every return would cost its readers the same errors.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

import kit.pause

# Trouble that goes on for this long is no moment of weakness.
DOWN_SECONDS = 10.0
# Without trouble, before the store is used again; doubled with each return of it.
QUIET_SECONDS = 10.0
LONGEST_QUIET_SECONDS = 3600.0
# After so long without trouble it is as if there never was any.
FORGET_SECONDS = 24 * 3600.0


class State(StrEnum):
    NORMAL = "normal"
    UNSTABLE = "unstable"  # it failed a moment ago
    DOWN = "down"  # it goes on failing, does not answer, or is not there


@dataclass(frozen=True)
class Sign:
    """What one look at the disk showed."""

    fault: str = ""  # '' when nothing is wrong
    gone: bool = False  # no disk, or another one
    missing: bool = False  # its disk is there, and no store on it: a new one may be made
    slow: bool = False  # only late: nothing says that it lost anything


@dataclass(frozen=True)
class DiskHealth:
    """Times are of the monotonic clock."""

    state: State = State.NORMAL
    why: str = ""
    since: float = 0.0  # of this state
    last_fault: float = 0.0
    troubles: int = 0  # how often it left NORMAL and was not forgotten
    suspect: bool = False  # since it was last NORMAL it has failed, and not only been late

    @property
    def usable(self) -> bool:
        return self.state is State.NORMAL

    @property
    def quiet(self) -> float:
        """Seconds without trouble before it is normal again."""
        return kit.pause.grown(max(self.troubles, 1), QUIET_SECONDS, LONGEST_QUIET_SECONDS)


def after(health: DiskHealth, sign: Sign, now: float) -> DiskHealth:
    """The health after one more look."""
    if not sign.fault:
        return _good(health, now)
    if health.usable:
        state = State.DOWN if sign.gone else State.UNSTABLE
        return DiskHealth(state, sign.fault, now, now, health.troubles + 1, not sign.slow)
    health = replace(health, suspect=health.suspect or not sign.slow)
    lasting = sign.gone or now - health.since >= DOWN_SECONDS
    if health.state is State.UNSTABLE and lasting:
        return replace(health, state=State.DOWN, why=sign.fault, since=now, last_fault=now)
    return replace(health, why=sign.fault, last_fault=now)


def _good(health: DiskHealth, now: float) -> DiskHealth:
    calm = now - health.last_fault
    if not health.usable:
        if calm < health.quiet:
            return health
        return replace(health, state=State.NORMAL, why="", since=now, suspect=False)
    if health.troubles and calm >= FORGET_SECONDS:
        return DiskHealth(since=health.since)
    return health
