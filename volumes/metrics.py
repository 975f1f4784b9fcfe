"""Metrics of the guard and the audit. Series are bounded: no label per device, file or pod."""

from collections import Counter
from collections.abc import Iterable

import msgspec
from prometheus_client.core import Metric

import kit.processes
from kit.findings import Finding
from kit.metrics import counter, gauge, state
from volumes.audit import actions
from volumes.audit.service import Audit
from volumes.guard import controller, kernel
from volumes.probe.examine import Kind

LINE_FATES = ("seen", "dropped", "lost")


def of_guard(guard: controller.Controller, found: Iterable[Finding]) -> Iterable[Metric]:
    """``found``: its findings."""
    present, manager, executor = guard.in_force.present, guard.manager, guard.executor
    counts = present.counters if present is not None else {}
    mode = present.mode if present is not None else kernel.Mode.OFF
    text = "The mode that the kernel is in, as a label; the value is 1."
    yield state("volumes_guard_mode", text, {(): str(mode)}, "mode")
    text = (
        "1: the kernel has the wanted mode: the one that a person set, else that of the settings."
    )
    yield gauge("volumes_guard_in_force", text, not guard.in_force.problems())
    text = "Current findings of the guard; no series for a rule that finds nothing."
    yield gauge("volumes_guard_findings", text, Counter(each.rule for each in found), "rule")
    text = "Guarded drivers that are not loaded. Their devices are guarded after loading."
    lacking = set(guard.in_force.settings.drivers) - guard.driver_names()
    yield gauge("volumes_guard_drivers_not_loaded", text, len(lacking))
    text = "1 while the kernel's log can be read; without it no lease is granted."
    yield gauge("volumes_guard_log_readable", text, guard.errors.readable)
    text = "How often the guard checked an attempt to open a device for writing, since the guard "
    text += "was loaded. A permitted attempt counts twice."
    checks = {name: counts.get(name, 0) for name in kernel.COUNTERS[:-1]}
    yield counter("volumes_guard_checks", text, checks, "outcome")
    text = "Records of refused formats that were lost because the ring buffer was full."
    yield counter("volumes_guard_events_lost", text, counts.get("lost", 0))
    yield counter("volumes_guard_leases", "Leases granted.", executor.granted)
    text = "Requests about PersistentVolumes. asked: sent. failed: ended with an error. limited: "
    text += "not sent, because of the limit per minute. marked: wrote a mark."
    yield counter("volumes_kubernetes_requests", text, executor.witness.counts, "what")
    text = "Refused formats that later got a lease. Each new volume can cause one."
    yield counter("volumes_guard_denied_then_leased", text, manager.denials.delayed)
    verdicts = {str(kind): manager.checks.verdicts.get(kind, 0) for kind in Kind}
    yield counter("volumes_probes", "Probes by verdict.", verdicts, "verdict")
    text = "Abandoned probes whose device still does not answer."
    yield gauge("volumes_probes_hanging", text, len(manager.checks.prober.hanging))
    text = "Attached devices of guarded drivers."
    yield gauge("volumes_guarded_devices", text, len(manager.known))
    text = "Volumes in this node's ledger."
    yield gauge("volumes_ledger_entries", text, len(executor.ledger.entries()))
    text = "Failed requests to Ceph: questions about an image (ask), copies of the ledger (mirror)."
    failures = {"ask": executor.mirror.failures, "mirror": executor.mirror_failures}
    yield counter("volumes_cluster_failures", text, failures, "what")


def of_audit(audit: Audit) -> Iterable[Metric]:
    """None of a disabled audit."""
    if not audit.settings.enabled:
        return
    inventory, follower, scanner = audit.inventory, audit.follower, audit.scanner
    text = "Current findings of the audit; no series for a rule that finds nothing."
    found = Counter((each.rule, str(each.severity)) for each in audit.findings)
    yield gauge("volume_findings", text, found, "rule", "severity")
    text = "The state that a rule is in, as a label; the value is 1. Unknown does not mean fine."
    states = {each.name: each.state for each in audit.states}
    yield state("volume_rule_state", text, states, "rule", "state")
    drivers = [device.driver for device in inventory.devices] if inventory else []
    devices = {driver: drivers.count(driver) for driver in audit.wanted.guard.drivers}
    yield gauge("volume_devices", "Guarded block devices that are attached.", devices, "driver")
    text = "Mount namespaces that the last full scan visited."
    yield gauge("volume_mount_namespaces", text, inventory.namespaces if inventory else 0)
    text = "Age of the last scan of the node."
    yield gauge("volume_look_age_seconds", text, max(0.0, audit.age()))
    yield counter("volume_looks", "Scans of the node.", scanner.scans)
    text = "Scans that failed or did not end in time."
    yield counter("volume_look_failures", text, scanner.failures)
    yield counter("volume_look_cpu_seconds", "CPU time of all scans.", scanner.cpu_seconds)
    text = "Child processes that hang in the kernel."
    yield gauge("volume_stuck_children", text, kit.processes.hanging())
    text = "Log lines by source (a name of logs.sources): seen, dropped above the limit, or lost."
    lines = msgspec.to_builtins(follower.counters()) if follower else {}
    fates = {(name, fate): counts[fate] for name, counts in lines.items() for fate in LINE_FATES}
    yield counter("volume_log_lines", text, fates, "source", "fate")
    text = "Restarts of the process that reads logs."
    yield counter("volume_log_restarts", text, follower.restarts if follower else 0)
    answers = {name: not isinstance(view, str) for name, view in audit.cluster_views().items()}
    yield gauge("volume_cluster_answers", "1 while the cluster answers.", answers, "cluster")
    # Without a 0 the first failure is no increase, and no alert.
    acted = {(actions.DETACH, "failed"): 0} | audit.runner.counts
    yield counter("volume_actions", "Actions of the audit.", acted, "action", "outcome")
    text = "Steps of repairs of broken mappings."
    yield counter("volume_repairs", text, audit.repairer.counts, "step", "outcome")
