"""Is anything written to an image? Asked of a real cluster, in bounded time for every image."""

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from ceph.client import ClusterClient
from ceph.protocol import Extents, ImageId
from ceph.settings import ClusterSettings
from linux import blkid
from tests.testbed import blockdev
from tests.testbed.ceph import CephCluster
from volumes import settings
from volumes.probe import examine

pytestmark = [pytest.mark.real, pytest.mark.timeout(180)]

TiB = 2**40
OBJECT = 4 * blockdev.MiB
# Where every object is visited, it takes the cluster far longer than the guard waits.
DEADLINE = settings.GuardSettings().cluster_timeout


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CephCluster]:
    made = CephCluster(tmp_path_factory.mktemp("ceph"), osd_bytes=4 * 2**30)
    try:
        made.start()
        made.run("rbd", "pool", "init", "rbd")
        yield made
    finally:
        made.stop()


@pytest.fixture
async def cluster(backend: CephCluster) -> AsyncIterator[ClusterClient]:
    made = ClusterClient(ClusterSettings(name="c1", conf=backend.conf, user="admin"), DEADLINE)
    await made.connect()
    yield made
    await made.close()


def image(backend: CephCluster, name: str, *options: str, source: Path | None = None) -> ImageId:
    if source is None:
        backend.run("rbd", "create", *options, f"rbd/{name}")
    else:
        backend.run("rbd", "import", *options, str(source), f"rbd/{name}")
    info = json.loads(backend.run("rbd", "info", "--format", "json", f"rbd/{name}"))
    pools = json.loads(backend.run("ceph", "osd", "pool", "ls", "detail", "--format", "json"))
    number = next(pool["pool_id"] for pool in pools if pool["pool_name"] == "rbd")
    return ImageId(number, "", info["id"])


def put(backend: CephCluster, folder: Path, where: ImageId, at: int) -> None:
    """Write a few bytes at this offset of the image."""
    (folder / "data").write_bytes(b"data")
    name = f"rbd_data.{where.image_id}.{at // OBJECT:016x}"
    backend.run(
        *("rados", "-p", "rbd", "put", name, str(folder / "data")), "--offset", str(at % OBJECT)
    )


@pytest.mark.parametrize("size", [TiB, 16 * TiB])
async def test_a_large_image_without_object_map_is_asked_about_marks_only(
    backend: CephCluster, cluster: ClusterClient, tmp_path: Path, size: int
) -> None:
    name = f"large-{size // TiB}"
    made = image(backend, name, "--size", f"{size // TiB}T", "--image-feature", "layering")
    places = Extents(0, tuple(examine.marks(size)))
    assert (await cluster.content(made, "key", places)).extent is None
    # The first mark reaches into the second object, the last one begins in the middle of the last.
    for at in (size - blockdev.MiB, OBJECT + 4096, 0):
        put(backend, tmp_path, made, at)
        found = (await cluster.content(made, "key", places)).extent
        assert found == (at // OBJECT * OBJECT, OBJECT), at


@pytest.mark.parametrize("features", ["layering", "layering,exclusive-lock,object-map,fast-diff"])
async def test_a_luks1_header_is_not_taken_for_data_of_its_mapping(
    backend: CephCluster, cluster: ClusterClient, tmp_path: Path, features: str
) -> None:
    disk, key = blockdev.blank(tmp_path / "disk", 64 * blockdev.MiB), tmp_path / "key"
    key.write_bytes(b"k" * 64)
    blockdev.run(*("cryptsetup", "-q", "--type", "luks1", "--pbkdf-force-iterations", "1000"),
                 *("--key-file", str(key), "luksFormat", str(disk)))  # fmt: skip
    with disk.open("rb") as stream:
        start = blkid.luks_data_offset(stream.fileno())
    assert start % OBJECT > 0, "header and data share an object"
    words = [word for each in features.split(",") for word in ("--image-feature", each)]
    made = image(backend, f"luks-{len(words)}", *words, source=disk)
    size = disk.stat().st_size - start
    marks = tuple((start + at, length) for at, length in examine.marks(size))
    assert (await cluster.content(made, "key", Extents())).extent is not None
    assert (await cluster.content(made, "key", Extents(start, marks))).extent is None
    put(backend, tmp_path, made, start)
    assert (await cluster.content(made, "key", Extents(start, marks))).extent == (
        *(start, OBJECT - start % OBJECT),
    )
