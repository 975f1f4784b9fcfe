"""The cache as the process sees it: its datasets, and what of the store belongs to none."""

import asyncio
import errno
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import structlog
from prometheus_client.core import Metric

import kit.child
import kit.errors
import kit.findings
import kit.line_worker
import kit.room
from cache import hints, status, view
from cache.dataset import STORE_SECONDS, VIEW_SECONDS, Dataset, state_file
from cache.jobs import Jobs
from cache.settings import CacheSettings, DatasetSettings
from cache.sources import cephfs, kinds
from cache.store import disk, generations

log = structlog.get_logger("cache")

# Deleting millions of files takes long; it happens beside everything else.
TRASH_SECONDS = 6 * 3600.0
TRASH_RETRY_SECONDS = 60.0
STORE_RETRY_SECONDS = (2.0, 60.0)
_LIVE = ("disk", "budget", "reserve", "refresh_interval", "source_timeout", "fill", "hints")


class Cache:
    name = "cache"

    def __init__(
        self, settings: CacheSettings, state_dir: Path, reporter: kit.findings.Reporter
    ) -> None:
        self.settings = settings
        self.datasets: dict[str, Dataset] = {}
        self.orphans: dict[str, int] = {}  # folders that no dataset has, and their SSD bytes
        self.trashed = 0  # SSD bytes of discarded generations that are not deleted yet
        self.jobs = Jobs(self.datasets, self._foreign)
        # The mount table shows real paths only, so links are followed once, here.
        self._state_dir = Path(os.path.realpath(state_dir))
        self._store = os.path.realpath(settings.store)
        self._views = os.path.realpath(settings.views)
        self._reporter = reporter
        # Why the store cannot be used: datasets are then served by their sources.
        self.no_store: kit.errors.AgentError | None = None
        self._anew = False  # the store has come or gone, and all begins anew
        self._store_backoff = kit.line_worker.Backoff(*STORE_RETRY_SECONDS)
        self._store_due = 0.0
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._scheduler: asyncio.Task[None] | None = None
        self._hinter: asyncio.Task[None] | None = None
        self._trash: asyncio.Task[None] | None = None
        self._trash_waits = False  # something was discarded since emptying began
        self._weighing = asyncio.Lock()  # so that the last answer is the newest

    # --- as kit.room.Component

    async def start(self) -> None:
        if os.geteuid() != 0:
            raise kit.errors.HostError("the cache", "it needs root", "run the agent as root")
        await kit.child.call(view.check_kernel, deadline=VIEW_SECONDS)
        await kit.child.call(view.prepare, self._views, deadline=VIEW_SECONDS)
        try:
            await self._prepare_store()
        except kit.errors.AgentError as error:
            log.error("store cannot be used; jobs read from the sources", error=str(error))
            self.no_store = error
            self._store_due = time.monotonic() + self._store_backoff.next()
        await self._add(self.settings.datasets)
        self._report()
        if self.no_store is not None:
            return
        await self._look_for_orphans()
        await self._weigh_trash()
        self._empty_trash()
        self._scheduler = asyncio.create_task(self.jobs.follow(), name="jobs")
        self._hinter = asyncio.create_task(hints.follow(self.datasets), name="hints")

    async def _check_disk(self) -> None:
        """HostError unless the store's disk is mounted. Beside the loop: mount tables are long."""
        await asyncio.to_thread(disk.check, self._store, self.settings.disk, self._state_dir)

    async def _prepare_store(self) -> None:
        """AgentError when the store cannot be used."""
        try:
            await self._check_disk()
            await kit.child.call(generations.prepare, self._store, deadline=STORE_SECONDS)
            disk.remember(self._store, self._state_dir)
        except (OSError, RuntimeError) as error:
            full = isinstance(error, OSError) and error.errno == errno.ENOSPC
            cause, remedy = ("it is full", "free some space there")
            if not full:
                cause, remedy = str(error), "see the kernel log"
            raise kit.errors.HostError(f"cache.store {self._store}", cause, remedy) from error

    async def _look_at_store(self) -> None:
        """Begin anew when the store can be used again, or its disk has gone."""
        if self.no_store is None:
            try:
                await self._check_disk()
            except kit.errors.HostError as error:
                self.no_store, self._anew = error, True
        elif time.monotonic() >= self._store_due:
            try:
                await self._prepare_store()
                self.no_store, self._anew = None, True
            except kit.errors.AgentError as error:
                self.no_store = error
                self._store_due = time.monotonic() + self._store_backoff.next()

    async def reconcile(self, settings: CacheSettings) -> Sequence[str]:
        refused = [
            name
            for name in ("store", "views")
            if getattr(settings, name) != getattr(self.settings, name)
        ]
        changed = [n for n in _LIVE if getattr(settings, n) != getattr(self.settings, n)]
        keep = {name: getattr(self.settings, name) for name in refused}
        wanted = {dataset.name: dataset for dataset in settings.datasets}
        kept: list[DatasetSettings] = []
        for name, new in wanted.items():
            old = self.datasets[name].settings if name in self.datasets else new
            # The source cannot change under a view; everything else can.
            if old.source == new.source and old.freshness == new.freshness:
                kept.append(new)
            else:
                refused.append(f"datasets.{name}.source")
                kept.append(old)
        self.settings = settings.model_copy(update={**keep, "datasets": tuple(kept)})
        for name in [n for n in self.datasets if n not in wanted]:
            await self._drop(name)
        await self._look_at_store()
        if added := [new for new in kept if new.name not in self.datasets]:
            await self._add(added)
            await self._look_for_orphans()
        for new in kept:
            dataset = self.datasets[new.name]
            dataset.cache = self.settings
            if dataset.settings != new:
                dataset.settings = new
                dataset.wake()
        if changed:
            await self.jobs.limits_changed()
        if {"budget", "reserve"} & set(changed):
            for dataset in self.datasets.values():
                if dataset.generation.state == "partial" and dataset.generation.left_files:
                    await self.jobs.warm(dataset)
        self.jobs.wake()
        self._report()
        return refused

    async def stop(self) -> None:
        tasks = [*self._tasks.values(), self._hinter, self._trash]
        for task in tasks:
            if task is not None:
                task.cancel()
        await asyncio.gather(*(d.stop() for d in self.datasets.values()))
        if self._scheduler is not None:
            # It writes the outcome of the pass, which was cancelled above.
            done, _ = await asyncio.wait({self._scheduler}, timeout=1.0)
            if not done:
                self._scheduler.cancel()
        await asyncio.gather(
            *(t for t in (*tasks, self._scheduler) if t is not None), return_exceptions=True
        )

    def health(self) -> kit.room.Health:
        dead = [name for name, task in self._tasks.items() if task.done()]
        alive = (
            not dead
            and not self._anew
            and not (self._scheduler is not None and self._scheduler.done())
        )
        reasons = [f"{name}: its task has ended" for name in dead]
        if self._anew:
            reasons.append("the store has come or gone")
        if self.no_store is not None:
            reasons.append(f"{self.no_store} (jobs read from the sources)")
        reasons += [
            f"{d.name}: not published ({d.why()})"
            for d in self.datasets.values()
            if d.stage is view.Stage.NONE and not d.removed
        ]
        return kit.room.Health(alive=alive, ready=alive and not reasons, reasons=reasons)

    def metrics(self) -> Iterable[Metric]:
        return status.metrics(self.datasets, budget=self.settings.budget, used=self.used())

    # --- datasets

    async def _add(self, added: Sequence[DatasetSettings]) -> None:
        new = [Dataset(each, self.settings, self._state_dir, self.jobs.wake) for each in added]
        folders = [dataset.folder for dataset in new]
        found = [None] * len(new)
        if self.no_store is None:
            found = await kit.child.call(generations.adopt, folders, deadline=STORE_SECONDS)
        for dataset, fields in zip(new, found, strict=True):
            dataset.no_store = self.no_store
            dataset.adopt(fields)
            self.datasets[dataset.name] = dataset
            self._tasks[dataset.name] = asyncio.create_task(dataset.follow(), name=dataset.name)

    async def _drop(self, name: str) -> None:
        """Stop work for a dataset that the settings lost. Its view and store stay until removed.

        A slip in the settings file must not cost a dataset that took hours to fill.
        """
        dataset = self.datasets.pop(name)
        task = self._tasks.pop(name)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await dataset.stop()
        log.warning("dataset is no longer in the settings; its view and store stay", dataset=name)
        await self._look_for_orphans()

    def get(self, name: str) -> Dataset:
        """NotFoundError names the datasets that exist."""
        try:
            return self.datasets[name]
        except KeyError:
            names = ", ".join(sorted(self.datasets)) or "none"
            raise kit.errors.NotFoundError(
                f"dataset {name!r}", "it does not exist", f"the datasets are: {names}"
            ) from None

    async def remove(self, name: str) -> None:
        """Remove a dataset of the settings, or what is left of one that the settings lost."""
        folders = [f for f in self.orphans if Path(f).parent.name == name]
        if name in self.datasets:
            await self.datasets[name].remove()
        else:
            target = f"{self._views}/{name}/data"
            if not folders and not await asyncio.to_thread(os.path.ismount, target):
                self.get(name)
            await kit.child.call(view.take_down, target, deadline=VIEW_SECONDS)
            await cephfs.release(kinds.folder_of(self._state_dir, name))
            state_file(self._state_dir, name).unlink(missing_ok=True)
        for folder in folders:
            await kit.child.call(generations.discard, self._store, folder, deadline=STORE_SECONDS)
        try:
            await self._weigh_trash()
            await self._look_for_orphans()
        finally:
            self._empty_trash()
        self.jobs.wake()

    async def _look_for_orphans(self) -> None:
        """Find generations that no dataset of the settings has. They take space until removed."""
        if self.no_store is not None:
            return
        found = await kit.child.call(generations.inventory, self._store, deadline=STORE_SECONDS)
        ours = {dataset.folder for dataset in self.datasets.values()}
        self.orphans = {folder: used for folder, used in found.items() if folder not in ours}

    async def _weigh_trash(self) -> None:
        async with self._weighing:
            self.trashed = await kit.child.call(
                generations.trash_bytes, self._store, deadline=STORE_SECONDS
            )

    def _empty_trash(self) -> None:
        self._trash_waits = True
        if self._trash is None or self._trash.done():
            self._trash = asyncio.create_task(self._empty(), name="trash")

    async def _empty(self) -> None:
        while self._trash_waits:
            self._trash_waits = False
            try:
                await kit.child.call(generations.empty_trash, self._store, deadline=TRASH_SECONDS)
                await self._weigh_trash()
            except (kit.errors.AgentError, OSError, RuntimeError) as error:
                log.warning("trash could not be emptied; it is tried again", why=str(error))
                self._trash_waits = True
                await asyncio.sleep(TRASH_RETRY_SECONDS)
        await self._room_again()

    async def _room_again(self) -> None:
        """Discarded generations are deleted: their bytes are for datasets that lacked room."""
        await self.jobs.limits_changed()
        for dataset in self.datasets.values():
            if dataset.generation.left_files:
                dataset.retry_now()

    # --- space and reports

    def _foreign(self) -> int:
        return sum(self.orphans.values()) + self.trashed

    def used(self) -> int:
        """SSD bytes of the whole store."""
        return sum(dataset.used() for dataset in self.datasets.values()) + self._foreign()

    def _report(self) -> None:
        self._reporter.report("cache", status.findings(self.datasets, self.orphans, self.no_store))
