"""A dataset as the API, the status page and the command line show it. Pure."""

from typing import TYPE_CHECKING, Any

import kit.findings
from cache import view

if TYPE_CHECKING:
    from cache.component import Cache
    from cache.dataset import Dataset


def dataset(shown: "Dataset") -> dict[str, Any]:
    """All there is to say; field names are those of the OpenAPI document."""
    progress, generation, reached = shown.work.progress, shown.generation, shown.reached
    files_rate, bytes_rate = progress.rates() if shown.work.running is not None else (0.0, 0.0)
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
            "total": progress.files_total,
            "done": progress.files_done,
            "failed": progress.failed,
            "skipped": progress.skipped,
            "no_room": generation.left_files,
        },
        "bytes": {
            "total": progress.bytes_total,
            "done": progress.bytes_done,
            "no_room": generation.left_bytes,
        },
        "estimated": progress.estimated,
        "phase": progress.phase if shown.work.running is not None else "",
        "rate": {"files": round(files_rate, 1), "bytes": round(bytes_rate)},
        "eta_seconds": _rounded(progress.eta()) if shown.work.running is not None else None,
        "store_bytes": shown.used(),
        "refreshes": shown.refreshes,
        "verify": shown.work.verified or None,
        "completed": generation.completed or None,
        "notes": shown.notes,
    }


def _rounded(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds)


def findings(cache: "Cache") -> list[kit.findings.Finding]:
    """What an operator should know of without having asked."""
    found = []
    for shown in cache.datasets.values():
        if shown.removed:
            continue
        if shown.trouble is not None and shown.state() != "complete":
            found.append(
                kit.findings.Finding(
                    id=f"dataset-not-served/{shown.name}",
                    rule="dataset-not-served",
                    severity=kit.findings.Severity.CRITICAL
                    if shown.stage is view.Stage.NONE
                    else kit.findings.Severity.WARNING,
                    subject=f"dataset {shown.name}",
                    message=f"{shown.trouble.thing}: {shown.trouble.cause}",
                    advice=shown.trouble.remedy,
                )
            )
        if shown.generation.state == "partial":
            found.append(
                kit.findings.Finding(
                    id=f"dataset-partial/{shown.name}",
                    rule="dataset-partial",
                    severity=kit.findings.Severity.WARNING,
                    subject=f"dataset {shown.name}",
                    message=f"dataset {shown.name} is only partly in the store: "
                    f"{shown.generation.why}",
                    advice="see 'nodeagent dataset show', raise cache.budget, or correct the "
                    "source and warm it again",
                )
            )
        if shown.work.verified.get("bad"):
            found.append(
                kit.findings.Finding(
                    id=f"store-bad-files/{shown.name}",
                    rule="store-bad-files",
                    severity=kit.findings.Severity.CRITICAL,
                    subject=f"dataset {shown.name}",
                    message=f"{shown.work.verified['bad']} files in the store were bad; "
                    f"{shown.work.verified['replaced']} were replaced",
                    advice="check the SSD (smartctl, kernel log), then verify again",
                )
            )
    for folder in sorted(cache.orphans):
        name = folder.split("/")[-2]
        found.append(
            kit.findings.Finding(
                id=f"store-orphan/{folder}",
                rule="store-orphan",
                severity=kit.findings.Severity.INFO,
                subject=f"dataset {name}",
                message=f"{folder} is of no dataset of the settings, or of one's earlier source",
                advice=f"'nodeagent dataset remove {name}' deletes everything of that name",
            )
        )
    return found
