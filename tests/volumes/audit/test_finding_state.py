"""From troubles to findings: patience, clearing, flapping, unknown. Pure."""

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from kit.findings import Severity
from volumes.audit import finding_state
from volumes.audit.finding_state import Judged
from volumes.audit.types import Trouble

TROUBLE = Trouble(subject="rbd0", message="m", advice="a", key="k", device="rbd0", pid=7)
SEEN = Judged("leaked-mount", ((TROUBLE, Severity.CRITICAL, 2.0),))
NOTHING = Judged("leaked-mount", ())
BLIND = Judged("leaked-mount", (), unknown="the look gave no answer")


def after(*steps: tuple[float, Judged], clear: float = 5.0) -> finding_state.State:
    state: finding_state.State = {}
    for now, judged in steps:
        state = finding_state.advance(state, [judged], now, clear)
    return state


def raised(state: finding_state.State) -> list[str]:
    return [finding.id for finding in finding_state.findings(state)]


def test_trouble_that_lasts_is_raised() -> None:
    assert raised(after((100, SEEN), (101, SEEN))) == []
    assert raised(after((100, SEEN), (102, SEEN))) == ["leaked-mount/rbd0/k"]


def test_gap_restarts_patience() -> None:
    assert raised(after((100, SEEN), (101, NOTHING), (102, SEEN))) == []


def test_since_is_kept() -> None:
    state = after((100, SEEN), (102, SEEN), (500, SEEN))
    assert finding_state.findings(state)[0].since == 100


def test_finding_clears_after_clear_after() -> None:
    steps = ((100.0, SEEN), (102.0, SEEN), (110.0, NOTHING))
    assert raised(after(*steps)) == ["leaked-mount/rbd0/k"]
    assert raised(after(*steps, (114, NOTHING))) == ["leaked-mount/rbd0/k"]
    assert raised(after(*steps, (115, NOTHING))) == []


def test_unknown_clears_nothing() -> None:
    blind = dataclasses.replace(NOTHING, unknown="the cluster does not answer")
    state = after((100, SEEN), (102, SEEN), (110, blind), (9999, blind))
    found = finding_state.findings(state)[0]
    assert found.evidence["not_looked_at_again"] == "the cluster does not answer"
    assert raised(finding_state.advance(state, [NOTHING], 10_000, 0.0)) == []


def test_unknown_time_does_not_count_towards_patience() -> None:
    waiting = after((100, SEEN), (101, BLIND), (160, BLIND))
    assert raised(waiting) == []
    assert finding_state.pending(waiting, 160) is None  # a look is what it waits for, not time
    waiting = finding_state.advance(waiting, [SEEN], 161, 5.0)
    assert raised(waiting) == []  # 1 s of its 2 s: the minute in the dark does not count
    assert finding_state.pending(waiting, 161) == 1.0
    assert raised(finding_state.advance(waiting, [SEEN], 162, 5.0)) == ["leaked-mount/rbd0/k"]


def test_gap_after_unknown_restarts_patience() -> None:
    assert raised(after((100, SEEN), (101, BLIND), (102, NOTHING), (103, SEEN), (104, SEEN))) == []


def test_waiting_entries_of_an_unknown_rule_are_bounded() -> None:
    state: finding_state.State = {}
    for round_ in range(3):
        many = tuple(
            (dataclasses.replace(TROUBLE, key=f"{round_}-{n}"), Severity.INFO, 9.0)
            for n in range(finding_state.MOST_OF_A_RULE)
        )
        judged = Judged("leaked-mount", many, unknown="one image cannot be asked")
        state = finding_state.advance(state, [judged], 100.0 + round_, 5.0)
    assert len(state) == 2 * finding_state.MOST_OF_A_RULE


def remembered(seen: float) -> Judged:
    trouble = dataclasses.replace(TROUBLE, seen=seen)
    return Judged("private-propagation", ((trouble, Severity.WARNING, 15.0),))


def test_patience_needs_a_second_scan() -> None:
    state = after((100, remembered(99.0)), (110, remembered(99.0)))
    assert not finding_state.unconfirmed(state, 110)
    state = finding_state.advance(state, [remembered(99.0)], 500, 5.0)
    assert raised(state) == []
    assert finding_state.unconfirmed(state, 500)  # another look is asked for
    seen = finding_state.advance(state, [remembered(501.0)], 502, 5.0)
    assert raised(seen) == ["private-propagation/rbd0/k"]
    assert not finding_state.unconfirmed(seen, 502)
    gone = finding_state.advance(state, [Judged("private-propagation", ())], 502, 5.0)
    assert raised(gone) == [] and not finding_state.unconfirmed(gone, 502)


def test_flapping_trouble_stays_raised() -> None:
    state: finding_state.State = {}
    changes = 0
    before: list[str] = []
    for step in range(200):
        now = 100.0 + step * 10
        judged = SEEN if step % 3 < 2 else NOTHING
        state = finding_state.advance(state, [judged], now, clear_after=5.0)
        state = finding_state.advance(state, [judged], now + 6, clear_after=5.0)
        changes += raised(state) != before
        before = raised(state)
    assert changes == 1 + 2 * finding_state.FLAPS
    assert before == ["leaked-mount/rbd0/k"]
    assert "flapping" in finding_state.findings(state)[0].evidence


def test_troubles_of_a_rule_are_bounded() -> None:
    many = tuple(
        (dataclasses.replace(TROUBLE, key=str(n)), Severity.INFO, 0.0) for n in range(10_000)
    )
    state = finding_state.advance({}, [Judged("r", many)], 1.0, 5.0)
    assert len(state) == finding_state.MOST_OF_A_RULE


@given(st.lists(st.tuples(st.floats(0.1, 100), st.sampled_from(["seen", "gone", "blind"]))))
def test_since_is_always_a_time_it_was_seen(steps: list[tuple[float, str]]) -> None:
    state: finding_state.State = {}
    now = 1000.0
    seen_at: list[float] = []
    known: dict[str, float] = {}
    for wait, what in steps:
        now += wait
        judged = SEEN if what == "seen" else NOTHING
        if what == "blind":
            judged = dataclasses.replace(NOTHING, unknown="x")
        if what == "seen":
            seen_at.append(now)
        state = finding_state.advance(state, [judged], now, 5.0)
        for found in finding_state.findings(state):
            assert found.since in seen_at
            assert known.setdefault(found.id, found.since) == found.since
        if not finding_state.findings(state):
            known = {}
