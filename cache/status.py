"""How datasets show to operators: in the API, as findings, and as metrics."""

import os
from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

import kit.child
import kit.errors
import kit.findings
import kit.processes
from cache.dataset import Dataset, Verification
from cache.store import index
from cache.view import Stage
from kit.findings import Finding, Severity

FAILURES_SECONDS = 15.0
STATES = (
    *("cold", "waiting", "queued", "scanning", "filling", "paused", "cancelled", "partial"),
    *("complete", "verifying", "withdrawing", "failed", "removed"),
)


# --- the API


def of_dataset(shown: Dataset) -> dict[str, Any]:
    """Everything about one dataset; fields as in openapi.yaml."""
    figures, generation, reached, job = shown.figures, shown.generation, shown.reached, shown.job
    files_rate, bytes_rate = job.rates() if job is not None else (0.0, 0.0)
    seconds_left = job.eta() if job is not None else None
    source = shown.settings.source.model_dump(mode="json", exclude={"secret_file"})
    return {
        "name": shown.name,
        "state": shown.state(),
        "why": shown.why(),
        "view": shown.view,
        "served_by": str(shown.stage),
        "freshness": shown.settings.freshness,
        "priority": shown.settings.priority,
        "warm": shown.settings.warm or generation.wanted,
        "source": {
            **source,
            "reachable": reached is not None,
            "read_by": reached.client if reached else None,
        },
        "files": {
            "total": figures.files,
            "done": figures.done_files,
            "failed": figures.failed,
            "skipped": figures.skipped,
            "no_room": generation.left_files,
        },
        "bytes": {
            "total": figures.bytes,
            "done": figures.done_bytes,
            "no_room": generation.left_bytes,
        },
        "estimated": figures.estimated,
        "phase": job.phase if job is not None else "",
        "rate": {"files": round(files_rate, 1), "bytes": round(bytes_rate)},
        "eta_seconds": None if seconds_left is None else round(seconds_left),
        "store_bytes": shown.used(),
        "refreshes": shown.refreshes,
        "verify": _verification(shown.verification),
        "completed": generation.completed or None,
        "notes": shown.notes,
    }


def _verification(last: Verification) -> dict[str, Any] | None:
    if not last.state:
        return None
    shown: dict[str, Any] = {"state": last.state, "source": last.source}
    if last.why or not last.pending:
        shown["why"] = last.why
    if last.result is not None:
        shown |= {**last.result, "at": last.at}
    return shown


async def failures(shown: Dataset, limit: int, after: str) -> dict[str, Any]:
    """``limit`` entries that could not be copied, those after ``after`` (``next`` of a page)."""
    wrong = kit.errors.SettingsError(
        "after", f"{after!r} is not the 'next' of a page", "leave it out to read from the start"
    )
    number, _, name = after.partition("/")
    if after and not number.isdigit():
        raise wrong
    try:
        start = [int(number or 0), os.fsdecode(bytes.fromhex(name))]
    except ValueError as error:
        raise wrong from error
    path = f"{shown.folder}/{index.NAME}"
    found: dict[str, Any] = await kit.child.call(
        index.failures_page, path, limit, start, deadline=FAILURES_SECONDS
    )
    return found


# --- findings


def findings(datasets: Mapping[str, Dataset], orphans: Iterable[str]) -> list[Finding]:
    """What an operator should know without asking."""
    found = []
    for shown in datasets.values():
        if not shown.removed:
            found += _of_one(shown)
    for folder in sorted(orphans):
        name = folder.split("/")[-2]
        found.append(
            Finding(
                id=f"store-orphan/{folder}",
                rule="store-orphan",
                severity=Severity.INFO,
                subject=f"dataset {name}",
                message=f"{folder} belongs to no dataset of the settings",
                advice=f"put the dataset back into the settings, or delete everything of that name "
                f"with 'nodeagent dataset remove {name}'",
            )
        )
    return found


def _of_one(shown: Dataset) -> list[Finding]:
    subject = f"dataset {shown.name}"
    found = []
    if shown.trouble is not None and shown.state() != "complete":
        severity = Severity.CRITICAL if shown.stage is Stage.NONE else Severity.WARNING
        found.append(
            Finding(
                id=f"dataset-not-served/{shown.name}",
                rule="dataset-not-served",
                severity=severity,
                subject=subject,
                message=f"{shown.trouble.thing}: {shown.trouble.cause}",
                advice=shown.trouble.remedy,
            )
        )
    elif shown.generation.why and shown.state() == "failed":
        found.append(
            Finding(
                id=f"dataset-not-filled/{shown.name}",
                rule="dataset-not-filled",
                severity=Severity.WARNING,
                subject=subject,
                message=f"{subject} cannot be filled: {shown.generation.why}",
                advice="jobs read through to the source meanwhile; it is tried again after a pause",
            )
        )
    if shown.generation.state == "partial":
        found.append(
            Finding(
                id=f"dataset-partial/{shown.name}",
                rule="dataset-partial",
                severity=Severity.WARNING,
                subject=subject,
                message=f"{subject} is only partly in the store: {shown.generation.why}",
                advice="see 'nodeagent dataset show', raise cache.budget, or correct the source "
                "and warm the dataset again",
            )
        )
    result = shown.verification.result or {}
    if result.get("bad"):
        found.append(
            Finding(
                id=f"store-bad-files/{shown.name}",
                rule="store-bad-files",
                severity=Severity.CRITICAL,
                subject=subject,
                message=f"{result['bad']} files in the store were bad, "
                f"{result['replaced']} of them were replaced",
                advice="check the SSD (smartctl, kernel log), then verify again",
            )
        )
    return found


# --- metrics


def metrics(datasets: Mapping[str, Dataset], *, budget: int, used: int) -> Iterable[Metric]:
    """A fixed number of series for each dataset of the settings."""

    def gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"nodeagent_cache_{name}", text, labels=["dataset", *labels])

    files = gauge("files", "Files of the dataset, by what became of them.", "kind")
    sizes = gauge("dataset_bytes", "Bytes of the dataset's files, by what became of them.", "kind")
    on_ssd = gauge("store_bytes", "Bytes of the SSD that the dataset takes.")
    state = gauge("state", "1 for the state that the dataset is in.", "state")
    stage = gauge("served_by", "1 for what serves the dataset's view.", "stage")
    reachable = gauge("source_reachable", "1 while the source answers.")
    refreshes = CounterMetricFamily(
        "nodeagent_cache_refreshes", "Refreshes of the dataset's view.", labels=["dataset"]
    )
    for name, dataset in sorted(datasets.items()):
        figures, generation = dataset.figures, dataset.generation
        for kind, value in (
            ("total", figures.files), ("stored", figures.done_files),
            ("failed", figures.failed), ("skipped", figures.skipped),
            ("no_room", generation.left_files),
        ):  # fmt: skip
            files.add_metric([name, kind], value)
        for kind, value in (
            ("total", figures.bytes), ("stored", figures.done_bytes),
            ("no_room", generation.left_bytes),
        ):  # fmt: skip
            sizes.add_metric([name, kind], value)
        on_ssd.add_metric([name], dataset.used())
        now = dataset.state()
        for each in STATES:
            state.add_metric([name, each], 1 if each == now else 0)
        for served_by in Stage:
            stage.add_metric([name, str(served_by)], 1 if served_by is dataset.stage else 0)
        reachable.add_metric([name], 1 if dataset.reached is not None else 0)
        refreshes.add_metric([name], dataset.refreshes)
    yield from (files, sizes, on_ssd, state, stage, reachable, refreshes)
    yield GaugeMetricFamily(
        "nodeagent_cache_budget_bytes", "Most bytes the store may take.", budget
    )
    yield GaugeMetricFamily("nodeagent_cache_used_bytes", "Bytes that the store takes.", used)
    yield GaugeMetricFamily(
        "nodeagent_children_abandoned",
        "Processes that hang in the kernel after their deadline.",
        kit.processes.hanging(),
    )
