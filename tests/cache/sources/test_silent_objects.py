"""Some placement groups are inactive: their files cost only themselves."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.testbed import ceph, trees
from tests.testbed.agent import Agent

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

FILES = 600


@pytest.fixture(scope="module")
def own(run_folder: Path) -> Iterator[ceph.CephCluster]:
    """A cluster that may be broken."""
    made = ceph.CephCluster(run_folder / "silent")
    made.start()
    try:
        yield made
    finally:
        made.stop()


def test_files_of_inactive_groups_cost_only_themselves(
    area: Path, node: Agent, own: ceph.CephCluster
) -> None:
    osd = own.add_osd_for("cephfs_data", 0.3)
    try:
        with own.mounted(area / "fs") as fs:
            trees.plain(fs / "data", FILES, directories=2)
            own.wait_until_not_recent()
            (fs / "data/.snap/v1").mkdir()
            sums = trees.records(fs / "data/.snap/v1")
        secret = area / "secret"
        secret.write_text(own.secret())
        source = {
            "kind": "cephfs", "monitors": [own.monitor], "path": "/data", "snapshot": "v1",
            "user": "admin", "secret_file": str(secret),
        }  # fmt: skip
        own.run("ceph", "osd", "set", "noout")
    finally:
        os.kill(osd, signal.SIGKILL)
    own.run("ceph", "osd", "down", "1")
    node.cache["datasets"] = [{"name": "a", "freshness": "snapshot", "source": source}]
    node.start()
    shown = node.wait_state("a", "partial", seconds=120)
    silent = node.failures("a")
    assert shown["files"]["done"] + len(silent) == FILES
    assert 0 < len(silent) < FILES / 2, "some groups, and not most"
    assert all("its object gave no answer" in why for why in silent.values())
    stored = trees.records(node.tree("a"))
    for path, record in stored.items():
        if record.kind == "file":
            assert record == sums[path]
    assert "killed" not in node.said()
