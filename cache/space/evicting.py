"""Evictions as operators meet them: what is refused and why, what is shown, what is found."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import kit.errors
from cache.dataset.dataset import Dataset
from cache.dataset.standing import finding
from kit.findings import Finding, Severity

_NAMED = 5  # users in a message


def refuse(dataset: Dataset, *, force: bool) -> None:
    """AgentError unless files may be taken out of the dataset now. ``force``: a kept one, too."""
    dataset.refuse_change()
    state = dataset.generation.state
    if dataset.removed or state not in ("complete", "partial"):
        why = f"it is {dataset.state()}: only what was filled can be taken out in part"
        raise dataset.refused(why, f"'nodeagent dataset remove {dataset.name}' gives its room")
    busy = dataset.job.kind if dataset.job is not None else ""
    busy = "verify" if dataset.verification.pending else busy
    busy = "update" if dataset.coming is not None else busy
    busy = "eviction" if dataset.eviction.pending else busy
    if busy:
        raise dataset.refused(f"its {busy} is under way", "wait for its end, or cancel it")
    if dataset.settings.keep and not force:
        why = "it is kept (cache.datasets[].keep)"
        raise dataset.refused(why, "evict it with --force, or set keep: false")


def refuse_used(dataset: Dataset, users: Sequence[str]) -> None:
    """InUseError names some of ``users``, if there are any."""
    if users:
        more = f" and {len(users) - _NAMED} more" if len(users) > _NAMED else ""
        raise kit.errors.InUseError(
            f"dataset {dataset.name}", "in use by " + "; ".join(users[:_NAMED]) + more,
            "end them, then try again",
        )  # fmt: skip


def shown(dataset: Dataset) -> dict[str, Any] | None:
    """The last eviction that an operator asked for; fields as in openapi.yaml."""
    last = dataset.eviction
    if not last.state:
        return None
    return {
        "state": last.state,
        "to": last.to,
        "why": last.why,
        "files": last.files,
        "bytes": last.bytes,
        "at": last.at or None,
    }


def findings(
    datasets: Mapping[str, Dataset], in_the_way: Callable[[str], Sequence[str]]
) -> Iterable[Finding]:
    """``in_the_way``: what is kept, by the name of what lacks room; '': the store."""
    lacking: dict[str, list[str]] = {}
    for name in ("", *sorted(datasets)):
        for each in in_the_way(name):
            text = f"dataset {name} lacks room" if name else "the store is beyond its budget"
            lacking.setdefault(each, []).append(text)
    for name, texts in sorted(lacking.items()):
        more = f" and {len(texts) - _NAMED} more" if len(texts) > _NAMED else ""
        why = "; ".join(texts[:_NAMED]) + more
        yield finding(
            "dataset-kept", name, Severity.WARNING,
            f"dataset {name} is kept and gives no room: {why}",
            f"raise cache.budget, or set keep: false for {name}",
        )  # fmt: skip
