"""The fill pass: the room it counts on for hints and repeated listings, and its hint queue."""

import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cache.fill import fill as fill_pass
from cache.fill import protocol
from cache.fill.coordinator import Ended
from cache.store import index
from cache.store.tree import Entry
from tests.cache import passes
from tests.testbed import trees

real = pytest.mark.real  # trusted xattrs

MIB = 2**20


@pytest.fixture
def silent_agent() -> Iterator[None]:
    """Standard input is the pipe from the agent: no command comes."""
    kept, (reading, writing) = os.dup(0), os.pipe()
    os.dup2(reading, 0)
    try:
        yield
    finally:
        os.dup2(kept, 0)
        for each in (kept, reading, writing):
            os.close(each)


PARTS_IN_THE_PIPE = 6


class Fill:
    """A pass over ``area``/source that is driven step by step."""

    def __init__(self, area: Path, *, budget: int = 2**40, used: int = 0) -> None:
        self.generation = area / "generation"
        self.generation.mkdir(exist_ok=True)
        self.budget = budget
        limits = dataclasses.replace(passes.LIMITS, reserve=0.0, budget=budget)
        common = passes.common(self.generation, area / "source")
        task = protocol.FillTask(**common | {"immutable": True, "limits": limits}, used=used)
        self.run, self.decides = fill_pass.begin(task)
        self.run.start(self.decides)

    def until(self, condition: Callable[[], bool]) -> Ended | None:
        """Step until ``condition``, or to the end of the pass, which is returned."""
        try:
            for _ in range(5000):
                if condition():
                    return None
                self.run.step()
        except Ended as ended:
            return ended
        raise AssertionError("the pass does not end")

    def end(self) -> Ended:
        ended = self.until(lambda: False)
        assert ended is not None
        return ended

    def taken(self) -> int:
        """SSD bytes of the tree, counted by the disk."""
        return trees.allocated(self.generation / "tree")

    def stop(self) -> None:
        self.run.pool.stop()
        self.run.index.close()
        os.close(self.run._lock)


@pytest.fixture
def begin(area: Path, silent_agent: None) -> Iterator[Callable[..., Fill]]:
    begun: list[Fill] = []

    def one(**more: Any) -> Fill:
        begun.append(Fill(area, **more))
        return begun[-1]

    yield one
    for fill in begun:
        try:
            fill.stop()
        except OSError:
            pass  # the test did


def files(area: Path, count: int, size: int) -> list[str]:
    (area / "source").mkdir()
    for number in range(count):
        trees.write(area / "source" / f"f{number:03}", os.urandom(size))
    return [f"f{number:03}" for number in range(count)]


def hinted(fill: Fill, names: list[str]) -> None:
    """Copy nothing but what these hints name, and commit it."""
    fill.decides.copy_assignment = lambda: None  # type: ignore[method-assign]
    fill.until(lambda: fill.decides.skeleton)
    fill.decides.hint(names)
    assignment = fill.decides.hint_assignment()
    if assignment is None:
        return
    fill.run.pool.give(fill.run.pool.idle()[0], assignment)
    assert isinstance(assignment.job, protocol.Hint)
    assert fill.run.room(inodes=0).bytes <= fill.budget - assignment.job.allowance
    commits = fill.run.commits
    fill.until(lambda: fill.run.commits > commits)


# --- hints


@real
def test_hints_stay_within_budget(area: Path, begin: Callable[..., Fill]) -> None:
    names = files(area, 20, MIB)
    fill = begin(budget=5 * MIB)
    hinted(fill, names)
    assert 3 * MIB < fill.taken() <= 5 * MIB


@real
def test_hint_skips_a_large_file(
    area: Path, begin: Callable[..., Fill], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fill_pass, "HINT_BYTES", MIB)
    files(area, 1, 2 * MIB)
    trees.write(area / "source" / "small", b"x")
    fill = begin()
    hinted(fill, ["f000", "small"])
    assert sorted(os.listdir(fill.generation / "tree")) == ["small"]


@real
def test_hinted_files_are_counted_once(area: Path, begin: Callable[..., Fill]) -> None:
    names = files(area, 8, MIB)
    fill = begin()
    hinted(fill, names[:4])
    assert fill.run.used() >= 4 * MIB
    fill.stop()
    fill = begin()  # an agent that was killed meanwhile: it is known from the index
    assert fill.run.used() >= 4 * MIB
    kept = {name: (fill.generation / "tree" / name).stat().st_ino for name in names[:4]}
    assert fill.end().result == "complete"
    assert 8 * MIB <= fill.run.used() < 9 * MIB, "each file is counted once"
    for name, inode in kept.items():
        assert (fill.generation / "tree" / name).stat().st_ino == inode, "copied once"
    assert not fill.run.index.any_ahead()


@real
def test_exact_budget_is_enough_with_hints(area: Path, begin: Callable[..., Fill]) -> None:
    names = files(area, 8, MIB)
    fill = begin(budget=8 * MIB + MIB // 2)
    hinted(fill, names[:6])
    assert fill.taken() >= 6 * MIB
    del fill.decides.copy_assignment
    assert fill.end().result == "complete"


# --- listings that are begun again


@real
def test_space_counts_while_listed_again(area: Path, begin: Callable[..., Fill]) -> None:
    names = files(area, 20, MIB // 2)
    fill = begin(budget=6 * MIB)
    assert fill.end().result == "partial"
    taken, used = fill.taken(), fill.run.used()
    assert used >= taken
    fill.run.index.fail(index.ROOT, names[0], "for the test", lasting=False)
    fill.stop()
    fill = begin(budget=6 * MIB)
    assert fill.run.totals.allocated >= taken - 4096, "the totals are those of before"
    fill.run.list_again(index.ROOT)
    fill.run.totals = fill.run.index.totals()
    assert fill.run.totals.allocated == 0
    assert fill.run.used() >= taken
    assert fill.end().result == "partial"
    assert fill.decides.skeleton, "full as it is, it is listed to its end"
    assert fill.taken() <= 6 * MIB
    assert taken <= fill.run.used() <= used + MIB // 4, "nothing is counted twice in the end"


@real
def test_lost_index_frees_no_room(area: Path, begin: Callable[..., Fill]) -> None:
    files(area, 20, MIB // 2)
    fill = begin(budget=6 * MIB)
    fill.end()
    taken = fill.taken()
    used = fill.run.used()
    fill.stop()
    index.Index.discard(fill.generation / index.NAME)
    fill = begin(budget=6 * MIB, used=used)
    assert fill.run.used() >= taken
    fill.end()
    assert fill.taken() <= 6 * MIB


@real
def test_exact_budget_is_enough_when_listed_again(area: Path, begin: Callable[..., Fill]) -> None:
    names = files(area, 8, MIB)
    fill = begin(budget=8 * MIB + MIB // 2)
    fill.until(lambda: fill.run.index.totals().done_files >= 4)
    fill.run.index.fail(index.ROOT, names[0], "for the test", lasting=False)
    used = fill.run.used()
    fill.stop()
    assert begin(budget=8 * MIB + MIB // 2, used=used).end().result == "complete"


# --- directories


@real
def test_scan_stops_making_directories_without_room(area: Path, begin: Callable[..., Fill]) -> None:
    for number in range(3000):
        (area / "source" / f"d{number:04}").mkdir(parents=True)
    fill = begin(budget=4 * MIB)
    assert fill.end().result == "partial"
    # Until the pass has heard of a part and stops the listing, more lie in the pipe.
    assert MIB < fill.taken() <= 4 * MIB + PARTS_IN_THE_PIPE * index.CHUNK_ENTRIES * 4096
    fill.stop()
    known = fill.taken()
    again = begin(budget=4 * MIB)
    assert again.end().result == "partial"
    assert again.taken() <= known + 4096, "trying again takes no more"
    again.stop()
    assert begin().end().result == "complete"


# --- the hint queue


def test_hint_queue_is_bounded_and_latest_first(tmp_path: Path) -> None:
    known = index.Index.open(tmp_path / "index")
    known.add_root(Entry("", 0o40755, 0, 0, 0, 0, 1, 1, True))
    queue = fill_pass.HintQueue()
    queue.add([f"unknown{n}/x" for n in range(1000)] + [f"f{n}" for n in range(100)])
    found = queue.next(known)
    assert found is not None
    assert (found[0], found[1], len(found[2])) == (1, [], fill_pass.MOST_HINTED_NAMES)
    assert queue.next(known) is None
    known.close()


# --- the end


@real
def test_fill_is_closed_when_it_reports_its_end(area: Path) -> None:
    # The agent kills the coordinator then: a log of the index would stay and take space, and Ceph
    # clients of workers would not be closed.
    made = passes.Generation(area)
    trees.plain(made.source, 40, directories=4)
    made.folder.mkdir()
    assert made.fill().result == "complete"
    assert not (made.folder / f"{index.NAME}-wal").exists()
