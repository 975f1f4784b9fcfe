"""The slots: who has them, who waits for them, and which fill stops for another one.

The jobs have one, evictions another (``cache.work.evictor``); ``cache.work.turns`` decides. A fill
that is to stop is cancelled as by a pause: what it copied is committed. It is queued again at once,
so it goes on where it was when its turn comes, which may be behind others that outrank it too.
"""

import asyncio
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence

import structlog

from cache.dataset.dataset import Dataset
from cache.fill import protocol
from cache.space.at_work import EVICTIONS, JOBS, Work
from cache.work import turns
from cache.work.running import FILL, UPDATE, Pass
from cache.work.turns import Claim, Kind

log = structlog.get_logger("job")

FILLS = (FILL, UPDATE)
LOOK_SECONDS = 0.05  # after something was queued: at a start a thousand datasets may be


class Slot:
    """One job runs at a time, and beside it one eviction."""

    def __init__(
        self,
        datasets: Mapping[str, Dataset],
        running: Sequence[tuple[Dataset, Pass]],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """``running``: the passes that run, as they come and go; at most one of them fills."""
        self._datasets, self._running, self._now = datasets, running, now
        self.work = Work()
        self._holder = ""  # the last to whom the slot was given, while somebody wants it
        self._winner = ""  # for whom the last fill stopped, until the slot is given again
        self._not_before: dict[str, float] = {}  # monotonic; only of datasets that stopped one
        self._urgent: set[str] = set()  # an operator wants them before all others, once
        self._soon: asyncio.TimerHandle | None = None
        self._later: asyncio.TimerHandle | None = None
        self._stopping: asyncio.Task[None] | None = None

    def next(self) -> Dataset | None:
        """The one whose job is to run now."""
        chosen = turns.first(self._every_claim(), self.work.of(EVICTIONS))
        self._winner, self._holder = "", chosen or ""
        return None if chosen is None else self._datasets[chosen]

    def next_eviction(self) -> Dataset | None:
        """The one of which files are to be taken out now."""
        chosen = turns.first_eviction(self._every_claim(), self.work.of(JOBS))
        return None if chosen is None else self._datasets[chosen]

    def look_soon(self) -> None:
        """Something may be queued."""
        if self._soon is None and self._fill() is not None:
            self._soon = asyncio.get_running_loop().call_later(LOOK_SECONDS, self.look)

    def _fill(self) -> tuple[Dataset, Pass] | None:
        return next(((d, job) for d, job in self._running if job.kind in FILLS), None)

    def look(self) -> None:
        """Have the running fill stop if somebody that waits outranks it. Not a second time before
        it has ended."""
        for timer in (self._soon, self._later):
            if timer is not None:
                timer.cancel()
        self._soon = self._later = None
        if (found := self._fill()) is None or found[1].cancelled:
            return
        dataset, job = found
        waiting = self._every_claim(but=dataset)
        urgent = dataset.name in self._urgent
        running = Claim(dataset.name, dataset.settings.priority, now=urgent)
        verdict = turns.stops_for(running, waiting, self._now(), self.work.of(EVICTIONS))
        if verdict.look_at is not None:
            pause = verdict.look_at - self._now()
            self._later = asyncio.get_running_loop().call_later(pause, self.look)
        if verdict.name is None:
            return
        self._winner = verdict.name
        if verdict.kind is Kind.FILL:
            known = {name: at for name, at in self._not_before.items() if name in self._datasets}
            self._not_before = known | {verdict.name: self._now() + turns.FAILED_SECONDS}
        log.info("fill stops for another dataset", dataset=dataset.name, to=verdict.name)
        self._stopping = asyncio.create_task(job.give_way())

    def asked(self, dataset: Dataset, *, now: bool = False) -> None:
        """An operator wants it: what it stopped before does not count.

        ``now``: before all others, until all that has room is there, or it is paused or removed.
        """
        self._not_before.pop(dataset.name, None)
        if now and (dataset.generation.state != "complete" or dataset.next is not None):
            self._urgent.add(dataset.name)
        self.look_soon()  # it may be queued already

    def rests(self, dataset: Dataset) -> None:
        """There is no more to fill for now, or an operator wants it no more."""
        self._urgent.discard(dataset.name)

    def ended_well(self, dataset: Dataset) -> None:
        self._urgent.discard(dataset.name)
        if dataset.name in self._not_before:
            self._not_before[dataset.name] = self._now() + turns.AGAIN_SECONDS

    def ahead(self, name: str) -> str:
        """For whom a dataset waits that is queued, and its priority; '' when it is next."""
        for other in (self._winner, self._holder):
            dataset = self._datasets.get(other)
            if dataset is None or other == name:
                continue
            if dataset.job is not None or _waits(dataset):  # else its turn is over
                asked = {"verify": ", its verify", "evict": ", its eviction"}
                kind = dataset.job.kind if dataset.job is not None else ""
                more = asked.get(kind, ", wanted now" if other in self._urgent else "")
                return f"{other} (priority {dataset.settings.priority}{more})"
        return ""

    def _waiting(self) -> list[Dataset]:
        gone = {name for name in self._urgent
                if name not in self._datasets or self._datasets[name].removed}  # fmt: skip
        self._urgent -= gone
        return [each for each in self._datasets.values() if _waits(each) and not each.removed]

    def _every_claim(self, *, but: Dataset | None = None) -> list[Claim]:
        others = [each for each in self._waiting() if each is not but]
        return [claim for each in others for claim in self._claims(each)]

    def _claims(self, dataset: Dataset) -> list[Claim]:
        """For what it waits. A verify of its own does not keep its fill from its turn."""
        one = Claim(dataset.name, dataset.settings.priority)
        found: list[Claim] = []
        # One that was cut short is finished before anything is filled.
        begun = dataset.current.queued and dataset.generation.evicting
        if dataset.eviction.queued or begun:
            found.append(dataclasses.replace(one, kind=Kind.EVICTION))
        if dataset.verification.queued:
            found.append(dataclasses.replace(one, kind=Kind.VERIFY))
        if (target := dataset.queued()) is None:
            return found
        retry = target.record.state == "partial"
        fill = dataclasses.replace(
            one, began=dataset.gave_way, retry=retry,
            now=dataset.name in self._urgent and not retry,
            not_before=self._not_before.get(dataset.name, 0.0),
        )  # fmt: skip
        return [*found, fill]


def outcome(dataset: Dataset, job: Pass, end: protocol.End) -> protocol.End:
    """How a pass ended. One that had to be killed to give way has not failed."""
    if not job.gives_way or end.result not in ("cancelled", "failed"):
        return end
    dataset.gave_way = True
    return dataclasses.replace(end, result="cancelled", why="")


def _waits(dataset: Dataset) -> bool:
    asked = dataset.verification.queued or dataset.eviction.queued
    return asked or dataset.queued() is not None
