"""The scrub: verifies what is stored, beside the jobs, in a slot of its own.

It runs one pass at a time (``cache.fill.verify``), of the dataset that ``cache.work.scrub_order``
chooses. An ordinary one reads slowly and goes on where it was cut short. One that follows trouble
of the disk is as fast as the disk, and until it is over the view shows the source.

A job of the same dataset comes first: the scrub ends, its cursor stays. Bad files are replaced from
the source; what cannot be replaced is withdrawn at once and filled again.

Generations that are kept beside the current one have rounds of their own, with a cursor of their
own. One in which something is bad retires (``cache.dataset.leaving``).
"""

import asyncio
import dataclasses
import time
from collections.abc import Iterator, Mapping

import structlog

import kit.errors
import kit.pause
import kit.tasks
from cache.dataset import leaving
from cache.dataset.dataset import Dataset
from cache.dataset.figures import Scrub
from cache.dataset.generation import Generation
from cache.fill import protocol
from cache.space import at_work, tasks
from cache.store.soundness import Soundness
from cache.work import running, scrub_order
from cache.work.jobs import Jobs
from cache.work.scrub_order import Candidate, Choice

log = structlog.get_logger("scrub")

LOOK_SECONDS = 1.0  # for what a running scrub must end or slow down for
IDLE_SECONDS = 5.0
RETRY_SECONDS = (5.0, 600.0)  # after a scrub that failed


class ScrubPass(running.Pass):
    """A verify that leaves the dataset's figures alone. ``shown``: how far it is."""

    def __init__(self, dataset: Dataset, target: Generation, reason: scrub_order.Reason) -> None:
        super().__init__(dataset, "verify", target)
        self._read = 0  # bytes
        self.shown = Scrub("running", reason)

    def _show(self, now: protocol.Progress) -> None:
        self._dataset.scrubs.bytes += now.copied_bytes - self._read
        self._read, counts = now.copied_bytes, now.counts
        self.shown = dataclasses.replace(
            self.shown, files=counts.files, bytes=counts.bytes,
            checked_files=counts.done_files, checked_bytes=counts.done_bytes,
        )  # fmt: skip
        show(self._dataset, self.target, self.shown)


def show(dataset: Dataset, target: Generation, shown: Scrub) -> None:
    if target is dataset.current:
        dataset.scrub = shown
    else:
        target.scrub = shown


class Scrubber:
    """The slot."""

    def __init__(self, datasets: Mapping[str, Dataset], jobs: Jobs, soundness: Soundness) -> None:
        self._datasets = datasets
        self._jobs = jobs
        self._soundness = soundness
        self._wake = asyncio.Event()
        self._now: running.Pass | None = None
        self._busy: Dataset | None = None  # until all of its scrub is over
        self._free = asyncio.Event()
        self._free.set()
        self._failures: dict[str, kit.pause.Backoff] = {}
        self._not_before: dict[str, float] = {}  # monotonic; by what ``_key`` says

    def wake(self) -> None:
        self._wake.set()

    async def follow(self) -> None:
        """Runs until it is cancelled."""
        while True:
            self._wake.clear()
            chosen = self._choose()
            if chosen is None:
                await kit.tasks.until(self._wake, IDLE_SECONDS)
                continue
            dataset = self._datasets[chosen.name]
            self._free.clear()
            self._busy = dataset
            try:
                await self._scrub(dataset, _target(dataset, chosen), chosen)
            except (kit.errors.AgentError, OSError, RuntimeError, ValueError) as error:
                self._failed(dataset, chosen, str(error))
            finally:
                self._busy = None
                self._free.set()
                dataset.scrubbing = None
                dataset.wake()
                self._jobs.wake()

    async def clear_way(self, dataset: Dataset) -> None:
        """End the scrub of this dataset, for a job that is about to run."""
        while self._busy is dataset:  # also while it takes out what it has found
            if self._now is not None:
                await self._now.cancel()
            await self._free.wait()

    # --- which

    def _choose(self) -> Choice | None:
        scrub = [each.cache.scrub for each in self._datasets.values()]
        if not scrub:
            return None
        found = [
            made
            for each in self._datasets.values()
            if self._free_now(each)
            for made in self._candidates(each)
            if time.monotonic() >= self._not_before.get(_key(each.name, made.earlier), 0.0)
        ]
        return scrub_order.choose(found, scrub[0], time.time())

    def _free_now(self, dataset: Dataset) -> bool:
        """No job works on it, and what is stored may be read."""
        busy = dataset.name in self._jobs.slot.work.of(at_work.JOBS, at_work.EVICTIONS)
        asked = dataset.current.queued or dataset.verification.pending
        usable = dataset.no_store is None and dataset.newer is None and not dataset.removed
        return usable and not (asked or busy or dataset.job is not None)

    def _may(self, dataset: Dataset) -> bool:
        """The current generation may be verified now."""
        state = dataset.generation.state
        stored = state in ("complete", "partial") or (dataset.suspect and state == "filling")
        # Bad files on the list go first; of a suspect one the view shows nothing of the store.
        stored = stored and (dataset.suspect or not dataset.generation.damaged)
        later = time.monotonic() < self._not_before.get(_key(dataset.name, ""), 0.0)
        return self._free_now(dataset) and stored and not later

    def _candidates(self, dataset: Dataset) -> Iterator[Candidate]:
        if self._may(dataset):
            yield self._candidate(dataset, dataset.current)
        for each in dataset.earlier:
            if not each.source.block:
                yield dataclasses.replace(self._candidate(dataset, each), earlier=each.id)

    def _candidate(self, dataset: Dataset, each: Generation) -> Candidate:
        record = each.record
        return Candidate(
            dataset.name, dataset.settings.priority, self._soundness.suspects(record),
            crashed=record.crashes < self._soundness.kept.crashes,
            last=max(record.scrubbed, record.completed, record.created),
        )  # fmt: skip

    def _ahead(
        self, dataset: Dataset, target: Generation, reason: scrub_order.Reason
    ) -> list[Generation]:
        """Those that have read, or will read, what they share with ``target``: in the order of
        their turns."""
        every = [dataset.current, *dataset.earlier]
        before = every[: every.index(target)]
        if reason == scrub_order.SUSPECT:
            return [each for each in before if not self._soundness.suspects(each.record)]
        crashes = self._soundness.kept.crashes if reason == scrub_order.CRASH else 0
        stored = [each for each in before if each.record.state in ("complete", "partial")]
        return [each for each in stored if each.record.crashes >= crashes]

    # --- one pass

    async def _scrub(self, dataset: Dataset, target: Generation, chosen: Choice) -> None:
        troubles = self._soundness.troubles
        cursor = f"{chosen.reason}-{target.record.scrubbed:.0f}"
        if chosen.reason == scrub_order.SUSPECT:
            cursor = f"{chosen.reason}-{troubles}"
        earlier = target is not dataset.current
        before = target.scrub if earlier else dataset.scrub
        scrub = ScrubPass(dataset, target, chosen.reason)
        pace = scrub_order.pace(chosen, dataset.cache.scrub, filling=self._jobs.filling())
        limits = self._jobs.scrub_limits(dataset, pace)
        if earlier:
            target.reached = None  # its source is asked when something is bad
        ahead = [each.folder for each in self._ahead(dataset, target, chosen.reason)]
        task = tasks.verify(dataset, target, limits, scrub=cursor, ahead=ahead)
        # No await since it was chosen: no job has begun meanwhile.
        show(dataset, target, scrub.shown)
        end = await self._run(dataset, scrub, task, chosen, pace)
        found = end.verify or protocol.VerifyEnd()
        known = before.bad if before.state in ("cancelled", "failed") else 0
        dataset.scrubs.bad += max(0, found.bad - known)
        dataset.scrubs.bad += await leaving.found_also(dataset, found)
        current, also = end, found.also.get(dataset.folder, 0)
        if earlier:  # what it found of the current one by the way
            current = protocol.End("bad", verify=protocol.VerifyEnd(bad=also, unreplaced=also))
        withdrawn, why = await self._jobs.withdrawals.take_out_bad(dataset, current)
        if current.verify is not None and current.verify.unreplaced and not why:
            dataset.due.fill_soon()
        if earlier:
            dataset.scrubs.bad += also
            if found.unreplaced:
                await leaving.retire(dataset, target, found.unreplaced)
        scrub.shown = dataclasses.replace(
            scrub.shown, state=end.result, why=why or end.why, bad=found.bad,
            replaced=found.replaced, withdrawn=withdrawn,
        )  # fmt: skip
        show(dataset, target, scrub.shown)
        if not why:
            await self._jobs.settle(dataset, end, troubles, target)
        log.info(
            "scrub ended", dataset=dataset.name, generation=target.id, reason=chosen.reason,
            result=end.result, why=why or end.why, checked_files=found.checked_files,
            shared_files=found.shared_files, bad=found.bad,
        )  # fmt: skip
        if end.result == "failed" or (why and end.result != "cancelled"):
            self._later(chosen)
        elif end.result != "cancelled":
            self._failures.pop(_key(chosen.name, chosen.earlier), None)
        dataset.want_refresh()

    async def _run(
        self, dataset: Dataset, scrub: running.Pass, task: protocol.AnyTask, chosen: Choice,
        pace: scrub_order.Pace,
    ) -> protocol.End:  # fmt: skip
        """Run a pass in the slot. Up to the first await here no job has begun meanwhile."""
        dataset.scrubbing, self._now = scrub, scrub
        minding = asyncio.create_task(self._mind(dataset, scrub, chosen, pace))
        try:
            return await scrub.run(task)
        finally:
            minding.cancel()
            self._now = None

    async def _mind(
        self, dataset: Dataset, scrub: running.Pass, chosen: Choice, pace: scrub_order.Pace
    ) -> None:
        """End the pass when it must not go on, and keep its pace."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            # A verify of a suspect store finds the bad block that is the trouble: it goes on.
            unusable = dataset.no_store is not None and chosen.reason != scrub_order.SUSPECT
            first = chosen.reason == scrub_order.SUSPECT and not chosen.earlier
            # Does a view wait for a verify?
            datasets = self._datasets.values()
            other = not first and any(each.suspect and self._may(each) for each in datasets)
            begins_anew = dataset.generation.state in ("new", "stale") and not chosen.earlier
            if unusable or other or begins_anew:
                await scrub.cancel()
                return
            now = scrub_order.pace(chosen, dataset.cache.scrub, filling=self._jobs.filling())
            if now != pace:
                pace = now
                await scrub.set_limits(self._jobs.scrub_limits(dataset, pace))

    def _failed(self, dataset: Dataset, chosen: Choice, why: str) -> None:
        log.warning("scrub could not run", dataset=dataset.name, why=why)
        target = _target(dataset, chosen)
        show(dataset, target, Scrub("failed", chosen.reason, why))
        self._later(chosen)

    def _later(self, chosen: Choice) -> None:
        key = _key(chosen.name, chosen.earlier)
        pauses = self._failures.setdefault(key, kit.pause.Backoff(*RETRY_SECONDS))
        self._not_before[key] = time.monotonic() + pauses.next()


def _target(dataset: Dataset, chosen: Choice) -> Generation:
    """The chosen generation; the current one when that has gone."""
    return next((e for e in dataset.earlier if e.id == chosen.earlier), dataset.current)


def _key(name: str, earlier: str) -> str:
    return f"{name}/{earlier}"
