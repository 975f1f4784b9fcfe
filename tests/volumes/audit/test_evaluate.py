"""All rules over one scene: what makes them unknown, the operator's changes, the documentation."""

from pathlib import Path

import pytest

from linux.syscalls import ClockState
from tests.volumes.audit.world import judge, log_hit, only, place, scene, view
from volumes.audit import evaluate
from volumes.audit.rules import clusters, mappings, mounting
from volumes.audit.rules.base import AuditRule
from volumes.audit.types import GuardView, Scene, Severity

DOCS = Path(__file__).parents[3] / "docs" / "audit.md"


def state(at: Scene, rule: str) -> str:
    return next(each.state for each in evaluate.evaluate(at)[1] if each.name == rule)


def weights(at: Scene, rule: str) -> list[tuple[Severity, float]]:
    judged = next(each for each in evaluate.evaluate(at)[0] if each.rule == rule)
    return [(severity, patience) for _, severity, patience in judged.troubles]


def test_rules_have_unique_documented_names() -> None:
    names = [rule.name for rule in evaluate.RULES]
    assert len(set(names)) == len(names)
    text = DOCS.read_text()
    for name in (*names, evaluate.BLIND):
        assert f"\n* [{name}](runbook.md#{name})" in text, name


def test_evaluate_applies_the_operators_changes() -> None:
    rule = "mapped-unmounted"
    assert weights(scene(), rule) == [(Severity.WARNING, 300.0)]
    change = {"severity": "critical", "patience": "1s"}
    assert weights(scene(settings={"rules": {rule: change}}), rule) == [(Severity.CRITICAL, 1.0)]
    assert weights(scene(settings={"rules": {rule: {"ignore": ["rbd0"]}}}), rule) == []
    off = scene(settings={"rules": {rule: {"enabled": False}}})
    assert state(off, rule) == "off"
    assert rule not in [each.rule for each in evaluate.evaluate(off)[0]]


def test_evaluate_states() -> None:
    enforcing = scene(guard=GuardView(enforcing=True))
    assert state(enforcing, "guard-not-enforcing") == "ok"
    assert state(scene(), "guard-not-enforcing") == "unknown"
    assert state(scene(), "mapped-unmounted") == "found"
    assert state(scene(), "mapped-elsewhere") == "off"


def test_evaluate_reports_log_hits_by_pattern() -> None:
    at = scene(logs=(log_hit(pattern="hung-task", severity=Severity.CRITICAL),))
    assert weights(at, "log-hung-task") == [(Severity.CRITICAL, 0.0)]
    ignored = {"rules": {"log-hung-task": {"enabled": False}}}
    at = scene(logs=(log_hit(pattern="hung-task"),), settings=ignored)
    assert "log-hung-task" not in [each.rule for each in evaluate.evaluate(at)[0]]


def test_blind_lists_unknown_rules() -> None:
    judged, _ = evaluate.evaluate(scene(inventory=None, blind="no answer within 10s"))
    ((trouble, severity, _),) = next(e for e in judged if e.rule == evaluate.BLIND).troubles
    assert "leaked-mount" in trouble.message and severity is Severity.WARNING
    assert trouble.evidence["leaked-mount"] == "no answer within 10s"


def test_a_silent_cluster_makes_its_rules_unknown() -> None:
    at = scene(clusters={"c1": "no answer within 15s"}, clock=ClockState(True, 0.0))
    rules = (
        mappings.mapped_elsewhere,
        mappings.blocklisted_client,
        clusters.version_skew,
        clusters.feature_skew,
        clusters.messenger_mode,
    )
    for rule in rules:
        assert "no answer" in judge(rule, at).unknown, rule.name


@pytest.mark.parametrize(
    ("command", "rules"),
    [
        ("versions", (clusters.version_skew,)),
        ("features", (clusters.feature_skew,)),
        ("osd get-require-min-compat-client", (clusters.feature_skew,)),
        ("osd blocklist ls", (mappings.blocklisted_client,)),
        ("mon dump", (clusters.messenger_mode,)),
    ],
)
def test_a_refused_command_makes_its_rules_unknown(
    command: str, rules: tuple[AuditRule, ...]
) -> None:
    for denied in ((), (command,)):
        at = scene(clusters={"c1": view(denied=denied)}, clock=ClockState(True, 0.0))
        for rule in rules:
            assert (f"'ceph {command}' is not allowed" in judge(rule, at).unknown) is bool(denied)


def test_a_failed_scan_makes_node_rules_unknown() -> None:
    at = scene(inventory=None, blind="the scan gave no answer within 10s")
    for rule in (
        mounting.leaked_mount,
        mappings.mapped_unmounted,
        mappings.mapped_twice,
        mounting.private_propagation,
    ):
        assert "no answer" in judge(rule, at).unknown


def test_missing_records_make_their_rules_unknown() -> None:
    at = scene(no_records="no kubelet directory at /var/lib/kubelet")
    rules = (
        mounting.busy_mount,
        mounting.private_propagation,
        mappings.mapped_unmounted,
        mappings.read_only_claim,
        mounting.host_mount_options,
    )
    for rule in rules:
        outcome = judge(rule, at)
        assert outcome.unknown == "no kubelet directory at /var/lib/kubelet", rule.name
        assert outcome.troubles == (), rule.name  # DEVICE is idle, and nobody knows for whom
    assert not judge(mounting.leaked_mount, at).unknown
    seen = scene(no_records="x", host=(place(read_only=True),))
    assert only(mappings.read_only_claim, seen).severity is None  # what is visible is reported
