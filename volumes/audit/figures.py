"""The audit's metrics. Bounded series: rules, severities, sources and outcomes only."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

import kit.processes
from kit.findings import Severity
from volumes.rules import registry

if TYPE_CHECKING:
    from volumes.audit.service import Audit

STATES = ("ok", "found", "unknown", "off")


def metrics(audit: "Audit") -> Iterable[Metric]:
    """Current figures; nothing here blocks."""
    yield _findings(audit)
    states = GaugeMetricFamily(
        "nodeagent_volume_rule_state",
        "1 for the state that a rule is in; unknown is not fine.",
        labels=["rule", "state"],
    )
    for rule in audit.states:
        for state in STATES:
            states.add_metric([rule.name, state], 1 if rule.state == state else 0)
    yield states
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
        "Mount namespaces seen by the last full pass.",
        value=inventory.namespaces if inventory else 0,
    )
    yield GaugeMetricFamily(
        "nodeagent_volume_look_age_seconds",
        "Age of what is known of the node.",
        value=max(0.0, audit.age()),
    )
    yield CounterMetricFamily(
        "nodeagent_volume_looks", "Looks at the node.", value=audit.scanner.looks
    )
    yield CounterMetricFamily(
        "nodeagent_volume_look_failures",
        "Looks that failed or gave no answer in time.",
        value=audit.scanner.failures,
    )
    yield CounterMetricFamily(
        "nodeagent_volume_look_cpu_seconds",
        "CPU time of all looks.",
        value=audit.scanner.cpu_seconds,
    )
    yield GaugeMetricFamily(
        "nodeagent_volume_stuck_children",
        "Children of the audit that hang in the kernel.",
        value=audit.scanner.stuck + kit.processes.hanging(),
    )
    yield from _logs(audit)
    yield from _clusters(audit)
    actions = CounterMetricFamily(
        "nodeagent_volume_actions", "Actions of the audit.", labels=["action", "outcome"]
    )
    for (action, outcome), count in sorted(audit.runner.counts.items()):
        actions.add_metric([action, outcome], count)
    yield actions


def _findings(audit: "Audit") -> Metric:
    family = GaugeMetricFamily(
        "nodeagent_volume_findings", "Findings that stand now.", labels=["rule", "severity"]
    )
    counts = {(rule.name, str(rule.severity)): 0 for rule in registry.RULES}
    for finding in audit.findings:
        pair = (finding.rule, str(finding.severity))
        counts[pair] = counts.get(pair, 0) + 1
    for (rule, severity), count in sorted(counts.items()):
        assert severity in list(Severity)
        family.add_metric([rule, severity], count)
    return family


def _logs(audit: "Audit") -> Iterable[Metric]:
    lines = CounterMetricFamily(
        "nodeagent_volume_log_lines",
        "Log lines: seen, dropped above the budget, lost before they were read, matched.",
        labels=["source", "fate"],
    )
    follower = audit.follower
    for source, counts in (follower.counters() if follower else {}).items():
        for fate in ("seen", "dropped", "lost", "matched", "squeezed"):
            lines.add_metric([source, fate], counts[fate])
    yield lines
    yield CounterMetricFamily(
        "nodeagent_volume_log_restarts",
        "Times the log child had to be replaced.",
        value=follower.restarts if follower else 0,
    )


def _clusters(audit: "Audit") -> Iterable[Metric]:
    answers = GaugeMetricFamily(
        "nodeagent_volume_cluster_answers", "1 while the cluster answers.", labels=["cluster"]
    )
    for cluster in audit.settings.clusters:
        view = audit.clusters.views.get(cluster.name)
        answers.add_metric([cluster.name], 0 if view is None or isinstance(view, str) else 1)
    yield answers
