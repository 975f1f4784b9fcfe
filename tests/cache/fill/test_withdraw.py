"""Bad files that cannot be replaced: withdrawn in the right order, wherever it is interrupted."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from cache.fill import protocol, verify, withdraw
from cache.store import generations, tree
from cache.store.index import Index
from tests.cache import passes
from tests.testbed import trees
from tests.testbed.agent import Agent
from tests.testbed.damage import flip

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]

BAD = "d1/f00001"


def lose(path: Path) -> None:
    """Unlink it; the times of its directory as before."""
    status = path.parent.stat()
    path.unlink()
    os.utime(path.parent, ns=(status.st_atime_ns, status.st_mtime_ns))


def is_sealed(folder: Path) -> bool:
    return tree.OPAQUE in os.listxattr(folder)


# --- the passes


@pytest.fixture
def complete(area: Path) -> passes.Generation:
    """A complete generation."""
    made = passes.Generation(area)
    trees.plain(made.source, 40, directories=4)
    made.folder.mkdir()
    assert made.fill().result == "complete"
    return made


@pytest.mark.parametrize("index", ["kept", "lost"])
def test_withdraw_is_safe_to_interrupt_and_repeat(complete: passes.Generation, index: str) -> None:
    stored = complete.tree / BAD
    flip(stored)
    lose(complete.source / BAD)
    end = complete.verify()
    assert end.verify is not None
    assert (end.result, end.verify.unreplaced) == ("bad", 1)
    assert complete.withdraw("marks").result == "withdrawn"
    assert not is_sealed(stored.parent)
    assert is_sealed(stored.parent.parent / "d2")
    known = Index.open(complete.folder / "index.sqlite")
    assert [(name, reason) for _, name, reason in known.failures(9)] == [("f00001", withdraw.BAD)]
    assert known.sealable(9) == []
    known.close()
    # As if it had been killed when the index knew and the mark was still on.
    os.setxattr(stored.parent, tree.OPAQUE, b"y")
    if index == "lost":
        Index.discard(complete.folder / "index.sqlite")
    end = complete.fill()
    assert end.result == "failed"
    assert "withdrawn first" in end.why
    assert stored.exists()
    assert complete.withdraw("marks").result == "withdrawn"
    assert not is_sealed(stored.parent)
    end = complete.withdraw("files")
    assert (end.result, end.withdrawn) == ("withdrawn", 1)
    assert not stored.exists()
    assert not generations.has_quarantined(str(complete.folder))
    assert complete.fill().result == "complete"
    trees.assert_equal(complete.source, complete.tree)


@pytest.mark.parametrize("part", ["hide", "files"])
def test_directory_above_a_lost_one_has_its_time_again(
    complete: passes.Generation, part: str
) -> None:
    """Losing "d1" changes the time of the directory above it, which a withdrawal puts right."""
    moment = complete.source.stat().st_mtime_ns
    shutil.rmtree(complete.tree / "d1")
    assert complete.tree.stat().st_mtime_ns != moment
    assert complete.verify().result == "bad"
    assert complete.withdraw("marks").result == "withdrawn"
    assert complete.withdraw(part).result == "withdrawn"
    assert complete.tree.stat().st_mtime_ns == moment
    assert not (complete.tree / "d1").exists()
    assert complete.withdraw("files").result == "withdrawn"
    assert complete.fill().result == "complete"
    assert complete.tree.stat().st_mtime_ns == moment
    trees.assert_equal(complete.source, complete.tree)


def test_unfinished_verify_keeps_quarantined_files(complete: passes.Generation) -> None:
    generations.write_quarantined(complete.folder, [(["d1"], "f00001")])
    task = protocol.VerifyTask(**complete.common, against_source=False, reachable=True)
    _, decides = verify.begin(task)
    decides.unreplaced = [(["d2"], "f00002"), (["d1"], "f00001")]
    assert decides.quarantine() == 2
    assert len(generations.read_quarantined(complete.folder)) == 2
    decides.unreplaced = []
    decides.whole = True
    assert decides.quarantine() == 0
    assert not generations.has_quarantined(str(complete.folder))


# --- the agent


def test_killed_agent_withdraws_before_it_fills(area: Path, node: Agent) -> None:
    source = area / "source"
    trees.plain(source, 200)
    node.add_dir("a", source)
    node.start()
    node.wait_state("a", "complete")
    node.kill()
    (generation,) = node.generations("a")
    flip(generation / "tree" / BAD)
    generations.write_quarantined(generation, [(["d1"], "f00001")])
    fields = json.loads((generation / "generation.json").read_bytes())
    fields |= {"state": "partial", "failed": 1}
    (generation / "generation.json").write_text(json.dumps(fields))
    node.start()
    node.wait_state("a", "complete")
    trees.assert_equal(source, node.view("a"))
    assert not generations.has_quarantined(str(generation))


def test_nothing_is_deleted_below_a_mark_that_stays(area: Path, node: Agent) -> None:
    source = area / "source"
    trees.plain(source, 200)
    node.add_dir("a", source)
    node.start()
    node.wait_state("a", "complete")
    folder = node.tree("a") / "d1"
    flip(node.tree("a") / BAD)
    lose(source / BAD)
    subprocess.run(["chattr", "+i", str(folder)], check=True)
    try:
        assert node.cli("dataset", "verify", "a").returncode != 0
        verify = node.dataset("a")["verify"]
        assert (verify["bad"], verify["withdrawn"]) == (1, 0)
        assert "could not be withdrawn" in verify["why"]
        assert (node.view("a") / BAD).exists()
        assert node.dataset("a")["state"] != "complete"
    finally:
        subprocess.run(["chattr", "-i", str(folder)], check=True)
    node.tell("a", "warm")
    node.wait_state("a", "complete")
    trees.assert_equal(source, node.view("a"))
