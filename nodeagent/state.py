"""What runs in this process, what is wrong with it and what happened: the app changes it, the admin
API and the status page show it.
"""

import asyncio
import collections
import copy
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import structlog
from prometheus_client.core import Metric

import kit.errors
import kit.findings
import kit.metrics
import kit.redact
import kit.room
from kit.findings import Finding, Severity
from nodeagent import rooms
from nodeagent.settings import Settings

log = structlog.get_logger("findings")

_LEVELS = {
    Severity.INFO: logging.INFO,
    Severity.WARNING: logging.WARNING,
    Severity.CRITICAL: logging.ERROR,
}
MOST_EVENTS = 500
LONGEST_TEXT = 500
MOST_FINDINGS = 1000  # of one origin: a faulty rule must not fill the memory or the log

# --- what happened: findings that came and cleared, and what changed its state


Kind = Literal["raised", "cleared", "changed"]  # a finding came, went; a state changed


@dataclass(frozen=True)
class Event:
    number: int  # grows by one with each event of this process
    at: float  # Unix time
    kind: Kind
    severity: Severity
    subject: str
    text: str
    rule: str = ""  # rule of a finding, else empty


class Journal:
    """The last ``MOST_EVENTS`` events, in memory: log and Prometheus keep what is older."""

    def __init__(self) -> None:
        self._events: collections.deque[Event] = collections.deque(maxlen=MOST_EVENTS)
        self._count = 0

    def note(
        self,
        kind: Kind,
        subject: str,
        text: str,
        severity: Severity = Severity.INFO,
        rule: str = "",
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
                yield asdict(event)
            if time.monotonic() - sent >= kit.room.HEARTBEAT_SECONDS:
                sent = time.monotonic()
                yield {"kind": "alive", "number": last, "at": time.time()}
            await asyncio.sleep(kit.room.WATCH_SECONDS)


# --- what is wrong


class Findings:
    """Where findings arrive (``kit.findings.Reporter``): they become log lines, metrics and events.

    Each origin (a room or a part of one) reports all that it finds now, as often as it likes. What
    is logged is what is new in the list, by the findings' ids, and what is in it no longer.

    Invariant: a finding keeps its ``since`` for as long as its origin reports it.
    """

    def __init__(self) -> None:
        self.journal = Journal()
        self._by_origin: dict[str, dict[str, Finding]] = {}

    def report(self, origin: str, findings: list[Finding]) -> None:
        before = self._by_origin.get(origin, {})
        now: dict[str, Finding] = {}
        for finding in findings[:MOST_FINDINGS]:
            known = before.get(finding.id)
            since = known.since if known else finding.since or time.time()
            now[finding.id] = noted = copy.copy(finding)  # a new one would be redacted again
            object.__setattr__(noted, "since", since)
            if known is None:
                log.log(
                    _LEVELS[finding.severity],
                    "finding",
                    id=finding.id,
                    rule=finding.rule,
                    severity=str(finding.severity),
                    subject=finding.subject,
                    message=finding.message,
                    advice=finding.advice,
                )
                self._note("raised", finding)
        for gone in before.keys() - now.keys():
            log.info("finding cleared", id=gone, rule=before[gone].rule)
            self._note("cleared", before[gone])
        self._by_origin[origin] = now

    def _note(self, kind: Kind, finding: Finding) -> None:
        self.journal.note(kind, finding.subject, finding.message, finding.severity, finding.rule)

    def current(self) -> list[Finding]:
        """All findings: the most severe first, of these the oldest first."""
        order = list(Severity)[::-1]
        found = [f for by_id in self._by_origin.values() for f in by_id.values()]
        return sorted(found, key=lambda f: (order.index(f.severity), f.since))

    def by_origin(self) -> dict[str, list[Finding]]:
        """What each origin finds now."""
        return {origin: list(found.values()) for origin, found in self._by_origin.items()}

    def metrics(self) -> Iterable[Metric]:
        found = collections.Counter(
            (origin, each.rule, str(each.severity))
            for origin, by_id in self._by_origin.items()
            for each in by_id.values()
        )
        text = "Current findings."
        yield kit.metrics.gauge("findings", text, found, "origin", "rule", "severity")


# --- what runs


@dataclass
class RunningRoom:
    """A room that the settings have, with its component. ``trouble``: why it does not work."""

    room: kit.room.Room
    component: kit.room.Component[Any]
    started: bool = False
    unsettled: bool = False  # started, and its first reconcile has not ended
    trouble: kit.errors.AgentError | None = None
    failures: int = 0  # of starts and reconciles, since the process began

    def health(self) -> kit.room.Health:
        own = self.component.health()
        if self.trouble is not None:
            more = own.reasons if self.started else ()
            return kit.room.Health(own.alive, ready=False, reasons=[str(self.trouble), *more])
        if self.starting:
            return kit.room.Health(own.alive, ready=False, reasons=["it is starting"])
        return own

    @property
    def starting(self) -> bool:
        """It does not know yet all that its settings have."""
        return self.unsettled or not self.started


def _unapplied(setting: str) -> Finding:
    return Finding(
        id=f"needs-restart/{setting}",
        rule="needs-restart",
        severity=Severity.WARNING,
        subject=setting,
        message=f"{setting}: the settings file has changed it, and the value of before is in force",
        advice="restart the agent, or undo the change; jobs do not notice a restart",
    )


@dataclass
class State:
    """The settings in force, and each room whose section they have."""

    settings: Settings
    findings: Findings = field(default_factory=Findings)
    running: list[RunningRoom] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)  # changed settings that need a restart
    degraded: dict[str, list[str]] = field(default_factory=dict)  # of the process's own parts
    begun: float = field(default_factory=time.time)  # Unix time
    config_error: str = ""  # why the file's latest content is not in force
    # Figures of the process's own parts.
    metrics: list[Callable[[], Iterable[Metric]]] = field(default_factory=list)

    def judge(self, part: str, wrong: Sequence[Finding], warnings: Sequence[Finding] = ()) -> None:
        """Say what is wrong with a part of the process itself; ``warnings`` degrade nothing."""
        self.findings.report(part, [*wrong, *warnings])
        self.degraded[part] = [each.message for each in wrong]

    def refuse(self, names: Sequence[str]) -> None:
        """Say which changed settings are not in force. What a door no longer should admit is one
        of them, so a list in /readyz is not enough."""
        self.refused = list(names)
        self.findings.report("settings", [_unapplied(name) for name in names])

    def build(self, room: kit.room.Room) -> kit.room.Component[Any]:
        """A new component of a room, not started."""
        section = getattr(self.settings, room.name)
        return room.build(section, self.settings.state_dir, self.findings)


def build(settings: Settings) -> State:
    """The components of the rooms that the settings have, in their start order; none started."""
    state = State(settings)
    for room in rooms.ROOMS:
        if getattr(settings, room.name) is not None:
            state.running.append(RunningRoom(room, state.build(room)))
    return state
