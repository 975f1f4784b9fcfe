"""Who is asked for how much, without passes: what is kept, and what an update may take."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import structlog

import kit.errors
from cache.dataset.dataset import Dataset
from cache.dataset.generation import Generation
from cache.fill import protocol, space
from cache.fill.protocol import Least
from cache.settings import CacheSettings, DatasetSettings, DirSource, at_snapshot
from cache.space import budgets, evictions, limits
from cache.store import subset
from cache.work.running import Pass

MIB = 2**20


class Node:
    """Datasets of one node, and what each was asked to stay within."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.datasets: dict[str, Dataset] = {}
        self.least, self.lacking = Least(), subset.Amount()
        self.asked: list[tuple[str, protocol.Limits]] = []
        self.gives = 0  # SSD bytes, each time

        async def settle(_: object, dataset: Dataset, **given: Any) -> bool:
            allowed = given["limits"] or self._limits(dataset, "evict")
            if given.get("own") and dataset.settings.keep and given["limits"] is None:
                allowed = limits.of_its_own(dataset, allowed)
            self.asked.append((dataset.name, allowed))
            dataset.freed += self.gives
            return True

        monkeypatch.setattr(evictions.Evictions, "settle", settle)
        monkeypatch.setattr(budgets, "LOOK_SECONDS", 0.0)  # a shortage lasts at once
        self.budgets = budgets.Budgets(
            self.datasets, self._run, self._limits, lambda: 0, self._nothing, self._nothing,
            lambda: self.lacking,
        )  # fmt: skip

    async def _run(self, *_: object) -> protocol.End:
        raise AssertionError("no pass")

    async def _nothing(self, *_: object) -> None:
        return

    def _limits(self, dataset: Dataset, kind: str) -> protocol.Limits:
        every = self.datasets.values()
        return limits.of(dataset, kind, every, 0, dataset.current, self.least)

    def add(self, name: str, used: int, **settings: Any) -> Dataset:
        """A complete dataset that takes ``used`` bytes in a hundred files."""
        source = DirSource(kind="dir", path=self.folder / name / ".snap" / "s1")
        own = DatasetSettings(name=name, freshness="snapshot", source=source, **settings)
        store, views = self.folder / "store", self.folder / "views"
        cache = CacheSettings(store=store, views=views, budget=1000 * MIB)
        dataset = Dataset(own, cache, self.folder / "state", lambda: None)
        dataset.generation = dataclasses.replace(
            dataset.generation, state="complete", used=used, inodes=110, done_files=100
        )
        dataset.current.show_kept_figures()
        self.datasets[name] = dataset
        return dataset


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    return Node(tmp_path, monkeypatch)


def left(allowed: protocol.Limits, used: int, inodes: int) -> subset.Amount:
    """What they leave on a disk of which half is free."""
    whole, half = 10**6, 5 * 10**5
    disk = os.statvfs_result((4096, 4096, whole, half, half, whole, half, half, 0, 255))
    return space.balance(disk, allowed, used=used, inodes=inodes)


async def test_kept_dataset_gives_only_what_is_beyond_its_own_budget(node: Node) -> None:
    """Others filled the disk, and the store is beyond the node's budget."""
    node.add("a", 300 * MIB + 1, keep=True, budget=300 * MIB)
    node.add("b", 900 * MIB)
    node.least, node.lacking = Least(share=0.9), subset.Amount(64 * MIB, 10**5)
    await node.budgets.keep()
    asked = dict(node.asked)
    found = left(asked["a"], 300 * MIB + 1, 110)
    assert found.bytes == -1
    assert found.inodes >= 0
    assert asked["a"].wanted == 0
    other = left(asked["b"], 900 * MIB, 110)
    assert other.bytes < -64 * MIB
    assert asked["b"].wanted == 64 * MIB


@pytest.mark.parametrize(
    ("own", "node_inodes", "why"),
    [
        ({"budget": 100 * MIB}, 0, "its own budget was exceeded"),
        ({"budget_inodes": 100}, 0, "its own budget_inodes was exceeded"),
        ({}, 100, "cache.budget_inodes was exceeded"),
        ({}, 0, "cache.budget was exceeded"),
    ],
)
async def test_eviction_says_which_budget_was_exceeded(
    own: dict[str, int], node_inodes: int, why: str, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    async def settle(_: object, __: Dataset, **given: Any) -> bool:
        said.append(given["why"])
        return True

    monkeypatch.setattr(evictions.Evictions, "settle", settle)
    dataset = node.add("a", (200 if own or node_inodes else 2000) * MIB, **own)
    dataset.cache = dataset.cache.model_copy(update={"budget_inodes": node_inodes})
    await node.budgets.keep()
    assert said == [why]


@pytest.mark.parametrize(
    ("own", "rest", "found"),
    [
        ({}, 0, (False, False)),
        ({"budget": MIB, "budget_inodes": 5}, 0, (True, True)),
        ({"budget": 2000 * MIB}, 0, (False, False)),
        ({"budget": 500 * MIB}, 600 * MIB, (False, False)),  # the node's ends sooner
    ],
)
def test_limits_say_whose_budget_ends_first(
    own: dict[str, int], rest: int, found: tuple[bool, bool], node: Node
) -> None:
    dataset = node.add("a", 0, **own)
    node.add("b", rest)
    allowed = node._limits(dataset, "fill")
    assert (allowed.own, allowed.own_inodes) == found


async def test_nobody_else_is_asked_after_the_end(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    async def settle(_: object, dataset: Dataset, **given: Any) -> bool:
        asked.append(dataset.name)
        node.budgets.end()  # the agent stops while one eviction runs
        return True

    monkeypatch.setattr(evictions.Evictions, "settle", settle)
    node.add("a", 900 * MIB)
    node.add("b", 900 * MIB)
    await node.budgets.keep()
    assert len(asked) == 1


async def test_kept_dataset_beyond_its_inodes_keeps_its_bytes(node: Node) -> None:
    node.add("a", 2000 * MIB, keep=True, budget_inodes=100)
    node.least = Least(share=0.9)
    await node.budgets.keep()
    ((name, allowed),) = node.asked
    assert name == "a"
    found = left(allowed, 2000 * MIB, 110)
    assert found.inodes == -10
    assert found.bytes > 0


@pytest.mark.parametrize(
    ("changes", "gives"),
    [
        ({}, True),
        ({"skeleton": False}, False),
        ({"gave_way": False}, False),
        ({"job": True}, False),
    ],
)
async def test_fill_that_stopped_for_another_one_gives_it_room(
    node: Node, changes: dict[str, bool], gives: bool
) -> None:
    """Its listing is complete and its files are committed. Its fill goes on after the eviction."""
    low, high = node.add("a", 600 * MIB), node.add("b", 400 * MIB, priority=5)
    skeleton = changes.get("skeleton", True)
    low.generation = dataclasses.replace(low.generation, state="filling", skeleton=skeleton)
    low.gave_way = changes.get("gave_way", True)
    low.job = Pass(low, "fill") if changes.get("job", False) else None
    node.gives = 100 * MIB
    end = protocol.FillEnd(400 * MIB, 50, 90 * MIB, short=True)
    assert await node.budgets._make_room(high, high.current, end) == gives
    assert ("a" in dict(node.asked)) == gives
    assert low.generation.state == "filling"


def next_one(dataset: Dataset, snapshot: str) -> Generation:
    found = dataset.generation_of(at_snapshot(dataset.settings.source, snapshot))
    dataset.next = found
    return found


async def test_update_that_cannot_be_listed_leaves_most_of_what_serves(node: Node) -> None:
    dataset = node.add("a", 900 * MIB)
    end = protocol.End("partial", "no room", protocol.FillEnd(MIB, 0, 0, short=True))
    node.gives = MIB
    for snapshot in ("s2", "s3"):
        new = next_one(dataset, snapshot)
        node.asked.clear()
        went_on = [await node.budgets.has_room_for(dataset, new, end) for _ in range(9)]
        assert went_on == [True] * 3 + [False] * 6
        assert len(node.asked) == 3
        assert not new.fits, "nothing of it could be served"


@pytest.mark.parametrize("kept", [False, True], ids=["alone", "beside an earlier version"])
async def test_eviction_leaves_what_was_asked_of_the_version_that_serves(
    node: Node, kept: bool
) -> None:
    """The earlier version goes by itself: it takes nothing of what is to stay."""
    dataset = node.add("a", 72 * MIB)
    node.add("b", 100 * MIB)
    if kept:
        earlier = dataset.generation_of(at_snapshot(dataset.settings.source, "s0"))
        earlier.record = dataclasses.replace(earlier.record, state="complete", used=72 * MIB)
        dataset.earlier = [earlier]
        dataset.generation = dataclasses.replace(
            dataset.generation, before=earlier.id, shared=70 * MIB
        )
    dataset.eviction = dataclasses.replace(dataset.eviction, state="queued", to=10 * MIB)
    await node.budgets.take_out(dataset)
    ((_, allowed),) = node.asked
    assert left(allowed, 72 * MIB, 110).bytes == 10 * MIB - 72 * MIB
    assert left(allowed, 9 * MIB, 110).bytes == MIB


@pytest.mark.parametrize(
    "error", [kit.errors.HostError("eviction", "a reader", ""), OSError(5, "no mount")]
)
async def test_an_eviction_that_fails_is_tried_again_after_a_growing_pause(
    node: Node, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    async def fails(*_: object) -> None:
        raise error

    async def kept_in_memory(of: Generation, **changes: Any) -> None:
        of.record = dataclasses.replace(of.record, **changes)

    monkeypatch.setattr(evictions.Evictions, "finish", fails)
    monkeypatch.setattr(Generation, "change", kept_in_memory)
    dataset = node.add("a", 100 * MIB)
    dataset.generation = dataclasses.replace(dataset.generation, evicting=True)
    for _ in range(3):
        assert not await node.budgets.finish(dataset)
        assert not dataset.due.fill()
    assert dataset.generation.why == str(error)


async def test_each_failed_eviction_of_an_operator_is_in_the_log(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a budget's, a moment ago, waited for the same."""
    error = kit.errors.HostError("eviction", "a reader", "")

    async def fails(*_: object, **__: Any) -> None:
        raise error

    monkeypatch.setattr(evictions.Evictions, "settle", fails)
    dataset = node.add("a", 2000 * MIB)
    with structlog.testing.capture_logs() as said:
        await node.budgets.keep()
        for _ in range(2):
            await node.budgets.take_out(dataset)
    assert [each["why"] for each in said if each["event"] == "eviction waits"] == [str(error)] * 3
