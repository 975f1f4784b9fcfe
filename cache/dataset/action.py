"""What a dataset needs next: one pure decision, asked again after each action.

The store itself is published only when it is complete, for it has no source to fall back to. An
overlay is published only when every directory of the source is in the tree: a directory that a
reader looked up earlier would show the source only. While the store cannot be trusted (its disk has
errors) or belongs to a source that is no longer there (``stale``), the source alone is published.
So it is while an overlay would lose files that jobs may read in the source (``unfit``), until a
fill comes to its end.
Nothing of a store with files that are known to be bad is published before they are out of it.
"""

from dataclasses import dataclass
from enum import Enum, auto

from cache.views.view import Stage


class Action(Enum):
    NOTHING = auto()
    REACH = auto()  # mount the source if the agent mounts it, and check that it answers
    PUBLISH_SOURCE = auto()
    PUBLISH_OVERLAY = auto()
    PUBLISH_STORE = auto()
    WITHDRAW = auto()  # take bad files out of the store
    RENEW = auto()  # discard the generation and begin another one
    QUEUE = auto()  # ask for a fill
    REFRESH = auto()
    RELEASE = auto()  # unmount the source


@dataclass(frozen=True)
class Facts:
    stage: Stage
    complete: bool
    skeleton: bool
    stale: bool  # the generation is of another source than the one that answers now
    store_usable: bool  # its disk has no trouble
    reached: bool  # the source answered the last check
    servable: bool  # it can be mounted: a block image needs a client of the kernel
    reach_due: bool
    moved: bool  # the view shows another mount of the source than the one that answers
    fill_wanted: bool
    job_there: bool  # queued or running
    refresh_due: bool
    source_needed: bool  # a job needs it
    source_mounted: bool  # the agent may have mounted something of it
    unfit: bool = False  # an overlay would lose files of the source
    bad: bool = False  # bad files may be in the tree, or its source has come back to replace them
    volumes: bool = False  # pods have volumes that show its tree: it is not discarded


def next_action(facts: Facts) -> Action:
    """The most urgent action. Pure; asked again after each action."""
    if facts.stale or not facts.store_usable or (facts.unfit and not facts.complete):
        return _without_store(facts)
    if facts.bad:  # before anything of the store is published
        return Action.REACH if facts.reach_due else Action.WITHDRAW
    if facts.complete:
        if facts.stage is not Stage.STORE:
            return Action.PUBLISH_STORE
        if facts.reach_due:
            return Action.REACH  # is it still the source that was filled from?
        # A mounted source costs memory (the cache of ceph-fuse) and keeps devices busy.
        release = facts.source_mounted and not facts.source_needed
        return Action.RELEASE if release else Action.NOTHING
    if not facts.reached:
        return Action.REACH if facts.reach_due else Action.NOTHING
    if facts.stage is Stage.OVERLAY or facts.skeleton:
        if facts.stage is not Stage.OVERLAY or facts.moved:
            return Action.PUBLISH_OVERLAY
    elif facts.servable and (facts.stage is not Stage.SOURCE or facts.moved):
        return Action.PUBLISH_SOURCE
    if facts.fill_wanted and not facts.job_there:
        return Action.QUEUE
    if facts.refresh_due and facts.stage is Stage.OVERLAY:
        return Action.REFRESH
    return Action.REACH if facts.reach_due else Action.NOTHING


def _without_store(facts: Facts) -> Action:
    """What the view shows stays until the source answers: it may still be read."""
    if not facts.reached:
        return Action.REACH if facts.reach_due else Action.NOTHING
    if facts.servable and (facts.stage is not Stage.SOURCE or facts.moved):
        return Action.PUBLISH_SOURCE
    if facts.stale and facts.store_usable and not facts.job_there and not facts.volumes:
        return Action.RENEW
    if not facts.stale and facts.store_usable and facts.fill_wanted and not facts.job_there:
        return Action.QUEUE
    return Action.REACH if facts.reach_due else Action.NOTHING
