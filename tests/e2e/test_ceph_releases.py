"""Later releases of Ceph than this machine's: what is proved with 16.2 holds with them, too.

The daemons are those of another Debian, the clients this machine's. TEST_CEPH=trixie runs all other
tests so.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cache.sources import test_cephfs, test_rbd
from tests.testbed import ceph

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

RELEASES = {"trixie": "18.2"}


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
