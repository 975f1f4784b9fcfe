"""What a fill reckons with while it decides whether there is room: hints, listings begun again."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cache.fill import engine, fillpass, index
from tests.cache import byhand
from tests.testbed import trees

pytestmark = pytest.mark.real  # trusted xattrs

MIB = 2**20


@pytest.fixture(autouse=True)
def no_commands() -> Iterator[None]:
    """Standard input is the line to the agent: one that says nothing."""
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

    def __init__(self, area: Path, *, budget: int = 2**40, **more: Any) -> None:
        self.generation = area / "generation"
        self.generation.mkdir(exist_ok=True)
        space = {"reserve": 0.0, "budget": budget, "others": 0}
        task = byhand.task(
            self.generation, area / "source", **{"immutable": True, "space": space} | more
        )
        self.made = fillpass.start(task)
        self.made._limits(self.made.task)
        self.made.crew.resize(self.made.workers)

    def until(self, true: Callable[[], bool]) -> engine.End | None:
        """Steps until ``true``, or the end of the pass, which is returned."""
        try:
            for _ in range(5000):
                if true():
                    return None
                self.made._step()
        except engine.End as end:
            return end
        raise AssertionError("the pass does not come to its end")

    def end(self) -> engine.End:
        end = self.until(lambda: False)
        assert end is not None
        return end

    def taken(self) -> int:
        """Bytes that the tree takes, by the disk's own count."""
        return trees.allocated(self.generation / "tree")

    def stop(self) -> None:
        self.made.crew.stop()
        self.made.index.close()
        os.close(self.made._lock)


@pytest.fixture
def begin(area: Path) -> Iterator[Callable[..., Fill]]:
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
    """Nothing but hints is done until they are committed."""
    fill.made._copy_job = lambda: None  # type: ignore[method-assign]
    fill.until(lambda: fill.made.skeleton)
    fill.made.hints.take(names)
    job = fill.made._hint_job()
    if job is None:
        return
    fill.made.crew.give(fill.made.crew.idle()[0], job)
    assert fill.made._room(inodes=0).bytes <= fill.made.task["space"]["budget"] - job["allowance"]
    commits = fill.made.commits
    fill.until(lambda: fill.made.commits > commits)


# --- hints ----------------------------------------------------------------------------------------


def test_hints_take_no_more_than_the_budget(area: Path, begin: Callable[..., Fill]) -> None:
    names = files(area, 20, MIB)
    fill = begin(budget=5 * MIB)
    hinted(fill, names)
    assert 3 * MIB < fill.taken() <= 5 * MIB


def test_a_large_file_is_left_to_its_chunk(
    area: Path, begin: Callable[..., Fill], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fillpass, "HINT_BYTES", MIB)
    files(area, 1, 2 * MIB)
    trees.write(area / "source" / "small", b"x")
    fill = begin()
    hinted(fill, ["f000", "small"])
    assert sorted(os.listdir(fill.generation / "tree")) == ["small"]


def test_what_hints_brought_is_counted_until_their_chunk_counts_it(
    area: Path, begin: Callable[..., Fill]
) -> None:
    names = files(area, 8, MIB)
    fill = begin()
    hinted(fill, names[:4])
    assert fill.made._used() >= 4 * MIB
    fill.stop()
    fill = begin()  # an agent that was killed meanwhile: it is known from the index
    assert fill.made._used() >= 4 * MIB
    kept = {name: (fill.generation / "tree" / name).stat().st_ino for name in names[:4]}
    assert fill.end().result == "complete"
    assert 8 * MIB <= fill.made._used() < 9 * MIB, "each file is counted once"
    for name, inode in kept.items():
        assert (fill.generation / "tree" / name).stat().st_ino == inode, "copied once"
    assert not fill.made.index.any_ahead()


def test_a_budget_that_just_holds_all_is_enough_with_hints_too(
    area: Path, begin: Callable[..., Fill]
) -> None:
    names = files(area, 8, MIB)
    fill = begin(budget=8 * MIB + MIB // 2)
    hinted(fill, names[:6])
    assert fill.taken() >= 6 * MIB
    del fill.made._copy_job
    assert fill.end().result == "complete"


# --- listings that are begun again ----------------------------------------------------------------


def test_what_a_directory_takes_is_reckoned_with_while_it_is_listed_anew(
    area: Path, begin: Callable[..., Fill]
) -> None:
    names = files(area, 20, MIB // 2)
    fill = begin(budget=6 * MIB)
    assert fill.end().result == "partial"
    taken, used = fill.taken(), fill.made._used()
    assert used >= taken
    fill.made.index.fail(index.ROOT, names[0], "for the test", lasting=False)
    fill.stop()
    fill = begin(budget=6 * MIB)
    assert fill.made.totals.allocated >= taken - 4096, "the totals are those of before"
    fill.made._list_anew(index.ROOT)
    fill.made.totals = fill.made.index.totals()
    assert fill.made.totals.allocated == 0
    assert fill.made._used() >= taken
    assert fill.end().result == "partial"
    assert fill.made.skeleton, "full as it is, it is listed to its end"
    assert fill.taken() <= 6 * MIB
    assert taken <= fill.made._used() <= used + MIB // 4, "nothing is counted twice in the end"


def test_a_lost_index_does_not_make_room(area: Path, begin: Callable[..., Fill]) -> None:
    files(area, 20, MIB // 2)
    fill = begin(budget=6 * MIB)
    fill.end()
    taken = fill.taken()
    used = fill.made._used()
    fill.stop()
    index.Index.discard(fill.generation / index.NAME)
    fill = begin(budget=6 * MIB, used=used)
    assert fill.made._used() >= taken
    fill.end()
    assert fill.taken() <= 6 * MIB


def test_a_budget_that_just_holds_all_is_enough_for_a_listing_anew_too(
    area: Path, begin: Callable[..., Fill]
) -> None:
    names = files(area, 8, MIB)
    fill = begin(budget=8 * MIB + MIB // 2)
    fill.until(lambda: fill.made.index.totals().done_files >= 4)
    fill.made.index.fail(index.ROOT, names[0], "for the test", lasting=False)
    used = fill.made._used()
    fill.stop()
    assert begin(budget=8 * MIB + MIB // 2, used=used).end().result == "complete"


# --- directories ----------------------------------------------------------------------------------


def test_one_listing_makes_no_more_directories_than_there_is_room_for(
    area: Path, begin: Callable[..., Fill]
) -> None:
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
