"""What to do next for a dataset. Pure: facts in, one action out.

Invariants: the store is published only when it is complete (it has nothing to fall through to);
an overlay only once every directory of the source is in the tree (a directory looked up before
that would keep only its source layer); nothing is unpublished here, a view only changes what
serves it.
"""

from dataclasses import dataclass
from enum import Enum, auto

from cache.view import Stage


class Action(Enum):
    NOTHING = auto()
    REACH = auto()  # mount the source if that is ours, look whether it answers
    PUBLISH_SOURCE = auto()
    PUBLISH_OVERLAY = auto()
    PUBLISH_STORE = auto()
    QUEUE = auto()  # ask for a pass
    REFRESH = auto()
    RELEASE = auto()  # let go of the source


@dataclass(frozen=True)
class Facts:
    stage: Stage
    complete: bool
    skeleton: bool
    reached: bool  # the source answered when it was last looked at
    reach_due: bool
    moved: bool  # the view shows another mount of the source than the one that answers
    pass_wanted: bool
    pass_there: bool  # queued or running
    refresh_due: bool
    source_needed: bool  # a verify is queued or under way
    source_held: bool  # something of it may be mounted by us


def next_action(facts: Facts) -> Action:
    """The most pressing one; asked again after it is done."""
    if facts.complete:
        if facts.stage is not Stage.STORE:
            return Action.PUBLISH_STORE
        # A mounted source costs memory (ceph-fuse keeps its cache) and keeps devices busy.
        release = facts.source_held and not facts.source_needed
        return Action.RELEASE if release else Action.NOTHING
    if not facts.reached:
        return Action.REACH if facts.reach_due else Action.NOTHING
    if facts.stage is Stage.OVERLAY or facts.skeleton:
        if facts.stage is not Stage.OVERLAY or facts.moved:
            return Action.PUBLISH_OVERLAY
    elif facts.stage is not Stage.SOURCE or facts.moved:
        return Action.PUBLISH_SOURCE
    if facts.pass_wanted and not facts.pass_there:
        return Action.QUEUE
    if facts.refresh_due and facts.stage is Stage.OVERLAY:
        return Action.REFRESH
    return Action.REACH if facts.reach_due else Action.NOTHING
