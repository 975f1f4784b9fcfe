"""An update of a dataset that does not fit: who gives room, what is served, what it waits for."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cache.sources import test_cephfs
from tests.cache.test_budget import taken
from tests.cache.test_generations_served import add, generations, serves, snap
from tests.cache.test_least_used import stored
from tests.testbed import ceph, trees, waiting
from tests.testbed.agent import Agent

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

# Indexes are small beside the files.
FILES, MEAN = 200, 100_000


def rewritten(area: Path, count: int) -> Path:
    """A directory with snapshots s1, s2, ... that have no file in common."""
    top = area / "source"
    for number in range(1, count + 1):
        trees.plain(snap(top, f"s{number}"), FILES, mean=MEAN, seed=number)
    return top


def one_and_its_bytes(node: Agent, top: Path) -> int:
    """Dataset a is complete; the SSD bytes that it takes."""
    add(node, top)
    node.start()
    serves(node, "s1")
    return taken(node)


def limit(node: Agent, budget: int, *, of_a: int = 0) -> None:
    node.cache["budget"] = budget
    node.cache["datasets"][0]["budget"] = of_a
    node.write()
    node.wait_for(lambda: budget_now(node) == budget, 30, "the settings to be taken")


def budget_now(node: Agent) -> float:
    lines = [line.split() for line in node.get("/metrics").splitlines() if "cache_budget" in line]
    (value,) = [line[1] for line in lines if not line[0].startswith("#")]
    return float(value)


def test_another_dataset_gives_room_to_an_update(area: Path, node: Agent) -> None:
    top = rewritten(area, 2)
    whole = one_and_its_bytes(node, top)
    trees.plain(area / "b", FILES, mean=MEAN, seed=9)
    node.cache["datasets"][0]["priority"] = 1
    node.add_dir("b", area / "b")
    node.write()
    node.wait_for(lambda: len(node.get("/v1/datasets")["datasets"]) == 2, 30, "b to come")
    node.wait_state("b", "complete")
    limit(node, int(whole * 2.4))
    node.tell("a", "update", {"snapshot": "s2"})
    serves(node, "s2")
    shown = node.wait_state("b", "partial", "complete")
    assert 0 < shown["files"]["done"] < FILES, "it gave a part"
    trees.assert_equal(snap(top, "s2"), node.view("a"))
    trees.assert_equal(area / "b", node.view("b"))
    assert taken(node) <= node.cache["budget"]


def test_kept_dataset_in_the_way_of_an_update_is_named(area: Path, node: Agent) -> None:
    """And the update is served all the same, as far as it fits."""
    top = rewritten(area, 2)
    whole = one_and_its_bytes(node, top)
    trees.plain(area / "b", FILES, mean=MEAN, seed=9)
    node.cache["datasets"][0]["priority"] = 1
    node.add_dir("b", area / "b", keep=True)
    node.write()
    node.wait_for(lambda: len(node.get("/v1/datasets")["datasets"]) == 2, 30, "b to come")
    node.wait_state("b", "complete")
    limit(node, int(whole * 2.4))
    with holding(node):
        node.tell("a", "update", {"snapshot": "s2"})
        shown = served_in_part(node, "s2")
        assert "in the way: b" in str(shown["why"])
        assert stored(node, "b") == FILES


def test_own_earlier_generation_goes_for_an_update(area: Path, node: Agent) -> None:
    """Nobody uses it; the update goes on as soon as it has gone."""
    top = rewritten(area, 3)
    whole = one_and_its_bytes(node, top)
    node.tell("a", "update", {"snapshot": "s2"})
    serves(node, "s2")
    assert [each["state"] for each in generations(node)] == ["current", "earlier"]
    limit(node, int(whole * 2.4))
    node.tell("a", "update", {"snapshot": "s3"})
    serves(node, "s3")
    found = [each["snapshot"] for each in generations(node)]
    assert "s1" not in found, found
    trees.assert_equal(snap(top, "s3"), node.view("a"))
    assert taken(node) <= node.cache["budget"]


class holding:
    """A process stands in the generation that serves now."""

    def __init__(self, node: Agent) -> None:
        folder = node.views / "a" / "by-id" / node.dataset("a")["generation"]
        node.wait_for(lambda: folder.exists() and os.listdir(folder), 30, "the by-id mount")
        self.folder: Path = folder

    def __enter__(self) -> Path:
        self._holder = subprocess.Popen(["sleep", "600"], cwd=self.folder / "d1")
        return self.folder

    def __exit__(self, *_: object) -> None:
        self._holder.kill()
        self._holder.wait(waiting.limit(10))


def served_in_part(node: Agent, snapshot: str) -> dict[str, object]:
    def there() -> dict[str, object] | None:
        shown: dict[str, object] = node.dataset("a")
        found = (shown["snapshot"], shown["state"], shown["served_by"], shown["update"])
        return shown if found == (snapshot, "partial", "overlay", None) else None

    found: dict[str, object] = node.wait_for(there, 90, f"a part of {snapshot} to be served")
    return found


def test_update_that_fits_in_part_serves_and_a_job_keeps_its_generation(
    area: Path, node: Agent
) -> None:
    """The new one grows when the job has gone. Kills of the agent change nothing."""
    top = rewritten(area, 2)
    whole = one_and_its_bytes(node, top)
    limit(node, 2**40, of_a=int(whole * 1.5))
    with holding(node) as first:
        node.tell("a", "update", {"snapshot": "s2"})
        shown = served_in_part(node, "s2")
        assert "it waits for the room of s1" in str(shown["why"])
        done = stored(node, "a")
        assert 0.2 * FILES < done < 0.8 * FILES
        trees.assert_equal(snap(top, "s2"), node.view("a"))
        trees.assert_equal(snap(top, "s1"), first)
        assert taken(node) <= whole * 1.5
        node.kill()
        trees.assert_equal(snap(top, "s2"), node.view("a"))
        node.start()
        served_in_part(node, "s2")
        trees.assert_equal(snap(top, "s2"), node.view("a"))
        trees.assert_equal(snap(top, "s1"), first)
    serves(node, "s2")
    trees.assert_equal(snap(top, "s2"), node.view("a"))
    assert taken(node) <= whole * 1.5


def test_dataset_bigger_than_its_budget_is_updated(area: Path, node: Agent) -> None:
    """It keeps a stable part of each version; the view shows each of them whole."""
    top = rewritten(area, 3)
    whole = one_and_its_bytes(node, top)
    budget = whole // 2
    limit(node, 2**40, of_a=budget)
    node.wait_for(lambda: node.dataset("a")["state"] == "partial", 60, "a part to be left")
    node.wait_for(lambda: taken(node) <= budget, 60, "the budget to be kept")
    for name in ("s2", "s3"):
        node.tell("a", "update", {"snapshot": name})
        served_in_part(node, name)
        trees.assert_equal(snap(top, name), node.view("a"))
        node.wait_for(lambda: len(generations(node)) == 1, 90, "the one before to go")
        node.wait_for(
            lambda: stored(node, "a") > 0.3 * FILES and not node.passes(), 90, "its share"
        )
        assert taken(node) <= budget
        trees.assert_equal(snap(top, name), node.view("a"))


def test_eviction_beside_a_held_generation_takes_no_more_than_is_beyond(
    area: Path, node: Agent
) -> None:
    """What both generations have takes room once."""
    top = area / "source"
    trees.plain(snap(top, "s1"), FILES, mean=MEAN)
    subprocess.run(["cp", "-al", snap(top, "s1"), snap(top, "s2")], check=True)
    for path in sorted(snap(top, "s2").rglob("f*"))[:40]:
        data = path.read_bytes()
        path.unlink()
        path.write_bytes(data[::-1])
    one_and_its_bytes(node, top)
    with holding(node) as first:
        node.tell("a", "update", {"snapshot": "s2"})
        serves(node, "s2")
        before = node.dataset("a")["store_bytes"]
        limit(node, 2**40, of_a=int(before * 0.97))
        node.wait_for(
            lambda: node.dataset("a")["store_bytes"] <= before * 0.97, 180, "the budget to be kept"
        )
        assert stored(node, "a") > FILES // 2
        trees.assert_equal(snap(top, "s1"), first)
        trees.assert_equal(snap(top, "s2"), node.view("a"))


# --- the snapshot that serves is deleted


@contextlib.contextmanager
def readable(wanted: Path, view: Path) -> Iterator[None]:
    """What ``view`` shows by the end of the block is all of ``wanted``, within seconds."""
    yield

    def whole() -> bool:
        try:
            trees.assert_equal(wanted, view)
        except (AssertionError, OSError):
            return False
        return True

    waiting.until(whole, 45, f"{wanted} to be read at {view}")


@pytest.mark.parametrize("complete", [False, True])
def test_update_does_not_wait_for_what_a_deleted_snapshot_cannot_give(
    area: Path, node: Agent, complete: bool
) -> None:
    """Neither can it be read whole, nor does it give room. It is followed in the same second."""
    top = rewritten(area, 2)
    whole = one_and_its_bytes(node, top)
    budget = whole + 4096 if complete else whole // 2
    limit(node, 2**40, of_a=budget)
    if not complete:
        node.wait_for(lambda: node.dataset("a")["state"] == "partial", 60, "a part to be left")
    node.wait_for(lambda: taken(node) <= budget, 60, "the budget to be kept")
    with readable(snap(top, "s2"), node.view("a")):
        snap(top, "s1").rename(area / "deleted")
        node.tell("a", "update", {"snapshot": "s2"})
    node.wait_for(lambda: len(generations(node)) == 1, 90, "the one before to go")
    node.wait_for(lambda: stored(node, "a") > 0.3 * FILES and not node.passes(), 90, "its share")
    assert node.dataset("a")["snapshot"] == "s2"
    assert taken(node) <= budget
    trees.assert_equal(snap(top, "s2"), node.view("a"))


def test_update_after_a_snapshot_of_a_real_cephfs_is_deleted(
    area: Path, node: Agent, cluster: ceph.CephCluster, run_folder: Path
) -> None:
    with cluster.mounted(run_folder / f"fs-{os.urandom(3).hex()}") as client:
        top = client / "rotated"
        trees.plain(top, FILES, mean=20_000)
        (top / ".snap" / "v1").mkdir()
        budget = FILES * 20_000 // 2
        node.cache["datasets"] = [test_cephfs.dataset(cluster, area, "/rotated")]
        node.cache["datasets"][0]["budget"] = budget
        node.start()
        node.wait_state("a", "partial")
        assert 0 < stored(node, "a") < FILES
        for path in top.rglob("f*"):
            path.write_bytes(path.read_bytes()[::-1])
        (top / ".snap" / "v2").mkdir()
        with readable(top / ".snap" / "v2", node.view("a")):
            (top / ".snap" / "v1").rmdir()
            node.tell("a", "update", {"snapshot": "v2"})
        node.wait_for(lambda: len(generations(node)) == 1, 90, "the one before to go")
        node.wait_for(lambda: stored(node, "a") > 0.3 * FILES, 90, "its share")
        trees.assert_equal(top / ".snap" / "v2", node.view("a"))
        node.end()
