"""Generations beside the current one when stored files, or a source, are not to be believed."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cache.sources.test_cephfs import dataset
from tests.cache.test_generations_served import add, generations, serves, settled, snap, versions
from tests.cache.test_ssd_trouble import EVERYWHERE, rules, store_state
from tests.testbed import blockdev, ceph, trees
from tests.testbed.agent import Agent

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]


@pytest.fixture
def disk(area: Path) -> Iterator[blockdev.FaultyDisk]:
    with blockdev.faulty_disk(area / "disk", 300 * blockdev.MiB) as made:
        blockdev.run("mkfs.ext4", "-q", made.device)
        yield made


def device(path: Path) -> int:
    return path.stat().st_dev


def on(node: Agent, path: Path, wanted: int, what: str) -> None:
    node.wait_for(lambda: path.exists() and device(path) == wanted, 60, what)


def test_every_generation_leaves_a_dying_disk_and_comes_back_when_it_is_verified(
    area: Path, node: Agent, disk: blockdev.FaultyDisk
) -> None:
    top = versions(area, 2)
    with blockdev.mounted(disk.device, area / "ssd") as ssd:
        node.put_store(ssd / "store")
        add(node, top)
        node.start()
        serves(node, "s1")
        first = node.dataset("a")["generation"]
        node.tell("a", "update", {"snapshot": "s2"})
        serves(node, "s2")
        second = node.dataset("a")["generation"]
        by_id = node.views / "a" / "by-id"
        stored, away = device(ssd), device(top)
        try:
            for name in (first, second):
                on(node, by_id / name, stored, "by-id")
            disk.fault({**EVERYWHERE, "errno": 5})
            for name, snapshot in ((first, "s1"), (second, "s2")):
                on(node, by_id / name, away, f"{snapshot} to leave")
                trees.assert_equal(snap(top, snapshot), by_id / name)
            node.kill()  # the doubt outlives the agent
            disk.clear()
            node.start()
            node.wait_for(lambda: store_state(node) == "normal", 90, "the disk to be well")
            node.wait_state("a", "complete", seconds=90)
            on(node, by_id / second, stored, "the verified one")
            on(node, by_id / first, stored, "the earlier one, when it was verified too")
            assert [each["suspect"] for each in generations(node)] == [False, False]
            trees.assert_equal(snap(top, "s1"), by_id / first)
            node.tell("a", "rollback")
            serves(node, "s1")
            trees.assert_equal(snap(top, "s1"), node.view("a"))
            node.wait_for(lambda: rules(node) == [], 60, "no finding")
        finally:
            disk.clear()
            node.end()


def test_rollback_never_serves_what_another_source_had(
    area: Path, node: Agent, cluster: ceph.CephCluster, run_folder: Path
) -> None:
    """The snapshot of the earlier generation was deleted and made again meanwhile."""
    with cluster.mounted(run_folder / f"fs-{os.urandom(3).hex()}") as fs:
        trees.plain(fs / "back", 60)
        (fs / "back" / ".snap" / "v1").mkdir()
        node.cache["datasets"] = [dataset(cluster, area, "/back")]
        node.start()
        serves(node, "v1")
        (fs / "back" / "d0" / "new").write_bytes(b"new")
        (fs / "back" / ".snap" / "v2").mkdir()
        node.tell("a", "update", {"snapshot": "v2"})
        serves(node, "v2")
        settled(node, ["current", "earlier"])
        (fs / "back" / ".snap" / "v1").rmdir()
        (fs / "back" / ".snap" / "v1").mkdir()
        node.tell("a", "rollback")
        serves(node, "v1")
        trees.assert_equal(fs / "back" / ".snap" / "v1", node.view("a"))
        assert (node.view("a") / "d0" / "new").exists()
