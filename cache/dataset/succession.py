"""How one generation of a dataset follows another: update, switch, rollback, retirement.

``Succession.follow`` is a loop beside that of the dataset: collect the facts, let
``update_step.next_step`` choose, do that one step. It fills nothing itself: ``cache.work.jobs``
does, and the generation that serves goes on serving meanwhile.

What is wanted: the snapshot that an operator chose, else the one of the settings, else (``follow``)
the newest. All of it is kept where it is true: a generation knows since when it served, so a killed
agent's successor goes on where it was.

Invariant: a generation is discarded only when nobody uses it, by whatever mount.
"""

import asyncio
import contextlib
import fnmatch
import json
import random
import time
from collections.abc import Callable
from typing import Any

import structlog

import kit.child
import kit.errors
import kit.tasks
from cache.dataset import due, leaving
from cache.dataset.dataset import VIEW_SECONDS, Dataset
from cache.dataset.generation import STORE_SECONDS, Generation, bad_left
from cache.dataset.update_step import FITS, Facts, Step, newest, next_step
from cache.settings import at_snapshot, snapshot_of
from cache.store import generations, identity, subset
from cache.views import by_id
from cache.views.view import Stage

log = structlog.get_logger("succession")

IDLE_SECONDS = 60.0  # between two looks when nothing is under way
SOON_SECONDS = 1.0
USERS_SECONDS = 60.0  # to look through all processes
# Between two looks whether a generation is still used: each reads all of /proc.
RETIRE_SECONDS = 20.0
LATER_SECONDS = 900.0  # until what lacks room is filled again, unless it gets some before


class Succession:
    """Of one dataset. ``found``: snapshots and when each was made, as last listed."""

    def __init__(self, dataset: Dataset, discarded: Callable[[], None]) -> None:
        """``discarded``: called when something went to the trash."""
        self.dataset = dataset
        self.found: dict[str, float] = {}
        self.users: dict[str, list[str]] = {}  # why a generation is not retired yet
        self.delay = 0.0  # seconds from the making of the current snapshot to its service
        self._discarded = discarded
        self._wake = asyncio.Event()
        self._shown: set[str] = set()
        self._lost: set[str] = set()  # others have unmounted them, or mounted over them
        self._poll_at = self._retire_at = self._leave_at = 0.0
        self._insists = False
        dataset.changed = self._wake.set

    # --- start

    def adopt(self, found: dict[str, dict[str, Any] | None]) -> dict[str, Any] | None:
        """Sort what an earlier agent left: generation.json by folder. The fields of the current."""
        dataset = self.dataset
        known: list[tuple[Generation, dict[str, Any]]] = []
        for folder, fields in found.items():
            each = self._known(folder, fields)
            if each is not None and fields is not None:
                known.append((each, fields))
        chosen = max(known, key=_rank, default=None)
        served = chosen is not None and _rank(chosen) != (0.0, 0.0)  # else nothing is complete
        wanted = found.get(dataset.folder)
        lost = {folder: each for folder, each in found.items() if each and "lost" in each}
        if dataset.folder in lost and (not served or dataset.settings.freshness == "snapshot"):
            chosen, served = (dataset.current, dataset.current.lost(lost.pop(dataset.folder))), True
            dataset.current.leaves = True  # what is mounted by its id, too
        for folder, fields in lost.items():
            each = dataset.generation_of(dataset.settings.source)
            each.folder = folder
            each.adopt(each.lost(fields))
            dataset.retired.append(each)  # it goes when nobody uses it
        if chosen is None or not served:
            if wanted is None:
                dataset.due.spread_fill(dataset.cache.fill.jitter)
            return wanted
        dataset.current = chosen[0]
        if chosen[1].get("damaged") and chosen[1].get("state") == "complete":
            bad = int(chosen[1]["damaged"])
            chosen[1].update(state="partial", failed=bad, wanted=True, why=bad_left(bad))
        rest = [(each, fields) for each, fields in known if each is not chosen[0]]
        rest.sort(key=_rank, reverse=True)
        for each, fields in rest:
            try:
                each.adopt(fields)
            except kit.errors.HostError:
                continue  # a newer agent's: it is left alone
            each.leaves = each.record.damaged > 0 and not each.source.block
            # What has served in part, too, as in ``Dataset.succeed``: jobs may hold it.
            if each.record.state == "complete" and each.record.served and not each.leaves:
                dataset.earlier.append(each)
            elif dataset.next or each.record.served or each.record.state == "stale":
                dataset.retired.append(each)
            else:
                dataset.next = each
        return chosen[1]

    def _known(self, folder: str, fields: dict[str, Any] | None) -> Generation | None:
        """The generation in ``folder`` when it is of this dataset's source."""
        if fields is None or "lost" in fields:
            return None
        try:
            named = dict(json.loads(fields.get("identity", "")))
        except (ValueError, TypeError, RecursionError):
            return None
        place, scan = self.dataset.settings.source, str(named.get("scan", ""))
        snapshot = str(named.get("snapshot") or fields.get("snapshot") or "")
        if not snapshot and "/.snap/" in str(named.get("path", "")):
            snapshot = str(named["path"]).split("/.snap/", 1)[1].split("/")[0]
        if snapshot:
            place = at_snapshot(place, snapshot)
        made = self.dataset.generation_of(place, scan)
        return made if made.folder == folder else None

    # --- the loop

    def wake(self) -> None:
        self._wake.set()

    async def follow(self) -> None:
        """Runs until it is cancelled."""
        dataset = self.dataset
        with contextlib.suppress(kit.errors.AgentError, OSError, RuntimeError):
            await self._look_at_mounts()
        while True:
            self._wake.clear()
            acted = False
            try:
                if dataset.removed:
                    self._shown.clear()
                elif dataset.newer is None:
                    await self._poll()
                    async with dataset.lock:
                        acted = await self._leave() or await self._do(next_step(self.facts()))
            except (kit.errors.AgentError, OSError, RuntimeError) as error:
                self._failed(error)
            if not acted:
                await kit.tasks.until(self._wake, self._patience())

    async def _look_at_mounts(self) -> None:
        """Find what an earlier agent mounted by its id, and detach what has no tree any more."""
        dataset = self.dataset
        names = [each.id for each in dataset.every_generation()]
        table = await asyncio.to_thread(dataset.mounts.now)
        others = set(by_id.shown(dataset.view, table)) - set(names)
        if dataset.newer is None and dataset.no_store is None and others:
            await kit.child.call(by_id.drop_others, dataset.view, names, deadline=VIEW_SECONDS)
        layers = {each.id: each.layer for each in dataset.every_generation()}
        table = await asyncio.to_thread(dataset.mounts.now)
        self._shown = set(by_id.whole(dataset.view, layers, table))

    @property
    def shown(self) -> frozenset[str]:
        """Ids at which jobs are to find the tree of the store."""
        dataset = self.dataset
        there = {each.id for each in dataset.every_generation()}
        if dataset.current.record.state != "complete":
            there.discard(dataset.current.id)  # removed or evicted, and filled again since
        return frozenset() if dataset.removed else frozenset(self._shown & there)

    def lose(self, name: str, what: str) -> None:
        """Jobs do not find it by its id any more. It is mounted again."""
        if name not in self._shown:
            return
        log.error("generation is lost; it is mounted again", dataset=self.dataset.name, id=name,
                  what=what)  # fmt: skip
        self._shown.discard(name)
        self._lost.add(name)
        self.wake()

    def _patience(self) -> float:
        now, dataset = time.monotonic(), self.dataset
        until = [now + IDLE_SECONDS]
        if self._lost:
            until.append(now + dataset.due.until_mount())
        if dataset.settings.freshness == "follow":
            until.append(self._poll_at)
        most = 0 if self._no_room() else dataset.settings.earlier
        if dataset.retired or len(dataset.earlier) > most:
            until.append(self._retire_at)
        if dataset.next is not None:
            until.append(now + dataset.next.due.patience(complete=False))
        if leaving.suspect(dataset, self._shown):
            until.append(self._leave_at)
        if (tainted := leaving.tainted(dataset)) is not None:
            until.append(now + tainted.due.patience(complete=False))
        return max(SOON_SECONDS / 10, min(until) - now)

    def _failed(self, error: Exception) -> None:
        if not isinstance(error, kit.errors.AgentError):
            thing = f"dataset {self.dataset.name}: another generation"
            why = str(error).splitlines()[-1] if str(error) else repr(error)
            error = kit.errors.HostError(thing, why, "see the kernel log; it is tried again")
        if str(error) != str(self.dataset.next_trouble):
            log.warning("update does not go on", dataset=self.dataset.name, why=str(error))
        self.dataset.next_trouble = error
        if self.dataset.next is not None:
            self.dataset.next.due.failed()
        self._retire_at = time.monotonic() + RETIRE_SECONDS

    async def _poll(self) -> None:
        """List the snapshots of a dataset that follows them, when that is due."""
        dataset = self.dataset
        due = time.monotonic() >= self._poll_at
        if dataset.settings.freshness != "follow" or dataset.chosen or not due:
            return
        # All nodes follow the same source; they do not ask at the same moment.
        self._poll_at = time.monotonic() + dataset.cache.follow_interval * random.uniform(0.9, 1.1)
        source = dataset.generation_of(at_snapshot(dataset.settings.source, "any")).source
        async with dataset.lock, dataset.looks:
            dataset.source_mounted = True
            self.found = await source.snapshots(dataset.cache.source_timeout)
        if dataset.next is None:
            dataset.next_trouble = None

    # --- facts

    def _newest(self) -> str:
        """The snapshot to follow, '' for that of the current generation."""
        pattern = self.dataset.settings.snapshots
        match = frozenset(
            name
            for name in self.found
            if fnmatch.fnmatchcase(name, pattern)
            and (pattern.startswith("_") or not name.startswith("_"))
        )
        return newest(self.found, match, self.made(self.dataset.current))

    def made(self, of: Generation) -> float:
        """When its snapshot was made, Unix time; 0 when it is not known."""
        kept = float(of.record.marks.get(identity.MADE, "0"))
        return kept or self.found.get(of.record.snapshot, 0.0)

    def _wanted(self) -> Generation | None:
        """A new object for the wanted generation, None when the current one is to stay."""
        dataset, settings = self.dataset, self.dataset.settings
        if settings.freshness == "frozen":
            scan = dataset.chosen.get("scan")
            return None if scan is None else dataset.generation_of(settings.source, scan)
        if chosen := dataset.chosen.get("snapshot", ""):
            if dataset.chosen.get("instead") == snapshot_of(settings.source):
                return dataset.generation_of(at_snapshot(settings.source, chosen))
            dataset.chosen = {}  # the settings were changed since: they count
        if settings.freshness == "snapshot":
            return dataset.generation_of(settings.source)
        name = self._newest()
        return dataset.generation_of(at_snapshot(settings.source, name)) if name else None

    def facts(self) -> Facts:
        dataset, now = self.dataset, time.monotonic()
        current, next_one = dataset.current, dataset.next
        wanted = (self._wanted() or current).id
        usable = dataset.no_store is None
        queued = next_one is not None and next_one.queued
        left = self._retired(wanted)
        if left is not None and (left.record.state == "stale" or left.record.evicting):
            wanted = ""  # not before that is gone: both have one folder
        job = queued or (dataset.job is not None and dataset.job.kind == "update")
        complete = self._complete()
        may_show = dataset.hidden is None and dataset.due.mount()
        if current.record.state != "complete":
            self._shown.discard(current.id)  # it has fallen back, and is shown again when it is
        return Facts(
            wanted=wanted if usable else "",
            # What an operator chose holds over restarts.
            insists=self._insists or bool(dataset.chosen or dataset.settings.freshness != "follow"),
            current=current.id,
            current_empty=current.record.state == "new" and dataset.job is None,
            current_busy=current.record.state in ("new", "filling")
            and not current.record.paused
            and dataset.reached is not None,
            next=next_one.id if next_one is not None and usable else "",
            next_state=self._coming_state(),
            outlived=self._is_outlived(),
            reached=next_one is not None and next_one.reached is not None,
            lost=next_one is not None
            and next_one.reached is None
            and dataset.next_trouble is not None,
            reach_due=next_one is not None and next_one.due.look(complete=False),
            fill_due=next_one is not None and next_one.due.fill(),
            job_there=job,
            earlier=tuple(each.id for each in dataset.earlier),
            keep=dataset.settings.earlier,
            no_room=self._no_room(),
            retire_due=now >= self._retire_at and usable and not self._shares(),
            shown=not usable or complete <= self._shown or not may_show,
            retired=bool(dataset.retired),
        )

    def _retired(self, name: str) -> Generation | None:
        """The generation of that id that is to be discarded, if it is still there."""
        return next((each for each in self.dataset.retired if each.id == name), None)

    def _coming_state(self) -> str:
        dataset, next_one = self.dataset, self.dataset.next
        if next_one is None:
            return ""
        may_go = bool(dataset.earlier or dataset.retired) and not dataset.earlier_used
        fits = next_one.record.state == "partial" and next_one.fits and not may_go
        return FITS if fits else next_one.record.state

    def _is_outlived(self) -> bool:
        """The snapshot that serves is gone, and it lacks files, or keeps the next one from
        being listed: neither has what the other waits for."""
        dataset, next_one = self.dataset, self.dataset.next
        if next_one is None or next_one.source.block or not dataset.current.gone:
            return False
        may_go = bool(dataset.earlier or dataset.retired) and not dataset.earlier_used
        stuck = next_one.record.state == "partial" and not next_one.figures.failed and not may_go
        return dataset.generation.state != "complete" or stuck

    def _shares(self) -> bool:
        """The current one is being filled, by links of one that is to go after that."""
        dataset = self.dataset
        fills = dataset.job is not None and dataset.job.kind == "fill"
        return fills and dataset.before(dataset.current) is not None

    def _no_room(self) -> bool:
        """The next generation lacks room, or the current one: no earlier one is kept."""
        next_one, now = self.dataset.next, self.dataset.generation
        room = self.dataset.current.lacks_room() or now.kept_share < subset.ALL
        lacks = now.state in ("partial", "filling") and room
        if next_one is not None and next_one.record.state == "partial":
            lacks = lacks or next_one.record.left_files > 0
        return self.dataset.no_room or lacks

    def _complete(self) -> set[str]:
        """Ids that are to be mounted: a block image has no tree."""
        dataset = self.dataset
        if dataset.current.source.block:
            return set()
        found = {each.id for each in dataset.earlier if not leaving.suspects(dataset, each)}
        if dataset.current.record.state == "complete" and dataset.stage is Stage.STORE:
            found.add(dataset.current.id)
        return found

    # --- steps; the caller has the dataset's lock

    async def _leave(self) -> bool:
        """Whether there was a generation to see to: one that is suspect shows its source by its id;
        one that has tried that loses its bad files."""
        suspect = leaving.suspect(self.dataset, self._shown)
        if not suspect or time.monotonic() < self._leave_at:
            taken = await leaving.take_out(self.dataset)
            self._leave_at = 0.0 if taken else self._leave_at  # the next one's turn
            return taken
        self._leave_at = time.monotonic() + leaving.AGAIN_SECONDS
        await leaving.leave(self.dataset, suspect[0])
        self._shown.discard(suspect[0].id)
        self._leave_at = 0.0
        return True

    async def _do(self, step: Step) -> bool:
        if step is Step.NOTHING:
            return False
        dataset, new = self.dataset, self._wanted()
        busy = dataset.job is not None or dataset.verification.pending
        outlived = step is Step.SWITCH and self._is_outlived()
        if outlived:
            await self._end_update()  # it goes on as the current one
            runs = dataset.job is not None and dataset.job.kind != "update"
            busy = runs or dataset.verification.pending
        match step:
            case Step.TAKE:
                assert new is not None
                if dataset.source.block:  # the next one is mapped in its place
                    await dataset.source.release()
                dataset.current = new
                dataset.trouble = None
                dataset.retry_now()
                self._spread(dataset.due)
            case Step.BEGIN:
                assert new is not None
                await self._begin(new)
            case Step.REACH:
                await self._reach()
            case Step.QUEUE:
                assert dataset.next is not None
                dataset.next.queued = True
                dataset.ask_jobs()
            case Step.SWITCH | Step.BACK if busy:
                return False  # its result is of the current generation; its end wakes this loop
            case Step.SWITCH:
                assert dataset.next is not None
                next_one = dataset.next
                if outlived and await next_one.has_bad_files():  # they go before it is shown
                    await next_one.change(damaged=max(1, next_one.record.damaged))
                if outlived or not await leaving.spoiled(next_one):
                    await self._switch(next_one)
            case Step.BACK:
                assert new is not None
                back = next(each for each in dataset.earlier if each.id == new.id)
                if other := await leaving.outdated(dataset, back):
                    dataset.earlier.remove(back)
                    await self._begin_anew(back, other)
                else:
                    await self._switch(back)
            case Step.DROP:
                assert dataset.next is not None
                await self._end_update()
                await self._part_with(dataset.next)
            case Step.SHOW:
                await self._show()
            case Step.RETIRE:
                await self._retire()
        return True

    async def _begin(self, new: Generation) -> None:
        dataset = self.dataset
        dataset.current.queued = False
        if dataset.job is not None and dataset.job.kind == "fill":
            await dataset.job.cancel()
        if (left := self._retired(new.id)) is not None:  # wanted again: it goes on where it was
            dataset.retired.remove(left)
            dataset.next, left.fits = left, False
            left.due.retry_now()
            log.info("update goes on", dataset=dataset.name, snapshot=left.record.snapshot)
            return
        now = dataset.generation
        shares = now.state in ("complete", "partial")
        share = subset.ALL if now.paused or new.source.block else now.kept_share
        await new.change(before=dataset.current.id if shares else "", kept_share=share)
        dataset.next = new
        self._spread(new.due)
        log.info("update begins", dataset=dataset.name, snapshot=new.record.snapshot)

    def _spread(self, fill: due.Due) -> None:
        if not self._insists:
            fill.spread_fill(self.dataset.cache.fill.jitter)

    async def _reach(self) -> None:
        dataset, next_one = self.dataset, self.dataset.next
        assert next_one is not None
        next_one.due.looking()
        dataset.source_mounted = True
        async with dataset.looks:
            other = await next_one.reach(dataset.cache.source_timeout, serve=False)
        if not other and dataset.job is None and next_one.record.state != "new":
            found = await next_one.resembles(dataset.cache.source_timeout)
            other = found["why"]
        next_one.due.answered(IDLE_SECONDS)
        dataset.next_trouble = None
        if other:
            await self._begin_anew(next_one, other)

    async def _switch(self, new: Generation) -> None:
        """From here on ``new`` serves. Durable first: a killed agent's successor publishes it."""
        dataset = self.dataset
        old = dataset.current
        if dataset.scrubbing is not None:
            await dataset.scrubbing.cancel()
        damaged = new.record.damaged  # it is filled again, from its source
        lacks_room = new.record.state == "partial"
        whole = new.record.state == "complete" and not damaged
        changes: dict[str, Any] = {"wanted": not whole}
        if not whole:
            if other := await new.reach(dataset.cache.source_timeout, serve=True):
                await self._begin_anew(new, other)
                return
            if damaged:
                changes |= {"state": "partial", "failed": damaged, "why": bad_left(damaged)}
            elif lacks_room:
                room_of = old.record.snapshot or old.id
                changes["why"] = f"{new.record.why}; it waits for the room of {room_of}"
                dataset.due.fill_later(LATER_SECONDS)  # or when that has gone
            else:
                dataset.due.fill_soon()
        await new.change(served=time.time(), paused="", **changes)
        new.leaves = False
        dataset.succeed(new)
        self._insists = False
        dataset.next_trouble = None
        self._retire_at = time.monotonic() + SOON_SECONDS
        made = self.made(new)
        self.delay = max(0.0, new.record.served - made) if made else 0.0
        new.show_kept_figures()
        log.info(
            "generation switched", dataset=dataset.name, before=old.record.snapshot,
            now=new.record.snapshot, delay=round(self.delay, 3), files=new.record.files,
            shared_files=new.record.shared_files, used=new.record.used, shared=new.record.shared,
        )  # fmt: skip
        if whole:
            await dataset.publish_store()
        elif not damaged:  # else its bad files go first, by the dataset's own loop
            await dataset.publish(Stage.OVERLAY if dataset.listed() else Stage.SOURCE)
        dataset.wake()

    async def _end_update(self) -> None:
        dataset = self.dataset
        if dataset.next is not None:
            dataset.next.queued = False
        if dataset.job is not None and dataset.job.kind == "update":
            await dataset.job.cancel()

    async def _begin_anew(self, next_one: Generation, why: str) -> None:
        log.warning("update begins anew", dataset=self.dataset.name, why=why)
        if next_one.record.served:
            await next_one.change(state="stale", why=f"the source is another one now: {why}")
        await self._part_with(next_one)

    async def _part_with(self, next_one: Generation) -> None:
        """Discard it; one that has served goes when nobody uses it any more."""
        dataset = self.dataset
        if not next_one.record.served:
            await self._discard(next_one)
            return
        dataset.next = None
        dataset.retired.append(next_one)

    async def _show(self) -> None:
        dataset = self.dataset
        for each in (dataset.current, *dataset.earlier):
            if each.id in self._complete() - self._shown:
                await kit.child.call(
                    by_id.show, dataset.view, each.id, each.layer, each.id in self._lost,
                    deadline=VIEW_SECONDS,
                )  # fmt: skip
                self._lost.discard(each.id)
                self._shown.add(each.id)

    async def _retire(self) -> None:
        """Discard what is left over, or the earliest generation, unless it is used."""
        dataset = self.dataset
        self._retire_at = time.monotonic() + RETIRE_SECONDS
        oldest = [*dataset.retired, *reversed(dataset.earlier)][0]
        found = await kit.child.call(
            by_id.users, dataset.view, oldest.id, oldest.layer, deadline=USERS_SECONDS
        )
        if not found:
            hide = by_id.hide, dataset.view, oldest.id
            with dataset.changing_view():  # or the watch of the views takes it for lost
                gone = await kit.child.call(*hide, deadline=VIEW_SECONDS)
                self._shown.discard(oldest.id)
            found = [] if gone else ["a process uses it by its id"]
        self.users = {oldest.id: found} if found else {}
        dataset.earlier_used = bool(found)
        if not found:
            if dataset.scrubbing is not None:  # perhaps of this one
                await dataset.scrubbing.cancel()
            await self._discard(oldest)
            self._retire_at = 0.0

    async def _discard(self, old: Generation) -> None:
        dataset = self.dataset
        await kit.child.call(generations.discard, dataset.store, old.folder, deadline=STORE_SECONDS)
        dataset.next = None if dataset.next is old else dataset.next
        dataset.earlier = [each for each in dataset.earlier if each is not old]
        dataset.retired = [each for each in dataset.retired if each is not old]
        if dataset.next is not None:
            dataset.next.fits = False  # there is more room in a moment
        log.info("generation discarded", dataset=dataset.name, snapshot=old.record.snapshot)
        self._discarded()

    def insist(self) -> None:
        """An operator has chosen: what is under way is given up for it."""
        self._poll_at, self._insists = 0.0, True
        if self.dataset.next is not None:
            self.dataset.next.due.retry_now()
        self.dataset.wake()


def _rank(known: tuple[Generation, dict[str, Any]]) -> tuple[float, float]:
    """The one that served last, else the one that was completed last."""
    fields = known[1]
    complete = float(fields.get("completed", 0)) if fields.get("state") == "complete" else 0.0
    return float(fields.get("served", 0)), complete
