"""The promises of the cache, checked on a real CephFS snapshot.

`make test` has 3,000 files, three kills and a freeze of 5 s; `make test-long` 50,000, ten and 60.

Jobs in pods read all the time and compare every byte: while the dataset warms, while the cluster is
frozen, and while the agent is killed again and again.
"""

import os
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.testbed import bigset, ceph, grave, held, pod, trees, waiting
from tests.testbed.agent import Agent

pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]

READERS = 4
LEAST = 501  # reads of each
KILLS = int(os.environ.get("PROMISE_KILLS", "3"))
FROZEN_SECONDS = float(
    os.environ.get("PROMISE_FROZEN", "5")
)  # at least; longer where a slow machine reads for longer
READ_SECONDS = waiting.limit(30.0)  # everything, once; an MDS shuts a client out after 300 s


def wait_for_reads(readers: list[pod.PodReader], more: int = 100) -> None:
    """Until every reader has read this many files from now on."""
    wanted = [reader.reads() + more for reader in readers]

    def reached() -> bool:
        return all(reader.reads() >= count for reader, count in zip(readers, wanted, strict=True))

    waiting.until(reached, 60, f"{more} more reads by every reader")


@pytest.fixture(scope="module")
def served(
    run_folder: Path, cluster: ceph.CephCluster, big: bigset.BigSet
) -> Iterator[tuple[Agent, pod.Pod, list[dict[str, int]]]]:
    """Warmed under four readers in a pod; the agent, the pod, and what the readers saw."""
    folder = run_folder / "promises"
    folder.mkdir(mode=0o755)
    node = Agent(folder / "node")
    fill = held.Fill(node, big.files // 2, chunks=True)
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
            fill.wait(seconds=240)
            wait_for_reads(readers, LEAST)
            fill.go_on()
            node.wait_state("big", "complete", seconds=240)
            wait_for_reads(readers)  # after the last change of the view too
            reports = [reader.stop() for reader in readers]
            yield node, job, reports
    finally:
        node.end()
        shutil.rmtree(folder, ignore_errors=True)


def test_readers_see_no_error_while_warming(
    served: tuple[Agent, pod.Pod, list[dict[str, int]]],
) -> None:
    _, _, reports = served
    for report in reports:
        with grave.wrong_bytes():
            assert (report["errors"], report["wrong"]) == (0, 0), report
        assert report["reads"] >= LEAST
        assert report["mapped"] > report["reads"] // 5


def test_view_equals_snapshot(
    served: tuple[Agent, pod.Pod, list[dict[str, int]]], big: bigset.BigSet
) -> None:
    node, _, _ = served
    shown = node.dataset("big")
    assert shown["files"]["done"] == shown["files"]["total"] == big.files
    assert shown["bytes"]["done"] == sum(r.size for r in big.records.values())
    found = trees.differences(big.records, trees.records(node.view("big")))
    with grave.wrong_bytes():
        assert not found, (len(found), found[:10])


def test_complete_store_is_opaque_and_checksummed(
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


def test_view_is_read_while_cluster_is_frozen_for_a_minute(
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
        seen = before.result(READ_SECONDS)
        with grave.wrong_bytes():
            assert (seen["errors"], seen["wrong"]) == (0, 0), seen
        assert seen["reads"] == big.files
        trees.drop_caches()
        with pod.pod(area / "late", node.views / "big") as late:
            newcomer = late.reader(big.manifest, "all")
            newcomer.begin()
            seen = newcomer.result(READ_SECONDS)
        with grave.wrong_bytes():
            assert (seen["errors"], seen["wrong"]) == (0, 0), seen
        assert seen["reads"] == big.files
        assert node.get("/healthz")["alive"]
        assert node.dataset("big")["state"] == "complete"
        time.sleep(max(0.0, deadline - time.monotonic()))
    assert node.get("/readyz")["ready"]


def test_readers_see_no_error_through_ten_agent_kills(
    area: Path, node: Agent, cluster: ceph.CephCluster, big: bigset.BigSet
) -> None:
    source = bigset.source(cluster, area / "secret")
    node.cache["datasets"] = [{"name": "big", "freshness": "snapshot", "source": source}]
    # Not complete before the last kill, and at work at each of them.
    fill = held.Fill(node, big.files // (KILLS + 2), chunks=True)
    node.start()
    node.wait_served("big", "source", "overlay")
    with pod.pod(area / "pod", node.views / "big") as job:
        readers = [job.reader(big.manifest, seed) for seed in range(READERS)]
        generator = random.Random(11)
        done = 0
        for number in range(KILLS):
            before = done

            def more(before: int = before) -> bool:
                return bool(node.dataset("big")["files"]["done"] > before)

            node.wait_for(more, 60, f"more than {before} files")
            time.sleep(generator.uniform(0.0, 1.5))  # a random point of a batch
            done = node.dataset("big")["files"]["done"]
            node.kill()
            wait_for_reads(readers, LEAST // KILLS + 1)  # without an agent
            if number == KILLS - 1:
                fill.go_on()
            node.start()
        assert done < big.files, "it was complete before the last kill: nothing was at risk"
        node.wait_state("big", "complete", seconds=180)
        reports = [reader.stop() for reader in readers]
    for report in reports:
        with grave.wrong_bytes():
            assert (report["errors"], report["wrong"]) == (0, 0), report
        assert report["reads"] >= LEAST
    (generation,) = node.generations("big")
    assert list((generation / "staging").iterdir()) == []
    assert list((generation / "links").iterdir()) == []
    found = trees.differences(big.records, trees.records(node.view("big")))
    with grave.wrong_bytes():
        assert not found, (len(found), found[:10])
