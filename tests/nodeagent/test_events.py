"""What happened lately: findings that come and clear, states that change, their stream."""

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

import kit.room
import kit.settings
from kit.findings import Finding, Severity
from nodeagent import events, state
from nodeagent.state import RunningRoom


class Thing(kit.settings.Shown):
    name: str
    state: str
    other: str = ""


def running(things: list[Thing], **more: Any) -> RunningRoom:
    def read(_: Any) -> list[Thing]:
        return things

    report = kit.room.Report(
        "things", Thing, many=True, read=read, brief=str, key="name", told=("state",), **more
    )
    component: Any = SimpleNamespace()
    room = kit.room.Room("x", "", kit.settings.Section, lambda *_: component, report=report)
    return RunningRoom(room, component)


def told(journal: state.Journal) -> list[tuple[str, str, str]]:
    return [(each.kind, each.subject, each.text) for each in journal.after()]


def test_findings_become_events_once() -> None:
    port = state.Findings()
    found = Finding("a", "rule", Severity.CRITICAL, "disk", "it is gone", "look")
    for now in ([found], [found], [], []):
        port.report("x", now)
    assert told(port.journal) == [
        ("raised", "disk", "it is gone"),
        ("cleared", "disk", "it is gone"),
    ]
    assert {(each.severity, each.rule) for each in port.journal.after()} == {("critical", "rule")}


def test_journal_is_bounded_and_numbers_go_on() -> None:
    journal = state.Journal()
    for number in range(state.MOST_EVENTS + 10):
        journal.note("changed", f"s{number}", "x" * (state.LONGEST_TEXT + 9))
    known = journal.after()
    assert len(known) == state.MOST_EVENTS
    assert known[0].number == 11
    assert journal.after(known[-2].number) == known[-1:]
    assert all(len(each.text) == state.LONGEST_TEXT for each in known)


def test_events_hold_no_secrets() -> None:
    journal = state.Journal()
    journal.note("changed", "pull", "GET https://u:hunter2@r.e/x?sig=abcdef failed")
    (event,) = journal.after()
    assert "hunter2" not in str(event)
    assert "abcdef" not in str(event)


def test_only_fields_that_are_told_are_events() -> None:
    before = events.seen(
        [running([Thing(name="a", state="cold"), Thing(name="b", state="cold")])], {}
    )
    same = events.seen(
        [running([Thing(name="a", state="cold", other="1"), Thing(name="b", state="cold")])], {}
    )
    assert list(events.changes(before, same)) == []
    now = events.seen([running([Thing(name="a", state="filling"), Thing(name="c", state="")])], {})
    assert list(events.changes(before, now)) == [
        ("thing a", "state cold → filling"),
        ("thing b", "gone: the settings have it no longer"),
        ("thing c", "new: "),
    ]


def test_a_room_that_cannot_be_read_changes_nothing() -> None:
    before = events.seen([running([Thing(name="a", state="cold")])], {})
    sick = running([])
    broken: Any = [SimpleNamespace(name="a")]  # has no state
    with pytest.raises(AttributeError):
        _ = broken[0].state
    room = running(broken).room
    assert (
        list(events.changes(before, events.seen([RunningRoom(room, sick.component)], before))) == []
    )


async def test_stream_gives_what_is_known_then_what_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kit.room, "WATCH_SECONDS", 0.01)
    monkeypatch.setattr(kit.room, "HEARTBEAT_SECONDS", 0.02)
    journal = state.Journal()
    journal.note("changed", "a", "1")
    async with contextlib.aclosing(journal.follow()) as items:
        assert (await anext(items))["subject"] == "a"
        alive = await anext(items)
        assert (alive["kind"], alive["number"]) == ("alive", 1)
        journal.note("changed", "b", "2")
        async for item in items:
            if item["kind"] != "alive":
                assert (item["number"], item["subject"]) == (2, "b")
                break


def test_looks_at_many_things_are_rare() -> None:
    """A look at a thousand datasets takes 0.05 s or so."""
    assert events.pause(0.001) == events.LOOK_SECONDS
    assert events.pause(0.05) == pytest.approx(0.05 / events.MOST_TIME)
