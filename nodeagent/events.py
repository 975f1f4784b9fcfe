"""What happened lately: findings that came and cleared, and what changed its state.

Kept in memory, at most ``MOST_EVENTS``, gone with the process: the log and Prometheus keep what is
older. The rooms say which of their fields matter (``kit.room.Report.told``); nobody has to call.
"""

import asyncio
import collections
import dataclasses
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any, Protocol

import kit.redact
import kit.room

MOST_EVENTS = 500
LONGEST_TEXT = 500
LOOK_SECONDS = 1.0  # how often the rooms are compared with what they said before
# The looks may take this share of the event loop's time. Where one look takes long, as on a node
# with a thousand datasets, the pause between two of them is longer.
MOST_TIME = 0.005

# What a room reports (its field, the thing's name) -> the fields whose change is an event.
Seen = Mapping[tuple[str, str], Mapping[str, str]]


class Running(Protocol):
    """A room with its component (``nodeagent.state.Running``)."""

    room: kit.room.Room
    component: kit.room.Component[Any]


@dataclasses.dataclass(frozen=True)
class Event:
    """``number`` grows by one with each event of this process. ``kind``: raised, cleared (of a
    finding) or changed (of a state). ``rule``: the finding's, else empty."""

    number: int
    at: float  # Unix time
    kind: str
    severity: str
    subject: str
    text: str
    rule: str = ""

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


class Journal:
    """Holds the last ``MOST_EVENTS`` events in memory. A new one pushes out the oldest."""

    def __init__(self) -> None:
        self._events: collections.deque[Event] = collections.deque(maxlen=MOST_EVENTS)
        self._count = 0

    def note(
        self, kind: str, subject: str, text: str, severity: str = "info", rule: str = ""
    ) -> None:
        """One event, now. Secrets are taken out of its texts, long ones are cut."""
        self._count += 1
        subject, text = (kit.redact.text(each)[:LONGEST_TEXT] for each in (subject, text))
        self._events.append(Event(self._count, time.time(), kind, severity, subject, text, rule))

    def after(self, number: int = 0) -> list[Event]:
        """Events with a higher number that are still known, the oldest first."""
        return [each for each in self._events if each.number > number]

    async def follow(self) -> AsyncGenerator[kit.room.Json, None]:
        """What is known, then each new event, as JSON. While there is none, ``{"kind": "alive"}``
        every few seconds: a client of a quiet stream must know that the agent is there."""
        last, sent = 0, time.monotonic()
        while True:
            for event in self.after(last):
                last, sent = event.number, time.monotonic()
                yield event.as_json()
            if time.monotonic() - sent >= kit.room.HEARTBEAT_SECONDS:
                sent = time.monotonic()
                yield {"kind": "alive", "number": last, "at": time.time()}
            await asyncio.sleep(kit.room.WATCH_SECONDS)


def seen(running: Sequence[Running], before: Seen) -> Seen:
    """What the rooms report now. Of a room that cannot be read: what it said ``before``."""
    found: dict[tuple[str, str], Mapping[str, str]] = {}
    for each in running:
        report = each.room.report
        if report is None or not report.told:
            continue
        try:
            said = report.read(each.component)
            for one in said if report.many else [said]:
                name = str(getattr(one, report.key)) if report.key else ""
                found[report.field, name] = {f: _word(getattr(one, f)) for f in report.told}
        except Exception:  # a sick room: its own finding says so
            found |= {key: value for key, value in before.items() if key[0] == report.field}
    return found


def _word(value: object) -> str:
    return ("no", "yes")[value] if isinstance(value, bool) else str(value)


def changes(before: Seen, now: Seen) -> Iterator[tuple[str, str]]:
    """Subject and text of each difference. Pure."""
    for key in sorted(before.keys() | now.keys()):
        subject = f"{key[0].removesuffix('s')} {key[1]}".strip()
        old, new = before.get(key), now.get(key)
        if old is None and new is not None:
            yield subject, "new: " + ", ".join(f"{n} {v}" for n, v in new.items() if v)
        elif new is None:
            yield subject, "gone: the settings have it no longer"
        elif old is not None and old != new:
            told = (f"{n} {old[n] or '-'} → {v or '-'}" for n, v in new.items() if old[n] != v)
            yield subject, ", ".join(told)


def pause(took: float) -> float:
    """Seconds until the next look. ``took``: seconds of CPU of the last one. Pure."""
    return max(LOOK_SECONDS, took / MOST_TIME)


async def watch(running: Sequence[Running], journal: Journal) -> None:
    """Notes what changes in the rooms. Never ends."""
    last: Seen | None = None
    while True:
        began = time.thread_time()
        now = seen(running, last or {})
        for subject, text in changes(last if last is not None else now, now):
            journal.note("changed", subject, text)
        last = now
        await asyncio.sleep(pause(time.thread_time() - began))
