"""Whose turn it is in each slot, and for whom a running fill stops."""

import dataclasses
import itertools

from hypothesis import example, given, settings
from hypothesis import strategies as st

from cache.work import turns
from cache.work.turns import Claim, Kind
from tests.testbed import examples


def test_next_is_what_operators_wait_for_then_the_higher_priority_then_the_name() -> None:
    waiting = [
        Claim("c", 5), Claim("b", 5), Claim("a", 0), Claim("d", -1, Kind.VERIFY),
    ]  # fmt: skip
    order = []
    while (name := turns.first(waiting)) is not None:
        order.append(name)
        waiting = [each for each in waiting if each.name != name]
    assert order == ["d", "b", "c", "a"]


def test_of_equals_the_one_that_stopped_for_another_goes_on_first() -> None:
    assert turns.first([Claim("a", 0), Claim("b", 0, began=True)]) == "b"
    assert turns.first([Claim("a", 1), Claim("b", 0, began=True)]) == "a"


def test_fill_stops_for_a_higher_priority_only() -> None:
    running = Claim("a", 3)
    for priority, stops in ((2, None), (3, None), (4, "b")):
        assert turns.stops_for(running, [Claim("b", priority)], 0.0).name == stops
    assert turns.stops_for(running, [Claim("c", 9), Claim("b", 9), Claim("d", 4)], 0.0).name == "b"


def test_evictions_have_a_slot_of_their_own() -> None:
    """A fill neither stops for one nor keeps it waiting."""
    eviction = Claim("b", 9, Kind.EVICTION)
    assert turns.first([eviction, Claim("a", 0)]) == "a"
    assert turns.first_eviction([eviction, Claim("a", 0)]) == "b"
    assert turns.first_eviction([eviction, Claim("c", 9, Kind.EVICTION, now=True)]) == "c"
    assert turns.stops_for(Claim("a", 3), [eviction], 0.0) == turns.Verdict()


def test_no_two_slots_work_on_one_dataset() -> None:
    """Its eviction comes before its jobs, and a fill stops for none that cannot run yet."""
    eviction, fill = Claim("b", 9, Kind.EVICTION), Claim("b", 9)
    running = Claim("a", 3)
    assert turns.first([eviction, fill, Claim("b", 9, Kind.VERIFY)]) is None
    assert turns.stops_for(running, [eviction, fill], 0.0) == turns.Verdict()
    assert turns.first([fill], busy=["b"]) is None
    assert turns.stops_for(running, [fill], 0.0, busy=["b"]) == turns.Verdict()
    assert turns.first_eviction([eviction], busy=["b"]) is None


def test_fill_stops_for_no_verify_of_whatever_priority() -> None:
    """A verify has no deadline: it may take as long as the fill."""
    waiting = Claim("b", 9, Kind.VERIFY)
    assert turns.stops_for(Claim("a", 3), [waiting], 0.0) == turns.Verdict()
    assert turns.stops_for(Claim("a", 3), [waiting, Claim("b", 9)], 0.0).kind is Kind.FILL


def test_of_equals_a_fill_stops_for_the_one_that_runs_then() -> None:
    waiting = [Claim("b", 9), Claim("c", 9, began=True)]
    assert turns.stops_for(Claim("a", 0), waiting, 0.0).name == turns.first(waiting) == "c"


def test_what_an_operator_wants_now_goes_before_all_priorities() -> None:
    urgent = Claim("b", 0, now=True)
    assert turns.first([Claim("a", 9), urgent]) == "b"
    assert turns.stops_for(Claim("a", 9), [urgent], 0.0).name == "b"
    assert turns.stops_for(urgent, [Claim("a", 9)], 0.0).name is None
    assert turns.stops_for(urgent, [Claim("a", 0, now=True)], 0.0).name is None


def test_what_only_tries_again_waits_for_the_end_of_the_fill() -> None:
    assert turns.stops_for(Claim("a", 0), [Claim("b", 9, retry=True)], 0.0) == turns.Verdict()


def test_who_has_stopped_a_fill_lately_waits_and_is_looked_at_again_in_time() -> None:
    running, waiting = Claim("a", 0), [Claim("b", 9, not_before=50.0), Claim("c", 8, not_before=70)]
    assert turns.stops_for(running, waiting, 10.0) == turns.Verdict(look_at=50.0)
    assert turns.stops_for(running, waiting, 50.0).name == "b"
    assert turns.stops_for(running, [*waiting, Claim("d", 1)], 10.0).name == "d"


@dataclasses.dataclass(frozen=True)
class Wish:
    """A dataset that comes at step ``at`` and is filled ``times`` times, ``work`` steps each."""

    at: int
    priority: int
    work: int
    fails: frozenset[int]  # at these steps of its work its fill fails, and is tried again at once
    lacks: frozenset[int] = frozenset()  # its fill ends without room, and is tried again
    now: bool = False  # an operator wants it before all others
    times: int = 1


_steps = st.frozensets(st.integers(1, 11), max_size=3)
_wishes = st.lists(
    st.builds(
        Wish, st.integers(0, 30), st.integers(0, 4), st.integers(1, 12), _steps, _steps,
        st.booleans(), st.integers(1, 3),
    ),
    min_size=1, max_size=8,
)  # fmt: skip
SECONDS = 20.0  # of a step
EVICTION_STEPS = 3
VERIFY = Claim("verify", 9, Kind.VERIFY)  # takes one step


class Simulated:
    """Wishes come, are stopped, end and are tried again; operators ask for the rest.

    Files go beside that, of what is filled and of others.
    """

    def __init__(self, wishes: list[Wish]) -> None:
        self.wishes = {str(number): wish for number, wish in enumerate(wishes)}
        self.done = dict.fromkeys(self.wishes, 0)
        self.troubles = {name: wish.fails | wish.lacks for name, wish in self.wishes.items()}
        self.left = {name: wish.times for name, wish in self.wishes.items()}
        self.urgent = {name for name, wish in self.wishes.items() if wish.now}
        self.retry: set[str] = set()
        self.began: set[str] = set()
        self.not_before: dict[str, float] = {}
        self.asked: list[Claim] = []  # of operators
        self.running: str | None = None
        self.evicted: tuple[str, int] | None = None  # whose files go, and steps until they are out
        self.stops: list[tuple[Claim, Claim, float]] = []

    def claim(self, name: str) -> Claim:
        retry = name in self.retry
        return Claim(
            name, self.wishes[name].priority, now=name in self.urgent and not retry,
            began=name in self.began, retry=retry, not_before=self.not_before.get(name, 0.0),
        )  # fmt: skip

    def step(self, number: int, asked: list[Claim]) -> None:
        now = number * SECONDS
        self.asked += asked
        fills = [
            self.claim(name)
            for name, wish in self.wishes.items()
            if wish.at <= number and self.left[name] and name != self.running
        ]
        waiting = [*fills, *self.asked]
        self.evict(waiting)
        busy = [] if self.evicted is None else [self.evicted[0]]
        if self.running is not None:
            running = dataclasses.replace(self.claim(self.running), retry=False)
            verdict = turns.stops_for(running, waiting, now, busy)
            if verdict.name is None:
                self.work(self.running, now)
                return
            winner = next(
                each for each in waiting if (each.name, each.kind) == (verdict.name, verdict.kind)
            )
            self.stops.append((running, winner, now))
            self.began.add(self.running)
            self.not_before[winner.name] = now + turns.FAILED_SECONDS
            waiting.append(self.claim(self.running))
        self.running = None
        name = turns.first(waiting, busy)
        assert name not in busy, "no two work on one"
        if name in self.wishes:
            self.running = name
            self.work(self.running, now)
        else:
            self.asked = [each for each in self.asked if each.name != name]

    def evict(self, waiting: list[Claim]) -> None:
        """What takes out files goes on, and the next one begins."""
        if self.evicted is not None:
            at, steps = self.evicted
            self.evicted = (at, steps - 1) if steps > 1 else None
        if self.evicted is not None:
            return
        filled = [] if self.running is None else [self.running]
        able = [c for c in self.asked if c.kind is Kind.EVICTION and c.name not in filled]
        name = turns.first_eviction(waiting, filled)
        assert (name is None) == (not able), "an eviction waits for no other job"
        if name is not None:
            assert name not in filled, "no two work on one"
            self.evicted = name, EVICTION_STEPS
            self.asked = [c for c in self.asked if (c.name, c.kind) != (name, Kind.EVICTION)]
            waiting[:] = [c for c in waiting if (c.name, c.kind) != (name, Kind.EVICTION)]

    def work(self, name: str, now: float) -> None:
        self.done[name] += 1
        self.began.discard(name)
        self.retry.discard(name)
        if self.done[name] in self.troubles[name]:
            if self.done[name] in self.wishes[name].lacks:
                self.retry.add(name)
                self.urgent.discard(name)
            self.troubles[name] -= {self.done[name]}
            self.running = None
        elif self.done[name] >= self.wishes[name].work:
            self.left[name] -= 1
            self.done[name], self.running = 0, None
            self.urgent.discard(name)
            if name in self.not_before:
                self.not_before[name] = now + turns.AGAIN_SECONDS


@settings(max_examples=examples.number(20))
@given(
    _wishes,
    st.dictionaries(st.integers(0, 60), st.integers(0, 9).map(str), max_size=6),
    st.sets(st.integers(0, 60)),
)
@example([Wish(0, 0, 12, frozenset()), Wish(1, 4, 12, frozenset({1, 2, 3}))], {}, set())
@example([Wish(0, 0, 12, frozenset()), Wish(1, 4, 2, frozenset(), times=3)], {2: "9"}, {3})
@example([Wish(0, 0, 12, frozenset()), Wish(1, 4, 12, frozenset())], {3: "0", 4: "1"}, set())
def test_all_fills_end_and_none_is_stopped_for_its_equal_or_again_and_again(
    wishes: list[Wish], evictions: dict[int, str], verifies: set[int]
) -> None:
    """Also when they fail, lack room, follow one another, or operators ask for other things:
    evictions, of what is to be filled and of others, are done beside."""
    node = Simulated(wishes)
    for number in range(1000):
        asked = [Claim(evictions[number], 0, Kind.EVICTION)] if number in evictions else []
        node.step(number, asked + ([VERIFY] if number in verifies else []))
    assert not any(node.left.values())
    assert node.asked == []
    assert node.evicted is None
    for running, winner, _ in node.stops:
        assert winner.rank > running.rank
        assert winner.kind is Kind.FILL
        assert not winner.retry
    for name, wish in node.wishes.items():
        times = [at for _, winner, at in node.stops if winner.name == name]
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        assert all(gap >= turns.AGAIN_SECONDS for gap in gaps)
        after_failures = [gap for gap in gaps if gap < turns.FAILED_SECONDS]
        assert len(after_failures) < wish.times, "a good end each"
