"""Which generation follows: the decision, over every combination of facts."""

import functools
import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from cache.dataset.update_step import FITS, Facts, Step, newest, next_step
from cache.settings import DirSource, at_snapshot, same_place, snapshot_of

IDLE = Facts(
    wanted="a", insists=False, current="a", current_empty=False, current_busy=False, next="",
    next_state="", outlived=False, reached=False, lost=False, reach_due=True, fill_due=True,
    job_there=False, earlier=(), keep=1, no_room=False, retire_due=True, retired=False, shown=True,
)  # fmt: skip
FLAGS = [name for name, value in vars(IDLE).items() if isinstance(value, bool)]


@functools.cache
def every() -> list[Facts]:
    """Made by the first test that wants it: every worker reads this module, and few run it."""
    return [
        Facts(**(vars(IDLE) | dict(zip(FLAGS, flags, strict=True))
                 | {"wanted": wanted, "next": following, "next_state": state, "earlier": earlier}))
        for wanted in ("", "a", "b", "c")
        for following, state in (("", ""), ("b", "new"), ("b", FITS), ("b", "complete"))
        for earlier in ((), ("c",), ("c", "d"))
        for flags in itertools.product((False, True), repeat=len(FLAGS))
    ]  # fmt: skip


def done(facts: Facts, step: Step) -> Facts:
    """The facts after ``step`` succeeded."""
    match step:
        case Step.TAKE:
            return replace(facts, current=facts.wanted, current_empty=False)
        case Step.BEGIN:
            return replace(
                facts, next=facts.wanted, next_state="new", reached=False, lost=False,
                reach_due=True,
            )  # fmt: skip
        case Step.REACH:
            return replace(facts, reached=True)
        case Step.QUEUE:
            return replace(facts, job_there=True)
        case Step.SWITCH | Step.BACK:
            new = facts.next if step is Step.SWITCH else facts.wanted
            earlier = (facts.current, *(each for each in facts.earlier if each != new))
            following = "" if step is Step.SWITCH else facts.next
            return replace(
                facts, current=new, earlier=earlier, next=following, insists=False,
                current_busy=False, current_empty=False, shown=False, outlived=False,
            )  # fmt: skip
        case Step.DROP:
            return replace(facts, next="", next_state="", job_there=False)
        case Step.SHOW:
            return replace(facts, shown=True)
        case Step.RETIRE:
            if facts.retired:
                return replace(facts, retired=False)
            return replace(facts, earlier=facts.earlier[:-1])
    return facts


def test_only_what_is_complete_or_cannot_grow_serves() -> None:
    for facts in every():
        match next_step(facts):
            case Step.SWITCH:
                gone = facts.outlived and facts.reached
                assert facts.next_state in ("complete", FITS) or gone
                assert not facts.insists or facts.wanted in ("", facts.next)
            case Step.BACK:
                assert facts.wanted in facts.earlier
            case Step.TAKE:
                assert facts.current_empty


def test_one_at_a_time_is_filled() -> None:
    for facts in every():
        step = next_step(facts)
        if step is Step.BEGIN:
            assert not facts.next
            assert facts.insists or not facts.current_busy
        if step is Step.QUEUE:
            assert facts.next
            assert facts.reached
            assert not facts.job_there


def test_snapshot_that_comes_during_a_fill_waits() -> None:
    fills = replace(IDLE, wanted="c", next="b", next_state="filling", reached=True,
                    job_there=True)  # fmt: skip
    assert next_step(fills) is Step.NOTHING
    assert next_step(replace(fills, insists=True)) is Step.DROP
    assert next_step(replace(fills, lost=True, reached=False, job_there=False)) is Step.DROP
    assert next_step(replace(fills, next_state="complete")) is Step.SWITCH
    served = done(replace(fills, next_state="complete"), Step.SWITCH)
    assert next_step(replace(served, shown=True, job_there=False)) is Step.BEGIN


def test_what_comes_serves_at_once_when_nobody_can_read_what_the_other_lacks() -> None:
    """Else each waits for the other: for its room, and for its last file."""
    stuck = replace(IDLE, wanted="c", next="c", next_state="partial", fill_due=False)
    assert next_step(replace(stuck, reached=True)) is Step.NOTHING
    gone = replace(stuck, outlived=True)
    assert next_step(gone) is Step.REACH
    for state in ("new", "filling", "partial"):
        for job in (False, True):
            now = replace(gone, reached=True, next_state=state, job_there=job)
            assert next_step(now) is Step.SWITCH
    assert next_step(replace(gone, reached=True, wanted="d", insists=True)) is Step.DROP


def test_no_more_than_kept_is_discarded() -> None:
    for facts in every():
        if next_step(facts) is Step.RETIRE:
            assert facts.retired or facts.no_room or len(facts.earlier) > facts.keep


def test_steps_come_to_an_end() -> None:
    steps: dict[Facts, int] = {}  # until nothing is left to do
    for facts in every():
        way, now = [], facts
        while now not in steps and (step := next_step(now)) is not Step.NOTHING:
            way.append(now)
            now = done(now, step)
            assert len(way) <= 12, f"{step} again and again from {facts}"
        ahead = steps.setdefault(now, 0)
        for passed, each in enumerate(reversed(way), 1):
            steps[each] = ahead + passed
        assert steps[facts] <= 12, facts


def test_newest_is_by_time_and_never_older() -> None:
    found = {"z-old": 1.0, "b": 5.0, "a": 5.0, "other": 9.0}
    matching = {"z-old", "b", "a"}
    assert newest(found, matching, 0.0) == "b"
    assert newest(found, matching, 4.9) == "b"
    assert newest(found, matching, 5.0) == ""


@pytest.mark.parametrize(
    ("path", "snapshot", "other"),
    [
        ("/m/.snap/s1", "s1", "/m/.snap/s2"),
        ("/m/.snap/s1/below/x", "s1", "/m/.snap/s2/below/x"),
        ("/m", "", "/m/.snap/s2"),
    ],
)
def test_directory_in_another_snapshot(path: str, snapshot: str, other: str) -> None:
    source = DirSource(kind="dir", path=Path(path))
    assert snapshot_of(source) == snapshot
    moved = at_snapshot(source, "s2")
    assert isinstance(moved, DirSource)
    assert str(moved.path) == other
    assert same_place(source, moved) == bool(snapshot)
