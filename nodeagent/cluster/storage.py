"""What this node's NodeStorage says. Pure: made of what the rooms report."""

import importlib.metadata
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import kit.findings
import kit.room
import kit.units
from nodeagent.cluster import intent, kinds, requests
from nodeagent.state import State

MOST_ENTRIES = 500
MOST_FINDINGS = 30
LONGEST_TEXT = 500
LEAVING = "leaving"  # in the summary: how many deleted objects are not given up yet


def reports(state: State) -> dict[str, tuple[kit.room.Report, Any]]:
    """What each room that works reports, by its field."""
    found = {}
    for running in state.running:
        report = running.room.report
        if report is None or not running.started:
            continue
        shown = report.read(running.component)
        found[report.field] = report, shown[:MOST_ENTRIES] if report.many else shown
    return found


@dataclass(frozen=True)
class Objects:
    """What this node makes of the cluster's objects.

    ``leaving``: deleted ones that are not given up yet, and what they wait for ("": nothing).
    ``candidates``: objects with ``spread`` that select this node. ``asked_of``: what annotations of
    an object asked for, by verb. ``observed``: a digest of all that it knows.
    """

    verdicts: Sequence[intent.Verdict] = ()
    leaving: Mapping[intent.Key, str] = field(default_factory=dict)
    candidates: Mapping[intent.Key, intent.Wish] = field(default_factory=dict)
    asked_of: Callable[[intent.Key], Mapping[str, requests.ObjectRequest]] = lambda _: {}
    observed: str = ""

    @property
    def wanted(self) -> int:
        """How many there are to tell of."""
        theirs = {each.wish.key for each in self.verdicts} | self.candidates.keys()
        return len(theirs) + len(self.leaving)


def of_objects(
    objects: Objects, reported: Mapping[str, tuple[kit.room.Report, Any]]
) -> list[kinds.ObjectStatus]:
    """How far this node is with each object, MOST_ENTRIES at most: those that it has, and then
    those that it might have to keep, the oldest first."""
    found = []
    shown: dict[str, dict[str, Any]] = {}  # by kind, what its room reports by key
    for _, made in kinds.intents():
        _, elements = reported.get(made.field, (None, ()))
        shown[made.kind] = {str(getattr(each, made.key)): each for each in elements}
    for verdict in objects.verdicts:
        asked = verdict.wish
        mine = [shown[asked.kind].get(key) for key in verdict.keys]
        there = [each for each in mine if each is not None]
        size = sum(each.bytes for each in there)
        ready = bool(mine) and all(each is not None and each.percent == 100 for each in mine)
        share = sum(each.percent for each in there) // len(mine) if mine else 0
        why = next((f"{each.state}: {each.message}" for each in there if each.message), "")
        found.append(
            kinds.ObjectStatus(
                kind=asked.kind,
                name=asked.name,
                observed_generation=asked.generation,
                accepted=verdict.accepted,
                ready=ready and verdict.accepted,
                percent=share,
                bytes=size,
                message=(verdict.message or ("" if ready else why))[:LONGEST_TEXT],
                candidate=asked.key in objects.candidates,
                requests=tuple(
                    kinds.RequestStatus(
                        verb=verb, value=one.value, state=one.state, message=one.message
                    )
                    for verb, one in sorted(objects.asked_of(asked.key).items())
                ),
            )
        )
    known = {each.wish.key for each in objects.verdicts}
    for (kind, name), why in objects.leaving.items():
        if (kind, name) in known:
            continue  # made anew meanwhile
        text = (f"deleted, and waits: {why}" if why else "deleted, and about to go")[:LONGEST_TEXT]
        found.append(kinds.ObjectStatus(kind=kind, name=name, accepted=False, message=text))
    # All selected nodes say so of all such objects, and one agent reads that of all nodes: no more
    # than what the choice needs.
    found += [
        kinds.ObjectStatus(kind=asked.kind, name=asked.name, candidate=True)
        for asked in sorted(objects.candidates.values(), key=lambda each: (each.created, each.key))
        if asked.key not in known
    ]
    return found[:MOST_ENTRIES]


def left_out(wanted: int) -> list[kit.findings.Finding]:
    """Of so many objects, what ``of_objects`` has no room for."""
    if wanted <= MOST_ENTRIES:
        return []
    return [
        kit.findings.Finding(
            id="objects-left-out",
            rule="objects-left-out",
            severity=kit.findings.Severity.WARNING,
            subject="NodeStorage",
            message=f"{wanted} objects select this node, {wanted - MOST_ENTRIES} of them are left "
            f"out of its NodeStorage: their status is incomplete, with spread they are not placed",
            advice="have fewer objects, or select fewer nodes with nodeSelector",
        )
    ]


def plain(entry: kinds.ObjectStatus) -> dict[str, Any]:
    """One that this node only might have to keep says no more than that."""
    short = entry.candidate and not entry.observed_generation
    return entry.model_dump(mode="json", by_alias=True, exclude_defaults=short)


def of_findings(
    found: Sequence[kit.findings.Finding],
) -> tuple[tuple[kinds.FindingStatus, ...], kinds.FindingCounts]:
    shown = tuple(
        kinds.FindingStatus(
            rule=each.rule,
            severity=str(each.severity),
            subject=each.subject[:LONGEST_TEXT],
            message=each.message[:LONGEST_TEXT],
            advice=each.advice[:LONGEST_TEXT],
            since=kit.units.rfc3339(each.since),
        )
        for each in found[:MOST_FINDINGS]
    )
    counts = {str(s): sum(each.severity is s for each in found) for s in kit.findings.Severity}
    return shown, kinds.FindingCounts(**counts)


def status(state: State, objects: Objects) -> dict[str, Any]:
    """All of the status but when it is written."""
    reported = reports(state)
    shown, counts = of_findings(state.findings.current())
    made = kinds.NodeStatus(
        observed=objects.observed,
        summary={field: report.brief(each) for field, (report, each) in reported.items()}
        | {LEAVING: str(len(objects.leaving))},
        findings=shown,
        finding_counts=counts,
        versions=kinds.Versions(
            agent=importlib.metadata.version("nodeagent"), kernel=os.uname().release
        ),
    ).model_dump(mode="json", by_alias=True, exclude={"written", "objects"})
    made["objects"] = [plain(each) for each in of_objects(objects, reported)]
    for name, (report, each) in reported.items():
        many = [one.model_dump(mode="json", by_alias=True) for one in each] if report.many else []
        made[name] = many if report.many else each.model_dump(mode="json", by_alias=True)
    return made
