"""Who gives up stored files next, when something takes more than its budget or lacks room. Pure.

A dataset beyond its own budget gives first. While the store is beyond the node's, the others give:
those that no job uses before those that jobs use now, then the lowest priority, of equals the one
whose last use by a job is longest ago. The same when others fill the disk and its reserve is short.

For a dataset that lacks room only those give that come before it: no job uses them, and they have
a lower priority, or the same one and an earlier last use. So no two datasets take room from each
other in turn.

What is kept gives only what is beyond its own budget.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Share:
    """What one dataset takes of the store, all its generations together."""

    name: str
    bytes: int
    inodes: int
    budget: int = 0  # its own; 0: none
    budget_inodes: int = 0
    priority: int = 0
    keep: bool = False
    in_use: bool = False  # by a job
    used: float = 0.0  # Unix time of the last use by a job
    ready: bool = True  # something may be taken out of it now

    @property
    def beyond(self) -> bool:
        return (0 < self.budget < self.bytes) or (0 < self.budget_inodes < self.inodes)

    @property
    def rank(self) -> tuple[int, bool, float]:
        """Of two that want the same room the higher one gets it."""
        return self.priority, self.in_use, self.used


@dataclass(frozen=True)
class StoreBudget:
    """The node's budgets. ``foreign``: SSD bytes of the store that belong to no dataset."""

    budget: int
    budget_inodes: int = 0  # 0: none
    foreign: int = 0
    short: bool = False  # less of its disk is free than the reserve, and others took that

    def beyond(self, shares: Sequence[Share]) -> bool:
        inodes = sum(each.inodes for each in shares)
        size = self.foreign + sum(each.bytes for each in shares)
        return self.short or size > self.budget or 0 < self.budget_inodes < inodes


def exceeded(share: Share, shares: Sequence[Share], store: StoreBudget | None) -> str:
    """Which budget ``share`` gives files for, for operators: its own, or else the node's."""
    whose, size = "its own ", 0 < share.budget < share.bytes
    if store is not None and not share.beyond:
        whose = "cache."
        size = store.foreign + sum(each.bytes for each in shares) > store.budget
    return f"{whose}{'budget' if size else 'budget_inodes'} was exceeded"


def next_one(shares: Sequence[Share], store: StoreBudget, asked: Collection[str]) -> str | None:
    """The name of the dataset that gives now; None when nobody has to, or can.

    ``asked``: those that gave what they could, or could not, since budgets were looked at.
    """
    able = [each for each in shares if each.ready and each.name not in asked]
    if beyond := [each.name for each in able if each.beyond]:
        return min(beyond)
    if not store.beyond(shares):
        return None
    return _first(each for each in able if not each.keep)


def giver(shares: Sequence[Share], taker: str, asked: Collection[str]) -> str | None:
    """The name of the dataset that gives room to ``taker`` now; None when none is to, or can."""
    before = _before(shares, taker)
    return _first(e for e in before if e.ready and not e.keep and e.name not in asked)


def in_the_way(shares: Sequence[Share], taker: str) -> list[str]:
    """What would give room to ``taker`` if it were not kept."""
    return sorted(each.name for each in _before(shares, taker) if each.keep and each.bytes)


def _before(shares: Sequence[Share], taker: str) -> list[Share]:
    own = next(each for each in shares if each.name == taker)
    return [each for each in shares if not each.in_use and each.rank < own.rank]


def _first(shares: Iterable[Share]) -> str | None:
    order = min(shares, key=_order, default=None)
    return None if order is None else order.name


def _order(share: Share) -> tuple[bool, int, float, str]:
    return share.in_use, share.priority, share.used, share.name
