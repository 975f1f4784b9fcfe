"""The cache as the process sees it: its datasets, and what of the store belongs to none."""

import asyncio
import errno
import functools
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog
from prometheus_client.core import Metric

import kit.child
import kit.errors
import kit.findings
import kit.formats
import kit.pause
import kit.room
import kit.tasks
from cache import status
from cache.csi import driver
from cache.dataset import figures, kept, presence, view_watch
from cache.dataset.dataset import VIEW_SECONDS, Dataset
from cache.dataset.generation import STORE_SECONDS
from cache.dataset.succession import Succession
from cache.settings import CacheSettings, DatasetSettings, at_snapshot, same_place
from cache.sources import kinds
from cache.space import reserve, uses
from cache.store import disk, generations, probe, soundness, subset
from cache.store.health import State
from cache.store.watch import StoreWatch
from cache.views import by_id, view
from cache.work import compare, scrub
from cache.work.jobs import Jobs
from linux import mountinfo

log = structlog.get_logger("cache")

# Deleting millions of files takes long; it happens beside everything else.
TRASH_SECONDS = 6 * 3600.0
TRASH_RETRY_SECONDS = 60.0
OUTCOME_SECONDS = 1.0
USERS_SECONDS = 60.0  # to look through all processes
DAMAGED_SECONDS = 60.0  # until damaged files of the store are looked at again
_NONE: Mapping[str, str] = {}
STORE_RETRY_SECONDS = (2.0, 60.0)
# Each look at a source is a process of 22 MB and 44 ms of CPU, and may mount.
MOST_LOOKS = 12
MOST_PATHS = 5  # in a line of the log
_LIVE = ("disk", "budget", "budget_inodes", "reserve", "this_node", "fill", "scrub", "compare")


class Cache:
    name = "cache"

    def __init__(
        self, settings: CacheSettings, state_dir: Path, reporter: kit.findings.Reporter
    ) -> None:
        self.settings = settings
        self.datasets: dict[str, Dataset] = {}
        self.successions: dict[str, Succession] = {}
        self.orphans: dict[str, int] = {}  # folders that no dataset has, and their SSD bytes
        self.damaged: dict[str, str] = {}  # files of the store that were kept aside, and why
        self._damaged_due = 0.0
        self.lost_views: list[str] = []  # names of views that no dataset has
        self._past = figures.Totals()  # of datasets that the settings lost
        self.trashed = 0  # SSD bytes of discarded generations that are not deleted yet
        self.presence = presence.Presence(self.datasets)
        self.jobs = Jobs(self.datasets, self._foreign, lambda: self.trashed, self.lacking)
        self.soundness = soundness.Soundness(Path(os.path.realpath(state_dir)))
        self.scrubber = scrub.Scrubber(self.datasets, self.jobs, self.soundness)
        self.jobs.clear_way = self.scrubber.clear_way
        # The mount table shows real paths only, so links are followed once, here.
        self._state_dir = Path(os.path.realpath(state_dir))
        self.csi = driver.Driver(self.datasets, self._state_dir)
        self.uses = uses.Uses(self.datasets, self._state_dir, self.csi.has_volumes)
        self.jobs.look = self.uses.look
        self.reserve = reserve.Reserve(settings, self._reserve_changed)
        self.jobs.least = lambda: self.reserve.least
        self._store = os.path.realpath(settings.store)
        self._views = os.path.realpath(settings.views)
        self._reporter = reporter
        # Why the store cannot be used: datasets are then served by their sources.
        self.no_store: kit.errors.AgentError | None = None
        self._anew = False  # the store has come or come back, and all begins anew
        self._unread = False  # datasets were added or the disk was gone while it had trouble
        self.watch: StoreWatch | None = None  # from the time that the store could be used
        self._watching: asyncio.Task[None] | None = None
        self._store_backoff = kit.pause.Backoff(*STORE_RETRY_SECONDS)
        self._store_due = 0.0
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._scheduler: asyncio.Task[None] | None = None
        self._minders: list[asyncio.Task[None]] = []  # of the scrub
        self._trash: asyncio.Task[None] | None = None
        self._trash_waits = False  # something was discarded since emptying began
        self._looks = asyncio.Semaphore(MOST_LOOKS)
        self._mounts = mountinfo.Table()
        self.view_watch = view_watch.ViewWatch(
            self._views, self.datasets, self.successions, self._mounts, self._prepare_views,
            self._report,
        )  # fmt: skip
        self._weighing = asyncio.Lock()  # so that the last answer is the newest

    # --- as kit.room.Component

    async def start(self) -> None:
        if os.geteuid() != 0:
            raise kit.errors.HostError("the cache", "it needs root", "run the agent as root")
        await kit.child.call(view.check_kernel, deadline=VIEW_SECONDS)
        await self.view_watch.prepare()
        await asyncio.to_thread(self.soundness.start)
        await asyncio.to_thread(self.uses.start)
        self._minders = [asyncio.create_task(self.soundness.follow(), name="soundness")]
        try:
            await self._prepare_store()
        except kit.errors.AgentError as error:
            if generations.is_disk_trouble(error):
                self.soundness.count_trouble(str(error))
            log.error("store cannot be used; jobs read from the sources", error=str(error))
            self.no_store = error
            self._store_due = time.monotonic() + self._store_backoff.next()
        # Before anything of a dataset is discarded.
        await self.csi.node.adopt(self.settings.csi, self.settings.this_node)
        await self._add(self.settings.datasets)
        self._minders.append(asyncio.create_task(self.view_watch.follow(), name="views"))
        self._minders.append(asyncio.create_task(self.uses.follow(), name="uses"))
        self._minders.append(asyncio.create_task(self.reserve.follow(), name="reserve"))
        self._minders.append(asyncio.create_task(self.uses.follow_opens(), name="opens"))
        await self.csi.reconcile(self.settings.csi, self.settings.this_node)
        self._report()
        if self.no_store is not None:
            return
        await self._look_for_orphans()
        await self._weigh_trash()
        self._empty_trash()
        disk_set = self.settings.disk
        self.watch = StoreWatch(
            self._store,
            self._state_dir,
            disk_set,
            self._store_changed,
            self.soundness,
            functools.partial(_disk_looked_at, self),
        )
        self._watching = asyncio.create_task(self.watch.follow(), name="store watch")
        self._scheduler = asyncio.create_task(self.jobs.follow(), name="jobs")
        self._minders.append(asyncio.create_task(self.scrubber.follow(), name="scrub"))
        self._minders.append(
            asyncio.create_task(compare.Comparer(self.datasets).follow(), name="compare")
        )

    async def _prepare_views(self) -> None:
        """HostError, OSError."""
        left = await kit.child.call(view.prepare, self._views, deadline=VIEW_SECONDS)
        if left:
            log.warning(
                "others have files in the folder of the views; it stays on the disk, so that after "
                "a reboot jobs find empty directories until the views are mounted",
                paths=left[:MOST_PATHS],
            )

    async def _prepare_store(self) -> None:
        """AgentError when the store cannot be used."""
        try:
            # Beside the loop: mount tables are long.
            await asyncio.to_thread(disk.check, self._store, self.settings.disk, self._state_dir)
            known = await asyncio.to_thread(disk.kept_uuid, self._store, self._state_dir)
            await kit.child.call(generations.prepare, self._store, known, deadline=STORE_SECONDS)
            await asyncio.to_thread(disk.remember, self._store, self._state_dir)
            await asyncio.to_thread(disk.lock, self._store)
            if self.soundness.unknown:
                self.soundness.number_from(
                    await kit.child.call(
                        generations.highest_verified, self._store, deadline=STORE_SECONDS
                    )
                )
        except (OSError, RuntimeError) as error:
            full = isinstance(error, OSError) and error.errno == errno.ENOSPC
            cause, remedy = ("it is full", "free some space there")
            if not full:
                cause, remedy = str(error), "see the kernel log"
            raise kit.errors.HostError(f"cache.store {self._store}", cause, remedy) from error

    async def _look_at_store(self) -> None:
        """Begin anew when a store that could not be used at the start can be used now, and with a
        new one on a disk that has none any more."""
        none_there = self.watch is None or self.watch.missing
        if none_there and time.monotonic() >= self._store_due:
            try:
                await self._prepare_store()
                self.no_store, self._anew = None, True
            except kit.errors.AgentError as error:
                self.no_store = error
                self._store_due = time.monotonic() + self._store_backoff.next()

    def _store_changed(self) -> None:
        """The disk has got into trouble, or out of it."""
        assert self.watch is not None
        trouble = self.watch.trouble()
        self._unread |= self.watch.health.state is State.DOWN
        if trouble is None and self._unread:
            self._anew = True  # what lies there now may not be what is remembered
            return
        self.no_store = trouble
        for dataset in self.datasets.values():
            dataset.store_changed(trouble)
        self.jobs.wake()
        self.scrubber.wake()
        self._report()

    async def reconcile(self, settings: CacheSettings) -> Sequence[str]:
        refused = [
            name
            for name in ("store", "views")
            if getattr(settings, name) != getattr(self.settings, name)
        ]
        changed = [n for n in _LIVE if getattr(settings, n) != getattr(self.settings, n)]
        keep = {name: getattr(self.settings, name) for name in refused}
        wanted = {dataset.name: dataset for dataset in settings.datasets}
        taken: list[DatasetSettings] = []
        for name, new in wanted.items():
            old = self.datasets[name].settings if name in self.datasets else new
            # The source cannot change under a view; the way to it and everything else can. Nor can
            # a frozen tree become a snapshot while the agent runs, or the other way round.
            same_promise = (old.freshness == "frozen") == (new.freshness == "frozen")
            if same_place(old.source, new.source) and same_promise:
                taken.append(new)
            else:
                refused.append(f"datasets.{name}.source")
                taken.append(old)
        self.settings = settings.model_copy(update={**keep, "datasets": tuple(taken)})
        for name in [n for n in self.datasets if n not in wanted]:
            await self._drop(name)
        if self.watch is not None:
            self.watch.disk = settings.disk
        self.reserve.take(self.settings)
        await self._look_at_store()
        await self.csi.reconcile(settings.csi, self.settings.this_node)
        if added := [new for new in taken if new.name not in self.datasets]:
            await self._add(added)
            await self._look_for_orphans()
        roomier: list[str] = []
        for new in taken:
            dataset = self.datasets[new.name]
            dataset.cache = self.settings
            if dataset.settings != new:
                if dataset.settings.source != new.source:
                    for each in dataset.every_generation():
                        at = each.record.snapshot
                        each.source.take(at_snapshot(new.source, at) if at else new.source)
                    dataset.due.suspect()  # the next look takes the new way
                if _budgets(dataset.settings) != _budgets(new):
                    roomier.append(new.name)
                dataset.settings = new
                dataset.wake()
        if changed:
            await self.jobs.limits_changed()
        if {"budget", "budget_inodes", "reserve"} & set(changed):
            roomier = list(self.datasets)
        await self.jobs.budgets_raised([self.datasets[name] for name in roomier])
        if [each for each in self.datasets.values() if each.take_discarded()]:
            await self._weigh_trash()
            self._empty_trash()
        if self.damaged and self.no_store is None and time.monotonic() >= self._damaged_due:
            await self._look_at_damaged()
        self.jobs.wake()
        self._report()
        return refused

    async def stop(self) -> None:
        self.jobs.end()
        tasks = [*self._tasks.values(), self._trash, self._watching]
        for task in tasks:
            if task is not None:
                task.cancel()
        await self.csi.stop()
        await asyncio.gather(*(d.stop() for d in self.datasets.values()))
        await kit.tasks.end(*self._minders)
        await self.soundness.stop()
        if self._scheduler is not None:
            # It writes the outcome of the pass, which was cancelled above.
            done, _ = await asyncio.wait({self._scheduler}, timeout=OUTCOME_SECONDS)
            if not done:
                self._scheduler.cancel()
        await asyncio.gather(
            *(t for t in (*tasks, self._scheduler) if t is not None), return_exceptions=True
        )

    def health(self) -> kit.room.Health:
        dead = [name for (name, _), task in self._tasks.items() if task.done()]
        alive = (
            not dead
            and not self._anew
            and not (self._scheduler is not None and self._scheduler.done())
            and not (self._watching is not None and self._watching.done())
            and not any(task.done() for task in self._minders)
        )
        reasons = [f"{name}: its task has ended" for name in dead]
        if self._anew:
            reasons.append("the store has come back")
        if self.no_store is not None:
            reasons.append(f"{self.no_store} (jobs read from the sources)")
        reasons += self.csi.reasons()
        # Not a matter of readiness: one wrong source must not stop the rollout of every node.
        datasets = [
            f"{d.name}: not published ({d.why() or _reason(d)})"
            for d in self.datasets.values()
            if d.stage is view.Stage.NONE and not d.removed
        ]
        ready = alive and not reasons
        return kit.room.Health(alive=alive, ready=ready, reasons=[*reasons, *datasets])

    def metrics(self) -> Iterable[Metric]:
        yield from status.metrics(
            self.datasets, budget=self.settings.budget, used=self.used(), past=self._past,
            store=self.store_state(),
        )  # fmt: skip
        yield from self.csi.metrics()

    def store_state(self) -> str:
        """normal, unstable or down."""
        if self.watch is not None:
            return str(self.watch.health.state)
        return str(State.NORMAL if self.no_store is None else State.DOWN)

    # --- datasets

    async def _add(self, added: Sequence[DatasetSettings]) -> None:
        new = [Dataset(each, self.settings, self._state_dir, self.jobs.wake) for each in added]
        for dataset in new:
            dataset.looks, dataset.ahead = self._looks, self.jobs.slot.ahead
            dataset.mounts, dataset.withdraw = self._mounts, self.jobs.withdrawals.of
            dataset.look_again = self.view_watch.wake
        names = [dataset.name for dataset in new]
        found: list[dict[str, dict[str, Any] | None]] = [{} for _ in new]
        self._unread |= self.watch is not None and self.no_store is not None
        if self.no_store is None:
            found = await kit.child.call(
                generations.adopt_all, self._store, names, deadline=STORE_SECONDS
            )
            await self._look_at_damaged()  # what begins anew takes its damaged file along
        for dataset, kept_ones in zip(new, found, strict=True):
            succession = Succession(dataset, self._empty_trash)
            fields = succession.adopt(kept_ones)
            dataset.no_store, dataset.soundness = self.no_store, self.soundness
            dataset.has_volumes = functools.partial(self.csi.has_volumes, dataset.name)
            dataset.tell = self.presence.tell
            dataset.adopt(fields)
            self.datasets[dataset.name] = dataset
            self.successions[dataset.name] = succession
            for loop in (dataset, succession):
                task = asyncio.create_task(loop.follow(), name=dataset.name)
                self._tasks[dataset.name, type(loop).__name__] = task
        self.uses.take(new)

    async def _drop(self, name: str) -> None:
        """Stop work for a dataset that the settings lost. Its view and store stay until removed.

        A slip in the settings file must not cost a dataset that took hours to fill.
        """
        dataset = self.datasets.pop(name)
        self._past += dataset.totals()
        del self.successions[name]
        keys = [key for key in self._tasks if key[0] == name]
        await kit.tasks.end(*(self._tasks.pop(key) for key in keys))
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
        with self.csi.node.leaving(name):
            async with self.presence.ending(name):
                await self._remove(name)

    async def evict(self, name: str, *, to: int, force: bool) -> None:
        """Have a dataset that nobody uses take at most ``to`` bytes; ``force``: a kept one, too.

        The files are taken out soon; ``Dataset.eviction`` shows it. AgentError with why not.
        """
        dataset = self.get(name)
        refuse_eviction(dataset, force=force)
        using = await kit.child.call(by_id.all_users, dataset.view, deadline=USERS_SECONDS)
        if using := [*using, *map(str, self.csi.node.of(name))]:
            who = f"in use by {kit.errors.some(using)}"
            raise kit.errors.InUseError(f"dataset {name}", who, "end them, then try again")
        refuse_read(dataset, time.time())
        refuse_eviction(dataset, force=force)  # it may be another thing by now
        dataset.eviction = figures.Eviction("queued", to)
        self.jobs.wake()

    async def release(self, name: str) -> None:
        """Give up a dataset that an object of the cluster asked for and that nobody wants now.

        InUseError names who uses it. RefusedError while it is still in the settings.
        """
        if name in self.datasets:
            raise kit.errors.RefusedError(f"dataset {name}", "it is still in the settings", "")
        try:
            await self.remove(name)
        except kit.errors.NotFoundError:
            pass  # nothing of it is left

    async def _remove(self, name: str) -> None:
        folders = [f for f in self.orphans if Path(f).parent.name == name]
        if name in self.datasets:
            await self.datasets[name].remove()
        else:
            target = f"{self._views}/{name}/data"
            if not folders and name not in await asyncio.to_thread(view.names, self._views):
                self.get(name)
            await kit.child.call(by_id.take_down_all, target, deadline=VIEW_SECONDS)
            await kit.child.call(view.take_down, target, deadline=VIEW_SECONDS)
            await kinds.forget(self._state_dir, name)
            kit.formats.forget(kept.file_of(self._state_dir, name))
        for folder in folders:
            await kit.child.call(generations.discard, self._store, folder, deadline=STORE_SECONDS)
        try:
            await self._weigh_trash()
            await self._look_for_orphans()
        finally:
            self._empty_trash()
        self.jobs.wake()

    async def _look_for_orphans(self) -> None:
        """Find generations and views that no dataset of the settings has. They stay."""
        mounted = await asyncio.to_thread(view.names, self._views)
        self.lost_views = [name for name in mounted if name not in self.datasets]
        if self.no_store is not None:
            return
        found = await kit.child.call(generations.inventory, self._store, deadline=STORE_SECONDS)
        datasets = self.datasets.values()
        ours = {each.folder for dataset in datasets for each in dataset.every_generation()}
        self.orphans = {folder: used for folder, used in found.items() if folder not in ours}
        await self._look_at_damaged(also=self.damaged)

    async def _look_at_damaged(self, also: Mapping[str, str] = _NONE) -> None:
        """Find which files of the store were damaged. ``also``: what was found before stays."""
        found = await kit.child.call(generations.damaged, self._store, deadline=STORE_SECONDS)
        self.damaged = {**also, **found}
        self._damaged_due = time.monotonic() + DAMAGED_SECONDS

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
                await self._weigh_trash()
                await kit.child.call(generations.empty_trash, self._store, deadline=TRASH_SECONDS)
                await self._weigh_trash()
            except (kit.errors.AgentError, OSError, RuntimeError) as error:
                log.warning("trash could not be emptied; it is tried again", why=str(error))
                self._trash_waits = True
                await asyncio.sleep(TRASH_RETRY_SECONDS)
        # Their bytes are for datasets that lacked room.
        await self.jobs.limits_changed()
        self.jobs.room_came(self.datasets.values())

    # --- space and reports

    def _foreign(self) -> int:
        return sum(self.orphans.values()) + self.trashed

    def lacking(self) -> subset.Amount:
        """What the store's disk lacks of the reserve, beside what is being deleted."""
        if self.watch is None or not self.watch.health.usable or self.trashed:
            return subset.Amount()
        return self.reserve.short(self.watch.seen)

    def _reserve_changed(self) -> None:
        self._changing = asyncio.create_task(self.jobs.limits_changed())
        self._report()
        self.jobs.wake()

    def used(self) -> int:
        """SSD bytes of the whole store."""
        return sum(dataset.used() for dataset in self.datasets.values()) + self._foreign()

    def _report(self) -> None:
        found = [
            *status.findings(self.datasets, self.orphans, self.no_store, self.lost_views),
            *status.kept(self.datasets, self.jobs.budgets.in_the_way),
            *view_watch.findings(self.datasets, time.time()),
            *self.reserve.findings(),
            *self.csi.findings(),
            *status.damaged(self._store, self.damaged),
        ]
        self._reporter.report("cache", found)


def _disk_looked_at(cache: Cache) -> None:
    """What lacks room is filled again when other files have left some."""
    if cache.jobs.budgets.disk_changed():
        cache.jobs.wake()
    seen = cache.watch.seen if cache.watch is not None else probe.Seen()
    takes = seen.size - seen.free - cache.used()
    known = seen.size and not cache.trashed and cache.no_store is None
    if known and cache.reserve.others.left_room(time.monotonic(), takes, seen.size):
        cache.jobs.room_came(cache.datasets.values())


def refuse_eviction(dataset: Dataset, *, force: bool) -> None:
    """AgentError unless files may be taken out of the dataset now. ``force``: a kept one, too."""
    dataset.refuse_change()
    state = dataset.generation.state
    if dataset.removed or state not in ("complete", "partial"):
        why = f"it is {dataset.state()}: only what was filled can be taken out in part"
        raise dataset.refused(why, f"'nodeagent dataset remove {dataset.name}' gives its room")
    busy = dataset.job.kind if dataset.job is not None else ""
    busy = "verify" if dataset.verification.pending else busy
    busy = "update" if dataset.next is not None else busy
    busy = "eviction" if dataset.eviction.pending else busy
    if busy:
        raise dataset.refused(f"its {busy} is under way", "wait for its end, or cancel it")
    if dataset.settings.keep and not force:
        why = "it is kept (cache.datasets[].keep)"
        raise dataset.refused(why, "evict it with --force, or set keep: false")


def refuse_read(dataset: Dataset, now: float) -> None:
    """InUseError where somebody opens and closes files. Who holds the view is looked for anew."""
    if reader := dataset.use.opener(now):
        wait = kit.units.format_duration(figures.RECENT_SECONDS)
        remedy = f"end it, and try again {wait} after its last open"
        raise kit.errors.InUseError(f"dataset {dataset.name}", f"in use by {reader}", remedy)


def _budgets(settings: DatasetSettings) -> tuple[int, int]:
    return settings.budget, settings.budget_inodes


def _reason(dataset: Dataset) -> str:
    """Why a dataset without a trouble has no view."""
    if dataset.hidden is not None:
        return str(dataset.hidden)
    if dataset.loss.count:
        return f"{dataset.loss.what}; it is mounted again in {dataset.due.until_mount():.0f} s"
    if dataset.reached is None:
        return "its source was not reached yet"
    return dataset.reached.note or "it will be in a moment"
