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
    text = "Mode of the guard in the kernel."
    yield state("volumes_guard_mode", text, {(): str(mode)}, "mode")
    text = "1: the kernel has the mode that the settings or an operator chose."
    yield gauge("volumes_guard_in_force", text, not guard.in_force.problems())
    text = "Findings."
    yield gauge("volumes_guard_findings", text, Counter(each.rule for each in found), "rule")
    text = "Guarded drivers that the kernel has not loaded."
    lacking = set(guard.in_force.settings.drivers) - guard.driver_names()
    yield gauge("volumes_guard_drivers_not_loaded", text, len(lacking))
    text = "0: the agent cannot read the kernel log, so it grants no automatic leases."
    yield gauge("volumes_guard_log_readable", text, guard.errors.readable)
    text = "Checks of programs that open a device for writing. Each permitted open adds 2."
    checks = {name: counts.get(name, 0) for name in kernel.COUNTERS[:-1]}
    yield counter("volumes_guard_checks", text, checks, "outcome")
    text = "Refusals whose record was lost."
    yield counter("volumes_guard_events_lost", text, counts.get("lost", 0))
    yield counter("volumes_guard_leases", "Leases granted.", executor.granted)
    text = "Requests about PersistentVolumes (limited: not sent, to keep the limit)."
    yield counter("volumes_kubernetes_requests", text, executor.witness.counts, "what")
    text = "Refused formats of volumes that later got a lease."
    yield counter("volumes_guard_denied_then_leased", text, manager.denials.delayed)
    verdicts = {str(kind): manager.checks.verdicts.get(kind, 0) for kind in Kind}
    yield counter("volumes_probes", "Probes by result.", verdicts, "verdict")
    text = "Probes whose device still does not answer."
    yield gauge("volumes_probes_hanging", text, len(manager.checks.prober.hanging))
    text = "Attached devices of the guarded drivers."
    yield gauge("volumes_guarded_devices", text, len(manager.known))
    text = "Volumes in the ledger."
    yield gauge("volumes_ledger_entries", text, len(executor.ledger.entries()))
    text = "Failed requests to Ceph (ask: about images; mirror: copies of the ledger)."
    failures = {"ask": executor.mirror.failures, "mirror": executor.mirror_failures}
    yield counter("volumes_cluster_failures", text, failures, "what")


def of_audit(audit: Audit) -> Iterable[Metric]:
    """None of a disabled audit."""
    if not audit.settings.enabled:
        return
    inventory, follower, scanner = audit.inventory, audit.follower, audit.scanner
    text = "Findings."
    found = Counter((each.rule, str(each.severity)) for each in audit.findings)
    yield gauge("volume_findings", text, found, "rule", "severity")
    text = "State of each rule of the audit."
    states = {each.name: each.state for each in audit.states}
    yield state("volume_rule_state", text, states, "rule", "state")
    drivers = [device.driver for device in inventory.devices] if inventory else []
    devices = {driver: drivers.count(driver) for driver in audit.wanted.guard.drivers}
    yield gauge("volume_devices", "Attached devices that the audit sees.", devices, "driver")
    text = "Mount namespaces scanned."
    yield gauge("volume_mount_namespaces", text, inventory.namespaces if inventory else 0)
    text = "Age of the last scan."
    yield gauge("volume_look_age_seconds", text, max(0.0, audit.age()))
    yield counter("volume_looks", "Scans of the node.", scanner.scans)
    text = "Failed scans."
    yield counter("volume_look_failures", text, scanner.failures)
    yield counter("volume_look_cpu_seconds", "CPU time of scans.", scanner.cpu_seconds)
    text = "Child processes of the audit and the guard that hang in the kernel."
    yield gauge("volume_stuck_children", text, kit.processes.hanging(share="volumes"))
    text = "Log lines (dropped: above the limit)."
    lines = msgspec.to_builtins(follower.counters()) if follower else {}
    fates = {(name, fate): counts[fate] for name, counts in lines.items() for fate in LINE_FATES}
    yield counter("volume_log_lines", text, fates, "source", "fate")
    text = "Restarts of the log reader."
    yield counter("volume_log_restarts", text, follower.restarts if follower else 0)
    answers = {name: not isinstance(view, str) for name, view in audit.cluster_views().items()}
    yield gauge("volume_cluster_answers", "1: the cluster answers.", answers, "cluster")
    # Without a 0 the first failure is no increase, and no alert.
    acted = {(actions.DETACH, "failed"): 0} | audit.runner.counts
    yield counter("volume_actions", "Actions of the audit.", acted, "action", "outcome")
    text = "Steps of repairs of broken mappings."
    yield counter("volume_repairs", text, audit.repairer.counts, "step", "outcome")
