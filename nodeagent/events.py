"""What changes in the rooms becomes an event of the journal.

The rooms say which of their fields matter (``kit.room.Report.told``); nobody has to call.
"""

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence

from nodeagent.state import Journal, RunningRoom

LOOK_SECONDS = 1.0  # how often the rooms are compared with what they said before
# The looks may take this share of the event loop's time. Where one look takes long, as on a node
# with a thousand datasets, the pause between two of them is longer.
MOST_TIME = 0.005

# What a room reports (its field, the thing's name) -> the fields whose change is an event.
Seen = Mapping[tuple[str, str], Mapping[str, str]]


def seen(running: Sequence[RunningRoom], before: Seen) -> Seen:
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


async def watch(running: Sequence[RunningRoom], journal: Journal) -> None:
    """Notes what changes in the rooms. Never ends."""
    last: Seen | None = None
    while True:
        began = time.thread_time()
        now = seen(running, last or {})
        for subject, text in changes(last if last is not None else now, now):
            journal.note("changed", subject, text)
        last = now
        await asyncio.sleep(pause(time.thread_time() - began))
