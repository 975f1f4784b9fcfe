"""The evict pass: what goes, what stays, that the index is exact, and that it may be killed."""

import asyncio
import contextlib
import dataclasses
import itertools
import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest

import kit.line_worker
from cache.fill import commit, evict, protocol
from cache.store import index, large, manifest, subset, tree
from tests.cache import passes
from tests.testbed import trees

pytestmark = [pytest.mark.real, pytest.mark.timeout(180)]


class Evicted(passes.Generation):
    """A generation with passes that evict."""

    def __init__(self, area: Path) -> None:
        super().__init__(area)
        self.folder.mkdir()

    def limited(self, **limits: Any) -> dict[str, Any]:
        return {**self.common, "limits": dataclasses.replace(passes.LIMITS, **limits)}

    def evict(self, part: str, share: int = subset.ALL, **limits: Any) -> protocol.EvictEnd:
        task = evict.EvictTask(**self.limited(**limits), part=part, share=share)
        end = passes.run("evict", task)
        assert end.evict is not None, end
        return end.evict

    def partly(self, share: int, **limits: Any) -> protocol.End:
        return passes.run("fill", protocol.FillTask(**self.limited(**limits), share=share))

    def stopped(self, files: int) -> None:
        """A fill that is cancelled once it has listed all and stored so many files."""

        async def listen() -> protocol.End | None:
            about = "cache.fill.fill:main"
            worker = kit.line_worker.LineWorker(about, protocol.Report, about=about, largest=2**20)
            task = protocol.FillTask(**self.limited(files_per_second=4 * files))
            listed = False
            try:
                async with contextlib.aclosing(worker.listen(task, 60.0)) as reports:
                    async for report in reports:
                        listed |= report.skeleton
                        now = report.progress
                        if listed and now is not None and now.counts.done_files >= files:
                            await worker.send(protocol.Command(cancel=True))
                        if report.end is not None:
                            return report.end
                return None
            finally:
                await worker.close()

        end = asyncio.run(listen())
        assert end is not None
        assert end.result == "cancelled"

    def stored(self) -> dict[str, int]:
        """Path and inode of what is in the tree beside directories."""
        found = {}
        for folder, _, names in os.walk(self.tree):
            for name in names:
                path = os.path.join(folder, name)
                found[os.path.relpath(path, self.tree)] = os.lstat(path).st_ino
        return found

    def allocated(self) -> int:
        """SSD bytes of the tree without its directories, names counted as the index does."""
        total = 0
        for path in self.stored():
            status = (self.tree / path).lstat()
            total += status.st_blocks * 512 + tree.entry_of(Path(path).name, status).name_bytes
        return total

    def index(self) -> index.Totals:
        with contextlib.closing(index.Index.read_only(self.folder / index.NAME)) as opened:
            return opened.totals()

    def positions(self) -> dict[str, int]:
        """Where each entry of the manifest and of what is left to copy stands."""
        opened = index.Index(index.connect(self.folder / index.NAME))
        found = {}
        with contextlib.closing(opened):
            key = subset.key_of("", self.folder.parent.name)
            totals = opened.totals()
            positions = subset.Positions(key, subset.Amount(totals.bytes, totals.files))
            for number in opened.known_directories(0, 10_000):
                path, inside = opened.path(number), opened.directory(number).inside
                for part in opened.parts(number):
                    entries = [item.entry for item in part.items]
                    for entry, at in zip(entries, positions.of(path, inside, entries), strict=True):
                        assert "/".join([*path, entry.name]) not in found, "an entry twice"
                        found["/".join([*path, entry.name])] = at
        return found


@pytest.fixture
def made(area: Path) -> Evicted:
    """A generation that is complete."""
    generation = Evicted(area)
    trees.plain(generation.source, 600)
    assert generation.fill().result == "complete"
    return generation


def extra_of_directories(generation: Evicted) -> int:
    """What the index counts of directories beside their first block."""
    return generation.index().allocated - generation.allocated()


def test_smaller_share_takes_out_exactly_what_is_beyond(made: Evicted) -> None:
    before, extra = made.stored(), extra_of_directories(made)
    for share in (3000, 1500, 0):
        made.evict("marks", share)
        end = made.evict("files", share)
        positions = made.positions()
        assert positions.keys() == before.keys(), "the manifest has every entry, stored or not"
        kept = {path: before[path] for path, at in positions.items() if at < share}
        assert made.stored() == kept
        totals = made.index()
        assert totals.done_files == len(kept)
        assert totals.allocated == made.allocated() + extra
        assert end.fill.left_files == len(before) - len(kept)
        marks = [d for d, _, _ in os.walk(made.tree) if tree.OPAQUE in os.listxattr(d)]
        for path in marks:  # of those that lack nothing
            of_source = made.source / os.path.relpath(path, made.tree)
            assert sorted(os.listdir(path)) == sorted(os.listdir(of_source))
    assert made.partly(subset.ALL).result == "complete"
    trees.assert_equal(made.source, made.tree)


def test_marks_that_a_fill_took_away_are_among_those_that_went(made: Evicted) -> None:
    """It was cut off before it marked again, and the overlay may remember them."""
    made.evict("marks", 1500)
    made.evict("files", 1500)
    closed = [d for d, _, _ in os.walk(made.tree) if tree.OPAQUE in os.listxattr(d)]
    assert closed
    with tree.opened_root(made.tree) as root:
        for path in closed:
            commit.unmark(root, os.path.relpath(path, made.tree).split("/"))
    assert [made.evict("marks", 1500).evicted for _ in range(2)] == [len(closed), 0]


def test_larger_share_adds_and_moves_nothing(made: Evicted) -> None:
    made.evict("marks", 400)
    made.evict("files", 400)
    shares = (400, 1200, 2400)
    for less, more in itertools.pairwise(shares):
        before = made.stored()
        end = made.partly(more)
        assert end.result == "partial"
        after = made.stored()
        assert before.items() <= after.items(), "nothing that was kept was touched"
        positions = made.positions()
        added = {path for path in after if path not in before}
        assert added == {path for path, at in positions.items() if less <= at < more}
    assert made.index().sealed == 0, "a sealed directory hides what is not stored"


def test_choice_fits_the_budget(made: Evicted) -> None:
    whole = made.index().used
    for part in (0.7, 0.2):
        budget = int(whole * part) + 200_000  # and its index
        chosen = made.evict("choose", budget=budget)
        made.evict("marks", chosen.share)
        end = made.evict("files", chosen.share)
        assert end.fill.used <= budget
        assert chosen.beyond == end.evicted
        assert made.evict("choose", budget=budget).beyond == 0
    inodes = made.index().inodes - 50
    chosen = made.evict("choose", inodes=inodes)
    assert chosen.beyond > 0
    made.evict("files", chosen.share)
    assert inodes - 10 <= made.index().inodes <= inodes


@pytest.mark.parametrize("lost", ["index", "tree"])
def test_cut_short_and_done_again(made: Evicted, lost: str) -> None:
    """After a power cut either of both may be older than the other."""
    share, extra = 1000, extra_of_directories(made)
    database = made.folder / index.NAME
    earlier = database.read_bytes()
    inodes = made.stored()
    made.evict("marks", share)
    if lost == "index":
        made.evict("files", share)
        database.write_bytes(earlier)
        for suffix in ("-wal", "-shm"):
            database.with_name(database.name + suffix).unlink(missing_ok=True)
    else:
        back = [path for path, at in made.positions().items() if at >= share][:40]
        made.evict("files", share)
        for path in back:
            (made.tree / path).write_bytes(b"came back")
    made.evict("marks", share)
    made.evict("files", share)
    kept = {path for path, at in made.positions().items() if at < share}
    assert made.stored() == {path: inodes[path] for path in kept}
    assert made.index().done_files == len(kept)
    assert made.index().allocated == made.allocated() + extra
    assert made.partly(subset.ALL).result == "complete"
    trees.assert_equal(made.source, made.tree)


def test_fill_that_was_stopped_gives_what_is_beyond_and_goes_on(area: Path) -> None:
    """It gives room to the dataset that it stopped for."""
    generation = Evicted(area)
    trees.plain(generation.source, 400)
    generation.stopped(60)
    inodes, extra = generation.stored(), extra_of_directories(generation)
    assert 60 <= len(inodes) < 400
    assert generation.index().done_files == len(inodes)
    budget = generation.index().used // 2 + 200_000  # and its index
    chosen = generation.evict("choose", budget=budget)
    assert 0 < chosen.beyond < len(inodes)
    generation.evict("marks", chosen.share)
    end = generation.evict("files", chosen.share)
    assert (end.evicted, end.fill.used <= budget) == (chosen.beyond, True)
    kept = generation.stored()
    assert kept == {path: inodes[path] for path in kept}
    assert len(kept) == len(inodes) - chosen.beyond == generation.index().done_files
    assert generation.index().allocated == generation.allocated() + extra
    assert generation.partly(subset.ALL).result == "complete"
    trees.assert_equal(generation.source, generation.tree)
    assert {path: generation.stored()[path] for path in kept} == kept


def test_hard_links_go_together_and_free_their_space(area: Path) -> None:
    generation = Evicted(area)
    generation.source.mkdir()
    for number in range(40):
        (generation.source / f"a{number}").write_bytes(os.urandom(9000))
        os.link(generation.source / f"a{number}", generation.source / f"b{number}")
    assert generation.fill().result == "complete"
    generation.evict("marks", 2000)
    generation.evict("files", 2000)
    left = generation.stored()
    assert 0 < len(left) < 80
    for path in left:
        assert (generation.tree / path).lstat().st_nlink == 2, "both names, or none"
    assert list((generation.folder / "links").iterdir()) == []


def test_part_of_the_manifest_that_a_newer_agent_wrote_is_left_alone(made: Evicted) -> None:
    with contextlib.closing(sqlite3.connect(made.folder / index.NAME)) as opened, opened:
        opened.execute("UPDATE manifest SET entries = x'ff00'")
    before = made.stored()
    task = evict.EvictTask(**made.common, part="files", share=0)
    assert passes.run("evict", task).result == "failed"
    assert made.stored() == before
    with pytest.raises(ValueError, match="has format"):
        manifest.unpack(b"\xff\x00")


def beside(generation: Evicted) -> set[str]:
    """What lies there of large files beside the tree."""
    found = [generation.folder / name for name in (large.PARTS, large.RECORDS)]
    return {f"{folder.name}/{each.name}" for folder in found for each in folder.iterdir()}


def test_large_file_goes_with_its_records_and_comes_back(area: Path) -> None:
    generation = Evicted(area)
    trees.plain(generation.source, 40)
    big = generation.source / "big"
    big.write_bytes(os.urandom(large.LARGEST_SMALL + 5000))
    assert generation.fill().result == "complete"
    (records,) = beside(generation)
    whole = generation.index().used
    end = generation.evict("choose", budget=whole // 2)
    assert 0 < end.share < subset.ALL
    generation.evict("marks", end.share)
    end = generation.evict("files", end.share)
    assert beside(generation) == set(), "its space is free"
    assert end.fill.used < whole // 2
    assert len(generation.stored()) == 40, "the small ones stay: the large one comes late"
    again = generation.partly(subset.ALL)
    assert again.result == "complete"
    assert beside(generation) == {records}
    trees.assert_equal(generation.source, generation.tree)


def test_part_of_a_large_file_is_discarded_with_it(area: Path) -> None:
    generation = Evicted(area)
    trees.plain(generation.source, 40)
    big = generation.source / "big"
    big.write_bytes(os.urandom(large.LARGEST_SMALL + 5000))
    end = generation.partly(subset.ALL, budget=20 * 2**20)
    assert (end.result, end.fill and end.fill.short) == ("partial", True)
    item = tree.entry_of("big", big.lstat())
    with contextlib.closing(index.Index.read_only(generation.folder / index.NAME)) as opened:
        known = [each.entry for each in opened.kept(index.ROOT) if each.entry.name == "big"]
    assert [each.size for each in known] == [item.size]
    top = tree.open_root(generation.folder)
    try:
        with large.part(top, large.key_of([], known[0]), known[0]):
            pass
    finally:
        os.close(top)
    assert beside(generation)
    generation.evict("marks", 0)
    generation.evict("files", 0)
    assert beside(generation) == set()
    assert generation.stored() == {}
