"""Trouble where people look: Events of the Node, and its conditions. Pure.

Each room says which condition its critical findings make True (``kit.room.Room.condition``).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import kit.findings
from nodeagent import rooms
from nodeagent.cluster import storage

CRITICAL = kit.findings.Severity.CRITICAL
MOST_NAMED = 3


@dataclass(frozen=True)
class Condition:
    type: str
    status: bool
    reason: str
    message: str


def conditions(found: Mapping[str, Iterable[kit.findings.Finding]]) -> list[Condition]:
    """``found``: by origin."""
    made = []
    for room in rooms.ROOMS:
        if room.condition is None:
            continue
        kind, well = room.condition
        origins = (room.name, f"agent.{room.name}")
        bad = [
            each
            for origin, findings in sorted(found.items())
            if any(origin == o or origin.startswith(f"{o}.") for o in origins)
            for each in findings
            if each.severity is CRITICAL
        ]
        if not bad:
            made.append(Condition(kind, False, well, "no critical finding of the agent"))
            continue
        bad.sort(key=lambda each: (each.since, each.id))
        texts = [f"{each.subject}: {each.message}" for each in bad[:MOST_NAMED]]
        more = f" and {len(bad) - MOST_NAMED} more" if len(bad) > MOST_NAMED else ""
        text = ("; ".join(texts) + more)[: 2 * storage.LONGEST_TEXT]
        made.append(Condition(kind, True, camel(bad[0].rule), text))
    return made


def camel(rule: str) -> str:
    """A rule's name as a reason: leaked-mount is LeakedMount."""
    return "".join(part.title() for part in rule.replace("_", "-").split("-"))[:128]


@dataclass(frozen=True)
class Event:
    reason: str
    message: str
    warning: bool


def events(
    before: Mapping[str, kit.findings.Finding], now: Mapping[str, kit.findings.Finding]
) -> list[Event]:
    """What appeared and what cleared since, by the findings' ids; not what only informs."""
    info = kit.findings.Severity.INFO
    made = [
        Event(camel(each.rule), f"{each.subject}: {each.message}; {each.advice}", True)
        for id, each in now.items()
        if id not in before and each.severity is not info
    ]
    made += [
        Event(f"{camel(each.rule)}Cleared", f"{each.subject}: {each.message}", False)
        for id, each in before.items()
        if id not in now and each.severity is CRITICAL
    ]
    return made
