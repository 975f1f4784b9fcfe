"""The sampled compare of frozen datasets with their sources, which are promised not to change.

Each one is compared every ``cache.compare.every``, give or take a tenth (``cache.store.sample`` has
the order); one round at a time on the node. A difference is a finding and nothing else: what jobs
read changes only when an operator asks for a rescan (``cache.dataset.choices``).

When the next round is due is known from the last one, which is kept with the generation: a restart
neither forgets a difference nor asks the source again.
"""

import asyncio
import random
import sqlite3
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import structlog

import kit.child
import kit.errors
import kit.pause
from cache.dataset.dataset import Dataset
from cache.dataset.generation import STORE_SECONDS
from cache.dataset.standing import finding
from cache.store import sample
from kit.findings import Finding, Severity

log = structlog.get_logger("frozen")

IDLE_SECONDS = 5.0
FIRST_SECONDS = 60.0  # nodes that start at the same time do not ask at the same moment
# For a round, which ends by itself after sample.ROUND_SECONDS unless the source hangs.
LOOK_SECONDS = 60.0
RETRY_SECONDS = (30.0, 3600.0)  # after a round that failed


async def follow(datasets: Mapping[str, Dataset]) -> None:
    """Runs until it is cancelled. ``datasets`` may change meanwhile."""
    await Comparer(datasets).follow()


class Comparer:
    """The slot."""

    def __init__(self, datasets: Mapping[str, Dataset]) -> None:
        self._datasets = datasets
        self._known: dict[str, str] = {}  # the generation whose last round is known
        self._due: dict[str, float] = {}  # Unix time
        self._failures: dict[str, kit.pause.Backoff] = {}
        self._began = time.time()

    async def follow(self) -> None:
        """Runs until it is cancelled."""
        while True:
            try:
                await self._learn()
            except (kit.errors.AgentError, OSError, RuntimeError) as error:
                log.warning("earlier compares are not known", why=str(error))
            dataset = self._next()
            if dataset is None:
                await asyncio.sleep(IDLE_SECONDS)
                continue
            await self._round(dataset)

    async def _learn(self) -> None:
        """Take what is remembered of generations that are new here."""
        every = {name: each for name, each in self._datasets.items() if _may(each)}
        for name in self._known.keys() - self._datasets.keys():
            for kept in (self._known, self._due, self._failures):
                kept.pop(name, None)
        new = [each for name, each in every.items() if self._known.get(name) != _version(each)]
        if not new:
            return
        folders, versions = [each.folder for each in new], [_version(each) for each in new]
        found = await kit.child.call(sample.load_all, folders, deadline=STORE_SECONDS)
        for dataset, fields, version in zip(new, found, versions, strict=True):
            if version == _version(dataset):
                self._known[dataset.name] = version
                dataset.compared, dataset.not_compared = sample.seen_of(fields), ""
                self._later(dataset)

    def _later(self, dataset: Dataset) -> None:
        """From the last round to the next one; a time in the future counts as long ago."""
        last = dataset.compared.at if dataset.compared.at <= time.time() else 0.0
        every = dataset.cache.compare.every
        first = self._began + random.uniform(0.0, min(FIRST_SECONDS, every))
        self._due[dataset.name] = max(first, last + every * random.uniform(0.9, 1.1))

    def _next(self) -> Dataset | None:
        ready = [
            each
            for name, each in self._datasets.items()
            if _may(each) and self._known.get(name) == _version(each)
        ]
        found = min(ready, key=lambda each: self._due[each.name], default=None)
        return found if found is not None and self._due[found.name] <= time.time() else None

    async def _round(self, dataset: Dataset) -> None:
        version = _version(dataset)
        dataset.comparing = True  # its source stays mounted
        try:
            found = await self._look(dataset)
        except (kit.errors.AgentError, OSError, RuntimeError, sqlite3.Error) as error:
            if version == _version(dataset):
                self._failed(dataset, error)
            return
        finally:
            dataset.comparing = False
            dataset.wake()
        if version != _version(dataset):
            return  # it follows the one that was looked at
        before, dataset.compared, dataset.not_compared = dataset.compared, found, ""
        self._failures.pop(dataset.name, None)
        self._later(dataset)
        if found.differing and not before.differing:
            example = found.units[0]
            log.error(
                "source of a frozen dataset has changed", dataset=dataset.name, path=example.path,
                what=example.what, differing=found.differing, compared=found.entries,
            )  # fmt: skip

    async def _look(self, dataset: Dataset) -> sample.Seen:
        async with dataset.lock:
            if dataset.reached is None:
                await dataset.reach()
            folder, reached = dataset.folder, dataset.reached
        if reached is None:
            raise kit.errors.SourceError(f"dataset {dataset.name}", "it has no source now", "")
        entries = dataset.cache.compare.entries
        return sample.seen_of(
            await kit.child.call(
                sample.look, folder, reached.root, reached.stamp, entries, deadline=LOOK_SECONDS
            )
        )

    def _failed(self, dataset: Dataset, error: Exception) -> None:
        why = str(error)
        if isinstance(error, kit.child.DeadlineError):
            why = f"its source did not answer within {LOOK_SECONDS:g}s"
        log.warning("frozen dataset could not be compared", dataset=dataset.name, why=why)
        dataset.not_compared = why
        pauses = self._failures.setdefault(dataset.name, kit.pause.Backoff(*RETRY_SECONDS))
        self._due[dataset.name] = time.time() + pauses.next()


def _version(dataset: Dataset) -> str:
    """Tells generations apart, also one that began anew in the same folder."""
    return f"{dataset.current.id} {dataset.generation.created}"


def _may(dataset: Dataset) -> bool:
    frozen = dataset.settings.freshness == "frozen" and dataset.cache.compare.every > 0
    usable = dataset.no_store is None and dataset.newer is None and not dataset.removed
    stored = dataset.generation.state in ("complete", "partial")
    return frozen and usable and stored and dataset.job is None


@dataclass(frozen=True)
class ShownCompare:
    """The sampled compare of a frozen dataset with its source."""

    at: float | None  # Unix time of the last round
    entries: int  # files and links that it compared
    differing: int  # entries that are known to differ, of all rounds
    path: str  # one of them; empty when none differs
    what: str  # differs
    why: str  # why the source could not be compared since; else empty


def shown(dataset: Dataset) -> ShownCompare | None:
    """None before the first round, and of other datasets."""
    found = dataset.compared
    if dataset.settings.freshness != "frozen" or not (found.at or dataset.not_compared):
        return None
    example = found.units[0] if found.units else None
    return ShownCompare(
        at=found.at or None,
        entries=found.entries,
        differing=found.differing,
        path=example.path if example is not None else "",
        what=example.what if example is not None else "",
        why=dataset.not_compared,
    )


def findings(dataset: Dataset) -> Iterable[Finding]:
    name, found = dataset.name, dataset.compared
    if dataset.settings.freshness != "frozen" or not found.units:
        return
    example = found.units[0]
    message = (
        f"the source of dataset {name} is promised not to change, and it has: {example.path}: "
        f"{example.what} ({found.differing} differ so far, a sample is compared)"
    )
    advice = (
        f"'nodeagent dataset rescan {name}' lists it again and serves the new files, all at once; "
        "until then jobs read what was stored"
    )
    rule = "dataset-source-changed"
    yield finding(rule, name, Severity.WARNING, message, advice)
