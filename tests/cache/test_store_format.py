"""A store that an agent of November 2026 left is adopted as it is.

stores/format1.tar.gz has the sources ``done``, ``half`` and ``bad`` and the store of an agent that
was killed: ``done`` is complete, ``half`` was being filled, and of ``bad`` a verify had found a bad
file (``d1/f00001``) that was not withdrawn yet. Packed with
``tar --xattrs --xattrs-include=*``.
"""

import contextlib
import hashlib
import json
import sqlite3
import subprocess
from pathlib import Path

import pytest

from tests.testbed import trees, waiting
from tests.testbed.agent import Agent, ApiError

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]

STORE = Path(__file__).parent / "stores" / "format1.tar.gz"


@pytest.fixture
def adopted(area: Path, node: Agent) -> Agent:
    """An agent over that store, its sources at other paths than then."""
    area.joinpath("node").mkdir(exist_ok=True)
    command = ["tar", "--xattrs", "--xattrs-include=*", "-xzf", str(STORE), "-C", str(area)]
    subprocess.run(command, check=True, timeout=waiting.limit(60))
    node.put_store(area / "store")
    for name in ("done", "half", "bad"):
        (folder,) = (node.store / name).iterdir()
        identity = json.dumps({"kind": "dir", "path": str(area / name)}, sort_keys=True)
        path = folder / "generation.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"identity": identity}))
        digest = hashlib.sha256(identity.encode()).hexdigest()[:12]
        folder.rename(folder.with_name(f"frozen-{digest}"))
        node.add_dir(name, area / name)
    return node


def inodes(root: Path) -> dict[str, int]:
    return {str(p.relative_to(root)): p.stat().st_ino for p in root.rglob("f0*")}


def test_old_store_is_adopted_without_refilling(area: Path, adopted: Agent) -> None:
    before = {name: inodes(adopted.tree(name)) for name in ("done", "half", "bad")}
    assert len(before["done"]) == 40
    assert 50 < len(before["half"]) < 200
    adopted.start()
    assert adopted.get("/v1/datasets")["orphans"] == []
    for name, files in (("done", 44), ("half", 204), ("bad", 44)):
        shown = adopted.wait_state(name, "complete")
        assert (shown["files"]["done"], shown["files"]["total"]) == (files, files)
        trees.assert_equal(area / name, adopted.view(name))
    before["bad"].pop("d1/f00001")  # withdrawn and copied again
    for name, kept in before.items():
        now = inodes(adopted.tree(name))
        assert {path: now[path] for path in kept} == kept, f"{name} was copied again"
    adopted.tell("done", "verify")
    adopted.wait_for(lambda: adopted.dataset("done")["verify"].get("at"), 30, "the verify")
    verify = adopted.dataset("done")["verify"]
    assert (verify["state"], verify["bad"], verify["checked_files"]) == ("good", 0, 43)


def test_newer_formats_are_left_alone(area: Path, adopted: Agent) -> None:
    """Of a newer agent are: generation.json of ``done``, ``half``'s index, ``bad``'s state file."""
    (done,), (half,) = (adopted.generations(name) for name in ("done", "half"))
    newer = [done / "generation.json", half / "index.sqlite", adopted.state / "datasets/bad.json"]
    newer[0].write_text(json.dumps(json.loads(newer[0].read_text()) | {"format": 2, "state": 7}))
    with contextlib.closing(sqlite3.connect(newer[1])) as db:
        db.execute("PRAGMA user_version=2")
    newer[2].parent.mkdir(parents=True)
    newer[2].write_text('{"format": 2, "removed": "in another way"}')
    before = [path.read_bytes() for path in newer]
    stored = inodes(adopted.tree("done"))
    adopted.add_dir("other", area / "half")

    adopted.start()
    adopted.wait_state("other", "complete")
    wanted = {("dataset-not-served", "done"), ("dataset-not-filled", "half")}
    wanted.add(("dataset-not-served", "bad"))

    def found() -> set[tuple[str, str]]:
        return {
            (each["rule"], each["subject"].removeprefix("dataset "))
            for each in adopted.findings()
            if "newer agent" in each["message"]
        }

    adopted.wait_for(lambda: found() == wanted, 60, "the findings")
    with pytest.raises(ApiError, match="newer agent wrote it"):
        adopted.tell("done", "warm")
    with pytest.raises(ApiError, match="newer agent wrote it"):
        adopted.remove("bad")
    assert adopted.stop() == 0
    assert [path.read_bytes() for path in newer] == before
    assert inodes(adopted.tree("done")) == stored
