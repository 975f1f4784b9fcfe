"""Later releases of Ceph than this machine's: what is proved with 16.2 holds with them, too.

The daemons are those of another Debian, the clients this machine's. TEST_CEPH=trixie runs all other
tests so.
"""

import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cache.sources import test_cephfs, test_rbd
from tests.testbed import ceph, rbdimage, trees
from tests.testbed.agent import Agent

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

RELEASES = {"trixie": "18.2", "sid": "20.2"}


@pytest.fixture(scope="module", params=RELEASES)
def cluster(run_folder: Path, request: pytest.FixtureRequest) -> Iterator[ceph.CephCluster]:
    """In place of the session's: the tests from other modules take this one."""
    with ceph.running(run_folder / f"ceph-{request.param}", request.param) as made:
        yield made


fs = test_cephfs.fs
image = test_rbd.image
test_snapshot_is_copied_whole = test_cephfs.test_snapshot_of_odd_tree_is_copied_whole
test_rbd_image_is_copied_and_served = test_rbd.test_image_is_copied_served_adopted_and_removed


def test_daemons_are_of_another_release_than_the_clients(cluster: ceph.CephCluster) -> None:
    daemons = set(re.findall(r"ceph version (\d+\.\d+)", cluster.run("ceph", "versions")))
    assert daemons == {RELEASES[cluster.release]}
    client = re.findall(r"ceph version (\d+\.\d+)", cluster.run("ceph-fuse", "--version"))
    assert client and set(client).isdisjoint(daemons)


def why_of(node: Agent, name: str) -> str:
    return str(node.dataset(name)["why"])


def test_keys_that_the_client_does_not_know_are_told_and_what_is_told_helps(
    area: Path, node: Agent
) -> None:
    files = {"a": "/data", "train": "image"}
    with ceph.running(area / "cluster" / "ceph", "sid", older_clients=False) as cluster:
        node.cache.update(test_rbd.settings(cluster, area, files["train"]))
        node.cache["datasets"].append(test_cephfs.dataset(cluster, area, files["a"]))
        key = cluster.secret()
        node.start()
        for name in files:
            why = str(node.wait_for(functools.partial(why_of, node, name), 60, "why it waits"))
            assert "key of client.admin is of type aes256k" in why, why
            assert "this node's Ceph client 16.2" in why and "20.2.4 or newer" in why, why
        checked = node.cli("doctor").stdout
        for name in files:
            told = checked.partition(f"MISSING cache key {name}: ")[2].partition("MISSING")[0]
            assert "of type aes256k" in told and "--key-type aes" in told, checked
        assert key not in checked + node.said()
        # What it says to do.
        commands = re.findall(r"'(ceph [^']*aes[^']*)'", why)
        assert len(commands) == 2, why
        allow, rotate = (cluster.inside(*each.split()) for each in commands)
        cluster.run(*allow)
        cluster.take_key(rotate)
        assert cluster.secret() != key
        (area / "secret").write_text(cluster.secret())
        with cluster.mounted(area / "fs") as fs:
            trees.plain(fs / "data", 50)
            trees.settle(fs / "data")
            frozen = test_cephfs.snapshot(fs, "data")
            rbdimage.file_system(area / "image", "ext4", 64 * test_rbd.MIB, test_rbd.write)
            rbdimage.imported(cluster, area / "image", files["train"])
            for name in files:
                node.wait_state(name, "complete", seconds=120)
            trees.assert_equal(frozen, node.view("a"))
            assert test_rbd.shown(node.view("train")) == test_rbd.FILES
        assert node.stop() == 0
