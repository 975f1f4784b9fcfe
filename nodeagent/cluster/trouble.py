"""Trouble where people look: Events of this Node and its conditions, as findings come and go.

Each room says which condition its critical findings make True (``kit.room.Room.condition``).
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import kit.errors
import kit.findings
import kit.pause
from kube import client, objects
from nodeagent import rooms
from nodeagent.cluster import follow, storage
from nodeagent.state import State

CRITICAL = kit.findings.Severity.CRITICAL
MOST_NAMED = 3
LOOK_SECONDS = 5.0
BEAT_SECONDS = 3600.0  # an unchanged condition is written again, in case somebody took it away
MOST_PENDING = 50


def conditions(found: Mapping[str, Iterable[kit.findings.Finding]]) -> list[objects.Condition]:
    """``found``: by origin. Pure."""
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
            made.append(objects.Condition(kind, False, well, "no critical finding of the agent"))
            continue
        bad.sort(key=lambda each: (each.since, each.id))
        texts = [f"{each.subject}: {each.message}" for each in bad]
        text = kit.errors.some(texts, MOST_NAMED)[: 2 * storage.LONGEST_TEXT]
        made.append(objects.Condition(kind, True, camel(bad[0].rule), text))
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
    """What appeared and what cleared since, by the findings' ids; not what only informs. Pure."""
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


class Teller:
    """``server`` belongs to whoever made it."""

    def __init__(self, follower: follow.Follower, server: client.ApiServer) -> None:
        self._events = objects.Events(server, follower.name)
        self._follower = follower
        self._server = server
        self._told: dict[str, kit.findings.Finding] = {}
        self._pending: list[Event] = []
        self._epoch = 0
        self._conditions: dict[str, tuple[objects.Condition, float]] = {}

    async def follow(self, state: State) -> None:
        """Never ends."""
        await client.repeat(
            lambda: self._tell(state), LOOK_SECONDS, "trouble cannot be told to the cluster"
        )

    async def _tell(self, state: State) -> None:
        node = self._follower.node.objects.get(self._follower.name)
        if node is None:
            return
        if self._epoch != self._follower.epoch:
            self._conditions.clear()
            self._epoch = self._follower.epoch
        for each in conditions(state.findings.by_origin()):
            known, due = self._conditions.get(each.type, (None, 0.0))
            if known == each and time.monotonic() < due:
                continue
            await objects.set_condition(self._server, self._follower.name, each)
            due = time.monotonic() + kit.pause.jittered(BEAT_SECONDS)
            self._conditions[each.type] = each, due
        now = {each.id: each for each in state.findings.current()}
        self._pending += events(self._told, now)
        self._told = now
        del self._pending[:-MOST_PENDING]
        while self._pending:
            event = self._pending[0]
            await self._events.emit(
                event.reason, event.message, warning=event.warning, uid=node["uid"]
            )
            del self._pending[0]
