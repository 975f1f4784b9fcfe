"""A dataset: what is known about it, and what its view needs next.

``Dataset.follow`` is a loop: collect the facts, let ``next_action`` choose, do that one action, and
wait for an event when there is none. So a restarted agent, a lost source and an operator's request
all take the same path. Jobs (``cache.work.jobs``) copy and read files; this module asks for them.

What is stored is a generation (``cache.dataset.generation``); ``current`` is the one that the view
shows. When its source is another one, by the same name, it is *stale*: the view shows the source,
the generation is discarded and another one begins.

Invariants: everything that changes the view or generation.json holds ``lock``. Nothing here takes a
view away; it changes what serves it.
"""

import asyncio
import contextlib
import dataclasses
import errno
import math
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import structlog

import kit.child
import kit.errors
import kit.formats
import kit.tasks
from cache.dataset import due, hits, kept, standing
from cache.dataset.action import Action, Facts, next_action
from cache.dataset.figures import Job, Loss, Scrub, Scrubs, Verification
from cache.dataset.generation import STORE_SECONDS, Generation, folder_name, named
from cache.settings import CacheSettings, DatasetSettings, Source, ViewAccessSettings, snapshot_of
from cache.sources import base, claims, kinds
from cache.store import generations, identity, soundness
from cache.views import by_id, view
from cache.views.view import Stage
from linux import mountinfo

# What an action's exception means to an operator.

AGAIN = "see the kernel log; it is tried again"


def trouble_of(name: str, view: str, error: Exception) -> kit.errors.AgentError:
    """``name`` of the dataset whose ``view`` was to change."""
    if isinstance(error, RuntimeError):  # a child process died, for lack of memory perhaps
        why = f"a helper process failed ({str(error).splitlines()[-1]})"
        return kit.errors.HostError(f"dataset {name}", why, AGAIN)
    if isinstance(error, OSError):
        thing = f"dataset {name}: view {view}"
        return kit.errors.HostError(thing, f"{error.strerror or error}", AGAIN)
    assert isinstance(error, kit.errors.AgentError)
    return error


log = structlog.get_logger("dataset")

VIEW_SECONDS = 30.0  # a swap takes a millisecond, but looking up a hanging source never ends
ONLY_ROOT = "only root may enter the view"
_PUBLISH = (Action.PUBLISH_SOURCE, Action.PUBLISH_OVERLAY, Action.PUBLISH_STORE)
# The tree of a store cannot be opened: it has gone, or its disk fails.
_TREE_LOST = (errno.ENOENT, errno.ENOTDIR, errno.EIO, errno.EUCLEAN, errno.ESTALE)


class Dataset(standing.Standing):
    """One dataset of the settings while the agent runs."""

    def __init__(
        self,
        settings: DatasetSettings,
        cache: CacheSettings,
        state_dir: Path,
        job_queued: Callable[[], None],
    ) -> None:
        self.settings = settings
        self.cache = cache
        self.view = f"{os.path.realpath(cache.views)}/{settings.name}/data"
        self._state = kept.file_of(state_dir, settings.name)
        self._scratch = str(state_dir / "scratch")
        self.ask_jobs = job_queued  # wakes the scheduler
        self.store = os.path.realpath(cache.store)
        self.state_dir = state_dir
        self.claim = claims.ClaimLookup(lambda: self.cache.this_node)
        self.current = self.generation_of(settings.source)
        self.earlier: list[Generation] = []  # complete ones to go back to, the latest first
        self.retired: list[Generation] = []  # are to be discarded when nobody uses them
        self.no_room = False  # beyond a budget: no earlier generation is kept
        self.earlier_used = False  # somebody uses the one that is to go next
        self.chosen: dict[str, str] = {}  # by an operator (cache.dataset.succession)
        self.changed: Callable[[], None] = lambda: None  # whenever it is woken
        self.stage = Stage.NONE
        self.trouble: kit.errors.AgentError | None = None  # of the last action that failed
        self.no_store: kit.errors.AgentError | None = None  # why nothing can be stored
        self.newer: kit.errors.HostError | None = None  # a newer agent's files: all is left alone
        self.has_volumes: Callable[[], bool] = lambda: False  # pods hold what is stored
        # Withdraws bad files of a generation (cache.work.withdrawals); False: some are left.
        self.withdraw: Callable[[Dataset, Generation], Awaitable[bool]] = _none_left
        self.discarded = False  # a generation went to the trash, which is to be emptied
        self.removed = False
        self.unsure = ""  # why an operator may have removed it, which is not known
        self.notes: list[str] = []
        self.refreshes = self.evicted = self.freed = 0  # since the start; files and their SSD bytes
        # Jobs: what is asked for, what runs, and when a fill may be asked for again.
        self.verification = Verification()
        self.job: Job | None = None
        self.soundness = soundness.Soundness()  # all datasets share one
        self.scrub, self.scrubs, self.hits = Scrub(), Scrubs(), hits.Hits()  # the last one; all
        self.scrubbing: Job | None = None
        self.due = due.Due()
        self._shown = view.Shown()
        self.mounted = view.Mounted()  # at the view
        self.changes = 0  # of what is mounted at the view; odd while one is under way
        # One has ended (cache.dataset.view_watch).
        self.look_again: Callable[[], None] = lambda: None
        self.hidden: kit.errors.HostError | None = None  # why nothing can be mounted there
        self._allowed: ViewAccessSettings | None = None
        self._ending: asyncio.Task[None] | None = None
        self._published_device = ""
        self.server = ""  # its source's file system at the last look (``base.Reached``)
        self.source_mounted = True  # an earlier agent may have left it mounted
        self._wake = asyncio.Event()
        self.lock = asyncio.Lock()
        self.looks = asyncio.Semaphore()  # all datasets share one
        self.mounts = mountinfo.Table()  # all datasets share one

    # --- what the view shows: more shorthands of ``current``

    @property
    def folder(self) -> str:
        return self.current.folder

    @property
    def layer(self) -> str:
        return self.current.layer

    @property
    def source(self) -> base.Source:
        return self.current.source

    def generation_of(self, place: Source, scan: str = "") -> Generation:
        """One of this dataset whose source is at ``place``, perhaps in another snapshot.

        ``scan``: as of ``Generation``.
        """
        snapshot = snapshot_of(place)
        settings = self.settings.model_copy(update={"source": place})
        source = kinds.source_of(settings, self.state_dir, self.claim)
        if self.settings.freshness == "follow" and not snapshot:
            source = kinds.Unknown(self.settings)
        folder = folder_name(self.settings.freshness, named(source, scan))
        path = f"{self.store}/{self.name}/{folder}"
        return Generation(self.name, source, path, self.refuse_change, snapshot, scan)

    def every_generation(self) -> list[Generation]:
        """All that it has, the current one first."""
        next_one = [] if self.next is None else [self.next]
        return [self.current, *next_one, *self.earlier, *self.retired]

    def before(self, target: Generation) -> Generation | None:
        """The generation with which ``target`` shares files, if it is still there."""
        wanted = target.record.before
        return next(
            (each for each in self.every_generation() if wanted and each.id == wanted), None
        )

    def succeed(self, new: Generation) -> None:
        """``new`` is the current one; what was it goes to the others. The caller has the lock."""
        old = self.current
        self.earlier = [each for each in self.earlier if each is not new]
        if old.record.state == "complete":
            self.earlier.insert(0, old)
        elif old.record.state != "new":
            self.retired.append(old)
        self.next = None if self.next is new else self.next
        self.current, self.verification = new, Verification()
        old.queued = new.queued = False
        self.stage = Stage.UNKNOWN if self.stage is not Stage.NONE else Stage.NONE

    def refuse_change(self) -> None:
        """AgentError while nothing may be written to the store."""
        if self.no_store is not None:
            raise self.no_store
        self._refuse_newer()

    # --- start

    def adopt(self, fields: dict[str, Any] | None) -> None:
        """Continue what an earlier agent left. ``fields``: of generation.json, if there is one.

        What a newer agent left stays as it is: the view, the store and the files.
        """
        try:
            if fields is not None:
                self.current.adopt(fields)
            remembered = kept.load(self._state)
        except kit.errors.HostError as error:
            self.newer = self.trouble = error
            self.current.look_away(fields or {})
            self._look_at_view({}, int((fields or {}).get("tree", 0)))
            log.error("dataset of a newer agent is left alone", dataset=self.name, why=str(error))
            return
        lost = ""
        if isinstance(remembered, kit.formats.Damage):
            lost, remembered = str(remembered), None
        remembered = remembered or {}
        self.removed = bool(remembered.get("removed"))
        self._published_device = str(remembered.get("device", ""))
        self.chosen = dict(remembered.get("chosen") or {})
        self._look_at_view(remembered, int((fields or {}).get("tree", 0)))
        self.unsure = str(remembered.get("unsure", ""))
        if lost:
            log.error("what was decided about a dataset is lost", dataset=self.name, why=lost)
            self.chosen = self._probably_chosen()
            # What is removed has neither a view nor anything in the store.
            self.unsure = lost if self.stage is Stage.NONE else ""
        if self.generation.state != "new":
            self.unsure = ""
        self.due.first_check(self._check_interval())

    def _probably_chosen(self) -> dict[str, str]:
        """When an operator's choice is lost: to stay with the generation that serves, where a later
        one is complete."""
        now = self.generation
        if not now.served or not any(e.record.completed > now.completed for e in self.earlier):
            return {}
        if self.settings.freshness == "frozen":
            return {"scan": self.current.scan}
        return {"snapshot": now.snapshot, "instead": snapshot_of(self.settings.source)}

    def _look_at_view(self, remembered: dict[str, Any], tree: int) -> None:
        names = ("device", "root", "layer")
        values = dict(remembered.get("shown") or {})
        self._shown = view.Shown(**{name: values[name] for name in names if name in values})
        if values.get("generation", self.generation.created) != self.generation.created:
            tree = 0  # inode numbers are given again
        table = self.mounts.now()
        self.stage = view.stage_of(self.view, self.layer, table, self._shown, tree)
        if self.stage is Stage.UNKNOWN and view.is_covered(self.view, self._shown, table):
            self.stage = Stage.NONE
        if self.stage is not Stage.NONE:
            self.mounted = view.Mounted.of(mountinfo.at(self.view, table)[-1])
        self.due.refresh_wanted = self.stage is Stage.OVERLAY  # something was stored since

    # --- what others do at the view (cache.dataset.view_watch)

    @contextlib.contextmanager
    def changing_view(self) -> Iterator[None]:
        """While the agent itself mounts or unmounts at the view."""
        self.changes += 1
        try:
            yield
        finally:
            self.changes += 1
            self.look_again()

    @property
    def published(self) -> bool:
        """Whether something of the agent is to be found at the view."""
        return self.stage is not Stage.NONE and not self.removed and self.newer is None

    def count_loss(self, what: str) -> None:
        """Others took something that is mounted for jobs; before it is mounted again."""
        self.loss = Loss(self.loss.count + 1, time.time(), what)
        self.due.lost()

    def lose_view(self, what: str) -> None:
        """Jobs do not find any more what was published. It is published again."""
        log.error("view is lost; it is mounted again", dataset=self.name, what=what)
        self.stage, self._allowed = Stage.NONE, None
        self.current.reached = None  # its mount may have gone as well
        self.due.suspect()
        self._telling = asyncio.create_task(self.tell_loss())
        self.wake()

    def find_view(self, hidden: kit.errors.HostError | None, *, back: bool) -> None:
        """What keeps a view from being mounted. ``back``: what was lost is to be seen again."""
        if back and self.stage is Stage.NONE:
            self.stage = Stage.UNKNOWN  # it is not believed to show what was stored since
        if str(hidden) != str(self.hidden):
            self.hidden = hidden
            self.due.suspect()
            self.wake()

    async def save_state(self, **other: Any) -> None:
        """``other``: fields that are to be as they are not yet. AgentError, OSError."""
        self._refuse_newer()
        fields = {
            "removed": self.removed, "device": self._published_device, "chosen": self.chosen,
            "shown": {**dataclasses.asdict(self._shown), "generation": self.generation.created},
            **({"unsure": self.unsure} if self.unsure else {}), **other,
        }  # fmt: skip
        await kit.child.call(
            kit.formats.save, str(self._state), fields, kept.FORMAT, deadline=STORE_SECONDS
        )

    def _refuse_newer(self) -> None:
        if self.newer is not None:
            raise self.newer

    async def change(self, of: Generation | None = None, /, **changes: Any) -> None:
        """Change generation.json of a generation durably; None: of the current one."""
        was = self.whole()
        await (of or self.current).change(**changes)
        if was and not self.whole():
            await self.tell_loss()

    # --- the loop

    def wake(self) -> None:
        self._wake.set()
        self.changed()

    async def follow(self) -> None:
        """Runs until it is cancelled."""
        while True:
            self._wake.clear()
            try:
                if self._half_removed():
                    await self.remove()
                    self.discarded = True
                async with self.lock:
                    # The parent of a view is made with it: until then a pod that asks for it as a
                    # directory has to wait.
                    if self.published:
                        await self._set_access()
                    acted = await self._act(next_action(self.facts()))
            except (kit.errors.AgentError, OSError, RuntimeError) as error:
                acted = False
                self._note_trouble(error)
            if not acted:
                patience = self.due.patience(complete=self._served_by_store())
                await kit.tasks.until(self._wake, patience)

    def _half_removed(self) -> bool:
        """An earlier agent ended while it removed it, and nobody has it now."""
        shown = self.removed and self.stage is not Stage.NONE
        return shown and self.newer is None and not self.has_volumes()

    def _served_by_store(self) -> bool:
        usable = self.no_store is None and not self.suspect
        return self.generation.state == "complete" and usable

    def _check_interval(self) -> float:
        return self.cache.source_check if self.source.replaceable else math.inf

    def facts(self) -> Facts:
        generation = self.generation
        wanted = self.settings.warm or generation.wanted or generation.evicting
        # What failed may succeed later, and there may be room for what did not fit.
        unfinished = generation.state in ("new", "filling") or (
            generation.state == "partial" and (generation.failed > 0 or self.current.lacks_room())
        )
        return Facts(
            stage=self.stage,
            complete=generation.state == "complete",
            skeleton=self.listed(),
            stale=generation.state == "stale",
            unfit=self.unfit(),
            store_usable=self.no_store is None and not self.suspect,
            reached=self.reached is not None,
            servable=self.reached is not None and bool(self.reached.root),
            reach_due=self.due.look(complete=self._served_by_store()) and not self.removed,
            moved=self.reached is not None and self.reached.device != self._published_device,
            fill_wanted=wanted
            and unfinished
            and (not generation.paused or generation.evicting)
            and not (self.removed or self.unsure)
            and self.next is None
            and self.due.fill(),
            job_there=self.current.queued or self.job is not None,
            refresh_due=self.due.refresh(),
            source_mounted=self.source_mounted,
            source_needed=self.verification.pending
            or self.job is not None
            or self.next is not None
            or self.comparing
            or self.settings.freshness == "follow",
            bad=self._has_bad_files(),
            volumes=self.has_volumes() and not self.source.block,  # devices keep their images
        )

    def _has_bad_files(self) -> bool:
        """Some may be in the tree, or were taken out of it and can be replaced now."""
        if self.source.block:  # bad chunks are forgotten, and filled again
            return self.generation.damaged > 0 and self.generation.state != "filling"
        there = self.reached is not None or not self.current.hidden
        return self.generation.damaged > 0 and there

    async def _set_access(self) -> None:
        """Give the view's parent its owner and mode."""
        access = self.settings.access
        if self._allowed == access:
            return
        wanted = access.owner, access.group, access.mode, self.source.place
        why = access.fault
        if not view.is_allowed(self.view, *wanted):
            async with self.looks:  # not a process for each dataset at once
                shut = await kit.child.call(view.allow, self.view, *wanted, deadline=VIEW_SECONDS)
            why = f"{shut} keeps users out" if shut else why
        others = [each for each in self.notes if not each.startswith(ONLY_ROOT)]
        self.notes = [*others, f"{ONLY_ROOT}, as {why}: set access.mode"] if why else others
        self._allowed = access

    async def _act(self, action: Action) -> bool:
        if action is Action.NOTHING or self.removed or self.newer is not None:
            return False
        if action in _PUBLISH and not self.due.mount():
            return False
        match action:
            case Action.REACH:
                await self.reach()
            case Action.PUBLISH_SOURCE:
                await self.publish(Stage.SOURCE)
            case Action.PUBLISH_OVERLAY:
                if await self.may_overlay():
                    await self.publish(Stage.OVERLAY)
            case Action.PUBLISH_STORE:
                await self.publish_store()
            case Action.WITHDRAW:
                return await self._withdraw()
            case Action.RENEW:
                await self._renew()
            case Action.QUEUE:
                self.current.queued = True
                self.ask_jobs()
            case Action.REFRESH:
                await self.refresh()
            case Action.RELEASE:
                self.current.reached = None
                await self.source.release()
                self.source_mounted = False
        return True

    async def _withdraw(self) -> bool:
        """Unless a pass over it runs: its end wakes this loop."""
        if is_busy(self) or not self.due.withdraw():
            return False
        try:
            await self.withdraw(self, self.current)
        except BaseException:
            self.due.withdraw_later()
            raise
        return True

    def _note_trouble(self, error: Exception) -> None:
        found = trouble_of(self.name, self.view, error)
        # The first of a dataset that is not complete is logged as the finding that it becomes.
        told = self.trouble is None and self.state() != "complete"
        if not told and str(found) != str(self.trouble):
            log.warning("dataset is not served as it should be", dataset=self.name, why=str(found))
        self.trouble = found
        self.due.failed()
        self.changed()  # another generation may be worth more now

    # --- what jobs use too; the caller has the lock

    async def reach(self, *, serve: bool = False) -> None:
        """Reach the source. SourceError when it does not answer; the view stays as it is.

        ``serve``: jobs are to read it soon, although the store serves them now.
        """
        self.due.looking()
        self.source_mounted = True
        async with self.looks:
            serve = serve or not self._served_by_store()
            other = await self.current.reach(self.cache.source_timeout, serve=serve)
        self.due.answered(self._check_interval())
        self.server = self.reached.server if self.reached is not None else ""
        if isinstance(self.trouble, kit.errors.SourceError) and self.generation.failed:
            self.due.fill_soon()  # what failed while it did not answer
        self.trouble = None
        if other:
            await self._outdate(other)
        if not self.generation.skeleton and self.job is None and self.reached is not None:
            self.figures = self.figures.at_least(self.reached)

    async def may_overlay(self, *, refusals: bool = True) -> bool:
        """Whether what is stored and its source may be shown as one, or filled on.

        If not, what is stored is of another source, or (``refusals``) root is refused files that
        jobs may read there: the view shows the source. SourceError when what was stored is not
        there.
        """
        try:
            found = await self.current.resembles(VIEW_SECONDS)
        except (kit.errors.AgentError, OSError):
            self.due.fill_later(None)
            raise
        if found["match"] != identity.Match.SAME.name:
            await self._outdate(f"its files are other ones: {found['why']}")
            return False
        if not refusals or not found["refused"]:
            return True
        await self.refused_by_source(refused=found["refused"])
        return False

    async def refused_by_source(self, *, refused: str = "", crossed: str = "") -> None:
        """An overlay would lose files of the source: the view shows it alone."""
        state = "partial" if self.generation.state == "complete" else self.generation.state
        why = standing.unfit(refused, crossed)
        await self.change(state=state, refused=refused, crossed=crossed, why=why)
        self.due.fill_later(due.PARTIAL_SECONDS)

    async def _outdate(self, why: str) -> None:
        """The source is another one now. What is stored is never filled or completed any more."""
        log.error("source is another one by the same name", dataset=self.name, why=why)
        await self.change(state="stale", why=f"the source is another one now: {why}")
        self._end_job()

    async def _renew(self) -> None:
        """Discard a stale generation; another one begins. The view shows the source."""
        old = self.generation
        await kit.child.call(generations.discard, self.store, self.folder, deadline=STORE_SECONDS)
        self.discarded = True
        self.current.begin_anew(
            marks=self.reached.marks if self.reached is not None else {},
            wanted=old.wanted or old.completed > 0, paused=old.paused, replaced=old.why,
        )  # fmt: skip
        self.verification = Verification()
        self.due.spread_fill(self.cache.fill.jitter)
        await self.change()
        log.warning("dataset begins anew", dataset=self.name, why=old.why)

    def take_discarded(self) -> bool:
        """Whether a generation was discarded since the last call."""
        was, self.discarded = self.discarded, False
        return was

    # --- the view

    async def publish(self, stage: Stage) -> None:
        """Have ``stage`` serve the view. HostError, OSError."""
        if self.hidden is not None:
            raise self.hidden
        source = self.reached.root if self.reached else ""
        hide = self.settings.access.mode is None and bool(self.source.place)
        stamp = self.reached.stamp if self.reached else ""
        with self.changing_view():
            done = await kit.child.call(
                view.publish, self.view, str(stage), source, self.layer, self._scratch, self.stage,
                stamp, hide, deadline=VIEW_SECONDS,
            )  # fmt: skip
            log.info("view published", dataset=self.name, before=str(self.stage), now=str(stage))
            major, _, minor = done["device"].partition(":")
            device = int(major), int(minor)
            self.mounted = view.Mounted(done.pop("mount"), device, done["root"])
            await self._set_access()  # before anybody hears that it is served
            self.stage = stage
        self.due.refresh_wanted = False
        if not done.pop("clean"):
            note = "this kernel (before 6.5) keeps earlier mounts of the view below it"
            self.notes = [note, *(each for each in self.notes if each != note)]
        self._shown = view.Shown(**done)
        if self.reached is not None:
            self._published_device = self.reached.device
        await self.save_state()

    async def publish_store(self) -> None:
        """Publish the store; when its tree cannot be opened, fill again from the source."""
        try:
            await self.publish(Stage.STORE)
        except OSError:
            if self.stage is Stage.STORE:
                raise  # it is published, and could not be noted
            lost = await kit.child.call(view.trouble_of, self.layer, deadline=STORE_SECONDS)
            if lost in _TREE_LOST:
                log.error("store of a complete dataset is unreadable", dataset=self.name)
                self.stage = Stage.UNKNOWN if self.stage is Stage.OVERLAY else self.stage
                await self.change(state="filling", skeleton=False, why="the store lost its tree")
            raise

    async def refresh(self) -> None:
        self.due.refresh_wanted = False
        began = time.monotonic()
        await kit.child.call(view.refresh, self.view, self.layer, deadline=VIEW_SECONDS)
        self.refreshes += 1
        self.due.refreshed(self.cache.refresh_interval, time.monotonic() - began)

    def want_refresh(self) -> None:
        """Something was committed that running views do not see yet."""
        self.due.refresh_wanted = True
        self.wake()

    def retry_now(self) -> None:
        """Check the source and fill soon; earlier failures delay nothing any more."""
        self.due.retry_now()
        self.wake()

    def store_changed(self, why: kit.errors.AgentError | None) -> None:
        """The store's disk has got into trouble, or out of it."""
        self.no_store = why
        if why is not None or self.suspect:
            self.current.queued = False
            self.due.suspect()
            if self.job is not None and self.job.kind != "verify":  # that finds what is bad
                self._end_job()
        self.wake()

    def _end_job(self) -> None:
        if self.job is not None:
            self._ending = asyncio.create_task(self.job.cancel())

    async def put_back(self) -> None:
        """It was removed, and is wanted again. The caller has the lock."""
        self.removed, self.unsure = False, ""
        await self.save_state()

    async def remove(self) -> None:
        """Take the view down and discard the store. InUseError names who uses the view.

        Durable first: a disk that takes nothing must not bring it back at the next start.
        """
        self._refuse_newer()
        async with self.lock:
            await kit.child.call(by_id.refuse_used, self.view, deadline=VIEW_SECONDS)
            await self.save_state(removed=True)
            with self.changing_view():
                try:
                    await kit.child.call(by_id.take_down_all, self.view, deadline=VIEW_SECONDS)
                    await kit.child.call(view.take_down, self.view, deadline=VIEW_SECONDS)
                except (kit.errors.AgentError, OSError, RuntimeError):
                    with contextlib.suppress(kit.errors.AgentError, OSError, RuntimeError):
                        await self.save_state()  # it stays as it was
                    raise
                self.stage = Stage.NONE
                self.removed, self.unsure, self._allowed = True, "", None
            self.current.queued = False
        await self.stop()
        async with self.lock:
            for each in self.every_generation():
                await kit.child.call(
                    generations.discard, self.store, each.folder, deadline=STORE_SECONDS
                )
            self.next, self.earlier, self.retired = None, [], []
            self.current.begin_anew()
            self.trouble = self.current.reached = None
            await self.source.release()
        log.info("dataset removed", dataset=self.name)

    async def stop(self) -> None:
        """End the running jobs. The view stays."""
        for job in (self.job, self.scrubbing):
            if job is not None:
                await job.cancel()

    def used(self, *, beside: Generation | None = None) -> int:
        """SSD bytes that it takes, with what its generations share counted once. ``beside``:
        without what that one takes of its own."""
        every = self.every_generation()
        return sum(each.used(every) for each in every if each is not beside)


def is_busy(dataset: Dataset) -> bool:
    """A pass over it runs: nothing is withdrawn now."""
    passes = dataset.job is not None or dataset.scrubbing is not None
    return passes or dataset.verification.state == "running"


async def _none_left(*_: object) -> bool:
    return True
