"""A running pass, as the agent sees it: a coordinator process (``cache.fill.coordinator``).

It gets a task and reports its progress, which is shown with the dataset. A pass without progress is
killed, because its source or the disk hangs.
"""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Sequence

import structlog

import kit.line_worker
from cache.dataset.dataset import Dataset
from cache.dataset.figures import Figures
from cache.dataset.generation import Generation
from cache.fill import protocol

# How fast a job works, and how long it will take.

MOST_POINTS = 60
_FIRST_STEP = 2.0  # seconds of a point, until the points are too many
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


class Trend:
    """The rate of a job from its beginning, in points that stand for equal times: at most
    MOST_POINTS, so that each stands for longer the longer the job takes."""

    def __init__(self) -> None:
        self._step = _FIRST_STEP
        self._points: list[float] = []
        self._last: tuple[float, int] | None = None

    def add(self, now: float, size: int) -> None:
        """``size``: bytes since the beginning."""
        if self._last is None:
            self._last = now, size
            return
        at, before = self._last
        steps = int((now - at) / self._step)
        if not steps:
            return
        # After a pause a point for each step of it, or the time would look shorter.
        self._points += [(size - before) / (now - at)] * min(steps, MOST_POINTS)
        self._last = now, size
        while len(self._points) > MOST_POINTS:
            pairs = (self._points[at : at + 2] for at in range(0, len(self._points), 2))
            self._points = [sum(pair) / len(pair) for pair in pairs]
            self._step *= 2

    def points(self) -> Sequence[float]:
        """Bytes per second, the oldest first."""
        return tuple(self._points)


def eta(left_files: int, left_bytes: int, rates: tuple[float, float]) -> float | None:
    """Seconds left by the slower of files and bytes, None when it cannot be estimated."""
    files, size = rates
    if files <= 0 or (left_bytes > 0 and size <= 0):
        return None
    return max(left_files / files, left_bytes / size if left_bytes > 0 else 0.0)


log = structlog.get_logger("job")

# A pass that neither lists, copies nor commits for this long hangs on its source.
STALL_SECONDS = 60.0
# A commit waits for all dirty data on the SSD, also for that of other programs.
SYNC_SECONDS = 600.0
# For a cancelled pass to commit what is staged.
CANCEL_SECONDS = 8.0
_LONGEST_LINE = 1024 * 1024
FILL, UPDATE = "fill", "update"  # of the generation that serves, of the next one


class Pass:
    """One coordinator process; the ``job`` of its dataset while it runs."""

    def __init__(self, dataset: Dataset, kind: str, target: Generation | None = None) -> None:
        """``target``: the generation that it works on; default: the current one."""
        self.target = target or dataset.current
        self.kind = kind
        self.phase: protocol.Phase = ""
        self._dataset = dataset
        block = self.target.source.block
        work = "fill" if kind == UPDATE else kind
        self._worker = kit.line_worker.LineWorker(
            f"cache.fill.blocks:{work}" if block else f"cache.fill.{work}:main",
            protocol.Report,
            about=f"{kind} of dataset {dataset.name}",
            largest=_LONGEST_LINE,
            forked=block,
        )
        self._rates = Rates()
        self._trend = Trend()
        self._last: protocol.Progress | None = None
        self.cancelled = False
        self.gives_way = False  # to another dataset, and goes on later
        self._moved = asyncio.get_running_loop().time()  # when it last made progress
        self._patience = asyncio.timeout(None)
        self._late = ""  # why it is killed
        self._ended = asyncio.Event()

    async def run(self, task: protocol.AnyTask) -> protocol.End:
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
                    if self.cancelled:  # perhaps before there was a process to tell
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
            target = self.target
            target.figures = dataclasses.replace(target.figures, estimated=False)
            if not target.record.skeleton:
                # It becomes durable with the next change; a restart before that scans again.
                target.record = dataclasses.replace(target.record, skeleton=True)
            dataset.wake()
        if report.note:
            log.info("pass reports", dataset=dataset.name, text=report.note)

    def _progressed(self, now: protocol.Progress) -> None:
        last, self._last = self._last, now
        if last is None or _signs_of_progress(now) != _signs_of_progress(last):
            self._moved = asyncio.get_running_loop().time()
        if not self.cancelled:
            self._wait_until(self._moved, SYNC_SECONDS if now.syncing else STALL_SECONDS)
        self.phase = now.phase
        self._rates.add(time.monotonic(), now.copied_files, now.copied_bytes)
        self._trend.add(time.monotonic(), now.copied_bytes)
        self._show(now)
        if self.kind != UPDATE and now.commits != (last.commits if last is not None else 0):
            self._dataset.want_refresh()

    def _show(self, now: protocol.Progress) -> None:
        target = self.target
        estimated = target.figures.estimated
        shown = Figures(
            **now.counts.counts(), used=now.used, shared=now.shared, estimated=estimated
        )
        known = target.reached if estimated else None
        target.figures = shown if known is None else shown.at_least(known)

    def rates(self) -> tuple[float, float]:
        return self._rates.per_second()

    def trend(self) -> Sequence[float]:
        return self._trend.points()

    def eta(self) -> float | None:
        shown = self.target.figures
        return eta(shown.files - shown.done_files, shown.bytes - shown.done_bytes, self.rates())

    async def set_limits(self, limits: protocol.Limits) -> None:
        await self._worker.send(protocol.Command(limits=limits))

    async def give_way(self) -> None:
        """As ``cancel``, for another dataset: it is no failure when it has to be killed."""
        self.gives_way = True
        await self.cancel()

    async def cancel(self) -> None:
        self.cancelled = True
        self._late = f"it did not end within {CANCEL_SECONDS:g}s of its cancel"
        with contextlib.suppress(RuntimeError):  # it has ended
            self._patience.reschedule(asyncio.get_running_loop().time() + CANCEL_SECONDS)
        await self._worker.send(protocol.Command(cancel=True))
        await self._ended.wait()


def _signs_of_progress(progress: protocol.Progress) -> protocol.Progress:
    """What changes only when the pass works."""
    counts = dataclasses.replace(progress.counts, failed=0, skipped=0)
    return dataclasses.replace(progress, counts=counts, phase="", used=0, syncing=False)
