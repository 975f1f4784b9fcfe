"""How scrubs show to operators: in the API, as findings, and as metrics."""

from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client.core import Metric

from cache.dataset.dataset import Dataset
from cache.dataset.standing import finding
from kit.findings import Finding, Severity
from kit.metrics import counter, gauge


def shown(dataset: Dataset) -> dict[str, Any]:
    """Fields as in openapi.yaml."""
    now, generation = dataset.scrub, dataset.generation
    return {
        "state": now.state,
        "reason": now.reason,
        "why": now.why,
        "suspect": dataset.suspect,
        "files": {"total": now.files, "checked": now.checked_files},
        "bytes": {"total": now.bytes, "checked": now.checked_bytes},
        "bad": now.bad,
        "replaced": now.replaced,
        "withdrawn": now.withdrawn,
        "ended": generation.scrubbed or None,
    }


def findings(dataset: Dataset) -> Iterable[Finding]:
    name, now = dataset.name, dataset.scrub
    if dataset.suspect:
        message = (
            f"the SSD had errors, so dataset {name} is read from its source until every stored "
            "file is verified"
        )
        advice = (
            "nothing, if it ends ('nodeagent dataset show' tells how far it is); check the SSD "
            "(smartctl, kernel log)"
        )
        yield finding("dataset-suspect", name, Severity.WARNING, message, advice)
    advice = "check the SSD (smartctl, kernel log)"
    if now.bad:
        message = (
            f"the scrub of dataset {name} found {now.bad} bad files in the store, "
            f"{now.replaced} were replaced, {now.withdrawn} withdrawn"
        )
        yield finding("store-damage", name, Severity.CRITICAL, message, advice)
    for each in (*dataset.earlier, *dataset.left):
        which = each.record.snapshot or each.id
        if each.scrub.bad:
            message = f"the scrub of {which}, an earlier generation of dataset {name}, found "
            message += f"{each.scrub.bad} bad files in the store"
            about = f"{name}/{each.id}"
            yield finding("store-damage", name, Severity.CRITICAL, message, advice, about)
        if each.record.damaged and not each.source.block:
            message = f"{each.record.damaged} files of {which}, an earlier generation of dataset "
            message += f"{name}, were bad on the SSD: it is discarded when nobody uses it"
            remedy = (
                "jobs read its source by its id, and miss these files where that cannot be read; "
                f"'nodeagent dataset generations {name}' names who uses it. A rollback fills it "
                "again"
            )
            about = f"{name}/{each.id}"
            yield finding("generation-damaged", name, Severity.WARNING, message, remedy, about)


def metrics(datasets: Mapping[str, Dataset]) -> Iterable[Metric]:
    each = dict(sorted(datasets.items()))
    text = "Datasets whose view shows the source until their stored files are verified."
    yield gauge("cache_suspect_datasets", text, sum(dataset.suspect for dataset in each.values()))
    ended = [at for dataset in each.values() if (at := dataset.generation.scrubbed)]
    text = "Unix time at which the last whole scrub of a dataset ended, of the dataset where that "
    text += "is longest ago; no series before the first scrub."
    yield gauge("cache_oldest_scrub_timestamp_seconds", text, {(): min(ended)} if ended else {})
    bad = {name: dataset.scrubs.bad for name, dataset in each.items()}
    text = "Damaged files and directories that scrubs found in the store."
    yield counter("cache_scrub_bad", text, bad, "dataset")
