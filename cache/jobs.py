"""Jobs: what copies, verifies and withdraws files. One job at a time runs on the node.

The scheduler runs one job at a time, verifies before fills, then by priority and name. So limits
hold for the whole node, and a training job that waits gets one whole dataset instead of a little of
all of them.

A job runs one or more passes. A pass is a coordinator process (``cache.fill.coordinator``): it gets
a task and reports its progress, which is shown with the dataset. A pass without progress is killed
and tried again later, because its source or the disk hangs; another dataset gets its turn.

Invariants: the outcome of a job is in generation.json before ``Dataset.job`` is None again. Nothing
is filled while the quarantine list of a generation has files.
"""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import structlog

import kit.child
import kit.errors
import kit.line_worker
from cache.dataset import Dataset, Figures, Verification
from cache.fill import protocol
from cache.store import generations
from cache.view import Stage
from linux import mountinfo

log = structlog.get_logger("job")

# A pass that neither lists, copies nor commits for this long hangs on its source.
STALL_SECONDS = 60.0
# A commit waits for all dirty data on the SSD, also for that of other programs.
SYNC_SECONDS = 600.0
# For a cancelled pass to commit what is staged.
CANCEL_SECONDS = 8.0
# Entries that could not be copied are tried again after this long.
PARTIAL_SECONDS = 900.0
LIST_SECONDS = 30.0  # to look for the quarantine list
RETRY_SECONDS = 5.0  # after a job that could not start
# Training jobs read the same SSD: two readers find bad blocks soon enough.
VERIFY_WORKERS = 2
NOT_WITHDRAWN = "bad files could not be withdrawn"
_LONGEST_LINE = 1024 * 1024
_RATE_SECONDS = 10.0  # rates are those of about the last ten seconds


class Rates:
    """Files and bytes per second, from samples of two counters."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, int, int]] = []

    def add(self, now: float, files: int, size: int) -> None:
        self._samples.append((now, files, size))
        while len(self._samples) > 2 and now - self._samples[0][0] > _RATE_SECONDS:
            self._samples.pop(0)

    def per_second(self) -> tuple[float, float]:
        if len(self._samples) < 2:
            return 0.0, 0.0
        (t0, f0, b0), (t1, f1, b1) = self._samples[0], self._samples[-1]
        return ((f1 - f0) / (t1 - t0), (b1 - b0) / (t1 - t0)) if t1 > t0 else (0.0, 0.0)


def eta(left_files: int, left_bytes: int, rates: tuple[float, float]) -> float | None:
    """Seconds left by the slower of files and bytes, None when it cannot be estimated."""
    files, size = rates
    if files <= 0 or (left_bytes > 0 and size <= 0):
        return None
    return max(left_files / files, left_bytes / size if left_bytes > 0 else 0.0)


class Pass:
    """One coordinator process; the ``job`` of its dataset while it runs."""

    def __init__(self, dataset: Dataset, kind: str) -> None:
        self.kind = kind
        self.phase = ""
        self._dataset = dataset
        self._worker = kit.line_worker.Worker(
            f"cache.fill.{kind}:main",
            protocol.Report,
            about=f"{kind} of dataset {dataset.name}",
            largest=_LONGEST_LINE,
        )
        self._rates = Rates()
        self._last: protocol.Progress | None = None
        self._cancelled = False
        self._moved = asyncio.get_running_loop().time()  # when it last made progress
        self._patience = asyncio.timeout(None)
        self._late = ""  # why it is killed
        self._ended = asyncio.Event()

    async def run(self, task: protocol.Task) -> protocol.End:
        """To its end, which is "failed" for one that was killed or died. OSError at its start."""
        log.info("pass started", dataset=self._dataset.name, kind=self.kind)
        try:
            async with (
                self._patience,
                contextlib.aclosing(self._worker.listen(task, SYNC_SECONDS)) as reports,
            ):
                self._wait_until(self._moved, STALL_SECONDS)
                async for report in reports:
                    if report.end is not None:
                        return report.end
                    if self._cancelled:  # perhaps before there was a process to tell
                        await self._worker.send(protocol.Command(cancel=True))
                    self._heard(report)
        except TimeoutError:
            log.warning("pass is killed", dataset=self._dataset.name, why=self._late)
            return protocol.End("failed", self._late)
        except kit.line_worker.ChildError:
            pass
        finally:
            self._ended.set()
        return protocol.End("failed", "the pass ended unexpectedly")

    def _wait_until(self, since: float, seconds: float) -> None:
        self._late = f"no progress for {seconds:g}s: the source or the disk hangs"
        self._patience.reschedule(since + seconds)

    def _heard(self, report: protocol.Report) -> None:
        dataset = self._dataset
        if report.progress is not None:
            self._progressed(report.progress)
        if report.skeleton:
            dataset.figures = dataclasses.replace(dataset.figures, estimated=False)
            if not dataset.generation.skeleton:
                # It becomes durable with the next change; a restart before that scans again.
                dataset.generation = dataclasses.replace(dataset.generation, skeleton=True)
            dataset.wake()
        if report.note:
            log.info("pass reports", dataset=dataset.name, text=report.note)

    def _progressed(self, now: protocol.Progress) -> None:
        last, self._last = self._last, now
        if last is None or _signs_of_progress(now) != _signs_of_progress(last):
            self._moved = asyncio.get_running_loop().time()
        if not self._cancelled:
            self._wait_until(self._moved, SYNC_SECONDS if now.syncing else STALL_SECONDS)
        self.phase = now.phase
        self._rates.add(time.monotonic(), now.copied_files, now.copied_bytes)
        dataset = self._dataset
        estimated = dataset.figures.estimated
        shown = Figures(**now.counts.counts(), used=now.used, estimated=estimated)
        known = dataset.reached if estimated else None
        dataset.figures = shown if known is None else shown.at_least(known)
        if now.commits != (last.commits if last is not None else 0):
            dataset.want_refresh()

    def rates(self) -> tuple[float, float]:
        return self._rates.per_second()

    def eta(self) -> float | None:
        shown = self._dataset.figures
        return eta(shown.files - shown.done_files, shown.bytes - shown.done_bytes, self.rates())

    async def set_limits(self, limits: protocol.Limits) -> None:
        await self._worker.send(protocol.Command(limits=limits))

    async def hint(self, paths: list[str]) -> None:
        if self.kind == "fill":
            await self._worker.send(protocol.Command(hints=paths))

    async def cancel(self) -> None:
        self._cancelled = True
        self._late = f"it did not end within {CANCEL_SECONDS:g}s of its cancel"
        with contextlib.suppress(RuntimeError):  # it has ended
            self._patience.reschedule(asyncio.get_running_loop().time() + CANCEL_SECONDS)
        await self._worker.send(protocol.Command(cancel=True))
        await self._ended.wait()


def _signs_of_progress(progress: protocol.Progress) -> protocol.Progress:
    """What changes only when the pass works."""
    counts = dataclasses.replace(progress.counts, failed=0, skipped=0)
    return dataclasses.replace(progress, counts=counts, phase="", used=0, syncing=False)


class Jobs:
    """The jobs of the node: what operators ask for, and whose turn it is."""

    def __init__(self, datasets: Mapping[str, Dataset], foreign: Callable[[], int]) -> None:
        """``foreign``: SSD bytes of the store that belong to no dataset of the settings."""
        self._datasets = datasets
        self._foreign = foreign
        self._turn = asyncio.Event()
        self._active: tuple[Dataset, Pass] | None = None

    def wake(self) -> None:
        """Something may be queued."""
        self._turn.set()

    # --- requests of operators

    async def warm(self, dataset: Dataset) -> None:
        """Fill, continue, or try again what failed. A complete dataset stays as it is."""
        dataset.put_back()
        async with dataset.lock:
            if (state := dataset.generation.state) != "complete":
                state = "filling" if state == "partial" else state
                await dataset.change(state=state, wanted=True, held="", why="")
        dataset.retry_now()

    async def pause(self, dataset: Dataset) -> None:
        """Stop filling; other datasets get their turn. ``resume`` continues."""
        _refuse_unless_filling(dataset, "pause")
        await self._hold(dataset, held="paused")

    async def resume(self, dataset: Dataset) -> None:
        if not dataset.generation.held:
            raise _refused(dataset, "it is not paused", "nothing to do")
        await self.warm(dataset)

    async def cancel(self, dataset: Dataset) -> None:
        """Stop filling or verifying. What is stored stays and serves."""
        if dataset.job is not None and dataset.job.kind == "verify":
            await dataset.job.cancel()
            return
        _refuse_unless_filling(dataset, "cancel")
        await self._hold(dataset, held="cancelled", wanted=False)

    async def _hold(self, dataset: Dataset, **changes: Any) -> None:
        async with dataset.lock:
            await dataset.change(**changes)
        dataset.fill_queued = False
        await dataset.stop()

    async def verify(self, dataset: Dataset, *, source: bool) -> None:
        """Queue a verify; ``Dataset.verification`` shows its result."""
        before = dataset.verification
        if dataset.job is not None or before.state == "running":
            kind = dataset.job.kind if dataset.job is not None else "verify"
            raise _refused(dataset, f"a {kind} is running", "wait for it or cancel it")
        if dataset.generation.state not in ("complete", "partial"):
            why = f"it is {dataset.state()}, nothing is finished yet"
            raise _refused(dataset, why, "warm it first")
        # Queued before the source is reached: otherwise a complete dataset would release it.
        dataset.verification = queued = Verification("queued", source)
        try:
            async with dataset.lock:
                if source and dataset.reached is None and not dataset.removed:
                    await dataset.reach()
        except BaseException:
            if dataset.verification is queued:  # it has not begun meanwhile
                dataset.verification = before
            dataset.wake()  # releases what was mounted
            raise
        self.wake()

    # --- the scheduler

    async def follow(self) -> None:
        """Runs until it is cancelled."""
        while True:
            self._turn.clear()
            dataset = self._next()
            if dataset is None:
                await self._turn.wait()
                continue
            try:
                if dataset.verification.queued:
                    await self._verify(dataset)
                else:
                    await self._fill(dataset)
            except (kit.errors.AgentError, OSError, RuntimeError, ValueError) as error:
                log.error("job could not run", dataset=dataset.name, why=str(error))
                if dataset.verification.state == "running":
                    dataset.verification = Verification("failed", why=str(error))
                dataset.fill_queued = False
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(RETRY_SECONDS):
                        await self._turn.wait()

    def _next(self) -> Dataset | None:
        waiting = [
            each
            for each in self._datasets.values()
            if (each.fill_queued or each.verification.queued) and not each.removed
        ]
        return min(waiting, key=_turn, default=None)

    async def limits_changed(self) -> None:
        if self._active is not None:
            dataset, running = self._active
            await running.set_limits(self._limits(dataset, running.kind))

    def _limits(self, dataset: Dataset, kind: str) -> protocol.Limits:
        fill = dataset.cache.fill
        others = sum(each.used() for each in self._datasets.values() if each is not dataset)
        # The limits of the settings are for reads from sources.
        only_store = kind == "verify" and not dataset.verification.source
        return protocol.Limits(
            workers=VERIFY_WORKERS if only_store else fill.workers,
            bytes_per_second=0 if only_store else fill.bytes_per_second,
            files_per_second=0 if only_store else fill.files_per_second,
            budget=dataset.cache.budget,
            reserve=dataset.cache.reserve,
            others=others + self._foreign(),
        )

    def _task(self, dataset: Dataset, kind: str) -> dict[str, Any]:
        """The fields of every task. Without a source, the tree stands for it."""
        reached = dataset.reached
        return {
            "generation": dataset.folder,
            "source": reached.root if reached is not None else dataset.tree,
            "stamp": reached.stamp if reached is not None else "",
            "immutable": dataset.source.immutable,
            "limits": self._limits(dataset, kind),
        }

    async def _run(self, dataset: Dataset, kind: str, task: protocol.Task) -> protocol.End:
        dataset.job = running = Pass(dataset, kind)
        self._active = dataset, running
        try:
            return await running.run(task)
        finally:
            self._active = None

    # --- fill

    async def _fill(self, dataset: Dataset) -> None:
        async with dataset.lock:
            # It stays queued until it runs, or a second fill would be requested.
            reached = dataset.reached
            held = dataset.generation.held or dataset.removed
            if reached is None or held or not dataset.fill_queued:
                dataset.fill_queued = False
                return  # held, removed or lost its source since it was queued
            if not await self._withdraw_rest(dataset):
                dataset.fill_queued = False
                return
            await dataset.change(state="filling", why="", left_files=0, left_bytes=0)
        task = protocol.FillTask(
            **self._task(dataset, "fill"), native=reached.native,
            mounted=_mounted_below(reached.root), used=dataset.generation.used,
        )  # fmt: skip
        dataset.fill_queued = False
        try:
            end = await self._run(dataset, "fill", task)
            await self._fill_ended(dataset, end)
        finally:
            dataset.job = None
            dataset.wake()

    async def _fill_ended(self, dataset: Dataset, end: protocol.End) -> None:
        log.info("fill ended", dataset=dataset.name, result=end.result, why=end.why)
        changes: dict[str, Any] = {"why": end.why}
        if end.fill is not None:
            changes |= dataset.figures.counts() | dataclasses.asdict(end.fill)
        match end.result:
            case "complete":
                changes |= {"state": "complete", "completed": time.time(), "wanted": False}
                dataset.fill_backoff.reset()
            case "partial":
                changes |= {"state": "partial", "wanted": False}
                dataset.fill_later(PARTIAL_SECONDS)
                dataset.fill_backoff.reset()
            case "failed":
                dataset.fill_later()
                dataset.suspect_source()
        async with dataset.lock:
            await dataset.change(**changes)
            dataset.want_refresh()

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
        task = protocol.VerifyTask(
            **self._task(dataset, "verify"), against_source=against_source,
            reachable=dataset.reached is not None,
        )  # fmt: skip
        try:
            end = await self._run(dataset, "verify", task)
        finally:
            dataset.job = None
        found = end.verify or protocol.VerifyEnd()
        result = {**dataclasses.asdict(found), "withdrawn": 0}
        del result["unreplaced"]
        why = end.why
        if found.unreplaced:
            result["withdrawn"], failure = await self._withdraw(dataset, found.unreplaced)
            why = failure or why
        log.info("verify ended", dataset=dataset.name, result=end.result, why=why, **result)
        dataset.show_kept_figures()
        dataset.verification = Verification(end.result, against_source, why, result, time.time())
        dataset.want_refresh()

    async def _withdraw(self, dataset: Dataset, bad: int) -> tuple[int, str]:
        """Withdraw bad files, so that readers get the source's. How many, and why not all."""
        async with dataset.lock:
            if dataset.reached is None:
                return 0, "bad files stay until the source answers: it has the only copy"
            # First of all, so that the successor of a killed agent continues.
            await dataset.change(
                state="partial", failed=bad, why=f"{bad} bad files could not be replaced"
            )
            withdrawn, why = await self._take_out(dataset)
            if why:
                await self._not_withdrawn(dataset, why)
                return withdrawn, f"{NOT_WITHDRAWN}: {why}"
            dataset.fill_later(PARTIAL_SECONDS)
            return withdrawn, ""

    async def _withdraw_rest(self, dataset: Dataset) -> bool:
        """Finish a withdrawal that failed or was cut short. False when bad files are left.

        The caller has the lock. A fill would take the bad files for good ones.
        """
        listed = generations.has_quarantined
        if not await kit.child.call(listed, dataset.folder, deadline=LIST_SECONDS):
            return True
        log.info("bad files of an earlier verify are withdrawn first", dataset=dataset.name)
        _, why = await self._take_out(dataset)
        if why:
            await self._not_withdrawn(dataset, why, state="partial")
        return not why

    async def _not_withdrawn(self, dataset: Dataset, why: str, **changes: Any) -> None:
        await dataset.change(why=f"{NOT_WITHDRAWN}: {why}", **changes)
        dataset.fill_later()

    async def _take_out(self, dataset: Dataset) -> tuple[int, str]:
        """Both passes of a withdrawal: how many files are out, and why not all ('' if all).

        No file is deleted unless every mark above it is removed and the view knows that.
        """
        end = await self._withdraw_pass(dataset, "marks")
        if end.result != "withdrawn":
            return 0, end.why or end.result
        shows_store = dataset.stage in (Stage.OVERLAY, Stage.STORE)
        if shows_store:
            # A bind of the store has no source to fall back to, and an overlay may have looked up
            # directories with their marks: both are replaced by a new overlay.
            await dataset.publish(Stage.OVERLAY)
        end = await self._withdraw_pass(dataset, "files")
        if shows_store:
            await dataset.refresh()
        return end.withdrawn, "" if end.result == "withdrawn" else end.why or end.result

    async def _withdraw_pass(self, dataset: Dataset, part: str) -> protocol.End:
        assert dataset.reached is not None
        task = protocol.WithdrawTask(**self._task(dataset, "withdraw"), part=part)
        try:
            return await self._run(dataset, "withdraw", task)
        finally:
            dataset.job = None


def _turn(dataset: Dataset) -> tuple[bool, int, str]:
    return not dataset.verification.queued, -dataset.settings.priority, dataset.name


def _refused(dataset: Dataset, cause: str, remedy: str) -> kit.errors.RefusedError:
    return kit.errors.RefusedError(f"dataset {dataset.name}", cause, remedy)


def _refuse_unless_filling(dataset: Dataset, what: str) -> None:
    if (state := dataset.generation.state) in ("complete", "partial"):
        why = f"it is {state}, there is nothing to {what}"
        raise _refused(dataset, why, "see 'nodeagent dataset show'")


def _mounted_below(root: str) -> list[str]:
    """Mount points inside the source, relative to it: what they show is not part of the dataset."""
    return [
        mount.target[len(root) + 1 :]
        for mount in mountinfo.read()
        if mount.target.startswith(root + "/")
    ]
