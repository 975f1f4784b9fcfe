"""Metrics of the guard, the probes and the ledger."""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from volumes.guard import controller, kernel
from volumes.probe.examine import Kind


def metrics(guard: controller.Controller) -> Iterable[Metric]:
    present = guard.present
    mode = GaugeMetricFamily(
        "nodeagent_volumes_guard_mode", "1 for the mode that the kernel is in.", labels=["mode"]
    )
    for each in kernel.Mode:
        mode.add_metric([str(each)], 1 if present is not None and present.mode is each else 0)
    yield mode
    yield GaugeMetricFamily(
        "nodeagent_volumes_guard_in_force",
        "1 while the kernel does what the settings say.",
        value=0 if guard.problems() else 1,
    )
    opens = CounterMetricFamily(
        "nodeagent_volumes_guard_checks",
        "Checks of write opens since the program was loaded, by outcome; an open that passes is "
        "checked twice.",
        labels=["outcome"],
    )
    for name in kernel.COUNTERS[:-1]:
        opens.add_metric([name], present.counters.get(name, 0) if present else 0)
    yield opens
    yield CounterMetricFamily(
        "nodeagent_volumes_guard_events_lost",
        "Denials that found the ring buffer full.",
        value=present.counters.get("lost", 0) if present else 0,
    )
    yield CounterMetricFamily(
        "nodeagent_volumes_guard_leases", "Leases granted.", value=guard.manager.granted
    )
    yield CounterMetricFamily(
        "nodeagent_volumes_guard_denied_then_leased",
        "Denied attempts whose device got a lease right after, as with every new volume.",
        value=guard.denials.delayed,
    )
    probes = CounterMetricFamily(
        "nodeagent_volumes_probes", "Probes by verdict.", labels=["verdict"]
    )
    for kind in Kind:
        probes.add_metric([str(kind)], guard.manager.verdicts.get(kind, 0))
    yield probes
    yield GaugeMetricFamily(
        "nodeagent_volumes_probes_hanging",
        "Abandoned probes whose device still does not answer.",
        value=len(guard.manager.prober.hanging),
    )
    yield GaugeMetricFamily(
        "nodeagent_volumes_guarded_devices",
        "Attached devices of guarded drivers.",
        value=len(guard.manager.known),
    )
    yield GaugeMetricFamily(
        "nodeagent_volumes_ledger_entries",
        "Volumes in this node's ledger.",
        value=len(guard.ledger.entries()),
    )
    failures = CounterMetricFamily(
        "nodeagent_volumes_cluster_failures", "Ceph clusters that did not answer.", labels=["what"]
    )
    failures.add_metric(["ask"], guard.mirror.failures)
    failures.add_metric(["mirror"], guard.manager.mirror_failures)
    yield failures
