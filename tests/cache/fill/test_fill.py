"""The fill pass: the room it counts on for repeated listings."""

import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash

from cache.fill import copy, protocol
from cache.fill import fill as fill_pass
from cache.fill.agent import Ended
from cache.store import generations, index, sample, tree
from tests.cache import passes
from tests.testbed import damage, trees

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


class Fill:
    """A pass over ``area``/source that is driven step by step."""

    def __init__(
        self, area: Path, *, budget: int = 2**40, used: int = 0, immutable: bool = True,
        inodes: int = 2**40,
    ) -> None:  # fmt: skip
        self.generation = area / "generation"
        self.generation.mkdir(exist_ok=True)
        self.budget = budget
        limits = dataclasses.replace(passes.LIMITS, reserve=0.0, budget=budget, inodes=inodes)
        common = passes.common(self.generation, area / "source")
        task = protocol.FillTask(**common | {"immutable": immutable, "limits": limits}, used=used)
        self.run, self.decides = fill_pass.begin(task)
        self.run.start(self.decides)

    def until(self, condition: Callable[[], bool]) -> Ended | None:
        """Step until ``condition``, or to the end of the pass, which is returned."""
        try:
            for _ in range(50_000):  # idle ones too, on a busy machine
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
@pytest.mark.parametrize("limit", [{"budget": 4 * MIB}, {"inodes": 500}])
@pytest.mark.parametrize("parents", [1, 10])
def test_scan_stops_making_directories_without_room(
    parents: int, limit: dict[str, int], area: Path, begin: Callable[..., Fill]
) -> None:
    for number in range(3000):
        (area / "source" / f"p{number % parents}" / f"d{number:04}").mkdir(parents=True)
    for _ in range(3):  # trying again takes no more
        fill = begin(**limit)
        assert fill.end().result == "partial"
        made = sum(1 for _ in (fill.generation / "tree").rglob("*"))
        assert made > 200
        assert fill.taken() <= limit.get("budget", 2**40)
        assert made <= limit.get("inodes", 2**40)
        fill.stop()
    assert begin().end().result == "complete"


@real
def test_manifest_has_the_version_that_was_copied(
    area: Path, begin: Callable[..., Fill], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log grows between its listing and its copy."""
    (area / "source").mkdir()
    trees.write(area / "source" / "train.log", bytes(15516))
    seen = copy.settled

    def grown(origin: int, immutable: bool) -> os.stat_result:
        trees.write(area / "source" / "train.log", bytes(15711))
        return seen(origin, immutable)

    monkeypatch.setattr(copy, "settled", grown)  # the workers are forked
    fill = begin(immutable=False)
    assert fill.end().result == "complete"
    (item,) = fill.run.index.kept(index.ROOT)
    now = (area / "source" / "train.log").stat()
    assert sample.difference(item.entry, now) == ""
    assert item.checksum == xxhash.xxh3_128_hexdigest(bytes(15711))


# --- room for some


@real
def test_oversize_file_keeps_no_small_one_out(area: Path, begin: Callable[..., Fill]) -> None:
    # "big" comes in the middle of the only chunks there are, and never fits.
    files(area, 900, 100)
    trees.write(area / "source" / "big", os.urandom(60 * MIB))
    budget = 40 * MIB
    fill = begin(budget=budget)
    ended = fill.end()
    assert ended.result == "partial"
    assert "no room for 1 files" in ended.why
    assert ended.why.endswith(": cache.budget is too small")
    stored = os.listdir(fill.generation / "tree")
    assert len(stored) == 900 and "big" not in stored
    fill.stop()
    page = generations.failures_page(str(fill.generation), 10, [0, ""])
    assert [each["path"] for each in page["failures"]] == ["big"]
    assert "no room" in page["failures"][0]["reason"]
    assert begin(budget=100 * MIB).end().result == "complete"


@real
def test_directory_whose_xattrs_are_too_large_costs_only_itself(
    area: Path, begin: Callable[..., Fill], monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("big", "plain"):
        (area / "source" / folder).mkdir(parents=True, mode=0o755)
        trees.write(area / "source" / folder / "f", b"x")
    os.setxattr(area / "source" / "big", "user.x", b"x")
    found, big = tree.xattrs_of, (area / "source" / "big").stat().st_ino

    def larger(directory: int) -> dict[str, bytes]:  # as XFS holds, and the store's ext4 does not
        return {"user.x": bytes(6000)} if os.fstat(directory).st_ino == big else found(directory)

    monkeypatch.setattr(tree, "xattrs_of", larger)  # the workers are forked
    fill = begin()
    ended = fill.end()
    why = "its xattrs are larger than the store's file system takes"
    told = f"1 entry could not be copied: big ({why})"
    assert (ended.result, ended.why) == ("partial", told)
    assert fill.run.index.failures(10)[0][1:] == ("big", why)
    assert (fill.generation / "tree" / "plain" / "f").exists()
    assert not (fill.generation / "tree" / "big").exists(), "jobs read the source's"


@real
def test_what_does_not_fit_is_listed_in_pages(area: Path, begin: Callable[..., Fill]) -> None:
    names = files(area, 30, MIB)
    fill = begin(budget=10 * MIB)
    assert fill.end().result == "partial"
    stored = set(os.listdir(fill.generation / "tree"))
    fill.stop()
    listed: list[str] = []
    reasons: set[str] = set()
    after: list[Any] = [0, ""]
    while after:
        page = generations.failures_page(str(fill.generation), 4, after)
        listed += [each["path"] for each in page["failures"]]
        reasons |= {each["reason"] for each in page["failures"]}
        number, _, name = (page["next"] or "").partition("/")
        after = [int(number), os.fsdecode(bytes.fromhex(name))] if number else []
    assert sorted(listed) == sorted(set(names) - stored)
    assert reasons == {"no room for its 1.0 MiB on the SSD"}


# --- hard links


@real
def test_bad_hard_linked_file_does_not_come_back(area: Path, begin: Callable[..., Fill]) -> None:
    source = area / "source"
    source.mkdir()
    trees.write(source / "one", b"linked" * 1000)
    os.link(source / "one", source / "two")
    trees.write(source / "big", os.urandom(2 * MIB))
    made = passes.Generation(area)
    fill = begin(budget=MIB)  # it does not finish, so that the spare links stay
    assert fill.end().result == "partial"
    fill.stop()
    assert os.listdir(made.folder / "links")
    right = damage.flip(made.tree / "one")
    found = made.verify().verify
    assert found is not None and found.bad == 2
    os.unlink(made.tree / "two")  # it is copied again, and must not get the bad bytes
    with index.Index.open(made.folder / index.NAME).transaction() as known:
        known.execute("INSERT INTO failures VALUES (1, 'two', 'for the test', 0)")
    assert made.fill().result == "complete"
    assert (made.tree / "one").read_bytes() == right
    assert (made.tree / "two").read_bytes() == right


@real
def test_hard_links_of_any_names(area: Path) -> None:
    made = passes.Generation(area)
    made.source.mkdir()
    made.folder.mkdir()
    long = "\N{CJK UNIFIED IDEOGRAPH-6570}" * 84
    for one, two in (("a", "b"), (f"{long}x", f"{long}y")):
        trees.write(made.source / one, os.urandom(5000))
        os.link(made.source / one, made.source / two)
    for name in ("a.link", "b.link"):
        trees.write(made.source / name, b"another file")
    end = made.fill()
    assert (end.result, end.why) == ("complete", "")
    trees.assert_equal(made.source, made.tree)


# --- listings of any length


@real
def test_names_of_many_directories_come_in_parts(
    area: Path, begin: Callable[..., Fill], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A message of all names at once would be refused: 1,200 of 100 bytes stand for a million.
    monkeypatch.setattr(protocol, "LONGEST", 100_000)
    # Fewer at a time, too: on a busy machine all directories can be sealed at once.
    monkeypatch.setattr(fill_pass, "SEALS_IN_A_BATCH", 200)
    long = "n" * 96
    for number in range(1200):
        (area / "source" / f"{long}{number:04}").mkdir(parents=True)
    fill = begin()
    ended = fill.end()
    assert ended.result == "complete", ended
    fill.stop()
    fill = begin()
    fill.run.index.restart_listing(index.ROOT)
    fill.run.index.count_rescan(index.ROOT)
    (area / "source" / f"{long}0007").rmdir()
    ended = fill.end()
    assert ended.result == "complete", ended
    assert fill.run.totals.directories == 1200, "the root, and all but the one that vanished"
    fill.stop()
    assert f"{long}0007" not in os.listdir(fill.generation / "tree")


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
