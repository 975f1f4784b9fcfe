"""Datasets of one cluster and user read through one client: adopted, healed and let go as one."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from linux import mountinfo
from tests.cache.sources.test_cephfs import daemons, dataset
from tests.testbed import ceph, trees
from tests.testbed.agent import Agent

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

COUNT = 4


@pytest.fixture(scope="module")
def many(cluster: ceph.CephCluster, run_folder: Path) -> Iterator[dict[str, Path]]:
    """Snapshots below /many, by the name of their dataset."""
    with cluster.mounted(run_folder / f"fs-{os.urandom(3).hex()}") as fs:
        found = {}
        for number in range(COUNT):
            name = f"d{number:02}"
            trees.plain(fs / "many" / name, 6, directories=2, seed=number)
            found[name] = fs / "many" / name / ".snap" / "v1"
            found[name].mkdir()
        yield found


def settings(cluster: ceph.CephCluster, area: Path, names: list[str]) -> list[dict[str, Any]]:
    """Not filled until that is asked for: their views need the source."""
    more: dict[str, Any] = {"warm": False}
    return [dataset(cluster, area, f"/many/{name}") | more | {"name": name} for name in names]


def shown(node: Agent) -> list[str]:
    listed = node.get("/v1/datasets")["datasets"]
    return sorted(each["name"] for each in listed if each["served_by"] == "source")


def equal(node: Agent, truth: dict[str, Path]) -> bool:
    """Whether every view can be read and shows its snapshot."""
    try:
        return not any(
            trees.differences(trees.records(each), trees.records(node.view(name)))
            for name, each in truth.items()
        )
    except OSError:
        return False


def devices(node: Agent) -> set[tuple[int, int]]:
    """Of all mounts of sources."""
    below = f"{node.state}/sources/"
    return {each.device for each in mountinfo.read() if each.target.startswith(below)}


def test_one_client_serves_all_datasets_of_a_user(
    area: Path, node: Agent, cluster: ceph.CephCluster, many: dict[str, Path]
) -> None:
    names = sorted(many)
    node.cache["datasets"] = settings(cluster, area, names)
    node.cache["fill"] = {"files_per_second": 1}
    node.start()
    node.wait_for(lambda: shown(node) == names, 60, "every view to be served")
    (daemon,) = daemons(node)
    assert len(devices(node)) == 1
    assert equal(node, many)
    # A restarted agent adopts it, however the one before ended.
    mounted = {each.mount_id for each in mountinfo.read() if str(node.state) in each.target}
    assert len(mounted) == COUNT + 1
    for end in (node.kill, node.stop):
        end()
        assert equal(node, many)
        node.start()
        node.wait_for(lambda: shown(node) == names, 60, "every view to be served")
        now = {each.mount_id for each in mountinfo.read() if str(node.state) in each.target}
        assert (now, daemons(node)) == (mounted, [daemon])
    # One that goes takes nothing from the others.
    gone = names.pop()
    node.cache["datasets"] = settings(cluster, area, names)
    node.write()
    node.wait_for(lambda: node.get("/v1/datasets")["orphans"] == [gone], 30, "an orphan")
    assert node.cli("dataset", "remove", gone).returncode == 0
    assert not (node.state / "sources" / gone).exists()
    left = {name: many[name] for name in names}
    assert equal(node, left) and daemons(node) == [daemon]
    # The cluster shuts the client out: it is mounted again once, and all come back.
    out = cluster.run("ceph", "tell", "mds.a", "session", "ls")
    below = f"{node.state}/sources/"
    (client,) = [
        each["id"]
        for each in json.loads(out[out.index("[") :])
        if each["client_metadata"].get("mount_point", "").startswith(below)
    ]
    cluster.run("ceph", "tell", "mds.a", "client", "evict", f"id={client}")
    for name in names:  # looks at the source soon
        node.tell(name, "warm")
    node.wait_for(lambda: equal(node, left), 120, "all views to heal")
    node.wait_for(lambda: len(devices(node)) == 1, 60, "all to share the new mount")
    node.wait_for(lambda: len(daemons(node)) == 1, 60, "the earlier client to end")
    assert daemons(node) != [daemon]
    # The last one to be complete lets go of it.
    node.cache["fill"] = {}
    node.write()
    for name in names:
        node.wait_state(name, "complete", seconds=120)
    node.wait_for(lambda: not daemons(node), 60, "the client to end")
    assert not list((node.state / "sources").iterdir())
    assert equal(node, left)
