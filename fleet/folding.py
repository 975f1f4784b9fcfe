"""One picture of all nodes, made of their NodeStorage objects one after the other. Pure.

A node takes one short row, whatever it holds; datasets, images and rules are counted by name,
``MOST_NAMES`` of each at most.
"""

import heapq
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import kit.findings
import kit.units
from fleet import shapes

SILENT_SECONDS = 1800.0  # as agents see it (nodeagent.cluster.rollup): they write every 10 minutes
MOST_NAMES = 10_000
LONGEST_EXAMPLE = 300
_LATER = "~"  # sorts after every time
_RANKS = {"critical": 0, "warning": 1, "info": 2}


class Wellness(StrEnum):
    """The worst first."""

    CRITICAL = "critical"
    SILENT = "silent"
    WARNING = "warning"
    WELL = "well"


_ORDER = {each: rank for rank, each in enumerate(Wellness)}


@dataclass(frozen=True, order=True)
class Moment:
    """When something of a dataset happened on a node."""

    at: float  # Unix time
    dataset: str
    node: str


@dataclass(frozen=True)
class NodeRow:
    """``worst``: its most severe finding, in one line."""

    name: str
    wellness: Wellness
    written: float | None  # Unix time
    critical: int
    warning: int
    info: int
    datasets: int
    whole: int
    images: int
    ready_images: int
    guard: str
    agent: str
    kernel: str
    worst: str

    @property
    def order(self) -> tuple[int, str]:
        return _ORDER[self.wellness], self.name


@dataclass
class NameSum:
    """One dataset or image over all nodes. ``whole``: nodes that have all of it and write.
    ``why``: what a node that lacks some of it says. ``wish``: its object in the cluster."""

    name: str
    nodes: int = 0
    whole: int = 0
    bytes: int = 0
    percents: int = 0  # of all nodes, added up
    pinned: int = 0
    states: Counter[str] = field(default_factory=Counter)
    why: str = ""
    scrub: tuple[str, str] = (_LATER, "")  # its end and the node, where that is longest ago
    wish: shapes.WishObject | None = None

    @property
    def scrubbed(self) -> Moment | None:
        at = _time(self.scrub[0]) if self.scrub[1] else None
        return Moment(at, self.name, self.scrub[1]) if at is not None else None

    @property
    def wanted(self) -> int:
        """Nodes that should have it."""
        return max(self.nodes, self.wish.status.nodes.wanted if self.wish else 0)

    @property
    def complete(self) -> bool:
        return self.wanted > 0 and self.whole == self.wanted

    @property
    def percent(self) -> int:
        return 100 if self.complete else min(99, self.percents // self.wanted) if self.wanted else 0

    @property
    def said(self) -> str:
        """Why it is not whole everywhere: its object's own words, else a node's."""
        ready = self.wish.status.condition("Ready") if self.wish else None
        if self.complete:
            return ""
        if ready is not None and ready.status != "True":
            return f"{ready.reason}: {ready.message}"
        return self.why

    @property
    def order(self) -> tuple[bool, str]:
        return self.complete, self.name


@dataclass
class RuleSum:
    """One rule over all nodes, by the findings that NodeStorage shows (30 for each node)."""

    rule: str
    severity: str
    nodes: int = 0
    example: str = ""

    @property
    def order(self) -> tuple[int, int, str]:
        return _RANKS.get(self.severity, 3), -self.nodes, self.rule


class Fleet:
    """``add`` every NodeStorage, then read it. ``left_out``: names above ``MOST_NAMES``."""

    def __init__(self, now: float) -> None:
        self.now = now
        self.rows: list[NodeRow] = []
        self.datasets: dict[str, NameSum] = {}
        self.images: dict[str, NameSum] = {}
        self.rules: dict[tuple[str, str], RuleSum] = {}
        self.sets: list[shapes.WishObject] = []
        self.severities = Counter[str]()
        self.left_out = 0

    def add(self, storage: shapes.NodeStorage) -> None:
        status, node = storage.status, storage.metadata.name
        written = _time(status.written)
        silent = written is None or written < self.now - SILENT_SECONDS
        counts = status.finding_counts
        for each in status.datasets:
            if (found := self._sum(self.datasets, each.name)) is not None:
                _count(found, node, each, each.percent == 100, silent)
                # As text: agents write one form of time, and to read each takes most of the time.
                if each.scrubbed and each.scrubbed < found.scrub[0]:
                    found.scrub = each.scrubbed, node
        for image in status.images:
            if (found := self._sum(self.images, image.ref)) is not None:
                _count(found, node, image, image.state == "ready", silent)
                found.pinned += image.pinned
        self._findings(node, status.findings)
        self.severities.update(critical=counts.critical, warning=counts.warning, info=counts.info)
        worst = min(status.findings, key=lambda f: _RANKS.get(f.severity, 3), default=None)
        self.rows.append(
            NodeRow(
                name=node,
                wellness=_wellness(counts, silent),
                written=written,
                critical=counts.critical,
                warning=counts.warning,
                info=counts.info,
                datasets=len(status.datasets),
                whole=sum(each.percent == 100 for each in status.datasets),
                images=len(status.images),
                ready_images=sum(each.state == "ready" for each in status.images),
                guard=_guard(status.guard),
                agent=status.versions.agent,
                kernel=status.versions.kernel,
                worst=_example(worst) if worst is not None else "",
            )
        )

    def add_datasets(self, wishes: Iterable[shapes.WishObject]) -> None:
        """CachedDatasets, before or after the nodes."""
        for wish in wishes:
            if (found := self._sum(self.datasets, wish.metadata.name)) is not None:
                found.wish = wish

    def add_sets(self, wishes: Iterable[shapes.WishObject]) -> None:
        for wish in wishes:
            if len(self.sets) < MOST_NAMES:
                self.sets.append(wish)
            else:
                self.left_out += 1

    def _sum(self, of: dict[str, NameSum], name: str) -> NameSum | None:
        if name not in of:
            if len(of) >= MOST_NAMES:
                self.left_out += 1
                return None
            of[name] = NameSum(name)
        return of[name]

    def _findings(self, node: str, findings: Iterable[shapes.ToldFinding]) -> None:
        seen = set()
        for each in findings:
            key = each.severity, each.rule
            if key in seen or (key not in self.rules and len(self.rules) >= MOST_NAMES):
                continue
            seen.add(key)
            found = self.rules.setdefault(key, RuleSum(each.rule, each.severity))
            found.nodes += 1
            found.example = found.example or _on(node, _example(each))

    # --- what it says

    def nodes_by(self) -> dict[str, int]:
        found = Counter(str(row.wellness) for row in self.rows)
        return {str(each): found[each] for each in Wellness}

    def oldest_scrub(self) -> Moment | None:
        found = (each.scrubbed for each in self.datasets.values())
        return min((each for each in found if each is not None), default=None)

    def refused(self) -> list[str]:
        wishes = [each.wish for each in self.datasets.values() if each.wish is not None]
        return [w.metadata.name for w in (*wishes, *self.sets) if w.status.nodes.refused]

    def by_severity(self) -> dict[str, int]:
        return {each: self.severities[each] for each in _RANKS}

    @property
    def verdict(self) -> str:
        """As that of a node's own status: critical, attention or well."""
        by = self.nodes_by()
        if by["critical"]:
            return "critical"
        return "attention" if by["silent"] or by["warning"] or self.refused() else "well"

    def as_json(self, cluster: str) -> dict[str, Any]:
        """Without a row for each node."""
        oldest = self.oldest_scrub()
        return {
            "cluster": cluster,
            "verdict": self.verdict,
            "nodes": {"all": len(self.rows), **self.nodes_by()},
            "findings": self.by_severity(),
            "rules": [vars(each) for each in sorted(self.rules.values(), key=lambda r: r.order)],
            "datasets": datasets_json(self),
            "images": images_json(self),
            "image_sets": sets_json(self),
            "guard": dict(sorted(Counter(row.guard for row in self.rows).items())),
            "versions": dict(sorted(Counter(row.agent for row in self.rows).items())),
            "oldest_scrub": vars(oldest) if oldest else None,
            "left_out": self.left_out,
        }


def _wellness(counts: shapes.SeverityCounts, silent: bool) -> Wellness:
    if silent:
        return Wellness.SILENT  # what it said last may be long over
    if counts.critical:
        return Wellness.CRITICAL
    return Wellness.WARNING if counts.warning else Wellness.WELL


def _count(
    found: NameSum,
    node: str,
    each: shapes.StoredDataset | shapes.StoredImage,
    whole: bool,
    silent: bool,
) -> None:
    found.nodes += 1
    found.whole += whole and not silent
    found.bytes = max(found.bytes, each.bytes)
    found.percents += 0 if silent else each.percent
    found.states["silent" if silent else each.state] += 1
    if (silent or not whole) and not found.why:
        why = "its agent is silent" if silent else each.message or f"{each.state} {each.percent} %"
        found.why = _on(node, why)


def _guard(guard: shapes.ToldGuard | None) -> str:
    if guard is None:
        return "-"
    return guard.mode if guard.in_force or guard.mode == "off" else f"{guard.mode}, not in force"


def _example(finding: shapes.ToldFinding) -> str:
    return kit.findings.said(finding.subject, finding.message)[:LONGEST_EXAMPLE]


def _on(node: str, said: str) -> str:
    """The reason first: on a narrow terminal the end is cut, and 'nodes' has the name."""
    return f"{said[:LONGEST_EXAMPLE]} ({node})"


def _time(text: str) -> float | None:
    """Unix time; None for none, and for what is no time."""
    try:
        return kit.units.from_rfc3339(text) if text else None
    except ValueError:
        return None


# --- JSON


def nodes_json(fleet: Fleet) -> list[dict[str, Any]]:
    rows = sorted(fleet.rows, key=lambda row: row.order)
    return [{**vars(row), "wellness": str(row.wellness)} for row in rows]


def datasets_json(fleet: Fleet) -> list[dict[str, Any]]:
    found = []
    for each in sorted(fleet.datasets.values(), key=lambda one: one.order):
        scrubbed = each.scrubbed.at if each.scrubbed else None
        found.append({**_name_json(each), "object": each.wish is not None, "scrubbed": scrubbed})
    return found


def images_json(fleet: Fleet) -> list[dict[str, Any]]:
    found = sorted(fleet.images.values(), key=lambda one: one.order)
    return [{**_name_json(each), "pinned": each.pinned} for each in found]


def _name_json(each: NameSum) -> dict[str, Any]:
    return {
        "name": each.name,
        "wanted": each.wanted,
        "whole": each.whole,
        "percent": each.percent,
        "bytes": each.bytes,
        "states": dict(each.states),
        "why": each.said,
    }


def sets_json(fleet: Fleet) -> list[dict[str, Any]]:
    return [
        {
            "name": each.metadata.name,
            "wanted": each.status.nodes.wanted,
            "ready": each.status.nodes.ready,
            "refused": each.status.nodes.refused,
            "percent": each.status.percent,
        }
        for each in sorted(fleet.sets, key=lambda one: one.metadata.name)
    ]


# --- Events


class NewestEvents:
    """The newest ``most`` of all Events, whatever their number."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._heap: list[tuple[float, str, shapes.EventObject]] = []

    def add(self, event: shapes.EventObject) -> None:
        at = _time(event.last_timestamp or event.metadata.creation_timestamp) or 0.0
        one = at, f"{event.metadata.namespace}/{event.metadata.name}", event
        if len(self._heap) < self._most:
            heapq.heappush(self._heap, one)
        else:
            heapq.heappushpop(self._heap, one)

    def listed(self) -> list[dict[str, Any]]:
        """The newest last, as a log has them."""
        return [
            {
                "at": at,
                "type": each.type,
                "kind": each.involved_object.kind,
                "name": each.involved_object.name,
                "reason": each.reason,
                "message": each.message,
                "count": each.count or 1,
            }
            for at, _, each in sorted(self._heap, key=lambda one: one[:2])
        ]
