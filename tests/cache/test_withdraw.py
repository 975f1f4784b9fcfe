"""Bad files that cannot be replaced: out of the store in the right order, however it is cut."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cache.fill import tree, unreplaced, verifypass
from cache.fill.index import Index
from tests.cache import byhand
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


# --- the passes -----------------------------------------------------------------------------------


@pytest.fixture
def task(area: Path) -> dict[str, Any]:
    """A complete generation of a source, as a pass is told of it."""
    source, generation = area / "source", area / "generation"
    trees.plain(source, 40, directories=4)
    generation.mkdir()
    given = byhand.task(generation, source)
    assert byhand.run("fillpass", given)["result"] == "complete"
    return given


@pytest.mark.parametrize("index", ["kept", "lost"])
def test_between_marks_and_files_a_fill_is_refused_and_the_rest_can_be_done_again(
    area: Path, task: dict[str, Any], index: str
) -> None:
    stored = area / "generation" / "tree" / BAD
    flip(stored)
    lose(area / "source" / BAD)
    end = byhand.run("verifypass", task)
    assert (end["result"], end["unreplaced"]) == ("bad", 1)
    assert byhand.run("verifypass", task, withdraw="marks")["result"] == "withdrawn"
    assert not is_sealed(stored.parent)
    assert is_sealed(stored.parent.parent / "d2")
    known = Index.open(area / "generation" / "index.sqlite")
    assert [(name, reason) for _, name, reason in known.failures(9)] == [("f00001", verifypass.BAD)]
    assert known.sealable(9) == []
    known.close()
    # As if it had been killed when the index knew and the mark was still on.
    os.setxattr(stored.parent, tree.OPAQUE, b"y")
    if index == "lost":
        Index.discard(area / "generation" / "index.sqlite")
    end = byhand.run("fillpass", task)
    assert end["result"] == "failed"
    assert "withdrawn first" in end["why"]
    assert stored.exists()
    assert byhand.run("verifypass", task, withdraw="marks")["result"] == "withdrawn"
    assert not is_sealed(stored.parent)
    end = byhand.run("verifypass", task, withdraw="files")
    assert (end["result"], end["withdrawn"]) == ("withdrawn", 1)
    assert not stored.exists()
    assert not unreplaced.waiting(task["generation"])
    assert byhand.run("fillpass", task)["result"] == "complete"
    trees.assert_equal(area / "source", area / "generation" / "tree")


def test_a_verify_that_is_not_finished_forgets_no_bad_file(
    area: Path, task: dict[str, Any]
) -> None:
    unreplaced.keep(area / "generation", [[["d1"], "f00001"]])
    made = verifypass.VerifyPass(task)
    made.unreplaced = [[["d2"], "f00002"], [["d1"], "f00001"]]
    assert made._last_words()["unreplaced"] == 2
    assert len(unreplaced.read(area / "generation")) == 2
    made.unreplaced = []
    made.whole = True
    assert made._last_words()["unreplaced"] == 0
    assert not unreplaced.waiting(task["generation"])


def test_a_job_that_died_with_its_worker_is_done_again(area: Path, task: dict[str, Any]) -> None:
    unreplaced.keep(area / "generation", [[["d1"], "f00001"], [["d1"], "f00005"]])
    made = verifypass.WithdrawPass(task | {"withdraw": "files"})
    job = made._next_job()
    assert job is not None
    assert job["names"] == ["f00001", "f00005"]
    assert made._next_job() is None
    made._lost(job)
    assert made._next_job() == job


# --- the agent ------------------------------------------------------------------------------------


def test_an_agent_killed_before_bad_files_were_out_goes_on_with_that(
    area: Path, node: Agent
) -> None:
    source = area / "source"
    trees.plain(source, 200)
    node.add_dir("a", source)
    node.start()
    node.wait_state("a", "complete")
    node.kill()
    (generation,) = node.generations("a")
    flip(generation / "tree" / BAD)
    unreplaced.keep(generation, [[["d1"], "f00001"]])
    fields = json.loads((generation / "generation.json").read_bytes())
    fields |= {"state": "partial", "failed": 1}
    (generation / "generation.json").write_text(json.dumps(fields))
    node.start()
    node.wait_state("a", "complete")
    trees.assert_equal(source, node.view("a"))
    assert not unreplaced.waiting(str(generation))


def test_nothing_is_unlinked_below_a_mark_that_does_not_go(area: Path, node: Agent) -> None:
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
