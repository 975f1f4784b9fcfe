"""Metrics of the cache: a fixed number of series for each dataset of the settings."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

import kit.processes
from cache.view import Stage

if TYPE_CHECKING:
    from cache.component import Cache

STATES = (
    *("cold", "waiting", "queued", "scanning", "filling", "paused", "cancelled", "partial"),
    *("complete", "verifying", "failed", "removed"),
)


def collect(cache: "Cache") -> Iterable[Metric]:
    def gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"nodeagent_cache_{name}", text, labels=["dataset", *labels])

    files = gauge("files", "Files of the dataset, by what became of them.", "kind")
    sizes = gauge("dataset_bytes", "Bytes of the dataset's files, by what became of them.", "kind")
    used = gauge("store_bytes", "Bytes of the SSD that the dataset takes.")
    state = gauge("state", "1 for the state that the dataset is in.", "state")
    stage = gauge("served_by", "1 for what serves the dataset's view.", "stage")
    reachable = gauge("source_reachable", "1 while the source answers.")
    refreshes = CounterMetricFamily(
        "nodeagent_cache_refreshes", "Refreshes of the dataset's view.", labels=["dataset"]
    )
    for name, dataset in sorted(cache.datasets.items()):
        progress, generation = dataset.work.progress, dataset.generation
        for kind, value in (
            ("total", progress.files_total), ("stored", progress.files_done),
            ("failed", progress.failed), ("skipped", progress.skipped),
            ("no_room", generation.left_files),
        ):  # fmt: skip
            files.add_metric([name, kind], value)
        for kind, value in (
            ("total", progress.bytes_total), ("stored", progress.bytes_done),
            ("no_room", generation.left_bytes),
        ):  # fmt: skip
            sizes.add_metric([name, kind], value)
        used.add_metric([name], dataset.used())
        now = dataset.state()
        for each in STATES:
            state.add_metric([name, each], 1 if each == now else 0)
        for served_by in Stage:
            stage.add_metric([name, str(served_by)], 1 if served_by is dataset.stage else 0)
        reachable.add_metric([name], 1 if dataset.reached is not None else 0)
        refreshes.add_metric([name], dataset.refreshes)
    yield from (files, sizes, used, state, stage, reachable, refreshes)
    yield GaugeMetricFamily(
        "nodeagent_cache_budget_bytes", "Most bytes the store may take.", cache.settings.budget
    )
    yield GaugeMetricFamily(
        "nodeagent_cache_used_bytes", "Bytes that the store takes.", cache.used()
    )
    yield GaugeMetricFamily(
        "nodeagent_children_abandoned",
        "Calls that hang in the kernel after their deadline.",
        kit.processes.hanging(),
    )
