"""A source is known by what it is: snapshots made again and other clusters under the same names."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cache.sources.test_cephfs import dataset, snapshot
from tests.testbed import ceph, csi, held, trees, waiting
from tests.testbed.agent import Agent

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]


@pytest.fixture
def fs(run_folder: Path, cluster: ceph.CephCluster) -> Iterator[Path]:
    """The root of the session's CephFS, mounted for writing."""
    target = run_folder / f"fs-{os.urandom(3).hex()}"
    with cluster.mounted(target) as mounted:
        yield mounted


def other_bytes(top: Path) -> None:
    """Give every file other bytes, with the same size and the same times: only the bytes tell."""
    for path in sorted(top.rglob("f*")):
        status = path.stat()
        path.write_bytes(bytes(255 - byte for byte in path.read_bytes()))
        os.utime(path, ns=(status.st_mtime_ns, status.st_mtime_ns))


def make_again(fs: Path, name: str) -> Path:
    """Delete the snapshot and make another one of that name, of other bytes."""
    (fs / name / ".snap" / "v1").rmdir()
    other_bytes(fs / name)
    return snapshot(fs, name)


def filled(area: Path, node: Agent, cluster: ceph.CephCluster, fs: Path, name: str) -> Path:
    """A complete dataset of a fresh directory; its truth."""
    trees.plain(fs / name, 120)
    frozen = snapshot(fs, name)
    node.cache["datasets"] = [dataset(cluster, area, f"/{name}")]
    node.cache["source_check"] = "1s"
    node.start()
    node.wait_state("a", "complete", seconds=90)
    return frozen


def generation(node: Agent) -> Path:
    (folder,) = node.generations("a")
    return folder / "generation.json"


def began_anew(node: Agent, why: str) -> dict[str, Any]:
    def there() -> dict[str, Any] | None:
        shown = node.dataset("a")
        return shown if any(why in note for note in shown["notes"]) else None

    found: dict[str, Any] = node.wait_for(there, 60, "the dataset to begin anew")
    return found


@pytest.mark.parametrize("running", [True, False], ids=["running", "restarted"])
def test_complete_dataset_follows_a_snapshot_made_again(
    area: Path, node: Agent, cluster: ceph.CephCluster, fs: Path, running: bool
) -> None:
    name = f"again-{running}".lower()
    filled(area, node, cluster, fs, name)
    path = node.view("a") / "d0" / "f00000"
    before = path.read_bytes()
    held = os.open(path, os.O_RDONLY)
    try:
        if not running:
            node.kill()
        frozen = make_again(fs, name)
        if not running:
            node.start()
        began_anew(node, "its snapshot was deleted and made again")
        node.wait_state("a", "complete", seconds=90)
        trees.assert_equal(frozen, node.view("a"))
        assert os.pread(held, len(before), 0) == before, "what is open stays as it was"
        assert path.read_bytes() != before
    finally:
        os.close(held)
    node.wait_for(lambda: not list((node.store / ".trash").iterdir()), 30, "the trash to be empty")


def test_volumes_of_pods_hold_what_was_stored(
    area: Path, node: Agent, cluster: ceph.CephCluster, fs: Path
) -> None:
    kubelet = csi.Kubelet(area / "k")
    kubelet.serve(node)
    filled(area, node, cluster, fs, "held")
    stored = trees.records(node.view("a"))
    target = kubelet.target()
    waiting.until(kubelet.registration.exists, 20, "the driver")
    kubelet.publish(target, {"dataset": "a"})
    make_again(fs, "held")
    node.wait_served("a", "source", seconds=60)
    node.wait_for(lambda: "another one now" in node.dataset("a")["why"], 20, "the reason")
    later = kubelet.target()
    kubelet.publish(later, {"dataset": "a"}, identity="w")
    assert trees.records(later) == trees.records(fs / "held") != stored
    assert trees.records(target) == stored
    kubelet.unpublish(later, identity="w")
    kubelet.unpublish(target)
    began_anew(node, "its snapshot was deleted and made again")
    node.wait_state("a", "complete", seconds=90)


def test_snapshot_made_again_during_a_fill_is_never_mixed(
    area: Path, node: Agent, cluster: ceph.CephCluster, fs: Path
) -> None:
    trees.plain(fs / "during", 120, directories=12)
    snapshot(fs, "during")
    node.cache["datasets"] = [dataset(cluster, area, "/during")]
    fill = held.Fill(node, 40)
    node.cache["refresh_interval"] = "1s"
    node.start()
    fill.wait()
    node.wait_for(lambda: node.dataset("a")["files"]["done"] > 30, 60, "some files")
    frozen = make_again(fs, "during")
    fill.go_on()
    node.wait_for(lambda: not node.passes(), 60, "the pass over the old one to end")
    node.tell("a", "warm")
    began_anew(node, "made again")
    node.wait_state("a", "complete", seconds=90)
    trees.assert_equal(frozen, node.view("a"))


def test_other_cluster_under_the_same_names(
    area: Path, node: Agent, cluster: ceph.CephCluster, fs: Path
) -> None:
    filled(area, node, cluster, fs, "twin")
    assert node.stop() == 0
    other = ceph.CephCluster(area / "other")
    other.start()
    try:
        with other.mounted(area / "other-fs") as there:
            trees.plain(there / "twin", 120)
            other_bytes(there / "twin")
            frozen = snapshot(there, "twin")
            node.cache["datasets"] = [dataset(other, area, "/twin")]
            node.start()
            shown = began_anew(node, "it is in another cluster")
            assert cluster.fsid in str(shown["notes"])
            node.wait_state("a", "complete", seconds=90)
            trees.assert_equal(frozen, node.view("a"))
            node.end()
    finally:
        other.stop()


def test_complete_dataset_is_served_while_its_cluster_is_away(
    area: Path, node: Agent, cluster: ceph.CephCluster, fs: Path
) -> None:
    frozen = filled(area, node, cluster, fs, "away")
    truth = trees.records(frozen)
    with cluster.frozen("mon", "mds"):
        node.wait_for(lambda: not node.dataset("a")["source"]["reachable"], 60, "the source to go")
        node.kill()
        node.start()
        node.wait_state("a", "complete")
        assert trees.differences(truth, trees.records(node.view("a"))) == []
    assert node.generations("a") == [generation(node).parent]
    assert json.loads(generation(node).read_text())["replaced"] == ""


def test_store_without_a_mark_of_its_source_waits_for_a_verify(
    area: Path, node: Agent, cluster: ceph.CephCluster, fs: Path
) -> None:
    frozen = filled(area, node, cluster, fs, "unproven")
    fields = json.loads(generation(node).read_text())
    marks = fields["marks"]
    assert marks["cluster"] == cluster.fsid
    assert int(marks["root"]) == (fs / "unproven").stat().st_ino
    assert int(marks["filesystem"]) > 0
    assert int(marks["snapshot"]) > 0
    assert node.stop() == 0
    generation(node).write_text(json.dumps(fields | {"marks": {}}))
    node.start()

    def told() -> bool:
        return [f["rule"] for f in node.findings()] == ["dataset-unproven"]

    node.wait_for(told, 60, "the finding")
    assert node.dataset("a")["state"] == "complete"
    trees.assert_equal(frozen, node.view("a"))
    assert node.cli("dataset", "verify", "a", "--source").returncode == 0
    node.wait_for(lambda: node.findings() == [], 30, "the finding to go")
    assert json.loads(generation(node).read_text())["marks"] == marks
