"""One look at the whole node: is it well, and if not, what first.

The status page, ``nodeagent status`` and ``/v1/status`` show this and nothing else, so that they
cannot disagree. ``judge`` and ``headline`` are pure. What a room shows is asked for at most once in
``HELD_SECONDS``, however many ask.
"""

import importlib.metadata
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

import kit.findings
import kit.redact
import kit.room
from kit.findings import Finding, Severity
from nodeagent.state import Event, RunningRoom, State

HELD_SECONDS = 1.0
MOST_SHOWN = 200  # of findings, and of what one room reports
MOST_EVENTS = 50
LONGEST_HEADLINE = 240
FIRST = "Datasets"  # the section that most people come for
_END = re.compile(r"[.;](?= )|(?= \()")  # of a clause


class Verdict(StrEnum):
    """``attention``: the node works, a person should look today. ``critical``: now."""

    WELL = "well"
    ATTENTION = "attention"
    CRITICAL = "critical"


@dataclass(frozen=True)
class Part:
    """A room as it is now."""

    name: str
    ready: bool
    starting: bool = False
    reasons: Sequence[str] = ()
    brief: str = ""  # what it holds, in a few characters


def judge(parts: Sequence[Part], findings: Sequence[Finding], trouble: Sequence[str]) -> Verdict:
    """``trouble``: what is wrong with the process's own parts (settings, certificates)."""
    severities = {each.severity for each in findings}
    if Severity.CRITICAL in severities or any(not p.ready and not p.starting for p in parts):
        return Verdict.CRITICAL
    if Severity.WARNING in severities or trouble or not parts or any(p.starting for p in parts):
        return Verdict.ATTENTION
    return Verdict.WELL


def headline(
    verdict: Verdict, parts: Sequence[Part], findings: Sequence[Finding], trouble: Sequence[str]
) -> str:
    """Whether this node is well, in one sentence: the worst first, and how much more there is."""
    if not parts:
        return "This agent does nothing yet: its settings have no section for any component."
    if verdict is Verdict.WELL:
        held = ", ".join(part.brief for part in parts if part.brief)
        return f"This node is well: {held}." if held else "This node is well."
    grave = [
        each
        for severity in (Severity.CRITICAL, Severity.WARNING)
        for each in findings
        if each.severity is severity
    ]
    sick = {
        reason: f"{part.name} {'is starting' if part.starting else 'does not work fully'}: {reason}"
        for part in sorted(parts, key=lambda part: part.starting)
        for reason in (part.reasons or ("it gives no reason",))
        if not part.ready
    }
    if verdict is Verdict.CRITICAL and Severity.CRITICAL not in {f.severity for f in findings}:
        untold = [f for f in grave if not any(_tells(f, reason) for reason in sick)]
        things = [*sick.values(), *map(_said, untold)]
    else:
        untold_sick = [said for reason, said in sick.items() if not _told(reason, grave)]
        things = [*map(_said, grave), *untold_sick]
    things += [text for text in trouble if not _told(text, grave)]
    begin = (
        "This node needs a person now" if verdict is Verdict.CRITICAL else "This node works, but"
    )
    first = clipped(things[0].rstrip("."), LONGEST_HEADLINE)
    more = f" And {len(things) - 1} more." if len(things) > 1 else ""
    stop = "" if first.endswith("…") else "."
    joint = ": " if verdict is Verdict.CRITICAL else " "
    return f"{begin}{joint}{first}{stop}{more}"


def _said(found: Finding) -> str:
    return kit.findings.said(found.subject, found.message)


def _tells(found: Finding, text: str) -> bool:
    """Whether a finding is about what ``text`` says, a component or a part of the process."""
    return found.message in text or text in found.message or found.subject in text


def _told(text: str, findings: Sequence[Finding]) -> bool:
    return any(_tells(each, text) for each in findings)


def clipped(text: str, most: int) -> str:
    """The clauses of a text that fit, without half a parenthesis; of one too long its words."""
    if len(text) <= most:
        return text
    ends = (found.start() for found in _END.finditer(text[: most + 1]))
    whole = [end for end in ends if text.count("(", 0, end) == text.count(")", 0, end)]
    if whole:
        return text[: whole[-1]]
    return f"{text[:most].rpartition(' ')[0] or text[:most]} …"


def trouble_of(state: State) -> list[str]:
    """What is wrong with the process's own parts."""
    error = state.config_error
    found = [f"the settings file's latest content is not in force: {error}"] if error else []
    found += [f"setting {name} has changed and needs a restart" for name in state.refused]
    return found + [f"{part}: {why}" for part, said in state.degraded.items() for why in said]


def _part(each: RunningRoom, brief: str) -> Part:
    health = each.health()
    starting = each.starting and each.trouble is None
    return Part(each.room.name, health.ready, starting, tuple(health.reasons), brief)


def _report(each: RunningRoom) -> tuple[str, Any, str]:
    """Field, content as JSON and its brief; empty of a room that reports nothing now."""
    report = each.room.report
    if report is None:
        return "", None, ""
    try:
        said = report.read(each.component)
        brief = f"{report.field} {report.brief(said)}"
        shown = said[:MOST_SHOWN] if report.many else [said]
        content = [one.model_dump(mode="json") for one in shown]
    except Exception:  # a room that does not run may not know; why it does not run is said anyway
        return report.field, [] if report.many else None, ""
    return report.field, content if report.many else content[0], brief


def sections(running: Sequence[RunningRoom]) -> list[kit.room.PageSection]:
    """What the rooms show. A room that cannot be shown says so; the others are shown."""
    found: list[kit.room.PageSection] = []
    for each in running:
        if each.room.page is None:
            continue
        try:
            found += each.room.page(each.component)
        except Exception as error:
            what = f"It cannot be shown now ({type(error).__name__}: {error})."
            found.append(kit.room.PageSection(each.room.name.capitalize(), what, (), ()))
    return sorted(found, key=lambda each: each.title != FIRST)


@dataclass(frozen=True)
class Overview:
    """One node at one moment."""

    verdict: Verdict  # health of the node
    headline: str  # whether this node is well
    node: str
    version: str
    at: float  # Unix time
    uptime_seconds: int
    components: Sequence[Part]
    trouble: Sequence[str]  # problems of the process itself
    findings_total: int
    findings: Sequence[Finding]  # the most severe first; at most 200
    events: Sequence[Event]  # the newest first; at most 50
    reports: dict[str, Any]  # of each component (datasets, images, guard), as in NodeStorage
    sections: Sequence[kit.room.PageSection]  # what the status page shows


def of(state: State, now: float) -> Overview:
    """``now``: Unix time."""
    findings = state.findings.current()
    trouble = [kit.redact.text(each) for each in trouble_of(state)]
    reports: dict[str, Any] = {}
    parts = []
    for each in state.running:
        name, content, brief = _report(each)
        if name:
            reports[name] = content
        parts.append(_part(each, brief))
    verdict = judge(parts, findings, trouble)
    return Overview(
        verdict=verdict,
        headline=headline(verdict, parts, findings, trouble),
        node=state.settings.this_node.name,
        version=importlib.metadata.version("nodeagent"),
        at=now,
        uptime_seconds=round(max(0.0, now - state.begun)),
        components=parts,
        trouble=trouble,
        findings_total=len(findings),
        findings=findings[:MOST_SHOWN],
        events=state.findings.journal.after()[::-1][:MOST_EVENTS],
        reports=reports,
        sections=sections(state.running),
    )


class HeldOverview:
    """The overview of ``HELD_SECONDS`` ago at most: a crowd of callers costs as much as one."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._now: Overview | None = None
        self._made = 0.0
        self._bytes = b""

    def now(self) -> Overview:
        if self._now is None or time.monotonic() - self._made >= HELD_SECONDS:
            self._now, self._bytes = of(self._state, time.time()), b""
            self._made = time.monotonic()
        return self._now

    def answer(self) -> bytes:
        now = self.now()
        if not self._bytes:
            self._bytes = json.dumps(msgspec.to_builtins(now)).encode()
        return self._bytes
