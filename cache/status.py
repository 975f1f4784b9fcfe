"""How datasets show to operators: in the API, as findings, and as metrics."""

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from prometheus_client.core import Metric

import kit.child
import kit.errors
import kit.findings
import kit.processes
from cache.dataset import Dataset, Verification
from cache.store import generations
from cache.view import Stage
from kit.findings import Finding, Severity
from kit.metrics import counter, gauge

FAILURES_SECONDS = 15.0
STATES = (
    *("cold", "waiting", "queued", "scanning", "filling", "paused", "cancelled", "partial"),
    *("complete", "verifying", "withdrawing", "failed", "removed"),
)
STAGES = tuple(map(str, Stage))


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
    found: dict[str, Any] = await kit.child.call(
        generations.failures_page, shown.folder, limit, start, deadline=FAILURES_SECONDS
    )
    return found


# --- findings


def findings(
    datasets: Mapping[str, Dataset],
    orphans: Iterable[str],
    no_store: kit.errors.AgentError | None = None,
) -> list[Finding]:
    """What an operator should know without asking. ``no_store``: why the store cannot be used."""
    found = [each for shown in datasets.values() if not shown.removed for each in _of_one(shown)]
    if no_store is not None:
        found.insert(
            0,
            Finding(
                id="store-unusable",
                rule="store-unusable",
                severity=Severity.CRITICAL,
                subject=no_store.thing,
                message=f"{no_store.cause}; jobs read from the sources",
                advice=f"{no_store.remedy}; it is tried again by itself",
            ),
        )
    for folder in sorted(orphans):
        name = folder.split("/")[-2]
        message = f"{folder} belongs to no dataset of the settings"
        advice = (
            "put the dataset back into the settings, or delete everything of that name with "
            f"'nodeagent dataset remove {name}'"
        )
        found.append(_finding("store-orphan", name, Severity.INFO, message, advice, about=folder))
    return found


def _finding(
    rule: str, name: str, severity: Severity, message: str, advice: str, about: str = ""
) -> Finding:
    return Finding(f"{rule}/{about or name}", rule, severity, f"dataset {name}", message, advice)


def _of_one(shown: Dataset) -> Iterable[Finding]:
    if shown.trouble is not None and shown.state() != "complete":
        severity = Severity.CRITICAL if shown.stage is Stage.NONE else Severity.WARNING
        message = f"{shown.trouble.thing}: {shown.trouble.cause}"
        yield _finding("dataset-not-served", shown.name, severity, message, shown.trouble.remedy)
    elif shown.generation.why and shown.state() == "failed":
        message = f"dataset {shown.name} cannot be filled: {shown.generation.why}"
        advice = "jobs read through to the source meanwhile; it is tried again after a pause"
        yield _finding("dataset-not-filled", shown.name, Severity.WARNING, message, advice)
    if shown.generation.state == "partial":
        message = f"dataset {shown.name} is only partly in the store: {shown.generation.why}"
        advice = (
            "see 'nodeagent dataset show', raise cache.budget, or correct the source and warm the "
            "dataset again"
        )
        yield _finding("dataset-partial", shown.name, Severity.WARNING, message, advice)
    result = shown.verification.result or {}
    if bad := result.get("bad"):
        message = f"{bad} files in the store were bad, {result['replaced']} of them were replaced"
        advice = "check the SSD (smartctl, kernel log), then verify again"
        yield _finding("store-bad-files", shown.name, Severity.CRITICAL, message, advice)


# --- metrics


def metrics(datasets: Mapping[str, Dataset], *, budget: int, used: int) -> Iterable[Metric]:
    """A fixed number of series for each dataset of the settings."""
    shown = {name: of_dataset(dataset) for name, dataset in sorted(datasets.items())}

    def kinds(what: str) -> Mapping[tuple[str, str], float]:
        return {
            (name, "stored" if kind == "done" else kind): value
            for name, row in shown.items()
            for kind, value in row[what].items()
        }

    def is_now(what: str, words: Sequence[str]) -> Mapping[tuple[str, str], float]:
        return {(name, word): row[what] == word for name, row in shown.items() for word in words}

    for name, text, values, label in (
        ("files", "Files of the dataset, by what became of them.", kinds("files"), "kind"),
        ("dataset_bytes", "Bytes of the dataset, by what became of them.", kinds("bytes"), "kind"),
        ("state", "1 for the state of the dataset.", is_now("state", STATES), "state"),
        ("served_by", "1 for what serves the view.", is_now("served_by", STAGES), "stage"),
    ):
        yield gauge(f"cache_{name}", text, values, "dataset", label)
    on_ssd = {name: row["store_bytes"] for name, row in shown.items()}
    yield gauge("cache_store_bytes", "Bytes of the SSD that the dataset takes.", on_ssd, "dataset")
    answers = {name: row["source"]["reachable"] for name, row in shown.items()}
    yield gauge("cache_source_reachable", "1 while the source answers.", answers, "dataset")
    refreshes = {name: row["refreshes"] for name, row in shown.items()}
    yield counter("cache_refreshes", "Refreshes of the dataset's view.", refreshes, "dataset")
    yield gauge("cache_budget_bytes", "Most bytes the store may take.", budget)
    yield gauge("cache_used_bytes", "Bytes that the store takes.", used)
    hanging = kit.processes.hanging()
    yield gauge(
        "children_abandoned", "Processes that hang in the kernel after their deadline.", hanging
    )
