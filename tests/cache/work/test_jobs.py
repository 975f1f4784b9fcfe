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

import kit.child
import kit.errors
import kit.line_worker
import kit.messages
from cache.dataset import kept
from cache.dataset.dataset import Dataset
from cache.dataset.figures import Verification
from cache.dataset.generation import Generation
from cache.fill import protocol
from cache.settings import CacheSettings, DatasetSettings, DirSource
from cache.sources import base
from cache.store import generations, manifest
from cache.work import evictor, running
from cache.work.jobs import Jobs
from cache.work.running import Pass, Rates, eta
from tests.cache import passes
from tests.testbed import waiting
from tests.testbed.waiting import until_async


class Source:
    """A source that is held up in ``reach`` until ``go`` is set, and counts its callers."""

    immutable = replaceable = False
    place = note = ""

    def take(self, source: Any) -> None:
        pass

    identity: dict[str, Any] = {"kind": "slow"}  # noqa: RUF012

    def __init__(self, *, answers: bool = True) -> None:
        self.answers = answers
        self.reaching = self.most = self.times = 0
        self.entered, self.go = asyncio.Event(), asyncio.Event()

    block = False

    async def reach(self, deadline: float, *, serve: bool = True) -> base.Reached:
        self.reaching += 1
        self.times += 1
        self.most = max(self.most, self.reaching)
        self.entered.set()
        await self.go.wait()
        self.reaching -= 1
        if not self.answers:
            raise kit.errors.SourceError("the source", "it does not answer", "wait")
        return base.Reached("/nowhere", "1:1", "1:1", "slow")

    async def snapshots(self, deadline: float) -> dict[str, float]:
        return {}

    async def release(self) -> None:
        assert self.reaching == 0, "released while it is being reached"


def dataset(
    folder: Path, source: base.Source, state: Any = "complete", freshness: Any = "frozen"
) -> Dataset:
    settings = DatasetSettings(
        name="a", freshness=freshness, source=DirSource(kind="dir", path=folder / "source")
    )
    cache = CacheSettings(store=folder / "store", views=folder / "views")
    made = Dataset(settings, cache, folder / "state", lambda: None)
    made.current.source = source
    made.generation = dataclasses.replace(made.generation, state=state)
    return made


# --- requests


@pytest.mark.parametrize(
    ("state", "warm", "wanted", "why"),
    [
        ("new", False, False, "it is waiting, there is nothing to cancel"),
        ("new", True, False, ""),  # it would fill by itself
        ("new", False, True, ""),
        ("filling", False, False, ""),
        ("complete", True, False, "it is complete, there is nothing to cancel"),
    ],
)
async def test_what_does_nothing_is_not_cancelled(
    state: str, warm: bool, wanted: bool, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unsaved(*_: Any, deadline: float) -> None:
        """Nothing is kept."""

    monkeypatch.setattr(kit.child, "call", unsaved)
    shown = dataset(tmp_path, Source(), state)
    shown.settings = shown.settings.model_copy(update={"warm": warm})
    shown.generation = dataclasses.replace(shown.generation, wanted=wanted)
    jobs = Jobs({"a": shown}, lambda: 0)
    if why:
        with pytest.raises(kit.errors.RefusedError, match=why):
            await jobs.cancel(shown)
    else:
        await jobs.cancel(shown)
    assert shown.generation.paused == ("" if why else "cancelled")


async def test_what_nobody_asked_for_can_be_paused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A 'warm' of the settings that comes later waits then."""

    async def unsaved(*_: Any, deadline: float) -> None:
        """Nothing is kept."""

    monkeypatch.setattr(kit.child, "call", unsaved)
    shown = dataset(tmp_path, Source(), "new")
    shown.settings = shown.settings.model_copy(update={"warm": False})
    await Jobs({"a": shown}, lambda: 0).pause(shown)
    assert shown.generation.paused == "paused"


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


async def test_block_image_is_not_said_to_be_compared_with_its_source(tmp_path: Path) -> None:
    source = Source()
    source.block = True
    shown = dataset(tmp_path, source)
    with pytest.raises(kit.errors.RefusedError, match="not with its source; verify it without"):
        await Jobs({"a": shown}, lambda: 0).verify(shown, source=True)
    await Jobs({"a": shown}, lambda: 0).verify(shown, source=False)
    assert shown.verification == Verification("queued")


async def test_verify_fails_when_its_source_is_gone_at_its_turn(tmp_path: Path) -> None:
    source = Source(answers=False)
    source.go.set()
    shown = dataset(tmp_path, source)
    shown.verification = Verification("queued", source=True)
    await Jobs({"a": shown}, lambda: 0)._verify(shown)
    assert shown.verification.state == "failed"
    assert "does not answer" in shown.verification.why


async def test_a_fill_that_may_not_run_wakes_its_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source refuses root now: until the view shows it alone, jobs lose files."""
    shown = dataset(tmp_path, Source(), "partial")
    shown.current.queued = True
    scheduler = Jobs({"a": shown}, lambda: 0)

    async def may_fill(*_: object) -> bool:
        return False

    monkeypatch.setattr(scheduler, "_may_fill", may_fill)
    shown._wake.clear()
    await scheduler._fill(shown, shown.current)
    assert not shown.current.queued
    assert shown._wake.is_set()


async def test_a_raised_budget_that_could_not_be_written_down_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = dataset(tmp_path, Source(), "partial")
    scheduler = Jobs({"a": shown}, lambda: 0)
    change, refused = shown.change, 3

    async def refuses(**changes: Any) -> None:
        nonlocal refused
        refused -= 1
        if refused >= 0:
            raise OSError(28, "No space left on device")
        await change(**changes)

    monkeypatch.setattr(shown, "change", refuses)
    monkeypatch.setattr(evictor, "RETRY_SECONDS", 0.01)
    scheduler.evictor.budget_raised(shown)
    following = asyncio.create_task(scheduler.evictor.follow())
    await until_async(lambda: shown.generation.wanted, 30, "the wish to be written down")
    scheduler.evictor.end()
    await following
    assert capsys.readouterr().out.count("dataset is not filled again") == 1


async def test_requests_and_the_dataset_itself_save_one_after_the_other(tmp_path: Path) -> None:
    shown = dataset(tmp_path, Source(), "partial")
    scheduler = Jobs({"a": shown}, lambda: 0)
    shown.removed = True

    async def publish() -> None:
        async with shown.lock:
            await shown.save_state()

    asked = [scheduler.warm(shown) for _ in range(8)]
    await asyncio.gather(*asked, *(publish() for _ in range(8)))
    remembered = kept.load(kept.file_of(tmp_path / "state", "a"))
    assert isinstance(remembered, dict) and remembered["removed"] is False
    saved = generations.load(shown.folder)
    assert saved is not None and saved["wanted"] is True


@pytest.mark.parametrize(("kind", "told"), [("fill", 1), ("verify", 1), ("evict", 0)])
async def test_settings_that_change_meanwhile_leave_an_eviction_its_own_limits(
    kind: str, told: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator's 'evict --to' took nothing when the budget of the node changed just then."""
    heard: list[protocol.Limits] = []

    async def hear(_: Pass, limits: protocol.Limits) -> None:
        heard.append(limits)

    monkeypatch.setattr(Pass, "set_limits", hear)
    shown = dataset(tmp_path, Source())
    jobs = Jobs({"a": shown}, lambda: 0)
    jobs._active.append((shown, Pass(shown, kind)))
    await jobs.limits_changed()
    assert len(heard) == told


def two_that_fill(tmp_path: Path, *, queued: bool = True) -> tuple[Jobs, dict[str, Dataset]]:
    """``a`` with priority 0 and ``b`` with 5, whose sources answer."""
    known: dict[str, Dataset] = {}
    scheduler = Jobs(known, lambda: 0)
    for name, priority in (("a", 0), ("b", 5)):
        made = dataset(tmp_path, Source(), "filling")
        made.settings = made.settings.model_copy(update={"name": name, "priority": priority})
        made.current.reached = base.Reached("/nowhere", "1:1", "1:1", "slow")
        made.current.queued, made.ahead = queued, scheduler.slot.ahead
        known[name] = made
    return scheduler, known


async def test_next_prefers_verify_then_priority_then_name(tmp_path: Path) -> None:
    known = {}
    for name, priority in (("a", 0), ("b", 5), ("c", 5), ("d", -1)):
        made = dataset(tmp_path, Source())
        made.settings = made.settings.model_copy(update={"name": name, "priority": priority})
        made.current.queued = True
        known[name] = made
    known["d"].verification = Verification("queued")
    scheduler = Jobs(known, lambda: 0)
    order = []
    while (following := scheduler.slot.next()) is not None:
        order.append(following.name)
        following.current.queued = False
        following.verification = Verification()
    assert order == ["d", "b", "c", "a"]


async def test_who_is_queued_says_for_whom_it_waits(tmp_path: Path) -> None:
    scheduler, known = two_that_fill(tmp_path)
    first = scheduler.slot.next()
    assert first is known["b"]
    assert (known["a"].state(), known["a"].why()) == ("queued", "waits for b (priority 5)")
    assert (known["b"].state(), known["b"].why()) == ("queued", "")
    first.current.queued = False
    assert scheduler.slot.next() is known["a"]
    assert known["a"].why() == ""


async def test_what_is_wanted_now_is_so_until_it_is_complete_or_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Generation, "change", kept_in_memory)
    scheduler, known = two_that_fill(tmp_path)
    scheduler.slot.asked(known["a"], now=True)
    assert scheduler.slot.next() is known["a"]
    assert known["b"].why() == "waits for a (priority 0, wanted now)"
    scheduler.slot.ended_well(known["a"])
    assert scheduler.slot.next() is known["b"]
    scheduler.slot.asked(known["a"], now=True)
    await scheduler.pause(known["a"])
    await scheduler.resume(known["a"])
    known["a"].current.queued = True
    assert scheduler.slot.next() is known["b"]


@pytest.mark.parametrize(("result", "late"), [("cancelled", ""), ("failed", "it did not end")])
async def test_fill_that_gives_way_is_queued_again_and_has_not_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, result: str, late: str
) -> None:
    monkeypatch.setattr(Generation, "change", kept_in_memory)
    scheduler, known = two_that_fill(tmp_path, queued=False)
    stopped = asyncio.Event()

    async def run(running: Pass, _: Any) -> protocol.End:
        known["b"].current.queued = True
        scheduler.wake()
        await stopped.wait()
        assert running.gives_way
        return protocol.End(result, late)

    async def cancel(_: Pass) -> None:
        stopped.set()

    monkeypatch.setattr(Pass, "run", run)
    monkeypatch.setattr(Pass, "cancel", cancel)
    known["a"].current.queued = True
    async with asyncio.timeout(waiting.limit(30)):
        await scheduler._fill(known["a"], known["a"].current)
    assert known["a"].current.queued
    assert known["a"].gave_way
    assert known["a"].generation.why == ""
    assert known["a"].due.fill()  # without a pause
    assert scheduler.slot.next() is known["b"]


# --- passes


def report_the_same_for_ever() -> None:
    """A coordinator that lives and gets nowhere; it ends for no command."""
    kit.messages.hear(protocol.FillTask)
    counts = manifest.Counts(10, 10, 1, 1)
    progress = protocol.Progress(
        phase="filling", counts=counts, sealed=0, copied_files=1, copied_bytes=1,
        beats=0, commits=0, used=7, syncing=False,
    )  # fmt: skip
    while True:
        kit.messages.say(protocol.Report(progress=progress))
        time.sleep(0.01)


@pytest.fixture
async def stuck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pass]:
    real = kit.line_worker.LineWorker

    def worker(_: str, *rest: Any, **more: Any) -> Any:
        return real(f"{__name__}:report_the_same_for_ever", *rest, **more)

    monkeypatch.setattr(kit.line_worker, "LineWorker", worker)
    shown = dataset(tmp_path, Source())
    made = Pass(shown, "fill", shown.current)
    yield made
    await made._worker.close()


def task(folder: Path) -> protocol.FillTask:
    return protocol.FillTask(
        generation=str(folder), source=str(folder), stamp="", immutable=False, limits=passes.LIMITS
    )


async def test_pass_without_progress_is_killed(
    tmp_path: Path, stuck: Pass, monkeypatch: pytest.MonkeyPatch
) -> None:
    ending = asyncio.create_task(stuck.run(task(tmp_path)))
    await until_async(lambda: stuck.phase, 30, "the first report")
    assert stuck._dataset.figures.done_files == 1
    assert stuck._dataset.figures.used == 7
    monkeypatch.setattr(running, "STALL_SECONDS", 0.5)
    end = await ending
    assert end.result == "failed"
    assert end.why == "no progress for 0.5s: the source or the disk hangs"


async def test_cancelled_pass_that_does_not_end_is_killed(
    tmp_path: Path, stuck: Pass, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "CANCEL_SECONDS", 0.5)
    ended = asyncio.create_task(stuck.run(task(tmp_path)))
    await asyncio.sleep(0)
    await stuck.cancel()
    end = await ended
    assert (end.result, end.why) == ("failed", "it did not end within 0.5s of its cancel")


# --- rates


def test_eta_follows_the_slower_of_files_and_bytes() -> None:
    rates = Rates()
    assert eta(100, 100, rates.per_second()) is None
    rates.add(0.0, 0, 0)
    assert rates.per_second() == (0.0, 0.0)
    rates.add(10.0, 50, 1000)
    assert rates.per_second() == (5.0, 100.0)
    assert eta(50, 9000, rates.per_second()) == pytest.approx(90.0)
    assert eta(450, 0, rates.per_second()) == pytest.approx(90.0)


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(0, 50)), max_size=200))
def test_rates_keep_bounded_memory_and_are_never_negative(steps: list[tuple[float, int]]) -> None:
    rates, now, done = Rates(), 0.0, 0
    for wait, files in steps:
        now, done = now + wait, done + files
        rates.add(now, done, done * 10)
        assert all(rate >= 0 for rate in rates.per_second())
        left = eta(5, 5, rates.per_second())
        assert left is None or left >= 0
    assert all(now - at <= 20 for at, _, _ in rates._samples[1:])


# --- doubt


async def test_update_that_shares_doubted_files_is_doubted_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an update links from a generation that is not verified yet is not verified either."""
    shown = dataset(tmp_path, Source())
    monkeypatch.setattr(Generation, "change", kept_in_memory)
    next_one = shown.generation_of(shown.settings.source, "again")
    next_one.source = shown.source
    next_one.reached = base.Reached("/nowhere", "1:1", "1:1", "slow")
    await next_one.change(before=shown.current.id)
    shown.next = next_one
    scheduler = Jobs({"a": shown}, lambda: 0)
    monkeypatch.setattr(scheduler, "_run", complete)
    shown.soundness.count_trouble("the disk failed")
    assert shown.suspect
    next_one.queued = True
    await scheduler._fill(shown, next_one)
    assert next_one.record.state == "complete"
    assert shown.soundness.suspects(next_one.record)
    # Verified, the next one shares good files.
    shown.generation = dataclasses.replace(shown.generation, verified=1)
    next_one.record = dataclasses.replace(next_one.record, state="new")
    next_one.queued = True
    await scheduler._fill(shown, next_one)
    assert not shown.soundness.suspects(next_one.record)


@pytest.mark.parametrize("gives_way", [True, False])
async def test_update_that_gives_way_keeps_its_source_and_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gives_way: bool
) -> None:
    """One that ends for another reason looks for its source again, after a pause."""
    shown = dataset(tmp_path, Source())
    monkeypatch.setattr(Generation, "change", kept_in_memory)
    next_one = shown.generation_of(shown.settings.source, "again")
    next_one.source = shown.source
    next_one.reached = base.Reached("/nowhere", "1:1", "1:1", "slow")
    shown.next = next_one

    async def run(running: Pass, _: Any) -> protocol.End:
        running.gives_way = gives_way
        return protocol.End("cancelled")

    monkeypatch.setattr(Pass, "run", run)
    next_one.queued = True
    await Jobs({"a": shown}, lambda: 0)._fill(shown, next_one)
    assert next_one.record.state == "filling"
    assert next_one.queued is gives_way
    assert (next_one.reached is not None) is gives_way
    assert next_one.due.fill() is gives_way


async def kept_in_memory(of: Generation, **changes: Any) -> None:
    of.record = dataclasses.replace(of.record, **changes)


async def complete(*_: Any) -> protocol.End:
    return protocol.End("complete")
