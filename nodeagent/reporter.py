"""Where findings arrive: they become log lines and metrics, and the API and the page show them.

Each origin (a room or a part of one) reports the whole list of what it finds now, as often as it
likes. This module compares the list with the one before, by the findings' ids, so that a finding is
logged once when it appears and once when it clears, and keeps the time at which it was first seen.
"""

import copy
import time
from collections import Counter
from collections.abc import Iterable

import structlog
from prometheus_client.core import Metric

import kit.findings
from kit.metrics import gauge
from nodeagent import events

log = structlog.get_logger("findings")

# Of one origin: a faulty rule must not fill the memory or the log.
MOST_FINDINGS = 1000


class Findings:
    """What each origin finds now (``kit.findings.Reporter``).

    Invariant: a finding keeps its ``since`` for as long as its origin reports it.
    """

    def __init__(self) -> None:
        self.journal = events.Journal()
        self._by_origin: dict[str, dict[str, kit.findings.Finding]] = {}

    def report(self, origin: str, findings: list[kit.findings.Finding]) -> None:
        before = self._by_origin.get(origin, {})
        now: dict[str, kit.findings.Finding] = {}
        for finding in findings[:MOST_FINDINGS]:
            known = before.get(finding.id)
            since = known.since if known else finding.since or time.time()
            now[finding.id] = noted = copy.copy(finding)  # a new one would be redacted again
            object.__setattr__(noted, "since", since)
            if known is None:
                log.warning(
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

    def _note(self, kind: str, finding: kit.findings.Finding) -> None:
        severity = str(finding.severity)
        self.journal.note(kind, finding.subject, finding.message, severity, finding.rule)

    def current(self) -> list[kit.findings.Finding]:
        """All findings: the most severe first, of these the oldest first."""
        order = list(kit.findings.Severity)[::-1]
        found = [f for by_id in self._by_origin.values() for f in by_id.values()]
        return sorted(found, key=lambda f: (order.index(f.severity), f.since))

    def by_origin(self) -> dict[str, list[kit.findings.Finding]]:
        """What each origin finds now."""
        return {origin: list(found.values()) for origin, found in self._by_origin.items()}

    def metrics(self) -> Iterable[Metric]:
        found = Counter(
            (origin, str(each.severity))
            for origin, by_id in self._by_origin.items()
            for each in by_id.values()
        )
        text = "Current findings; no series of what finds nothing."
        yield gauge("findings", text, found, "origin", "severity")
