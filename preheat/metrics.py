"""Metrics of image preheating. Every label has a fixed, small set of values."""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from preheat import estimate, faces, reconciler, status

_P = "nodeagent_preheat_"


def collect(
    core: reconciler.Reconciler, breaker_trips: int, honours: bool | None
) -> Iterable[Metric]:
    """Cheap: from the last cycle's view."""
    rows = faces.rows(core)
    states = GaugeMetricFamily(_P + "images", "Wanted or pinned images.", labels=["state"])
    for state in status.STATES:
        states.add_metric([state], sum(row.state == state for row in rows))
    yield states
    seen = core.view
    gauges = {
        "pinned_bytes": (
            "Bytes on disk that pins keep, shared layers once.",
            estimate.union(pin.parts for pin in seen.pinned),
        ),
        "pin_budget_bytes": ("Most bytes that pins may keep.", core.section.pin_budget),
        "missing_bytes": (
            "Bytes still to fetch for everything wanted.",
            sum(row.bytes_missing for row in rows if row.state not in ("ready", "released")),
        ),
        "pulls_running": ("Pulls in progress.", len(core.running)),
        "disk_pressure": (
            "1 while the image disk is above the kubelet's thresholds.",
            int(seen.node is not None and seen.node.pressed),
        ),
        "pin_label_honoured": (
            "1 when the runtime tells the kubelet about pins, 0 when not, -1 not known yet.",
            -1 if honours is None else int(honours),
        ),
        "gc_fights": (
            "Pinned images that are removed more often than heals are allowed.",
            len(core.healer.fights),
        ),
    }
    for name, (text, value) in gauges.items():
        yield GaugeMetricFamily(_P + name, text, value=value)
    counts = core.healer.counts
    saved = CounterMetricFamily(
        _P + "saved_bytes", "Bytes that did not have to be fetched when needed.", labels=["how"]
    )
    saved.add_metric(["use"], core.totals.used_bytes)
    saved.add_metric(["heal"], counts.saved_bytes)
    yield saved
    refused = CounterMetricFamily(
        _P + "heals_refused", "Removed pinned images that were not put back.", labels=["reason"]
    )
    refused.add_metric(["disk_pressure"], counts.refused_pressure)
    refused.add_metric(["limit"], counts.refused_limit)
    yield refused
    failures = CounterMetricFamily(_P + "failures", "Failed pulls by class.", labels=["kind"])
    for kind, count in core.failed.items():
        failures.add_metric([kind], count)
    yield failures
    counters = {
        "heals": ("Removed pinned images that were put back.", counts.heals),
        "removals": ("Removals of pinned images by somebody else.", counts.removals),
        "pulls": ("Finished pulls.", core.totals.pulls),
        "fetched_bytes": ("Bytes fetched by finished pulls.", core.totals.fetched_bytes),
        "registry_requests": ("Requests of the agent to registries.", core.client.requests),
        "breaker_trips": ("Times the runtime went away on a changing call.", breaker_trips),
    }
    for name, (text, value) in counters.items():
        yield CounterMetricFamily(_P + name, text, value=value)
