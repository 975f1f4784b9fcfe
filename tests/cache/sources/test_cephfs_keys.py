"""CephFS as a source for users whose keys allow less than everything."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.testbed import ceph, trees
from tests.testbed.agent import Agent

pytestmark = [pytest.mark.real, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def frozen(cluster: ceph.CephCluster, run_folder: Path) -> Iterator[Path]:
    """A snapshot of /keys/data."""
    with cluster.mounted(run_folder / f"fs-{os.urandom(3).hex()}") as fs:
        trees.plain(fs / "keys/data", 300, directories=3)
        cluster.wait_until_not_recent()
        made = fs / "keys/data/.snap/v1"
        made.mkdir()
        yield made


def dataset(cluster: ceph.CephCluster, area: Path, user: str, keyring: str) -> dict[str, Any]:
    secret = area / "secret"
    secret.write_text(keyring)
    source = {
        "kind": "cephfs", "monitors": [cluster.monitor], "path": "/keys/data", "snapshot": "v1",
        "user": user, "secret_file": str(secret),
    }  # fmt: skip
    return {"name": "a", "freshness": "snapshot", "source": source}


def past_the_mount(node: Agent) -> str:
    return next((line for line in node.said().splitlines() if "past the mount" in line), "")


def test_key_of_one_directory_is_enough(
    area: Path, node: Agent, cluster: ceph.CephCluster, frozen: Path
) -> None:
    user = f"narrow{os.urandom(3).hex()}"
    keyring = cluster.run("ceph", "fs", "authorize", "cephfs", f"client.{user}", "/keys/data", "r")
    node.cache["datasets"] = [dataset(cluster, area, user, keyring)]
    node.start()
    node.wait_state("a", "complete", seconds=60)
    trees.assert_equal(frozen, node.view("a"))
    assert "300 files were read past the mount" in past_the_mount(node)
    manifest = frozen.parents[1] / "v1.manifest"  # beside the data, which the key may only read
    written = node.cli_json("dataset", "publish-manifest", "a", "--to", str(manifest))
    assert (written["entries"], written["through_mount"], written["snapshot"]) == (303, 0, "v1")
    node.remove("a")
    node.cache["datasets"][0]["source"]["manifest"] = "{snapshot}.manifest"
    node.stop()  # warmed before it had read the new settings, it would list the snapshot again
    node.start()
    node.tell("a", "warm")
    node.wait_for(
        lambda: f"4 directories are taken from {node.state}/" in node.said(), 60, "its use"
    )
    assert node.wait_state("a", "complete", seconds=60)["files"]["done"] == 300
    trees.assert_equal(frozen, node.view("a"))
    assert node.said().count("300 files were read past the mount") == 2
