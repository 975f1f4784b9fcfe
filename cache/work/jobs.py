"""Jobs: what copies, verifies and withdraws files. One job at a time runs on the node.

The scheduler runs one job at a time: what operators wait for, then fills by priority and name. So
limits hold for the whole node, and a training job that waits gets one whole dataset instead of a
little of all of them. A running fill stops for what outranks it and goes on after that
(``cache.work.slot``). Evictions of other datasets run beside it (``cache.work.evictor``).

A job runs one or more passes (``cache.work.running``). One without progress is killed and tried
again later, because its source or the disk hangs; another dataset gets its turn.

Invariants: the outcome of a job is in generation.json before ``Dataset.job`` is None again. Nothing
is filled while the quarantine list of a generation has files.
"""

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

import structlog

import kit.errors
import kit.tasks
from cache.dataset import due, leaving, standing
from cache.dataset.dataset import Dataset
from cache.dataset.figures import Eviction, Verification
from cache.dataset.generation import Generation
from cache.fill import protocol
from cache.fill.protocol import Least
from cache.sources import base
from cache.space import at_work, budgets, limits, tasks
from cache.store import subset
from cache.views.view import Stage
from cache.work import evictor, slot, withdrawals
from cache.work.running import FILL, UPDATE, Pass
from cache.work.scrub_order import Pace

log = structlog.get_logger("job")

RETRY_SECONDS = 5.0  # after a job that could not start


class Jobs:
    """The jobs of the node: what operators ask for, and whose turn it is."""

    def __init__(
        self,
        datasets: Mapping[str, Dataset],
        foreign: Callable[[], int],
        trashed: Callable[[], int] = lambda: 0,
        short: Callable[[], subset.Amount] = subset.Amount,
    ) -> None:
        """``foreign``: SSD bytes of the store that belong to no dataset of the settings;
        ``trashed``: those of them that are being deleted; ``short``: what the disk lacks of the
        reserve."""
        self._datasets = datasets
        self._foreign, self._trashed = foreign, trashed
        self._turn = asyncio.Event()
        self._ending = False
        self._active: list[tuple[Dataset, Pass]] = []
        self.slot = slot.Slot(datasets, self._active)
        # Ends the scrub of a dataset: its jobs come first.
        self.clear_way: Callable[[Dataset], Awaitable[None]] = _nothing
        self.least: Callable[[], Least] = Least  # that the kubelet wants free
        self.look: Callable[[], Awaitable[None]] = _nothing  # who uses datasets now
        self.withdrawals = withdrawals.Withdrawals(self._run, self._limits)
        self.budgets = budgets.Budgets(
            datasets, self._run, self._limits, lambda: foreign() - trashed(),
            lambda dataset: self.clear_way(dataset), lambda: self.look(), short, self.slot.work,
        )  # fmt: skip
        self.evictor = evictor.Evictor(
            datasets, self.slot, self.budgets, lambda of: self.withdrawals.finish(of),
            lambda dataset: self.clear_way(dataset), self._room_was_made,
        )  # fmt: skip

    def wake(self) -> None:
        """Something may be queued."""
        self._turn.set()
        self.evictor.wake()
        self.slot.look_soon()

    # --- requests of operators

    async def warm(self, dataset: Dataset, *, now: bool = False) -> None:
        """Fill, continue, or try again what failed. A complete dataset stays as it is.

        ``now``: before all others, whatever their priority.
        """
        async with dataset.lock:
            await dataset.put_back()
            dataset.eviction = Eviction()
            match dataset.generation.state:
                case "complete":
                    pass
                case "stale":  # why it is, is still to be told
                    await dataset.change(wanted=True, paused="")
                case state:
                    state = "filling" if state == "partial" else state
                    await dataset.change(state=state, wanted=True, paused="", why="")
            self.slot.asked(dataset, now=now)
        dataset.retry_now()

    async def ask(self, dataset: Dataset, *, now: bool = False) -> None:
        """``warm``, and its next generation too, if there is one. An operator's wish
        counts as use: it may take room from what is unused."""
        dataset.use = dataclasses.replace(dataset.use, last=max(dataset.use.last, time.time()))
        await self.warm(dataset, now=now)
        if dataset.next is not None:
            dataset.next.due.retry_now()
            dataset.wake()

    async def pause(self, dataset: Dataset) -> None:
        """Stop filling; other datasets get their turn. ``resume`` continues."""
        _refuse_unless_filling(dataset, "pause")
        await self._hold(dataset, paused="paused")

    async def resume(self, dataset: Dataset) -> None:
        if not dataset.generation.paused and not dataset.unsure:
            raise dataset.refused("it is not paused", "nothing to do")
        await self.warm(dataset)

    async def cancel(self, dataset: Dataset) -> None:
        """Stop filling or verifying. What is stored stays and serves."""
        if dataset.job is not None and dataset.job.kind == "verify":
            await dataset.job.cancel()
            return
        _refuse_unless_filling(dataset, "cancel")
        await self._hold(dataset, paused="cancelled", wanted=False)

    async def _hold(self, dataset: Dataset, **changes: Any) -> None:
        async with dataset.lock:
            await dataset.change(**changes)
        self.slot.rests(dataset)
        dataset.current.queued = False
        await dataset.stop()

    async def verify(self, dataset: Dataset, *, source: bool) -> None:
        """Queue a verify; ``Dataset.verification`` shows its result."""
        if dataset.no_store is not None:
            raise dataset.no_store
        before = dataset.verification
        if dataset.job is not None or before.state == "running":
            kind = dataset.job.kind if dataset.job is not None else "verify"
            raise dataset.refused(f"a {kind} is running", "wait for it or cancel it")
        if dataset.generation.state not in ("complete", "partial"):
            why = f"it is {dataset.state()}, nothing is finished yet"
            raise dataset.refused(why, "warm it first")
        if source and dataset.source.block:
            why = "a block image is compared with its checksums, not with its source"
            raise dataset.refused(why, "verify it without --source")
        # Queued before the source is reached: otherwise a complete dataset would release it.
        dataset.verification = queued = Verification("queued", source)
        try:
            async with dataset.lock:
                if source and dataset.reached is None and not dataset.removed:
                    with base.asked_once():
                        await dataset.reach()
        except BaseException:
            if dataset.verification is queued:  # it has not begun meanwhile
                dataset.verification = before
            dataset.wake()  # releases what was mounted
            raise
        self.wake()

    # --- the scheduler

    def end(self) -> None:
        """Begin no other job: ``follow`` returns when the outcome of what runs is written."""
        self._ending = True
        self.evictor.end()
        self._turn.set()

    async def follow(self) -> None:
        """Both slots. Runs until it is cancelled, or ``end`` was called."""
        async with asyncio.TaskGroup() as slots:
            slots.create_task(self._follow(), name="jobs")
            slots.create_task(self.evictor.follow(), name="evictions")

    async def _follow(self) -> None:
        while not self._ending:
            self._turn.clear()
            if self.budgets.lack():
                await self.budgets.keep()
            dataset = None if self._ending else self.slot.next()
            if dataset is None:
                await self._turn.wait()
                continue
            with self.slot.work.on(at_work.JOBS, dataset.name):
                ran = await self._turn_of(dataset)
            self.evictor.wake()
            if not ran:
                await kit.tasks.until(self._turn, RETRY_SECONDS)

    async def _turn_of(self, dataset: Dataset) -> bool:
        """Run the job whose turn it is; whether it could run."""
        try:
            await self.clear_way(dataset)
            if dataset.eviction.queued:
                return True  # it was asked for just now, and comes first
            if dataset.verification.queued:
                await self._verify(dataset)
            elif (target := dataset.queued()) is not None:
                await self._fill(dataset, target)
        except (kit.errors.AgentError, OSError, RuntimeError, ValueError) as error:
            log.error("job could not run", dataset=dataset.name, why=str(error))
            if dataset.verification.state == "running":
                dataset.verification = Verification("failed", why=str(error))
            for each in dataset.every_generation():
                each.queued = False
            return False
        return True

    # --- room

    async def budgets_raised(self, datasets: Sequence[Dataset]) -> None:
        """Or otherwise changed: what lacked room is filled again, as if an operator asked."""
        self.room_came(datasets)
        for dataset in datasets:
            now = dataset.generation
            # Perhaps an eviction, and settings do not wait for one.
            begins = now.state in ("complete", "partial") and dataset.lock.locked()
            if now.evicting or begins:  # it may give less now
                self.evictor.budget_raised(dataset)
            elif now.state == "partial" and dataset.current.lacks_room() and not now.paused:
                await self.warm(dataset)

    def room_came(self, datasets: Iterable[Dataset]) -> None:
        """What lacked room is filled again, and a fill under way looks again for what it leaves
        out, once it has ended. An eviction that waits keeps its pause."""
        for dataset in datasets:
            dataset.due.fill_again = True
            if dataset.current.lacks_room() and not dataset.generation.evicting:
                dataset.retry_now()
            if (next_one := dataset.next) is not None:
                next_one.due.fill_again = True
                if next_one.lacks_room():
                    next_one.due.fill_soon()
                    dataset.wake()

    async def _room_was_made(self, asked: bool) -> None:
        """Files were taken out beside a fill. ``asked``: by an operator."""
        await self.limits_changed()
        if asked:
            self.room_came([dataset for dataset, _ in self._active])
        self.wake()

    async def limits_changed(self) -> None:
        for dataset, running in list(self._active):
            if running.kind == "evict":  # its limits are what somebody asked for
                continue
            limits = self._limits(dataset, running.kind, running.target)
            await running.set_limits(limits)

    def scrub_limits(self, dataset: Dataset, pace: Pace) -> protocol.Limits:
        return dataclasses.replace(
            self._limits(dataset, "verify"), workers=pace.workers,
            bytes_per_second=pace.bytes_per_second, files_per_second=0,
        )  # fmt: skip

    def filling(self) -> bool:
        """Whether a fill runs."""
        return any(running.kind == "fill" for _, running in self._active)

    def _limits(
        self, dataset: Dataset, kind: str, target: Generation | None = None
    ) -> protocol.Limits:
        # What is being deleted takes no room from what is chosen to stay.
        foreign = self._foreign() - (self._trashed() if kind == "evict" else 0)
        every, of = self._datasets.values(), target or dataset.current
        return limits.of(dataset, kind, every, foreign, of, self.least())

    async def _run(
        self, dataset: Dataset, kind: str, task: protocol.AnyTask, target: Generation | None = None
    ) -> protocol.End:
        dataset.job = running = Pass(dataset, kind, target)
        self._active.append((dataset, running))
        if kind in slot.FILLS:
            dataset.gave_way = False
        self.slot.look_soon()  # somebody may have come while it was prepared
        try:
            return slot.outcome(dataset, running, await running.run(task))
        finally:
            self._active.remove((dataset, running))
            if kind not in slot.FILLS:  # of a fill the outcome is to be noted before
                dataset.job = None

    # --- fill

    async def _fill(self, dataset: Dataset, target: Generation) -> None:
        """Fill the generation that serves, or the next one, while that serves."""
        serves = target is dataset.current
        async with dataset.lock:
            # It stays queued until it runs, or a second fill would be requested.
            if not target.queued or not await self._may_fill(dataset, target):
                target.queued = False
                dataset.wake()  # its view may have to show something else now
                return
            before = dataset.before(target)  # perhaps of one that began to serve unfilled
            shared = None if before is None else before.record
            changes: dict[str, Any] = {"left_files": 0, "left_bytes": 0}
            if serves:
                changes["served"] = target.record.served or time.time()
            verified = dataset.soundness.verified(target.record, shared)
            await dataset.change(target, state="filling", why="", verified=verified, **changes)
        kind = FILL if serves else UPDATE
        task = tasks.fill(dataset, target, self._limits(dataset, kind, target))
        times = dataset.due if serves else target.due
        target.queued = times.fill_again = False
        try:
            end = await self._run(dataset, kind, task, target)
            await self._fill_ended(dataset, target, end, times)
        finally:
            dataset.job = None
            dataset.wake()

    async def _may_fill(self, dataset: Dataset, target: Generation) -> bool:
        """Whether it still may, and no bad file is left in it. The caller has the lock."""
        if target.reached is None or dataset.removed or dataset.no_store is not None:
            return False
        if target is dataset.current:
            if target.record.paused or target.record.state == "stale" or dataset.unsure:
                return False
            return await self.withdrawals.finish(dataset) and await dataset.may_overlay()
        if target is not dataset.next:
            return False
        if dataset.generation.damaged:
            await self.withdrawals.finish(dataset)  # jobs read it meanwhile
        if await self.withdrawals.finish_next(dataset, target):
            return True
        target.due.fill_later(None)
        return False

    async def _fill_ended(
        self, dataset: Dataset, target: Generation, end: protocol.End, times: due.Due
    ) -> None:
        """Note the outcome, and queue it again when it is to go on as soon as it is its turn.
        ``times``: of the fills of what serves, or of the next one."""
        serves = times is dataset.due
        event = "fill ended" if serves else "update ended"
        log.info(event, dataset=dataset.name, result=end.result, why=end.why)
        goes_on, refused = dataset.gave_way, end.result in ("refused", "crossed")
        changes: dict[str, Any] = {"why": end.why}
        if not serves:
            changes |= {"refused": "", "crossed": ""}
        if end.fill is not None:
            changes |= target.figures.counts() | end.fill.record()
        if end.result in ("complete", "partial"):
            changes |= {"state": end.result, "refused": "", "crossed": ""}
            times.filled()
            if end.result == "complete" or not serves:
                changes["completed"] = time.time()
        match end.result:
            case "complete":
                changes["wanted"] = False
                if serves and dataset.stage is Stage.STORE:
                    withdrawals.shows_old_blocks(dataset)
                self.slot.ended_well(dataset)
            case "partial":  # it is tried again, also by the next agent
                times.fill_later(due.PARTIAL_SECONDS)
                if serves:
                    goes_on = await self.budgets.share_changes(dataset, end.fill)
                else:
                    goes_on = await self.budgets.has_room_for(dataset, target, end)
            case "failed" if serves:
                times.fill_later(None)
                times.suspect()
            case _ if not serves:
                if refused:
                    why = standing.unfit(**{end.result: end.why})
                    changes |= {end.result: end.why, "why": why}
                if not goes_on:
                    target.reached = None
                    times.fill_later(None)
        async with dataset.lock:
            if not serves and dataset.next is not target:
                return
            if end.result == "partial":
                lacked = end.fill is not None and (end.fill.left_files > 0 or end.fill.short)
                if goes_on or (lacked and times.fill_again):  # room came since it began
                    # Of the one that serves an eviction may have written newer figures meanwhile.
                    changes = {"state": "filling"} if serves else changes | {"state": "filling"}
                    goes_on, target.fits = True, False
                    times.fill_soon()
                else:
                    changes["why"] += self.budgets.waits_for(dataset)
                    self.slot.rests(dataset)
            if target.record.state != "stale":  # found to be while it ran
                await dataset.change(target, **changes)
                if serves and refused:
                    await dataset.refused_by_source(**{end.result: end.why})
            if serves:
                dataset.want_refresh()
            target.queued = goes_on and _may_go_on(dataset, target)

    # --- verify and withdraw

    async def _verify(self, dataset: Dataset) -> None:
        against_source = dataset.verification.source
        # Without a gap from here to the pass, the source cannot be released.
        dataset.verification = Verification("running", against_source)
        why = ""
        async with dataset.lock:
            if dataset.removed:
                why = "the dataset was removed"
            elif dataset.reached is None:
                try:
                    await dataset.reach()
                except kit.errors.SourceError as error:
                    dataset.trouble = error  # bad files are found, but not replaced
                    why = str(error) if against_source else ""
        if why:
            dataset.verification = Verification("failed", against_source, why)
            dataset.wake()
            return
        limits = self._limits(dataset, "verify")
        task = tasks.verify(dataset, dataset.current, limits, source=against_source)
        troubles = dataset.soundness.troubles
        end = await self._run(dataset, "verify", task)
        found = end.verify or protocol.VerifyEnd()
        result = {**found.counts(), "withdrawn": 0}
        await leaving.found_also(dataset, found)
        result["withdrawn"], failure = await self.withdrawals.take_out_bad(dataset, end)
        why = failure or end.why
        if not failure:
            await self.settle(dataset, end, troubles)
        if end.result == "good" and against_source and not found.not_compared:
            async with dataset.lock:
                await dataset.current.prove()
        log.info("verify ended", dataset=dataset.name, result=end.result, why=why, **result)
        dataset.current.show_kept_figures()
        dataset.verification = Verification(end.result, against_source, why, result, time.time())
        dataset.want_refresh()

    async def settle(
        self, dataset: Dataset, end: protocol.End, troubles: int, of: Generation | None = None
    ) -> None:
        """All stored files were verified, and no bad one is left: note it, unless the disk had
        ``troubles`` since the verify began. ``of``: another generation than the current one."""
        now = dataset.soundness
        found = end.verify or protocol.VerifyEnd()
        clean = end.result == "good" or (end.result == "bad" and found.unreplaced)
        if clean and now.troubles == troubles and dataset.no_store is None:
            async with dataset.lock:
                each = of or dataset.current
                if each not in (dataset.current, *dataset.earlier) or dataset.removed:
                    return
                if each.record.state not in ("new", "stale"):
                    done = {"scrubbed": time.time(), "crashes": now.kept.crashes}
                    await each.change(verified=troubles, **done)


async def _nothing(*_: object) -> None:
    return


def _may_go_on(dataset: Dataset, target: Generation) -> bool:
    """Whether its fill, which has ended, may be queued again at once."""
    usable = not dataset.removed and dataset.no_store is None
    if target is not dataset.current:
        return usable
    stopped = target.record.paused or target.record.state == "stale" or dataset.suspect
    return usable and not stopped and dataset.next is None


def _refuse_unless_filling(dataset: Dataset, what: str) -> None:
    now = dataset.generation
    asked = dataset.job is not None or now.wanted or dataset.settings.warm or now.paused
    idle = what == "cancel" and not asked  # a pause is for what may be asked later
    if now.state in ("complete", "partial") or (now.state == "new" and idle):
        state = dataset.state() if now.state == "new" else now.state
        why = f"it is {state}, there is nothing to {what}"
        raise dataset.refused(why, f"see 'nodeagent dataset show {dataset.name}'")
