"""The audit's metrics. Series are bounded: rules, severities, sources and outcomes only."""

import dataclasses
from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

import kit.processes
from volumes.audit import evaluate
from volumes.audit.logs.matcher import Counters
from volumes.audit.service import Audit


def metrics(audit: Audit) -> Iterable[Metric]:
    """The current figures, none of a disabled audit; never blocks."""
    if not audit.settings.enabled:
        return
    yield _findings(audit)
    states = GaugeMetricFamily(
        "nodeagent_volume_rule_state",
        "1 for the state that a rule is in; unknown does not mean fine.",
        labels=["rule", "state"],
    )
    for rule in audit.states:
        for state in evaluate.STATES:
            states.add_metric([rule.name, state], 1 if rule.state == state else 0)
    yield states
    yield from _scans(audit)
    yield GaugeMetricFamily(
        "nodeagent_volume_stuck_children",
        "Child processes that hang in the kernel.",
        value=kit.processes.hanging(),
    )
    yield from _logs(audit)
    answers = GaugeMetricFamily(
        "nodeagent_volume_cluster_answers", "1 while the cluster answers.", labels=["cluster"]
    )
    for name, view in audit.cluster_views().items():
        answers.add_metric([name], 0 if isinstance(view, str) else 1)
    yield answers
    actions = CounterMetricFamily(
        "nodeagent_volume_actions", "Actions of the audit.", labels=["action", "outcome"]
    )
    for (action, outcome), count in sorted(audit.runner.counts.items()):
        actions.add_metric([action, outcome], count)
    yield actions


def _findings(audit: Audit) -> Metric:
    family = GaugeMetricFamily(
        "nodeagent_volume_findings", "Current findings.", labels=["rule", "severity"]
    )
    counts = {(rule.name, str(rule.severity)): 0 for rule in evaluate.RULES}
    for finding in audit.findings:
        pair = (finding.rule, str(finding.severity))
        counts[pair] = counts.get(pair, 0) + 1
    for (rule, severity), count in sorted(counts.items()):
        family.add_metric([rule, severity], count)
    return family


def _scans(audit: Audit) -> Iterable[Metric]:
    inventory = audit.inventory
    devices = GaugeMetricFamily(
        "nodeagent_volume_devices", "Guarded block devices with a medium.", labels=["driver"]
    )
    for driver in audit.drivers:
        count = sum(1 for d in inventory.devices if d.driver == driver) if inventory else 0
        devices.add_metric([driver], count)
    yield devices
    yield GaugeMetricFamily(
        "nodeagent_volume_mount_namespaces",
        "Mount namespaces that the last full scan visited.",
        value=inventory.namespaces if inventory else 0,
    )
    yield GaugeMetricFamily(
        "nodeagent_volume_look_age_seconds",
        "Age of the last scan of the node.",
        value=max(0.0, audit.age()),
    )
    yield CounterMetricFamily(
        "nodeagent_volume_looks", "Scans of the node.", value=audit.scanner.scans
    )
    yield CounterMetricFamily(
        "nodeagent_volume_look_failures",
        "Scans that failed or did not end in time.",
        value=audit.scanner.failures,
    )
    yield CounterMetricFamily(
        "nodeagent_volume_look_cpu_seconds",
        "CPU time of all scans.",
        value=audit.scanner.cpu_seconds,
    )


def _logs(audit: Audit) -> Iterable[Metric]:
    lines = CounterMetricFamily(
        "nodeagent_volume_log_lines",
        "Log lines: seen, dropped above the limit, lost before they were read, matched, squeezed "
        "(matched, but too many different ones at once).",
        labels=["source", "fate"],
    )
    follower = audit.follower
    for source, counters in (follower.counters() if follower else {}).items():
        for fate in dataclasses.fields(Counters):
            lines.add_metric([source, fate.name], getattr(counters, fate.name))
    yield lines
    yield CounterMetricFamily(
        "nodeagent_volume_log_restarts",
        "Times the log child was replaced.",
        value=follower.restarts if follower else 0,
    )
