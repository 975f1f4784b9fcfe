"""Who gives up files when something takes more than its budget: pure, by a state machine."""

import dataclasses
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cache.space.victims import Share, StoreBudget, giver, in_the_way, next_one

NAMES = ("a", "b", "c", "d")
SIZES = st.integers(0, 40)


class Node(RuleBasedStateMachine):
    """Datasets of a node that fill, are used, and get other budgets; each file has one byte."""

    def __init__(self) -> None:
        super().__init__()
        self.store = StoreBudget(100)
        self.shares: dict[str, Share] = {}
        self.now = 0.0
        self.stuck: set[str] = set()  # readers stand in an earlier view: it gives nothing

    @initialize(priorities=st.lists(st.integers(0, 1), min_size=4, max_size=4))
    def begin(self, priorities: list[int]) -> None:
        for name, priority in zip(NAMES, priorities, strict=True):
            self.shares[name] = Share(name, 0, 0, priority=priority)

    def _change(self, name: str, **changes: Any) -> None:
        self.shares[name] = dataclasses.replace(self.shares[name], **changes)

    @property
    def total(self) -> int:
        return sum(each.bytes for each in self.shares.values())

    def _room(self, share: Share) -> int:
        own = share.budget - share.bytes if share.budget else 10**6
        inodes = self.store.budget_inodes - self.total if self.store.budget_inodes else 10**6
        return max(0, min(self.store.budget - self.store.foreign - self.total, own, inodes))

    @rule(name=st.sampled_from(NAMES), files=SIZES)
    def fill(self, name: str, files: int) -> None:
        """As far as there is room, as a pass does; what it lacks is asked of others first."""
        wanted = self.shares[name]
        if wanted.budget:
            files = min(files, max(0, wanted.budget - wanted.bytes))
        asked: list[str] = []
        while self._room(wanted) < files and (
            other := giver(list(self.shares.values()), name, asked)
        ):
            given = self.shares[other]
            assert other != name
            assert other not in asked
            assert not given.keep, "what is kept gives to nobody"
            assert not given.in_use, "a job reads it"
            assert given.priority <= wanted.priority
            if given.priority == wanted.priority and not wanted.in_use:
                assert given.used < wanted.used, "one that was used later gives to an earlier one"
            asked.append(other)
            self._comes_first(given, asked)
            if other not in self.stuck:
                left = max(0, given.bytes - (files - self._room(wanted)))
                self._change(other, bytes=left, inodes=left)
        taken = wanted.bytes + min(files, self._room(wanted))
        self._change(name, bytes=taken, inodes=taken)

    @rule(name=st.sampled_from(NAMES))
    def use(self, name: str) -> None:
        self.now += 1.0
        self._change(name, used=self.now)

    @rule(name=st.sampled_from(NAMES), in_use=st.booleans())
    def hold(self, name: str, in_use: bool) -> None:
        self.now += 1.0
        self._change(name, in_use=in_use, used=self.now)

    @rule(name=st.sampled_from(NAMES), keep=st.booleans())
    def keep(self, name: str, keep: bool) -> None:
        self._change(name, keep=keep)

    @rule(name=st.sampled_from(NAMES))
    def stand(self, name: str) -> None:
        self.stuck ^= {name}

    @rule(name=st.sampled_from(NAMES), budget=SIZES)
    def set_own_budget(self, name: str, budget: int) -> None:
        self._change(name, budget=budget)

    @rule(budget=st.integers(1, 100), inodes=st.integers(0, 100), foreign=st.integers(0, 5))
    def set_budget(self, budget: int, inodes: int, foreign: int) -> None:
        self.store = StoreBudget(budget, inodes, foreign)

    @rule()
    def settle(self) -> None:
        """Ask one after the other; each gives what is beyond, unless it cannot now."""
        asked: list[str] = []
        while (name := next_one(list(self.shares.values()), self.store, asked)) is not None:
            assert name not in asked
            asked.append(name)
            share = self.shares[name]
            node = max(
                self.total + self.store.foreign - self.store.budget,
                self.total - self.store.budget_inodes if self.store.budget_inodes else 0,
            )
            own = share.bytes - share.budget if share.budget else 0
            over = max(own, 0 if share.keep else node)
            assert over > 0, "nothing is beyond, and something is taken"
            if not share.beyond:
                assert not share.keep, "what is kept gives to nobody"
                self._comes_first(share, asked)
            if name not in self.stuck:
                left = max(0, share.bytes - over)
                self._change(name, bytes=left, inodes=left)
        for share in self.shares.values():
            assert not share.beyond or share.name in self.stuck
        if self.store.beyond(list(self.shares.values())):
            for share in self.shares.values():
                assert share.bytes == 0 or share.keep or share.name in self.stuck

    def _comes_first(self, share: Share, asked: list[str]) -> None:
        for other in self.shares.values():
            if other.name in asked or other.keep:
                continue
            assert share.in_use <= other.in_use, "a job reads it, and nobody reads the other"
            if share.in_use == other.in_use:
                assert share.priority <= other.priority
                if share.priority == other.priority:
                    assert share.used <= other.used, "one that was used later gives first"

    @invariant()
    def nothing_within_its_budgets_gives(self) -> None:
        shares = list(self.shares.values())
        if not self.store.beyond(shares) and not any(each.beyond for each in shares):
            assert next_one(shares, self.store, ()) is None

    @invariant()
    def no_two_take_from_each_other(self) -> None:
        shares = list(self.shares.values())
        takes = {name: _givers(shares, name) for name in self.shares}
        for name, givers in takes.items():
            for other in givers:
                assert name not in takes[other]

    @invariant()
    def what_is_in_the_way_would_give(self) -> None:
        shares = list(self.shares.values())
        for name in self.shares:
            free = [dataclasses.replace(each, keep=False) for each in shares]
            assert set(in_the_way(shares, name)) <= set(_givers(free, name))


def _givers(shares: list[Share], taker: str) -> list[str]:
    found: list[str] = []
    while (name := giver(shares, taker, found)) is not None:
        found.append(name)
    return found


TestNode = Node.TestCase


def test_what_cannot_give_is_not_asked() -> None:
    shares = [Share("a", 60, 1, ready=False), Share("b", 60, 1, used=9.0)]
    assert next_one(shares, StoreBudget(100), ()) == "b"
    assert next_one(shares, StoreBudget(100), {"b"}) is None
    assert next_one(shares, StoreBudget(120), ()) is None
    shares.append(Share("c", 0, 0, used=10.0))
    assert giver(shares, "c", ()) == "b"
    assert giver(shares, "c", {"b"}) is None


def test_disk_that_others_fill_takes_as_a_budget_does() -> None:
    """Within all budgets: what is kept stays, what a job holds goes last."""
    shares = [
        Share("a", 10, 1, in_use=True), Share("b", 10, 1, used=9.0), Share("c", 10, 1, keep=True),
    ]  # fmt: skip
    assert next_one(shares, StoreBudget(100), ()) is None
    short = StoreBudget(100, short=True)
    assert next_one(shares, short, ()) == "b"
    assert next_one(shares, short, {"b"}) == "a"
    assert next_one(shares, short, {"a", "b"}) is None


def test_equal_ones_take_nothing_from_each_other() -> None:
    """Datasets that came together and that nobody used: the first one that was filled stays."""
    shares = [Share("a", 60, 1, used=5.0), Share("b", 40, 1, used=5.0)]
    assert giver(shares, "a", ()) is None
    assert giver(shares, "b", ()) is None


def test_one_that_a_job_holds_takes_from_one_that_was_used_a_moment_ago() -> None:
    shares = [Share("a", 60, 1, used=5.0, in_use=True), Share("b", 40, 1, used=9.0)]
    assert giver(shares, "a", ()) == "b"
    assert giver(shares, "b", ()) is None
    important = dataclasses.replace(shares[1], priority=1)
    assert giver([shares[0], important], "a", ()) is None
