"""Directories whose names mean something to a shell, to Ceph or to mount: they are only names."""

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cache.sources import kinds
from tests.cache.sources.test_cephfs import dataset, snapshot
from tests.testbed import ceph, leftovers, trees
from tests.testbed.agent import Agent

# As issue 23 asks: ODD_SECONDS=600. ceph-fuse first trims its cache after five.
SECONDS = int(os.environ.get("ODD_SECONDS", "15"))
MADE = Path("/nodeagent-was-here")


@pytest.mark.parametrize("name", ["a b", "a'b", "a;b", "a,b", "a#b", "a$b", "a\nb", "ä"])
def test_sources_of_an_odd_state_directory_have_a_plain_home(name: str) -> None:
    home = kinds.home(Path("/var/lib") / name)
    assert re.fullmatch(r"/run/nodeagent/sources/[0-9a-f]+", str(home))
    assert home == kinds.home(Path("/var/lib") / name) != kinds.home(Path("/var/lib2") / name)


def test_sources_of_a_plain_state_directory_are_below_it() -> None:
    state = Path("/var/lib/nodeagent/state-1_a+b@c.d")
    assert kinds.folder_of(state, "a") == state / "sources" / "a"


def daemons(node: Agent) -> list[int]:
    """ceph-fuse processes of the agent's source mounts."""
    ours = f"{kinds.home(node.state)}/"
    return [
        pid
        for pid, words in leftovers.commands()
        if words[0].endswith("ceph-fuse") and any(word.startswith(ours) for word in words)
    ]


@pytest.fixture
def node(area: Path) -> Iterator[Agent]:
    made = Agent(area / "it's a node, one; touch nodeagent-was-here; #")
    try:
        yield made
    finally:
        made.end()
        leftovers.clear(kinds.home(made.state))


@pytest.mark.real
@pytest.mark.timeout(240 + SECONDS)
def test_cephfs_is_served_from_a_state_directory_of_any_name(
    area: Path, node: Agent, cluster: ceph.CephCluster
) -> None:
    with cluster.mounted(area / "fs") as fs:
        trees.plain(fs / "odd-state", 200)
        snapshot(fs, "odd-state")
        before = trees.records(fs / "odd-state")
        node.cache["datasets"] = [dataset(cluster, area, "/odd-state") | {"warm": False}]
        node.start()
        node.wait_served("a", "source")
        clients = daemons(node)
        assert len(clients) == 1
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            assert trees.records(node.view("a")) == before
            time.sleep(0.2)
        node.kill()
        assert trees.records(node.view("a")) == before
        node.start()
        node.wait_served("a", "source")
        assert trees.records(node.view("a")) == before
        assert daemons(node) == clients  # taken over, not mounted anew
        node.tell("a", "warm")
        node.wait_state("a", "complete")
        assert trees.records(node.view("a")) == before
        assert not MADE.exists()
        node.stop()
        done = node.cli("uninstall", "--yes")
        assert done.returncode == 0, done.stderr
        node.wait_for(lambda: not daemons(node), 20, "ceph-fuse to end")
        assert not kinds.PLAIN.exists()
