"""One generation follows another: update, switch, rollback, retirement; by directories here."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.testbed import held, trees
from tests.testbed.agent import Agent, ApiError

pytestmark = [pytest.mark.real, pytest.mark.timeout(180)]


def versions(area: Path, count: int = 3, files: int = 120) -> Path:
    """A directory with snapshots s1, s2, ...: unchanged files are the same inodes in all of them,
    as in CephFS. Each changes a file, adds one, renames one and deletes one."""
    top = area / "source"
    first = top / ".snap" / "s1"
    trees.plain(first, files, mean=40_000)
    for number in range(2, count + 1):
        new = top / ".snap" / f"s{number}"
        subprocess.run(["cp", "-al", new.with_name(f"s{number - 1}"), new], check=True)
        changed = new / "d0" / "f00000"
        changed.unlink()
        changed.write_bytes(f"version {number}".encode() * 500)
        (new / "d1" / f"added{number}").write_bytes(os.urandom(3000))
        (new / "d2" / f"f{8 * number + 2:05}").rename(new / "d2" / f"renamed{number}")
        (new / "d3" / f"f{8 * number + 3:05}").unlink()
    return top


def add(node: Agent, top: Path, snapshot: str = "s1", **more: Any) -> None:
    node.cache["datasets"] = []
    node.add_dir("a", top / ".snap" / snapshot, freshness="snapshot", **more)


def serves(node: Agent, snapshot: str) -> None:
    def there() -> bool:
        shown = node.dataset("a")
        return (shown["snapshot"], shown["state"], shown["update"]) == (snapshot, "complete", None)

    node.wait_for(there, 60, f"{snapshot} to be served")


def generations(node: Agent) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = node.get("/v1/datasets/a/generations")["generations"]
    return found


def settled(node: Agent, states: list[str]) -> list[dict[str, Any]]:
    node.wait_for(lambda: [g["state"] for g in generations(node)] == states, 60, f"{states}")
    return generations(node)


def snap(top: Path, name: str) -> Path:
    return top / ".snap" / name


def on_disk(node: Agent) -> int:
    """SSD bytes of the trees, each inode once."""
    found = {}
    for each in node.generations("a"):
        for path in (each / "tree").rglob("*"):
            status = path.lstat()
            found[status.st_ino] = status.st_blocks * 512
    return sum(found.values())


def test_update_switches_whole_and_rollback_goes_back(area: Path, node: Agent) -> None:
    top = versions(area)
    add(node, top)
    node.start()
    serves(node, "s1")
    old = node.dataset("a")["generation"]
    by_id = node.views / "a" / "by-id"
    node.wait_for(lambda: (by_id / old).exists() and os.listdir(by_id / old), 30, "by-id")
    held = (by_id / old / "d0" / "f00000").open("rb")
    done = node.cli("dataset", "update", "a", "--snapshot", "s2", "--wait")
    assert "serves s2" in done.stdout
    trees.assert_equal(snap(top, "s2"), node.view("a"))
    trees.assert_equal(snap(top, "s1"), by_id / old)
    assert held.read() == (snap(top, "s1") / "d0" / "f00000").read_bytes()
    current, earlier = settled(node, ["current", "earlier"])
    assert (current["snapshot"], earlier["snapshot"]) == ("s2", "s1")
    assert current["shared_files"] == 120 - 3
    # What both have, 5 MB, is counted once; an index takes up to 1 MiB.
    total = node.dataset("a")["store_bytes"]
    assert total == current["store_bytes"] - current["shared_bytes"] + earlier["store_bytes"]
    assert on_disk(node) <= total < on_disk(node) + 5 * 2**19
    shown = node.cli("dataset", "generations", "a").stdout
    assert "s1" in shown
    assert "earlier" in shown
    node.cli("dataset", "rollback", "a")
    serves(node, "s1")
    trees.assert_equal(snap(top, "s1"), node.view("a"))
    node.kill()
    node.start()  # a choice outlives the agent
    serves(node, "s1")
    trees.assert_equal(snap(top, "s1"), node.view("a"))
    with pytest.raises(ApiError, match=r"s9"):
        node.tell("a", "update", {"snapshot": "s9"})
    # Other settings count more than the choice. s2 is still there: nothing is copied.
    add(node, top, "s2")
    node.write()
    serves(node, "s2")
    held.close()


def test_generation_is_kept_while_it_is_used_and_retired_after(area: Path, node: Agent) -> None:
    top = versions(area)
    add(node, top, earlier=0)
    node.start()
    serves(node, "s1")
    folder = node.generations("a")[0]
    reader = subprocess.Popen(["sleep", "600"], cwd=node.view("a") / "d1")  # no mount shows it then
    try:
        node.tell("a", "update", {"snapshot": "s2"})
        serves(node, "s2")
        found = node.wait_for(
            lambda: [g for g in generations(node) if g["users"]], 60, "the user to be named"
        )
        assert f"pid {reader.pid} " in found[0]["users"][0]
        names = os.listdir(f"/proc/{reader.pid}/cwd")
        assert sorted(names) == sorted(os.listdir(snap(top, "s1") / "d1"))
    finally:
        reader.kill()
        reader.wait()
    settled(node, ["current"])
    assert not folder.exists()
    assert os.listdir(node.views / "a" / "by-id") == [node.dataset("a")["generation"]]
    node.wait_for(lambda: os.listdir(node.store / ".trash") == [], 30, "an empty trash")
    assert on_disk(node) <= node.dataset("a")["store_bytes"] < on_disk(node) + 5 * 2**19
    assert node.cli("dataset", "remove", "a").stdout.startswith("a is removed")
    assert not (node.views / "a").exists()


def test_follow_serves_each_new_snapshot(area: Path, node: Agent) -> None:
    made = versions(area, 3)
    top = area / "followed"
    (top / ".snap").mkdir(parents=True)
    node.cache["follow_interval"] = "1s"
    node.add_dir("a", top, freshness="follow", snapshots="s*")
    node.start()
    for name in ("s1", "s2", "s3"):
        shutil.copytree(snap(made, name), snap(top, f"new-{name}"))  # of no interest
        snap(made, name).rename(snap(top, name))
        serves(node, name)
        trees.assert_equal(snap(top, name), node.view("a"))
    node.cli("dataset", "rollback", "a")
    serves(node, "s2")
    node.kill()
    node.start()
    serves(node, "s2")
    node.cli("dataset", "update", "a")
    serves(node, "s3")


@pytest.mark.parametrize("at", ["begins", "filling", "switched"])
def test_kill_during_an_update_leaves_no_litter(area: Path, node: Agent, at: str) -> None:
    top = versions(area, 2, files=240 if at == "filling" else 120)
    fill = held.Fill(node)
    if at == "filling":  # much to copy
        for path in sorted(snap(top, "s2").rglob("f*"))[::2]:
            data = path.read_bytes()
            path.unlink()
            path.write_bytes(data)
    add(node, top)
    node.start()
    serves(node, "s1")
    old = node.dataset("a")["generation"]
    if at == "filling":
        fill.hold(20)
    node.tell("a", "update", {"snapshot": "s2"})
    if at == "filling":
        node.wait_for(lambda: (node.dataset("a")["update"] or {}).get("files", {}).get("done", 0)
                      > 120, 60, "some files of the new one")  # fmt: skip
        fill.wait()
    elif at == "switched":
        serves(node, "s2")  # the mount follows what the API says
    node.kill()
    if at == "begins":  # nobody knows how far it came; one of them is shown, and whole
        view = trees.records(node.view("a"))
        assert any(
            not trees.differences(trees.records(snap(top, name)), view) for name in ("s1", "s2")
        )
    else:
        trees.assert_equal(snap(top, "s2" if at == "switched" else "s1"), node.view("a"))
    fill.go_on()
    node.start()
    serves(node, "s2")
    trees.assert_equal(snap(top, "s2"), node.view("a"))
    settled(node, ["current", "earlier"])
    by_id = node.views / "a" / "by-id"
    wanted = sorted([old, node.dataset("a")["generation"]])
    node.wait_for(lambda: sorted(os.listdir(by_id)) == wanted, 30, "both by their ids")
    trees.assert_equal(snap(top, "s1"), by_id / old)
    assert sorted(each.name for each in node.generations("a")) == wanted
    for each in node.generations("a"):
        assert json.loads((each / "generation.json").read_text())["state"] == "complete"
        assert not (each / "staging").exists() or os.listdir(each / "staging") == []
