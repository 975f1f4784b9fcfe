"""Which generation of a dataset follows the one that serves: one pure decision, asked again.

A dataset has one current generation, at most one that is next, and earlier ones that are kept to go
back to. What is wanted is named by the id of its folder.

The next one serves when it is complete. When it lacks room, and all that may give some gave
it, it serves as far as it is stored: what is missing is read from its source. So it does at once
when the snapshot that serves does not exist any more: what that lacks nobody can read, and it can
give no room while it serves.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass
from enum import Enum, auto

# The state of a next one that is partial: no more of it can be stored now.
FITS = "fits"


class Step(Enum):
    NOTHING = auto()
    TAKE = auto()  # the current one holds nothing yet: it is replaced by the wanted one
    BEGIN = auto()  # make the next generation
    REACH = auto()  # its source
    QUEUE = auto()  # its fill
    SWITCH = auto()  # it serves from now on
    BACK = auto()  # an earlier generation is wanted, and serves from now on
    DROP = auto()  # another one is wanted than the next one
    SHOW = auto()  # mount what is complete by its id
    RETIRE = auto()  # discard the oldest of the earlier ones, if nobody uses it


@dataclass(frozen=True)
class Facts:
    wanted: str  # id; '' while it is not known
    insists: bool  # an operator chose it: what is under way is given up for it
    current: str
    current_empty: bool  # nothing of it is stored
    current_busy: bool  # it is being filled
    next: str  # '' while there is none
    next_state: str  # as in generation.json, or FITS
    outlived: bool  # the next one is worth more than the current one, whose snapshot is gone
    reached: bool  # the source of the next one answered
    lost: bool  # it did not when it was asked last
    reach_due: bool
    fill_due: bool
    job_there: bool  # a fill of the next one is queued or runs
    earlier: tuple[str, ...]  # complete ones, the latest first
    keep: int  # how many of them are kept
    no_room: bool  # the next one lacks room, or the current one does
    retire_due: bool
    retired: bool  # generations that are neither complete nor wanted wait for their end
    shown: bool  # everything that is to be mounted by its id is


def next_step(facts: Facts) -> Step:
    """The most urgent step. Pure."""
    another = facts.wanted not in ("", facts.next)
    if facts.next and another and (facts.insists or (facts.lost and not facts.job_there)):
        return Step.DROP
    if facts.next and facts.next_state in ("complete", FITS):
        return Step.SWITCH
    if facts.next and facts.outlived and facts.reached:
        return Step.SWITCH
    if facts.wanted and facts.wanted != facts.current and not facts.next:
        if facts.wanted in facts.earlier:
            return Step.BACK
        if facts.current_empty:
            return Step.TAKE
        # A snapshot that comes during a fill waits, unless an operator chose it.
        if facts.insists or not facts.current_busy:
            return Step.BEGIN
    if not facts.shown:
        return Step.SHOW
    most = 0 if facts.no_room else facts.keep
    if facts.retire_due and (facts.retired or len(facts.earlier) > most):
        return Step.RETIRE
    if facts.next:
        return _fill(facts)
    return Step.NOTHING


def _fill(facts: Facts) -> Step:
    if not facts.reached:
        return Step.REACH if facts.reach_due else Step.NOTHING
    return Step.QUEUE if facts.fill_due and not facts.job_there else Step.NOTHING


def newest(found: Mapping[str, float], matching: Container[str], since: float) -> str:
    """The newest of the matching snapshots that is newer than ``since``; '' when there is none.

    ``found``: when each was made, in Unix time. Of two of the same moment the last by name counts.
    """
    newer = [(made, name) for name, made in found.items() if name in matching and made > since]
    return max(newer)[1] if newer else ""
