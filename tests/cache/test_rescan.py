"""A frozen dataset whose source has changed: the finding, the rescan, a restart in the middle."""

import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.cache.sources.test_cephfs import dataset
from tests.cache.test_follow import change
from tests.cache.test_generations_served import generations, settled
from tests.testbed import ceph, held, trees
from tests.testbed.agent import Agent, ApiError

pytestmark = [pytest.mark.real, pytest.mark.timeout(180)]

RULE = "dataset-source-changed"


def compared(node: Agent, differing: bool) -> dict[str, Any]:
    """The result of a round, once there is one that says so."""

    def there() -> dict[str, Any] | None:
        found: dict[str, Any] | None = node.dataset("a")["compare"]
        right = found is not None and found["entries"] and bool(found["differing"]) == differing
        return found if right else None

    found: dict[str, Any] = node.wait_for(there, 60, f"a compare, differing: {differing}")
    return found


def rules(node: Agent) -> list[str]:
    return [each["rule"] for each in node.findings()]


def start(area: Path, node: Agent) -> Path:
    """Its source, with 120 files in 8 directories."""
    source = area / "source"
    trees.plain(source, 120, directories=8, mean=20_000)
    node.add_dir("a", source)
    node.cache["compare"] = {"every": "1s", "entries": 200}
    node.start()
    node.wait_state("a", "complete")
    return source


def edit(source: Path) -> None:
    """In each directory one file is changed as by 'cp -p', one added, renamed, deleted, chmod."""
    change(source, [f"d{each}" for each in range(8)], 1, random.Random(7))


def test_changed_source_is_a_finding_until_a_rescan_takes_it_over(area: Path, node: Agent) -> None:
    source = start(area, node)
    assert compared(node, differing=False)["why"] == ""
    assert rules(node) == []
    with pytest.raises(ApiError, match="rescan"):
        node.tell("a", "update", {})
    was = trees.records(node.view("a"))
    edit(source)
    found = compared(node, differing=True)
    node.wait_for(lambda: rules(node) == [RULE], 60, "the finding")
    (finding,) = node.findings()
    assert "nodeagent dataset rescan a" in finding["advice"]
    assert "differ" in node.cli("dataset", "show", "a").stdout
    # Known after a restart without another look.
    node.kill()
    node.cache["compare"] = {"every": "1h"}
    node.start()
    again = compared(node, differing=True)
    assert again["at"] >= found["at"]
    node.wait_for(lambda: rules(node) == [RULE], 60, "the finding")
    assert trees.differences(was, trees.records(node.view("a"))) == [], "jobs read what was stored"
    first = node.dataset("a")["generation"]
    done = node.cli("dataset", "rescan", "a", "--wait")
    assert done.returncode == 0, done.stderr
    trees.assert_equal(source, node.view("a"))
    trees.assert_equal(source, node.views / "a" / "by-id" / settled_now(node))
    current, earlier = settled(node, ["current", "earlier"])
    assert earlier["generation"] == first
    # Changed, added, renamed, chmod in each directory: all else is shared.
    assert current["shared_files"] == 120 - 8 * 4
    node.wait_for(lambda: rules(node) == [], 60, "the finding to go")
    # None before the first round over the new generation, which may have been meanwhile.
    compare = node.dataset("a")["compare"]
    assert compare is None or compare["differing"] == 0
    # Back, which its source is not.
    assert node.stop() == 0
    node.cache["compare"] = {"every": "1s", "entries": 200}
    node.start()
    assert compared(node, differing=False)
    node.cli("dataset", "rollback", "a")
    node.wait_for(lambda: node.dataset("a")["generation"] == first, 60, "the rollback")
    node.wait_state("a", "complete")
    assert trees.differences(was, trees.records(node.view("a"))) == []
    compared(node, differing=True)


def settled_now(node: Agent) -> str:
    current: str = node.dataset("a")["generation"]
    by_id = node.views / "a" / "by-id" / current
    node.wait_for(lambda: by_id.exists() and os.listdir(by_id), 30, "the generation by its id")
    return current


def test_rescan_goes_on_after_a_kill_and_is_cancelled_by_an_operator(
    area: Path, node: Agent
) -> None:
    fill = held.Fill(node)
    source = start(area, node)
    was, first = trees.records(node.view("a")), node.dataset("a")["generation"]
    for path in sorted(source.rglob("f*")):
        if path.is_file():
            path.write_bytes(os.urandom(5000))

    def rescanning() -> dict[str, Any]:
        fill.hold(10)
        shown = node.tell("a", "rescan")
        assert shown["update"]["generation"] != first

        def begun() -> dict[str, Any] | None:
            update: dict[str, Any] | None = node.dataset("a")["update"]
            return update if update is not None and update["files"]["done"] > 5 else None

        update: dict[str, Any] = node.wait_for(begun, 60, "files of the rescan")
        return update

    rescanning()
    with pytest.raises(ApiError, match="already"):
        node.tell("a", "rescan")
    node.tell("a", "cancel")
    settled(node, ["current"])
    shown = node.dataset("a")
    assert (shown["generation"], shown["state"], shown["update"]) == (first, "complete", None)
    assert trees.differences(was, trees.records(node.view("a"))) == []
    next_one = rescanning()["generation"]
    node.kill()
    assert trees.differences(was, trees.records(node.view("a"))) == []
    fill.go_on()
    node.start()
    node.wait_for(lambda: node.dataset("a")["generation"] == next_one, 90, "the rescan to serve")
    node.wait_state("a", "complete")
    trees.assert_equal(source, node.view("a"))
    assert [each["state"] for each in generations(node)] == ["current", "earlier"]


def test_rescan_asked_again_takes_over_what_changed_while_it_was_stuck(
    area: Path, node: Agent
) -> None:
    source = start(area, node)
    # What lies on another file system is not copied.
    place = source / "d0" / "mountpoint"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(place)], check=True)
    try:
        (place / "x").touch()
        node.tell("a", "rescan")

        def stuck() -> bool:
            return "dataset-update-stuck" in rules(node)

        node.wait_for(stuck, 60, "the rescan to be stuck")
    finally:
        subprocess.run(["umount", str(place)], check=True)
    changed = next(each for each in sorted((source / "d5").iterdir()) if each.is_file())
    changed.write_bytes(os.urandom(5000))
    done = node.cli("dataset", "rescan", "a", "--wait")
    assert done.returncode == 0, done.stderr
    node.wait_state("a", "complete")
    trees.assert_equal(source, node.view("a"))


def test_frozen_cephfs_is_compared_and_listed_again(
    area: Path, node: Agent, cluster: ceph.CephCluster, run_folder: Path
) -> None:
    with cluster.mounted(run_folder / f"fs-{os.urandom(3).hex()}") as fs:
        source = fs / "frozen"
        trees.plain(source, 120, directories=8, mean=6000)
        wanted = dataset(cluster, area, "/frozen")
        del wanted["source"]["snapshot"]
        node.cache["datasets"] = [{**wanted, "freshness": "frozen"}]
        node.cache["compare"] = {"every": "1s", "entries": 200}
        node.start()
        node.wait_state("a", "complete", seconds=90)
        compared(node, differing=False)
        edit(source)
        compared(node, differing=True)
        node.tell("a", "rescan")
        node.wait_for(lambda: len(generations(node)) > 1, 60, "the rescan")
        node.wait_for(lambda: node.dataset("a")["update"] is None, 90, "the rescan to serve")
        node.wait_state("a", "complete", seconds=90)
        trees.assert_equal(source, node.view("a"))
        current, _ = settled(node, ["current", "earlier"])
        assert current["shared_files"] == 120 - 8 * 4
        compared(node, differing=False)


def test_eviction_to_a_size_leaves_that_much_beside_an_earlier_version(
    area: Path, node: Agent
) -> None:
    source = start(area, node)
    edit(source)
    done = node.cli("dataset", "rescan", "a", "--wait")
    assert done.returncode == 0, done.stderr
    settled(node, ["current", "earlier"])
    half = node.dataset("a")["bytes"]["done"] // 2
    said = node.cli("dataset", "evict", "a", "--to", str(half))
    assert said.returncode == 0, said.stderr
    shown = node.dataset("a")
    assert 20 < shown["files"]["done"] < 120, said.stdout
    settled(node, ["current"])  # a share of the new one and all of the earlier would be too much
    assert half * 0.5 < node.dataset("a")["store_bytes"] <= half
    assert "no room" not in node.cli("dataset", "show", "a").stdout
    trees.assert_equal(source, node.view("a"))
