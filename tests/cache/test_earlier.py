"""A new snapshot of a block image: what the copy of an earlier one has is not read again."""

import dataclasses
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cache.fill import protocol
from cache.store import extents, image_copy
from tests.cache import passes
from tests.cache.fill.test_blocks import MIB, SIZE, access_of, run, task, write
from tests.testbed import blockdev, rbdimage
from tests.testbed.ceph import CephCluster

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]


def touch(top: Path) -> None:
    """Change a little: one file anew, one gone."""
    (top / "d1" / "f1").write_bytes(random.Random(8).randbytes(50_000))
    (top / "d2" / "f2").unlink()


@pytest.fixture(params=["reflink", "copied"])
def disk(request: pytest.FixtureRequest, area: Path) -> Iterator[Path]:
    """Where the copies are: XFS can share blocks, ext4 cannot."""
    file, at = area / "disk", area / "ssd"
    with file.open("wb") as stream:
        stream.truncate(2000 * MIB)
    kind = "xfs" if request.param == "reflink" else "ext4"
    rbdimage.sh(f"mkfs.{kind}", "-q", file)
    at.mkdir()
    blockdev.mount_image(file, at)
    yield at
    rbdimage.sh("umount", at)


@pytest.fixture(scope="module")
def two(
    cluster: CephCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Path, int]]:
    """An image with snapshots v1 and v2, the file of v2, and the bytes that were changed."""
    made, name = tmp_path_factory.mktemp("two") / "made", "two"
    rbdimage.file_system(made, "ext4", SIZE, write)
    rbdimage.imported(cluster, made, name)
    rbdimage.changed(made, touch)
    yield name, made, rbdimage.updated(cluster, made, name, "v2")
    cluster.run("rbd", "snap", "purge", "--no-progress", f"rbd/{name}")
    cluster.run("rbd", "rm", "--no-progress", f"rbd/{name}")


def filled(
    cluster: CephCluster, folder: Path, name: str, snapshot: str
) -> tuple[protocol.End, int]:
    """How the fill ended, and the bytes that it read from the source."""
    access = dataclasses.replace(access_of(cluster, name), snapshot=snapshot)
    seen: list[protocol.Report] = []
    end = passes.run_module("cache.fill.blocks:fill", task(folder, access), seen.append)
    moved = max((each.progress.copied_bytes for each in seen if each.progress), default=0)
    return end, moved


def equal(made: Path, folder: Path) -> bool:
    copy = folder / image_copy.IMAGE
    return subprocess.run(["cmp", str(made), str(copy)], check=False).returncode == 0


def test_only_what_changed_is_read(
    cluster: CephCluster, disk: Path, two: tuple[str, Path, int]
) -> None:
    name, made, changed = two
    assert filled(cluster, disk / "d" / "1", name, "v1")[0].result == "complete"
    before = _free(disk)
    end, moved = filled(cluster, disk / "d" / "2", name, "v2")
    assert (end.result, end.why) == ("complete", "")
    assert equal(made, disk / "d" / "2")
    assert run("verify", task(disk / "d" / "2", None)).result == "good"
    # Whole objects are read: a changed block costs one chunk.
    chunks = {chunk for chunk in range(extents.count_of(SIZE)) if _differs(disk, chunk)}
    assert 0 < moved <= (len(chunks) + 1) * image_copy.CHUNK_BYTES, changed
    if "xfs" in rbdimage.sh("findmnt", "-no", "FSTYPE", disk):
        assert before - _free(disk) < moved + 4 * MIB, "the rest is shared"
    # The older copy can go: nothing of the new one is lost with it.
    shutil.rmtree(disk / "d" / "1")
    assert run("verify", task(disk / "d" / "2", None)).result == "good"


def _free(disk: Path) -> int:
    rbdimage.sh("sync", "-f", disk)
    return shutil.disk_usage(disk).free


def _differs(disk: Path, chunk: int) -> bool:
    first, second = (disk / "d" / each / image_copy.IMAGE for each in ("1", "2"))
    with first.open("rb") as one, second.open("rb") as other:
        for stream in (one, other):
            stream.seek(chunk * image_copy.CHUNK_BYTES)
        return one.read(image_copy.CHUNK_BYTES) != other.read(image_copy.CHUNK_BYTES)


def _rot(folder: Path) -> None:
    with (folder / image_copy.IMAGE).open("r+b") as stream:
        stream.write(b"rot" * 4096)


def _replay(folder: Path) -> None:
    image_copy.set_replayed(folder, "done")


def _newer(folder: Path) -> None:
    text = (folder / image_copy.CHUNKS).read_bytes()
    (folder / image_copy.CHUNKS).write_bytes(text.replace(b'"format": 1', b'"format": 9', 1))
    assert text != (folder / image_copy.CHUNKS).read_bytes()


def _headless(folder: Path) -> None:
    (folder / image_copy.CHUNKS).write_bytes(b"{}")


@pytest.mark.parametrize("spoil", [_rot, _replay, _newer, _headless])
def test_earlier_copy_that_cannot_be_trusted_costs_reading_only(
    cluster: CephCluster, area: Path, two: tuple[str, Path, int], spoil: Callable[[Path], None]
) -> None:
    name, made, _ = two
    assert filled(cluster, area / "d" / "1", name, "v1")[0].result == "complete"
    spoil(area / "d" / "1")
    assert filled(cluster, area / "d" / "2", name, "v2")[0].result == "complete"
    assert equal(made, area / "d" / "2")


# The last test here: it deletes the snapshot that the others use.
def test_deleted_snapshot_is_no_base(
    cluster: CephCluster, area: Path, two: tuple[str, Path, int]
) -> None:
    name, made, _ = two
    assert filled(cluster, area / "d" / "1", name, "v1")[0].result == "complete"
    cluster.run("rbd", "snap", "rm", "--no-progress", f"rbd/{name}@v1")
    end, moved = filled(cluster, area / "d" / "2", name, "v2")
    assert end.result == "complete" and equal(made, area / "d" / "2")
    assert moved >= 24 * MIB, "all of it was read"
