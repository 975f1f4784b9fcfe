"""Metrics of image preheating. Every label has a fixed, small set of values."""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from preheat import estimate, status
from preheat.reconciler import Reconciler

_P = "nodeagent_preheat_"


def collect(reconciler: Reconciler) -> Iterable[Metric]:
    """Cheap: from the last snapshot."""
    rows = status.images(reconciler)
    states = GaugeMetricFamily(_P + "images", "Requested or pinned images.", labels=["state"])
    for state in status.STATES:
        states.add_metric([state], sum(row.state == state for row in rows))
    yield states
    seen, runtime = reconciler.snapshot, reconciler.runtime
    honours = runtime.honours_pins
    gauges = {
        "pinned_bytes": (
            "Bytes on disk that pins keep, shared layers once.",
            estimate.union(pin.parts for pin in seen.pinned),
        ),
        "pin_budget_bytes": ("Most bytes that pins may keep.", reconciler.section.pin_budget),
        "missing_bytes": (
            "Bytes still to fetch for everything requested.",
            sum(row.bytes_missing for row in rows if row.state not in ("ready", "released")),
        ),
        "pulls_running": ("Pulls in progress.", len(reconciler.running)),
        "disk_pressure": (
            "1 while the image disk is above the kubelet's thresholds.",
            int(seen.node is not None and seen.node.pressed),
        ),
        "pin_label_honoured": (
            "1 when the runtime tells the kubelet about pins, 0 when not, -1 not known yet.",
            -1 if honours is None else int(honours),
        ),
        "gc_fights": (
            "Pinned images that somebody removes more often than heals are allowed.",
            len(reconciler.healer.fights),
        ),
    }
    for name, (text, value) in gauges.items():
        yield GaugeMetricFamily(_P + name, text, value=value)
    counts, totals = reconciler.healer.counts, reconciler.totals
    counters = {
        "heals": ("Removed pinned images that were restored.", counts.heals),
        "removals": ("Removals of pinned images by somebody else.", counts.removals),
        "pulls": ("Finished pulls.", totals.pulls),
        "fetched_bytes": ("Bytes fetched by finished pulls.", totals.fetched_bytes),
        "registry_requests": ("Requests of the agent to registries.", reconciler.client.requests),
        "breaker_trips": ("Times the runtime went away on a changing call.", runtime.trips),
    }
    for name, (text, value) in counters.items():
        yield CounterMetricFamily(_P + name, text, value=value)
    yield _labelled(
        "saved_bytes",
        "Bytes that did not have to be fetched when needed.",
        "how",
        {"use": totals.used_bytes, "heal": counts.saved_bytes},
    )
    yield _labelled(
        "heals_refused",
        "Removed pinned images that were not restored.",
        "reason",
        {"disk_pressure": counts.refused_pressure, "limit": counts.refused_limit},
    )
    yield _labelled("failures", "Failed pulls by class.", "kind", totals.failed)


def _labelled(name: str, text: str, label: str, values: dict[str, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(_P + name, text, labels=[label])
    for value, count in values.items():
        family.add_metric([value], count)
    return family
