"""Which generation is scrubbed next, why, and how fast. Pure.

Suspect ones come first: their views show the source until they are verified. Then those of a node
that went down uncleanly, then the one whose last scrub is longest ago, once a period is over. For
one reason current generations come before earlier ones, which need not read what they share with
those.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

from cache.settings import ScrubSettings

Reason = Literal["suspect", "crash", "round"]
SUSPECT: Final = "suspect"
CRASH: Final = "crash"
ROUND: Final = "round"
# No job reads a suspect store: as many readers as keep an SSD busy.
SUSPECT_WORKERS, WORKERS = 4, 1


@dataclass(frozen=True)
class Candidate:
    """A generation with files, which no job works on and which may be read now."""

    name: str
    priority: int
    suspect: bool
    crashed: bool  # the node went down since its last scrub began
    last: float  # Unix time when its files were last known to be good
    earlier: str = ""  # id of an earlier generation; '' of the current one


@dataclass(frozen=True)
class Choice:
    name: str
    reason: Reason
    earlier: str = ""


@dataclass(frozen=True)
class Pace:
    workers: int
    bytes_per_second: int  # 0: no limit


def choose(candidates: Iterable[Candidate], settings: ScrubSettings, now: float) -> Choice | None:
    """``now``: Unix time. A time in the future (the clock was set back) counts as long ago."""
    found = list(candidates)
    urgent: list[tuple[Reason, list[Candidate]]] = [
        (SUSPECT, [each for each in found if each.suspect]),
        (CRASH, [each for each in found if each.crashed and settings.every > 0]),
    ]
    for reason, those in urgent:
        if those:
            first = min(those, key=lambda c: (c.earlier != "", -c.priority, c.name, c.earlier))
            return Choice(first.name, reason, first.earlier)
    due = [c for c in found if settings.every > 0 and _age(c, now) >= settings.every]
    if not due:
        return None
    chosen = max(due, key=lambda c: (_age(c, now), c.earlier == "", c.priority, c.name, c.earlier))
    return Choice(chosen.name, ROUND, chosen.earlier)


def _age(candidate: Candidate, now: float) -> float:
    return now - candidate.last if candidate.last <= now else float("inf")


def pace(choice: Choice, settings: ScrubSettings, *, filling: bool) -> Pace:
    """``filling``: a fill runs, which needs the disk more than an ordinary scrub.

    No view waits for an earlier generation, so a suspect one is not as fast as the disk.
    """
    if choice.reason == SUSPECT and not choice.earlier:
        return Pace(SUSPECT_WORKERS, 0)
    if choice.reason in (CRASH, SUSPECT) and not filling:
        return Pace(WORKERS, settings.crash_bytes_per_second)
    return Pace(WORKERS, settings.bytes_per_second)
