"""What a newer agent left in a store and in the state directory stays as it is."""

import contextlib
import json
import sqlite3
from pathlib import Path

import pytest

from tests.testbed import trees
from tests.testbed.agent import Agent, ApiError

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]


@pytest.fixture
def left(area: Path, node: Agent) -> Agent:
    """An agent that has filled three datasets, and ended."""
    for name in ("done", "half", "bad"):
        trees.plain(area / name, 40, directories=4)
        node.add_dir(name, area / name)
    node.start()
    for name in ("done", "half", "bad"):
        node.wait_state(name, "complete")
    assert node.stop() == 0
    return node


def inodes(root: Path) -> dict[str, int]:
    return {str(p.relative_to(root)): p.stat().st_ino for p in root.rglob("f0*")}


def test_newer_formats_are_left_alone(area: Path, left: Agent) -> None:
    """Of a newer agent are: generation.json of ``done``, ``half``'s index, ``bad``'s state file."""
    (done,), (half,) = (left.generations(name) for name in ("done", "half"))
    newer = [done / "generation.json", half / "index.sqlite", left.state / "datasets/bad.json"]
    newer[0].write_text(json.dumps(json.loads(newer[0].read_text()) | {"format": 2, "state": 7}))
    record = half / "generation.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"state": "filling"}))
    with contextlib.closing(sqlite3.connect(newer[1])) as db:
        db.execute("PRAGMA user_version=2")
    newer[2].write_text('{"format": 2, "removed": "in another way"}')
    before = [path.read_bytes() for path in newer]
    stored = inodes(left.tree("done"))
    left.add_dir("other", area / "half")

    left.start()
    left.wait_state("other", "complete")
    wanted = {("dataset-not-served", "done"), ("dataset-not-filled", "half")}
    wanted.add(("dataset-not-served", "bad"))

    def found() -> set[tuple[str, str]]:
        return {
            (each["rule"], each["subject"].removeprefix("dataset "))
            for each in left.findings()
            if "newer agent" in each["message"]
        }

    left.wait_for(lambda: found() == wanted, 60, "the findings")
    with pytest.raises(ApiError, match="newer agent wrote it"):
        left.tell("done", "warm")
    with pytest.raises(ApiError, match="newer agent wrote it"):
        left.remove("bad")
    assert left.stop() == 0
    assert [path.read_bytes() for path in newer] == before
    assert inodes(left.tree("done")) == stored
