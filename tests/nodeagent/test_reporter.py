"""Findings that arrive, stay and clear."""

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import structlog

from kit.findings import Finding, Severity
from nodeagent import state


def finding(name: str, severity: Severity = Severity.WARNING, since: float = 0.0) -> Finding:
    return Finding(name, "rule", severity, "subject", "message", "advice", since=since)


def names(found: Sequence[Finding]) -> list[str]:
    return [each.id for each in found]


def test_finding_is_logged_when_it_appears_and_clears() -> None:
    port = state.Findings()
    with structlog.testing.capture_logs() as logged:
        for reported in ([finding("a")], [finding("a")], [], [finding("a")]):
            port.report("cache", reported)
    assert [(entry["event"], entry["id"]) for entry in logged] == [
        ("finding", "a"),
        ("finding cleared", "a"),
        ("finding", "a"),
    ]


@pytest.mark.parametrize(
    ("severity", "level"),
    [(Severity.INFO, "info"), (Severity.WARNING, "warning"), (Severity.CRITICAL, "error")],
)
def test_a_finding_is_logged_at_its_severity(severity: Severity, level: str) -> None:
    with structlog.testing.capture_logs() as logged:
        state.Findings().report("cache", [finding("a", severity)])
    assert [entry["log_level"] for entry in logged] == [level]


def test_finding_keeps_when_it_was_first_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    port = state.Findings()
    for now in (100.0, 200.0):
        monkeypatch.setattr(state, "time", SimpleNamespace(time=lambda now=now: now))
        port.report("x", [finding("a"), finding("b", since=50.0)])
    assert {each.id: each.since for each in port.current()} == {"a": 100.0, "b": 50.0}


def test_origins_do_not_clear_each_other() -> None:
    port = state.Findings()
    port.report("x", [finding("a")])
    port.report("y", [finding("b")])
    port.report("x", [])
    assert names(port.current()) == ["b"]


def test_current_is_by_severity_then_age() -> None:
    port = state.Findings()
    port.report(
        "x",
        [
            finding("info", Severity.INFO, 1.0),
            finding("new", Severity.CRITICAL, 9.0),
            finding("old", Severity.CRITICAL, 2.0),
            finding("warning", Severity.WARNING, 1.0),
        ],
    )
    assert names(port.current()) == ["old", "new", "warning", "info"]


def test_findings_of_an_origin_are_bounded() -> None:
    port = state.Findings()
    port.report("x", [finding(str(number)) for number in range(state.MOST_FINDINGS + 5)])
    assert len(port.current()) == state.MOST_FINDINGS


def test_metrics_count_by_origin_rule_and_severity() -> None:
    port = state.Findings()
    port.report("x", [finding("a"), finding("b"), finding("c", Severity.CRITICAL)])
    (family,) = port.metrics()
    counts = {
        (s.labels["origin"], s.labels["rule"], s.labels["severity"]): s.value
        for s in family.samples
    }
    rule = finding("a").rule
    assert counts == {("x", rule, "warning"): 2, ("x", rule, "critical"): 1}
    port.report("x", [finding("a")])
    (family,) = port.metrics()
    assert [(s.labels["severity"], s.value) for s in family.samples] == [("warning", 1)]
