"""Jobs: requests for a verify, passes that stall or do not end, rates."""

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kit.errors
import kit.line_worker
from cache import jobs
from cache.dataset import Dataset, Verification
from cache.fill import protocol
from cache.jobs import Jobs, Pass
from cache.settings import CacheSettings, DatasetSettings, DirSource
from cache.sources import base
from cache.store import index
from tests.cache import passes
from tests.testbed.waiting import until_async


class Source:
    """A source that is held up in ``reach`` until ``go`` is set, and counts its callers."""

    immutable = False
    identity: dict[str, Any] = {"kind": "slow"}  # noqa: RUF012

    def __init__(self, *, answers: bool = True) -> None:
        self.answers = answers
        self.reaching = self.most = self.times = 0
        self.entered, self.go = asyncio.Event(), asyncio.Event()

    async def reach(self, deadline: float) -> base.Reached:
        self.reaching += 1
        self.times += 1
        self.most = max(self.most, self.reaching)
        self.entered.set()
        await self.go.wait()
        self.reaching -= 1
        if not self.answers:
            raise kit.errors.SourceError("the source", "it does not answer", "wait")
        return base.Reached("/nowhere", "1:1", "1:1", "slow")

    async def release(self) -> None:
        assert self.reaching == 0, "released while it is being reached"


def dataset(folder: Path, source: base.Source, state: str = "complete") -> Dataset:
    settings = DatasetSettings(
        name="a", freshness="frozen", source=DirSource(kind="dir", path=folder / "source")
    )
    cache = CacheSettings(store=folder / "store", views=folder / "views")
    made = Dataset(settings, cache, folder / "state", lambda: None)
    made.source = source
    made.generation = dataclasses.replace(made.generation, state=state)
    return made


# --- requests


async def test_verify_reaches_the_source_once_and_keeps_it(tmp_path: Path) -> None:
    source = Source()
    shown = dataset(tmp_path, source)
    scheduler = Jobs({"a": shown}, lambda: 0)
    asked = [asyncio.create_task(scheduler.verify(shown, source=True)) for _ in range(2)]
    await source.entered.wait()
    assert shown.facts().source_needed
    assert shown.lock.locked()
    assert not scheduler._turn.is_set()
    source.go.set()
    await asyncio.gather(*asked)
    assert shown.facts().source_needed
    assert shown.verification.queued
    assert scheduler._turn.is_set()
    assert (source.most, source.times) == (1, 1)


async def test_verify_of_an_unreachable_source_is_not_queued(tmp_path: Path) -> None:
    source = Source(answers=False)
    source.go.set()
    shown = dataset(tmp_path, source)
    with pytest.raises(kit.errors.SourceError):
        await Jobs({"a": shown}, lambda: 0).verify(shown, source=True)
    assert shown.verification == Verification()
    assert not shown.facts().source_needed


async def test_verify_fails_when_its_source_is_gone_at_its_turn(tmp_path: Path) -> None:
    source = Source(answers=False)
    source.go.set()
    shown = dataset(tmp_path, source)
    shown.verification = Verification("queued", source=True)
    await Jobs({"a": shown}, lambda: 0)._verify(shown)
    assert shown.verification.state == "failed"
    assert "does not answer" in shown.verification.why


async def test_next_prefers_verify_then_priority_then_name(tmp_path: Path) -> None:
    known = {}
    for name, priority in (("a", 0), ("b", 5), ("c", 5), ("d", -1)):
        made = dataset(tmp_path, Source())
        made.settings = made.settings.model_copy(update={"name": name, "priority": priority})
        made.fill_queued = True
        known[name] = made
    known["d"].verification = Verification("queued")
    scheduler = Jobs(known, lambda: 0)
    order = []
    while (following := scheduler._next()) is not None:
        order.append(following.name)
        following.fill_queued = False
        following.verification = Verification()
    assert order == ["d", "b", "c", "a"]


# --- passes


def report_the_same_for_ever() -> None:
    """A coordinator that lives and gets nowhere; it ends for no command."""
    kit.line_worker.hear(protocol.FillTask)
    counts = index.Counts(10, 10, 1, 1)
    progress = protocol.Progress(
        phase="filling", counts=counts, sealed=0, copied_files=1, copied_bytes=1,
        beats=0, commits=0, used=7, syncing=False,
    )  # fmt: skip
    while True:
        kit.line_worker.say(protocol.Report(progress=progress))
        time.sleep(0.01)


@pytest.fixture
async def stuck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pass]:
    real = kit.line_worker.Worker

    def worker(_: str, *rest: Any, **more: Any) -> Any:
        return real(f"{__name__}:report_the_same_for_ever", *rest, **more)

    monkeypatch.setattr(kit.line_worker, "Worker", worker)
    made = Pass(dataset(tmp_path, Source()), "fill")
    yield made
    await made._worker.close()


def task(folder: Path) -> protocol.FillTask:
    return protocol.FillTask(
        generation=str(folder), source=str(folder), stamp="", immutable=False, limits=passes.LIMITS
    )


async def test_pass_without_progress_is_killed(
    tmp_path: Path, stuck: Pass, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = asyncio.create_task(stuck.run(task(tmp_path)))
    await until_async(lambda: stuck.phase, 30, "the first report")
    assert stuck._dataset.figures.done_files == 1
    assert stuck._dataset.figures.used == 7
    monkeypatch.setattr(jobs, "STALL_SECONDS", 0.5)
    end = await running
    assert end.result == "failed"
    assert end.why == "no progress for 0.5s: the source or the disk hangs"


async def test_cancelled_pass_that_does_not_end_is_killed(
    tmp_path: Path, stuck: Pass, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "CANCEL_SECONDS", 0.5)
    running = asyncio.create_task(stuck.run(task(tmp_path)))
    await asyncio.sleep(0)
    await stuck.cancel()
    end = await running
    assert (end.result, end.why) == ("failed", "it did not end within 0.5s of its cancel")


# --- rates


def test_eta_follows_the_slower_of_files_and_bytes() -> None:
    rates = jobs.Rates()
    assert jobs.eta(100, 100, rates.per_second()) is None
    rates.add(0.0, 0, 0)
    assert rates.per_second() == (0.0, 0.0)
    rates.add(10.0, 50, 1000)
    assert rates.per_second() == (5.0, 100.0)
    assert jobs.eta(50, 9000, rates.per_second()) == pytest.approx(90.0)
    assert jobs.eta(450, 0, rates.per_second()) == pytest.approx(90.0)


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(0, 50)), max_size=200))
def test_rates_keep_bounded_memory_and_are_never_negative(steps: list[tuple[float, int]]) -> None:
    rates, now, done = jobs.Rates(), 0.0, 0
    for wait, files in steps:
        now, done = now + wait, done + files
        rates.add(now, done, done * 10)
        assert all(rate >= 0 for rate in rates.per_second())
        left = jobs.eta(5, 5, rates.per_second())
        assert left is None or left >= 0
    assert all(now - at <= 20 for at, _, _ in rates._samples[1:])
