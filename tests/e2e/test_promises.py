"""What the cache promises, shown on 50,000 files of a real CephFS snapshot ("It must show" 2-4)."""

import os
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.testbed import bigset, ceph, pod, trees
from tests.testbed.agent import Agent

pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]

READERS = 4
KILLS = 10
FROZEN_SECONDS = 60.0


@pytest.fixture(scope="module")
def served(
    run_folder: Path, cluster: ceph.CephCluster, big: bigset.BigSet
) -> Iterator[tuple[Agent, pod.Pod, list[dict[str, int]]]]:
    """Warmed under four readers in a pod; the agent, the pod, and what the readers saw."""
    folder = run_folder / "promises"
    folder.mkdir(mode=0o755)
    node = Agent(folder / "node")
    source = bigset.source(cluster, folder / "secret")
    node.cache["datasets"] = [
        {"name": "big", "freshness": "snapshot", "warm": False, "source": source}
    ]
    try:
        node.start()
        node.wait_served("big", "source")
        with pod.pod(folder / "pod", node.views / "big") as job:
            readers = [job.reader(big.manifest, seed) for seed in range(READERS)]
            node.tell("big", "warm")
            node.wait_state("big", "complete", seconds=240)
            time.sleep(1.0)  # and a little after the last swap
            reports = [reader.stop() for reader in readers]
            yield node, job, reports
    finally:
        node.end()
        shutil.rmtree(folder, ignore_errors=True)


def test_readers_see_no_error_and_no_wrong_byte_while_it_warms(
    served: tuple[Agent, pod.Pod, list[dict[str, int]]],
) -> None:
    _, _, reports = served
    for report in reports:
        assert (report["errors"], report["wrong"]) == (0, 0), report
        assert report["reads"] > 500
        assert report["mapped"] > report["reads"] // 5


def test_every_byte_mode_owner_time_and_xattr_and_the_listing_are_equal(
    served: tuple[Agent, pod.Pod, list[dict[str, int]]], big: bigset.BigSet
) -> None:
    node, _, _ = served
    shown = node.dataset("big")
    assert shown["files"]["done"] == shown["files"]["total"] == big.files
    assert shown["bytes"]["done"] == sum(r.size for r in big.records.values())
    found = trees.differences(big.records, trees.records(node.view("big")))
    assert not found, (len(found), found[:10])


def test_complete_means_every_directory_is_opaque_and_every_file_has_its_checksum(
    served: tuple[Agent, pod.Pod, list[dict[str, int]]], big: bigset.BigSet
) -> None:
    node, _, _ = served
    tree = node.tree("big")
    for path, record in big.records.items():
        full = os.fsencode(tree) + b"/" + path
        if record.kind == "file":
            assert os.getxattr(full, "trusted.nodeagent.xxh3-128").decode() == record.digest
        elif path:
            assert os.getxattr(full, "trusted.overlay.opaque") == b"y"


def test_with_the_cluster_frozen_for_a_minute_everything_is_read_and_listed(
    served: tuple[Agent, pod.Pod, list[dict[str, int]]],
    cluster: ceph.CephCluster,
    big: bigset.BigSet,
    area: Path,
) -> None:
    node, job, _ = served
    before = job.reader(big.manifest, "all")
    with cluster.frozen("mds", "osd"):
        deadline = time.monotonic() + FROZEN_SECONDS
        trees.drop_caches()
        before.begin()
        seen = before.result(FROZEN_SECONDS - 5)
        assert (seen["errors"], seen["wrong"]) == (0, 0), seen
        assert seen["reads"] == big.files
        trees.drop_caches()
        with pod.pod(area / "late", node.views / "big") as late:
            newcomer = late.reader(big.manifest, "all")
            newcomer.begin()
            seen = newcomer.result(FROZEN_SECONDS)
        assert (seen["errors"], seen["wrong"]) == (0, 0), seen
        assert seen["reads"] == big.files
        assert node.get("/healthz")["alive"]
        assert node.dataset("big")["state"] == "complete"
        while time.monotonic() < deadline:
            time.sleep(0.5)
    assert node.get("/readyz")["ready"]


def test_readers_see_nothing_of_ten_kills_of_the_agent(
    area: Path, node: Agent, cluster: ceph.CephCluster, big: bigset.BigSet
) -> None:
    source = bigset.source(cluster, area / "secret")
    node.cache["datasets"] = [{"name": "big", "freshness": "snapshot", "source": source}]
    node.cache["fill"] = {"files_per_second": 1500}
    node.start()
    node.wait_served("big", "source", "overlay")
    with pod.pod(area / "pod", node.views / "big") as job:
        readers = [job.reader(big.manifest, seed) for seed in range(READERS)]
        generator = random.Random(11)
        done = 0
        for _ in range(KILLS):
            before = done

            def more(before: int = before) -> bool:
                return bool(node.dataset("big")["files"]["done"] > before)

            node.wait_for(more, 60, f"more than {before} files")
            time.sleep(generator.uniform(0.0, 1.5))  # anywhere in a batch
            done = node.dataset("big")["files"]["done"]
            node.kill()
            time.sleep(0.3)
            node.start()
        assert done < big.files, "it was complete before the last kill: nothing was at risk"
        node.cache["fill"] = {}
        node.write()
        node.wait_state("big", "complete", seconds=180)
        reports = [reader.stop() for reader in readers]
    for report in reports:
        assert (report["errors"], report["wrong"]) == (0, 0), report
        assert report["reads"] > 500
    (generation,) = node.generations("big")
    assert list((generation / "staging").iterdir()) == []
    assert list((generation / "links").iterdir()) == []
    found = trees.differences(big.records, trees.records(node.view("big")))
    assert not found, (len(found), found[:10])
