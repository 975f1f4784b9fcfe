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
    yield gauge(
        "volumes_guard_in_force",
        "1: the kernel enforces the mode of the settings.",
        not guard.in_force.problems(),
    )
    yield gauge(
        "volumes_guard_findings",
        "Current findings of the guard; no series for a rule that finds nothing.",
        Counter(each.rule for each in found),
        "rule",
    )
    yield gauge(
        "volumes_guard_drivers_not_loaded",
        "Guarded drivers that are not loaded. Their devices are guarded after loading.",
        len(set(guard.in_force.settings.drivers) - guard.driver_names()),
    )
    yield gauge(
        "volumes_guard_log_readable",
        "1 while the kernel's log can be read; without it no lease is granted.",
        guard.errors.readable,
    )
    yield counter(
        "volumes_guard_checks",
        "Checks of write opens since the program was loaded, by outcome; an open that passes is "
        "checked twice.",
        {name: counts.get(name, 0) for name in kernel.COUNTERS[:-1]},
        "outcome",
    )
    yield counter(
        "volumes_guard_events_lost",
        "Denials that got lost because the ring buffer was full.",
        counts.get("lost", 0),
    )
    yield counter("volumes_guard_leases", "Leases granted.", executor.granted)
    yield counter(
        "volumes_kubernetes_requests",
        "Requests about PersistentVolumes: asked, failed, limited (not sent, too many in this "
        "minute); and marks that were written.",
        executor.witness.counts,
        "what",
    )
    yield counter(
        "volumes_guard_denied_then_leased",
        "Denied attempts whose device then got a lease, as with every new volume.",
        guard.manager.denials.delayed,
    )
    yield counter(
        "volumes_probes",
        "Probes by verdict.",
        {str(kind): manager.checks.verdicts.get(kind, 0) for kind in Kind},
        "verdict",
    )
    yield gauge(
        "volumes_probes_hanging",
        "Abandoned probes whose device still does not answer.",
        len(manager.checks.prober.hanging),
    )
    yield gauge(
        "volumes_guarded_devices", "Attached devices of guarded drivers.", len(manager.known)
    )
    yield gauge(
        "volumes_ledger_entries",
        "Volumes in this node's ledger.",
        len(guard.executor.ledger.entries()),
    )
    yield counter(
        "volumes_cluster_failures",
        "Ceph clusters that did not answer.",
        {"ask": executor.mirror.failures, "mirror": executor.mirror_failures},
        "what",
    )


def of_audit(audit: Audit) -> Iterable[Metric]:
    """None of a disabled audit."""
    if not audit.settings.enabled:
        return
    inventory, follower, scanner = audit.inventory, audit.follower, audit.scanner
    yield gauge(
        "volume_findings",
        "Current findings of the audit; no series for a rule that finds nothing.",
        Counter((each.rule, str(each.severity)) for each in audit.findings),
        *("rule", "severity"),
    )
    yield state(
        "volume_rule_state",
        "The state that a rule is in, as a label; the value is 1. Unknown does not mean fine.",
        {each.name: each.state for each in audit.states},
        *("rule", "state"),
    )
    drivers = [device.driver for device in inventory.devices] if inventory else []
    yield gauge(
        "volume_devices",
        "Guarded block devices with a medium.",
        {driver: drivers.count(driver) for driver in audit.wanted.guard.drivers},
        "driver",
    )
    yield gauge(
        "volume_mount_namespaces",
        "Mount namespaces that the last full scan visited.",
        inventory.namespaces if inventory else 0,
    )
    yield gauge(
        "volume_look_age_seconds", "Age of the last scan of the node.", max(0.0, audit.age())
    )
    yield counter("volume_looks", "Scans of the node.", scanner.scans)
    yield counter(
        "volume_look_failures", "Scans that failed or did not end in time.", scanner.failures
    )
    yield counter("volume_look_cpu_seconds", "CPU time of all scans.", scanner.cpu_seconds)
    yield gauge(
        "volume_stuck_children",
        "Child processes that hang in the kernel.",
        kit.processes.hanging(),
    )
    lines = msgspec.to_builtins(follower.counters()) if follower else {}
    yield counter(
        "volume_log_lines",
        "Log lines: seen, dropped above the limit, lost before they were read.",
        {(source, fate): counts[fate] for source, counts in lines.items() for fate in LINE_FATES},
        *("source", "fate"),
    )
    yield counter(
        "volume_log_restarts",
        "Restarts of the process that reads logs.",
        follower.restarts if follower else 0,
    )
    yield gauge(
        "volume_cluster_answers",
        "1 while the cluster answers.",
        {name: not isinstance(view, str) for name, view in audit.cluster_views().items()},
        "cluster",
    )
    # Without a 0 the first failure is no increase, and no alert.
    acted = {(actions.DETACH, "failed"): 0} | audit.runner.counts
    yield counter("volume_actions", "Actions of the audit.", acted, "action", "outcome")
    yield counter(
        "volume_repairs",
        "Steps of repairs of broken mappings.",
        audit.repairer.counts,
        "step",
        "outcome",
    )
