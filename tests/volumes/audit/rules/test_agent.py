"""Rules about what the agent's own parts report. Pure."""

from tests.volumes.audit.world import judge, log_hit, only, scene, volume
from volumes.audit.inventory.model import Publish
from volumes.audit.rules import agent
from volumes.audit.types import GuardView, LedgerMismatch, Severity


def test_guard_rules_are_unknown_without_the_guard_and_silent_when_it_enforces() -> None:
    for rule in (agent.guard_not_enforcing, agent.ledger_mismatch):
        assert judge(rule, scene()).unknown
        outcome = judge(rule, scene(guard=GuardView(enforcing=True)))
        assert not outcome.troubles and not outcome.unknown


def test_guard_not_enforcing_says_why() -> None:
    weak = GuardView(enforcing=False, reasons=("its mode is dry-run",))
    assert "dry-run" in only(agent.guard_not_enforcing, scene(guard=weak)).message


def test_a_chosen_dry_run_is_an_info_and_a_guard_that_lacks_something_is_not() -> None:
    for only_reports, severity in ((True, Severity.INFO), (False, None)):
        weak = GuardView(False, reasons=("its mode is dry-run",), only_reports=only_reports)
        assert only(agent.guard_not_enforcing, scene(guard=weak)).severity is severity
    assert agent.guard_not_enforcing.severity is Severity.WARNING


def test_ledger_mismatch_names_both_contents() -> None:
    odd = GuardView(True, mismatches=(LedgerMismatch("rbd0", "i", "ext4 a", "ext4 b"),))
    found = only(agent.ledger_mismatch, scene(guard=odd))
    assert "ext4 a" in found.message and "ext4 b" in found.message
    # A second mapping that can write, on a node whose guard knows nothing of it, is the next fault.
    assert "on another node only mapped read-only" in found.advice


def test_unread_log_of_a_default_source_is_an_info() -> None:
    rule = agent.unread_log
    unread = {"kubelet": "/var/log/journal has no line of kubelet.service"}
    assert judge(rule, scene()).troubles == ()
    assert only(rule, scene(unread_logs=unread)).severity is Severity.INFO
    chosen = {"logs": {"sources": [{"name": "kubelet", "unit": "kubelet.service"}]}}
    assert only(rule, scene(unread_logs=unread, settings=chosen)).severity is Severity.WARNING
    kernel = scene(unread_logs={"kernel": "/dev/kmsg: Operation not permitted"})
    assert only(rule, kernel).severity is Severity.WARNING


def test_flooding_log_names_the_source_and_is_one_finding() -> None:
    found = only(agent.flooding_log, scene(flooding_logs={"ceph-csi": 25}))
    assert found.subject == "ceph-csi" and "more than 25" in found.message


def test_from_logs_adds_the_volume_of_the_device() -> None:
    published = volume(name="pvc-1", publishes=(Publish("uid", "/p", "pvc-1", True, False),))
    at = scene(volumes=(published,), logs=(log_hit(pattern="x", device="rbd0"),))
    ((rule, _, trouble),) = agent.from_logs(at)
    assert (rule, trouble.subject) == ("log-x", "rbd0")
    assert (trouble.evidence["volume"], trouble.evidence["pods"]) == ("pvc-1", "uid")
    assert trouble.evidence["image"] == "rbd/csi-vol-1"
