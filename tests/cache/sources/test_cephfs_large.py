"""Large files of CephFS: read by their objects whatever their layout, resumed after kill -9."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.testbed import ceph, waiting

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

MIB = 2**20
# Bytes; LARGE_MIB makes it a larger one.
SIZE = int(os.environ.get("LARGE_MIB", "200")) * MIB + 4321
STRIPED = "stripe_unit=1048576 stripe_count=3 object_size=4194304 pool=cephfs_data"


@pytest.fixture(scope="module")
def snapshot(run_folder: Path, cluster: ceph.CephCluster) -> Iterator[Path]:
    """A snapshot with a striped file, a file of the common layout and one with a hole."""
    with cluster.mounted(run_folder / "large") as fs:
        top = fs / "large"
        (top / "striped").mkdir(parents=True)
        os.setxattr(top / "striped", "ceph.dir.layout", STRIPED.encode())
        write(top / "striped/big", 70 * MIB + 777)
        write(top / "plain", SIZE)
        write(top / "sparse", 80 * MIB, hole=(8 * MIB, 40 * MIB))
        (top / "small").write_bytes(b"small")
        cluster.wait_until_not_recent()
        made = top / ".snap/v1"
        made.mkdir()
        yield made


def write(path: Path, size: int, hole: tuple[int, int] = (0, 0)) -> None:
    block = os.urandom(MIB)
    with path.open("wb") as stream:
        for at in range(0, size, MIB):
            if not hole[0] <= at < hole[1]:
                stream.seek(at)
                stream.write((at.to_bytes(8, "big") + block[8:])[: size - at])
        stream.truncate(size)


def apart(which: str, area: Path, snapshot: Path, cluster: ceph.CephCluster) -> None:
    """Have it done by tests.cache.fill.large_fill."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.cache.fill.large_fill", which, str(area), str(snapshot),
         str(cluster.conf)],
        cwd=Path(__file__).parents[3], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stderr is not None
        said = process.stderr.read()
        assert process.wait(waiting.limit(200)) == 0, said
    print(said)


def test_killed_fill_goes_on_where_it_was(
    area: Path, snapshot: Path, cluster: ceph.CephCluster
) -> None:
    apart("killed", area, snapshot, cluster)


def test_striped_file_is_read_by_its_objects(
    area: Path, snapshot: Path, cluster: ceph.CephCluster
) -> None:
    apart("striped", area, snapshot, cluster)
