"""Whose turn it is in each slot, and for whom a running fill stops. Pure.

There is one slot for the jobs (fills, updates, verifies) and one for evictions, so that room is
given back while something is filled. No two work on one dataset; its eviction comes before its
jobs.

What operators wait for comes first, then the higher priority; of equals what has begun, then the
first by name. A running fill stops for what outranks it: one that an operator wants now, or a
higher priority. Of equals none stops for the other, so no two of them take turns. A verify waits
for its end: it has no deadline, and may take as long.

A source that fails again and again must not stop another fill each time: what has stopped one
does so again after a while only (``Claim.not_before``), and what merely tries again what failed
waits until the slot is free.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import Enum

AGAIN_SECONDS = 60.0  # from the good end of a fill that another one stopped for
FAILED_SECONDS = 900.0  # from the stop, while the fill that it was for has no good end


class Kind(Enum):
    EVICTION = "eviction"
    VERIFY = "verify"
    FILL = "fill"


@dataclass(frozen=True)
class Claim:
    """One dataset that waits for its slot, or has it."""

    name: str
    priority: int
    kind: Kind = Kind.FILL
    now: bool = False  # an operator wants it before all others
    began: bool = False  # its fill has stopped for another one
    retry: bool = False  # its fill has ended once, and tries again what failed or did not fit
    not_before: float = 0.0  # monotonic time from which a fill may be stopped for it

    @property
    def rank(self) -> tuple[bool, int]:
        """A running fill stops for a higher one."""
        return self.now, self.priority


@dataclass(frozen=True)
class Verdict:
    """``name``: for whom the running fill stops now, and for what. ``look_at``: monotonic time at
    which to decide again, though nothing else changes."""

    name: str | None = None
    kind: Kind | None = None
    look_at: float | None = None


def first(waiting: Iterable[Claim], busy: Collection[str] = ()) -> str | None:
    """The name of the one whose job runs when that slot is free.

    ``busy``: what the other slot works on.
    """
    return _name_of(_jobs(waiting, busy))


def first_eviction(waiting: Iterable[Claim], busy: Collection[str] = ()) -> str | None:
    """The same of the evictions."""
    able = (each for each in waiting if each.kind is Kind.EVICTION)
    return _name_of(each for each in able if each.name not in busy)


def stops_for(
    running: Claim, waiting: Iterable[Claim], now: float, busy: Collection[str] = ()
) -> Verdict:
    """``running``: a fill. ``now``: monotonic time."""
    jobs = _jobs(waiting, busy)
    able = [each for each in jobs if each.kind is not Kind.VERIFY and not each.retry]
    better = [each for each in able if each.rank > running.rank]
    allowed = [each for each in better if each.not_before <= now]
    if allowed:
        chosen = min(allowed, key=_order)
        return Verdict(chosen.name, chosen.kind)
    return Verdict(look_at=min((each.not_before for each in better), default=None))


def _jobs(waiting: Iterable[Claim], busy: Collection[str]) -> list[Claim]:
    """Those that may run now."""
    every = list(waiting)
    later = {each.name for each in every if each.kind is Kind.EVICTION}.union(busy)
    return [each for each in every if each.name not in later]


def _name_of(able: Iterable[Claim]) -> str | None:
    chosen = min(able, key=_order, default=None)
    return None if chosen is None else chosen.name


def _order(claim: Claim) -> tuple[bool, bool, int, bool, str]:
    return claim.kind is Kind.FILL, not claim.now, -claim.priority, not claim.began, claim.name
