"""Damage in generations beside the current one: found once, in all that share it, and taken out."""

import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest

from cache.fill import protocol
from cache.store import generations
from tests.cache import passes
from tests.testbed import trees
from tests.testbed.damage import flip

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]

FILES = 64  # eight in each of eight directories
OWN, SHARED = (["d0"], "f00000"), (["d1"], "f00001")


class Pair:
    """An earlier generation and a current one, which share all files but one."""

    def __init__(self, area: Path) -> None:
        self.earlier, self.current = passes.Generation(area), passes.Generation(area / "next")
        trees.plain(self.earlier.source, FILES)
        self.current.source.parent.mkdir()
        shutil.copytree(self.earlier.source, self.current.source, copy_function=os.link)
        changed = self.at(self.current.source, OWN)
        changed.unlink()
        changed.write_bytes(b"another version")
        for each in (self.earlier, self.current):
            record = dataclasses.asdict(generations.new("a", "source"))
            generations.save(str(each.folder), record | {"state": "complete"})
        assert self.earlier.fill().result == "complete"
        assert self.fill() == FILES - 1

    def fill(self) -> int:
        """The current one; how many files it shares."""
        task = protocol.FillTask(**self.current.common, before=str(self.earlier.folder))
        end = passes.run("fill", task)
        assert end.fill is not None
        return end.fill.shared_files

    @staticmethod
    def at(root: Path, file: tuple[list[str], str]) -> Path:
        return root.joinpath(*file[0], file[1])

    def scrub(self, current: bool = False) -> protocol.VerifyEnd:
        this, other = (self.current, self.earlier) if current else (self.earlier, self.current)
        task = protocol.VerifyTask(
            **this.common, against_source=False, reachable=False, scrub="round-1",
            ahead=[] if current else [str(other.folder)], also=[str(other.folder)],
        )  # fmt: skip
        found = passes.run("verify", task).verify
        assert found is not None
        return found

    def listed(self) -> list[tuple[list[str], str]]:
        return generations.read_quarantined(self.earlier.folder)


@pytest.fixture
def pair(area: Path) -> Pair:
    return Pair(area)


def test_what_generations_share_is_read_once_and_is_bad_in_both(pair: Pair) -> None:
    flip(pair.at(pair.earlier.tree, OWN))
    flip(pair.at(pair.earlier.tree, SHARED))
    found = pair.scrub()
    assert (found.checked_files, found.shared_files, found.bad) == (FILES, FILES - 1, 1)
    assert pair.listed() == [OWN]
    found = pair.scrub(current=True)
    assert (found.checked_files, found.shared_files, found.bad) == (FILES, 0, 1)
    assert found.also == {str(pair.earlier.folder): 1}
    assert pair.listed() == [OWN, SHARED]


def test_fill_takes_no_bad_file_from_the_generation_before(pair: Pair) -> None:
    """What was withdrawn would come back with the same bad bytes."""
    right = flip(pair.at(pair.current.tree, SHARED))
    pair.scrub(current=True)
    for part in ("marks", "files"):
        assert pair.current.withdraw(part).result == "withdrawn"
    assert pair.fill() == FILES - 2
    assert pair.at(pair.current.tree, SHARED).read_bytes() == right
    assert pair.listed() == [SHARED]


def test_what_is_taken_out_of_an_earlier_one_stays_in_the_current_one(pair: Pair) -> None:
    """Who still has the tree of the earlier one finds it missing, not wrong; it stays known."""
    flip(pair.at(pair.earlier.tree, OWN))
    pair.scrub()
    generations.add_quarantined(pair.earlier.folder, [SHARED])
    for _ in range(2):  # as after a kill
        assert pair.earlier.withdraw("hide").result == "withdrawn"
    assert not any(pair.at(pair.earlier.tree, each).exists() for each in (OWN, SHARED))
    assert pair.listed() == [OWN, SHARED]
    assert pair.scrub(current=True).bad == 0
    for part in ("marks", "files"):  # somebody wants it again
        assert pair.earlier.withdraw(part).result == "withdrawn"
    assert pair.earlier.fill().result == "complete"
    trees.assert_equal(pair.earlier.source, pair.earlier.tree)


def test_list_names_each_file_once_and_goes_with_its_generation(tmp_path: Path) -> None:
    generations.add_quarantined(tmp_path, [OWN])
    assert generations.read_quarantined(tmp_path) == []
    (tmp_path / "generation.json").write_text(json.dumps({}))
    generations.add_quarantined(tmp_path, [OWN])
    generations.add_quarantined(tmp_path, [SHARED, OWN])
    assert generations.read_quarantined(tmp_path) == [OWN, SHARED]
