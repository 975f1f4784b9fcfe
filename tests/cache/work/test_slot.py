"""Who has the slot of the jobs, for whom a fill stops, and whether a fill that ended goes on."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from cache.dataset.dataset import Dataset
from cache.dataset.figures import Eviction, Verification
from cache.dataset.generation import Generation
from cache.fill import protocol
from cache.sources import base
from cache.space import at_work, budgets, evictions
from cache.work.jobs import Jobs
from cache.work.running import Pass
from tests.cache.work.test_jobs import Source, dataset, kept_in_memory
from tests.testbed import waiting
from tests.testbed.waiting import until_async

REACHED = base.Reached("/nowhere", "1:1", "1:1", "slow")
NO_ROOM = protocol.End("partial", "no room", protocol.FillEnd(0, 3, 300, short=True))


class Node:
    """Datasets whose passes end as ``ends`` says; ``during`` is called while one runs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.known: dict[str, Dataset] = {}
        self.jobs = Jobs(self.known, lambda: 0)
        self.end = NO_ROOM
        self.during: Callable[[Pass], None] = lambda _: None
        self.ends = asyncio.Event()  # passes end
        self.ends.set()
        self.cancelled = False

    def add(self, name: str, priority: int = 0, state: str = "filling") -> Dataset:
        made = dataset(self._folder, Source(), state)
        made.settings = made.settings.model_copy(update={"name": name, "priority": priority})
        made.current.reached, made.ahead = REACHED, self.jobs.slot.ahead
        self.known[name] = made
        return made

    def add_next(self, of: Dataset) -> Generation:
        of.next = next_one = of.generation_of(of.settings.source, "again")
        next_one.source, next_one.reached = of.source, REACHED
        return next_one

    async def run(self, running: Pass, _: Any) -> protocol.End:
        self.during(running)
        await self.ends.wait()
        return self.end

    async def fill(self, of: Dataset) -> bool:
        """Whether it goes on by itself."""
        target = of.next or of.current
        target.queued = True
        await self.jobs._fill(of, target)
        return target.queued

    def runs(self, of: Dataset) -> None:
        """A fill of it, that stops when it is asked to."""
        of.job = Pass(of, "fill")
        self.jobs._active[:] = [(of, of.job)]

    async def next(self) -> Dataset | None:
        """Who comes when the fill that runs has ended as it was asked to; None: it was not."""
        ((of, running),) = self.jobs._active
        if self.jobs.slot._stopping is None:
            self.jobs.slot.look()
        await asyncio.sleep(0)
        if not running.gives_way:
            return None
        of.job, of.current.queued, of.gave_way = None, True, True
        self.jobs._active.clear()
        self.jobs.slot._stopping = None
        return self.jobs.slot.next()


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    made = Node(tmp_path)

    async def run(running: Pass, task: Any) -> protocol.End:
        return await made.run(running, task)

    async def cancel(_: Pass) -> None:
        made.cancelled = True

    async def none_given(*_: Any) -> bool:
        return False

    async def on_disk(_: Dataset) -> bool:
        return True

    monkeypatch.setattr(Generation, "change", kept_in_memory)
    monkeypatch.setattr(Dataset, "save_state", on_disk)
    monkeypatch.setattr(made.jobs.withdrawals, "finish", on_disk)
    monkeypatch.setattr(made.jobs.budgets, "_make_room", none_given)
    monkeypatch.setattr(made.jobs.budgets._evictions, "settle", settles_nothing)
    monkeypatch.setattr(budgets, "MOST_LISTINGS", 0)
    monkeypatch.setattr(Pass, "run", run)
    monkeypatch.setattr(Pass, "cancel", cancel)
    return made


async def settles_nothing(*_: Any, **__: Any) -> bool:
    return False


# --- what is wanted now


@pytest.mark.parametrize("what", ["fill", "update", "evict"])
async def test_what_is_wanted_now_is_so_no_more_once_it_lacks_room_or_is_evicted(
    node: Node, what: str
) -> None:
    wanted, other = node.add("a"), node.add("b", 5)
    if what == "update":
        node.add_next(wanted)
    await node.jobs.ask(wanted, now=True)
    wanted.current.queued = other.current.queued = True
    assert node.jobs.slot.next() is wanted
    if what == "evict":
        wanted.current.queued = other.current.queued = False
        wanted.eviction = Eviction("queued")
        following = asyncio.create_task(node.jobs.follow())
        async with asyncio.timeout(waiting.limit(30)):
            while wanted.eviction.pending:
                await asyncio.sleep(0)
        following.cancel()
    else:
        wanted.current.queued = False
        assert not await node.fill(wanted)
    wanted.next = None
    wanted.generation = dataclasses.replace(wanted.generation, state="filling")
    wanted.current.queued = other.current.queued = True
    assert node.jobs.slot.next() is other


async def test_removed_dataset_that_is_wanted_again_is_wanted_now(node: Node) -> None:
    """A look while the request waits for the lock does not forget it."""
    again, other = node.add("a"), node.add("b", 5)
    again.removed = other.current.queued = True
    async with again.lock:
        asking = asyncio.create_task(node.jobs.ask(again, now=True))
        await asyncio.sleep(0)
        assert node.jobs.slot.next() is other
    await asking
    again.current.queued = True
    assert node.jobs.slot.next() is again


# --- room that comes during a fill


@pytest.mark.parametrize("updates", [False, True])
@pytest.mark.parametrize("when", ["during", "at the end", "never", "not for room"])
async def test_room_that_comes_during_a_fill_counts_for_what_it_leaves_out(
    node: Node, monkeypatch: pytest.MonkeyPatch, updates: bool, when: str
) -> None:
    """A budget is raised, a dataset removed, or the trash emptied."""
    shown = node.add("a")
    next_one = node.add_next(shown) if updates else None

    async def ends_slowly(*_: Any) -> bool:
        node.jobs.room_came([shown])
        return False

    if when == "during":
        node.during = lambda _: node.jobs.room_came([shown])
    elif when == "at the end":
        monkeypatch.setattr(node.jobs.budgets, "share_changes", ends_slowly)
        monkeypatch.setattr(node.jobs.budgets, "has_room_for", ends_slowly)
    elif when == "not for room":
        node.during = lambda _: node.jobs.room_came([shown])
        node.end = dataclasses.replace(NO_ROOM, fill=protocol.FillEnd(0, 0, 0))
    goes_on = when in ("during", "at the end")
    assert await node.fill(shown) == goes_on
    record, times = (next_one or shown.current).record, (next_one or shown).due
    assert record.state == ("filling" if goes_on else "partial")
    assert times.fill() == goes_on
    if goes_on:  # and not for ever
        node.during = lambda _: None
        monkeypatch.setattr(node.jobs.budgets, "share_changes", no_share)
        monkeypatch.setattr(node.jobs.budgets, "has_room_for", no_share)
        assert not await node.fill(shown)


async def no_share(*_: Any) -> bool:
    return False


async def test_raised_budget_is_tried_by_what_lacked_room_and_by_what_follows_it(
    node: Node,
) -> None:
    shown = node.add("a", state="partial")
    next_one = node.add_next(shown)
    for each, times in ((shown.current, shown.due), (next_one, next_one.due)):
        each.record = dataclasses.replace(each.record, state="partial", left_files=3)
        times.fill_later(900.0)
    await node.jobs.budgets_raised([shown])
    assert shown.due.fill()
    assert shown.generation.state == "filling"
    assert next_one.due.fill()


async def test_room_hurries_no_eviction_that_waits_but_a_raised_budget_does(node: Node) -> None:
    """Its pauses grow; somewhere on the node room comes each minute."""
    waits = node.add("a", state="partial")
    waits.generation = dataclasses.replace(waits.generation, evicting=True, left_files=3)
    waits.due.fill_later(900.0)
    node.jobs.room_came([waits])
    assert not waits.due.fill()
    await node.jobs.budgets_raised([waits])
    async with following(node):
        await until_async(waits.due.fill, 30, "the next try")


@pytest.mark.parametrize(
    ("when", "block"),
    [("files go", False), ("it waits", False), ("files are chosen", False), ("it waits", True)],
)
async def test_a_raised_budget_is_a_wish_while_files_go(
    node: Node, monkeypatch: pytest.MonkeyPatch, when: str, block: bool
) -> None:
    """Of a dataset that nothing else wants: it would stay partial for ever. Nor do the settings
    wait for a pass of minutes."""
    goes, waits = node.add("a", state="partial"), when == "it waits"
    goes.settings = goes.settings.model_copy(update={"warm": False})
    monkeypatch.setattr(goes.source, "block", block)
    evicting = {"state": "partial", "evicting": True, "left_files": 3}
    begun = {"state": "complete"} if when == "files are chosen" else evicting
    goes.generation = dataclasses.replace(goes.generation, **begun)

    async def finish(_: evictions.Evictions, of: Dataset) -> None:
        await of.change(evicting=False)

    monkeypatch.setattr(evictions.Evictions, "finish", finish)
    async with following(node):
        async with contextlib.nullcontext() if waits else goes.lock:
            await node.jobs.budgets_raised([goes])
            await asyncio.sleep(0)
            if not waits:
                await goes.change(**evicting)
                await goes.change(evicting=False)
        await until_async(lambda: goes.generation.wanted, 30, "the wish")
        goes.current.queued = waits
        node.jobs.wake()
        await until_async(lambda: not goes.generation.evicting, 30, "the end of the eviction")
    assert goes.generation.wanted
    goes.current.queued, goes.due._fill = False, 0.0
    assert goes.facts().fill_wanted


@pytest.mark.parametrize(
    "then", [{"paused": "evicted"}, {"state": "complete"}, {"state": "new"}, {"state": "stale"}]
)
async def test_a_raised_budget_is_no_wish_for_what_is_whole_or_held_by_then(
    node: Node, then: dict[str, Any]
) -> None:
    goes, other = node.add("a", state="partial"), node.add("b", state="partial")
    for each in (goes, other):
        each.generation = dataclasses.replace(each.generation, evicting=True, left_files=3)
    async with following(node):
        async with goes.lock:
            await node.jobs.budgets_raised([goes, other])
            await goes.change(**then)
        await until_async(lambda: other.generation.wanted, 30, "the other one")
        await until_async(lambda: not goes.lock.locked(), 30, "the look at it")
    assert not goes.generation.wanted


async def test_a_wish_is_kept_though_the_agent_ends_meanwhile(node: Node) -> None:
    goes = node.add("a", state="partial")
    goes.generation = dataclasses.replace(goes.generation, evicting=True, left_files=3)
    follows = asyncio.create_task(node.jobs.follow())
    await asyncio.sleep(0)
    async with goes.lock:
        await node.jobs.budgets_raised([goes])
        node.jobs.end()
        await asyncio.sleep(0)
    async with asyncio.timeout(waiting.limit(30)):
        await follows
    assert goes.generation.wanted


async def test_a_wish_that_the_disk_refuses_ends_no_evictions(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused, other = node.add("a", state="partial"), node.add("b", state="partial")
    for each in (refused, other):
        each.generation = dataclasses.replace(each.generation, evicting=True, left_files=3)

    async def refuse(**_: Any) -> None:
        raise OSError("the disk takes nothing")

    monkeypatch.setattr(refused.current, "change", refuse)
    async with following(node):
        await node.jobs.budgets_raised([refused, other])
        await until_async(lambda: other.generation.wanted, 30, "the other one")


# --- what goes on


@pytest.mark.parametrize("why", ["removed", "suspect", "stale", ""])
async def test_fill_does_not_go_on_when_its_dataset_may_not_be_filled(node: Node, why: str) -> None:
    shown = node.add("a")

    def during(running: Pass) -> None:
        running.gives_way = True
        shown.removed = why == "removed"
        if why == "suspect":
            shown.soundness.count_trouble("the disk failed")
        if why == "stale":
            shown.generation = dataclasses.replace(shown.generation, state="stale")

    node.during, node.end = during, protocol.End("cancelled")
    assert await node.fill(shown) == (why == "")


async def test_update_of_a_removed_dataset_does_not_go_on(node: Node) -> None:
    shown = node.add("a")
    node.add_next(shown)

    def during(running: Pass) -> None:
        running.gives_way = shown.removed = True

    node.during, node.end = during, protocol.End("cancelled")
    assert not await node.fill(shown)


# --- the slot


async def test_verify_that_is_queued_while_a_fill_stops_goes_first(node: Node) -> None:
    low, high, other = node.add("a"), node.add("b", 5), node.add("c", 0, "complete")
    node.runs(low)
    high.current.queued = True
    node.jobs.slot.look()
    other.verification = Verification("queued")
    assert await node.next() is other


async def test_verify_stops_no_fill_and_keeps_no_fill_from_its_turn(node: Node) -> None:
    low, high = node.add("a"), node.add("b", 5, "complete")
    node.runs(low)
    high.verification = Verification("queued")
    assert await node.next() is None
    following = node.add_next(high)
    following.queued = True
    assert await node.next() is high


class Evicting:
    """Evictions that end when ``go`` says so; ``seen``: on what each slot worked at each begin."""

    def __init__(self, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = asyncio.Event()
        self.seen: list[tuple[str, frozenset[str]]] = []

        async def settle(of: Dataset, **_: Any) -> bool:
            self.seen.append((of.name, node.jobs.slot.work.of(at_work.JOBS)))
            await self.go.wait()
            of.freed += 1000
            return True

        monkeypatch.setattr(node.jobs.budgets._evictions, "settle", settle)


@pytest.fixture
def evicting(node: Node, monkeypatch: pytest.MonkeyPatch) -> Evicting:
    return Evicting(node, monkeypatch)


@contextlib.asynccontextmanager
async def following(node: Node) -> AsyncIterator[None]:
    task = asyncio.create_task(node.jobs.follow())
    try:
        async with asyncio.timeout(waiting.limit(60)):
            yield
    finally:
        task.cancel()


async def test_files_go_beside_a_fill_of_another_dataset(node: Node, evicting: Evicting) -> None:
    """The fill does not stop for it, and sees the room that comes."""
    filled, other = node.add("a", 5), node.add("b", 0, "complete")
    filled.current.queued = True
    node.ends.clear()
    async with following(node):
        await until_async(lambda: filled.job is not None, 30, "the fill")
        other.eviction = Eviction("queued")
        node.jobs.wake()
        evicting.go.set()
        await until_async(lambda: not other.eviction.pending, 30, "the eviction")
        assert other.eviction.state == "evicted"
        assert evicting.seen == [("b", frozenset({"a"}))]
        assert filled.job is not None
        assert not node.cancelled
        assert filled.due.fill_again
        node.ends.set()
        await until_async(lambda: filled.job is None, 30, "the end of the fill")


async def test_fill_that_asks_for_room_waits_for_one_eviction_and_no_longer(
    node: Node, evicting: Evicting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An eviction of what it would ask, too."""
    monkeypatch.delattr(node.jobs.budgets, "_make_room")
    filled, other = node.add("a", 5), node.add("b", 0, "complete")
    other.figures = dataclasses.replace(other.figures, done_files=9, used=9000)
    other.generation = dataclasses.replace(other.generation, used=9000)
    async with following(node):
        other.eviction = Eviction("queued")
        node.jobs.wake()
        await until_async(lambda: len(evicting.seen) == 1, 30, "the eviction")
        filled.current.queued = True
        node.jobs.wake()
        await until_async(lambda: filled.job is not None, 30, "the fill")
        evicting.go.set()
        await until_async(lambda: not other.eviction.pending, 30, "the eviction")
        await until_async(lambda: len(evicting.seen) > 1, 30, "room for the fill")
    assert [name for name, _ in evicting.seen[:2]] == ["b", "b"]


async def test_no_files_of_a_dataset_go_before_its_own_job_has_noted_its_end(
    node: Node, evicting: Evicting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the passes of a job none of them runs."""
    shown = node.add("a")
    ending, noted = asyncio.Event(), asyncio.Event()

    async def ends_slowly(*_: Any) -> bool:
        shown.job = None  # as after a pass of its own
        ending.set()
        await noted.wait()
        return False

    monkeypatch.setattr(node.jobs.budgets, "share_changes", ends_slowly)
    shown.current.queued = True
    evicting.go.set()
    async with following(node):
        await ending.wait()
        shown.eviction = Eviction("queued")
        node.jobs.wake()
        for _ in range(50):
            await asyncio.sleep(0)
        assert evicting.seen == []
        noted.set()
        await until_async(lambda: not shown.eviction.pending, 30, "the eviction")
    assert evicting.seen == [("a", frozenset())]


async def test_eviction_that_was_cut_short_is_finished_beside_a_fill_and_before_its_own(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled, cut = node.add("a", 5), node.add("b")
    cut.generation = dataclasses.replace(cut.generation, evicting=True)
    filled.current.queued = True
    node.ends.clear()
    at: list[Any] = []

    async def finish(_: object, of: Dataset) -> None:
        at.append((of.name, filled.job is not None))
        of.generation = dataclasses.replace(of.generation, evicting=False)

    monkeypatch.setattr(evictions.Evictions, "finish", finish)
    async with following(node):
        await until_async(lambda: filled.job is not None, 30, "the fill")
        cut.current.queued = True
        node.jobs.wake()
        await until_async(lambda: not cut.generation.evicting, 30, "the rest of the eviction")
        assert cut.current.queued
        node.ends.set()
        await until_async(lambda: cut.job is not None or not cut.current.queued, 30, "its own fill")
    assert at == [("b", True)]


async def test_who_has_had_its_turn_is_ahead_of_nobody(node: Node) -> None:
    first, then = node.add("a"), node.add("b")
    first.current.queued = then.current.queued = True
    assert node.jobs.slot.next() is first
    assert then.why() == "waits for a (priority 0)"
    first.current.queued, first.job = False, Pass(first, "fill")
    assert then.why() == "waits for a (priority 0)"
    first.job = None
    assert then.why() == ""


# --- what operators ask for


async def test_warm_of_a_dataset_starts_the_update_that_waits(node: Node) -> None:
    shown = node.add("a", state="complete")
    next_one = node.add_next(shown)
    next_one.due.spread_fill(1e6)
    next_one.due.failed()
    await node.jobs.ask(shown)
    assert next_one.due.fill()
    assert next_one.due.look(complete=False)


async def test_at_its_end_what_runs_ends_and_nothing_else_begins(
    node: Node, evicting: Evicting
) -> None:
    """An agent that stops waits for the outcome of what it cancelled, and for nothing else."""
    filled, queued, evicted = node.add("a", 5), node.add("b", 0), node.add("c", 0, "complete")
    filled.current.queued = queued.current.queued = True
    node.ends.clear()
    follow = asyncio.create_task(node.jobs.follow())
    await until_async(lambda: filled.job is not None, 30, "the fill")
    node.jobs.end()
    evicted.eviction = Eviction("queued")
    node.jobs.wake()
    for _ in range(20):
        await asyncio.sleep(0)
    assert not follow.done()
    node.end = protocol.End("complete", "", protocol.FillEnd(0, 3, 300))
    node.ends.set()
    async with asyncio.timeout(waiting.limit(30)):
        await follow
    assert filled.generation.state == "complete"
    assert queued.current.queued
    assert evicted.eviction.pending


async def test_at_its_end_what_is_idle_ends_at_once(node: Node) -> None:
    follow = asyncio.create_task(node.jobs.follow())
    await asyncio.sleep(0)
    node.jobs.end()
    async with asyncio.timeout(waiting.limit(30)):
        await follow
