"""Block images that are odd, and what happens to a source while it is being copied."""

import asyncio
import contextlib
import dataclasses
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kit.errors
import kit.line_worker
from cache.fill import protocol
from cache.store import image_copy
from ceph.protocol import ImageAccess
from tests.cache.fill.test_blocks import (
    MIB,
    SIZE,
    access_of,
    digests,
    look,
    run,
    shown,
    task,
    write,
)
from tests.testbed import rbdimage, waiting
from tests.testbed.ceph import CephCluster

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with an ext4 and its files."""
    file = tmp_path_factory.mktemp("odd") / "made"
    rbdimage.file_system(file, "ext4", SIZE, write)
    return file


@pytest.fixture
def name(cluster: CephCluster, area: Path) -> Iterator[str]:
    """Of an image that goes with the test."""
    yield (image := f"odd-{area.name}")
    for each in (f"{image}-clone", image):
        with contextlib.suppress(RuntimeError):
            cluster.run("rbd", "snap", "purge", "--no-progress", f"rbd/{each}")
        with contextlib.suppress(RuntimeError):
            cluster.run("rbd", "rm", "--no-progress", f"rbd/{each}")


def equal(made: Path, folder: Path) -> bool:
    copy = folder / image_copy.IMAGE
    return subprocess.run(["cmp", str(made), str(copy)], check=False).returncode == 0


def refused(access: ImageAccess) -> str:
    """What a look at the image says instead of its facts."""
    thing = f"dataset d: RBD image {access.spec}"
    with pytest.raises(kit.errors.SourceError) as error:
        look(access, thing)
    text = str(error.value)
    assert access.image in text
    return text


# --- images that are odd


def test_image_without_fast_diff_is_copied(
    cluster: CephCluster, area: Path, made: Path, name: str
) -> None:
    rbdimage.imported(cluster, made, name, "--image-feature", "layering")
    assert run("fill", task(area / "g", access_of(cluster, name))).result == "complete"
    assert equal(made, area / "g")


def test_clone_is_copied_with_what_its_parent_has(
    cluster: CephCluster, area: Path, made: Path, name: str
) -> None:
    rbdimage.imported(cluster, made, name)
    cluster.run("rbd", "snap", "protect", f"rbd/{name}@v1")
    clone = f"{name}-clone"
    cluster.run("rbd", "clone", f"rbd/{name}@v1", f"rbd/{clone}")
    cluster.run("rbd", "snap", "create", "--no-progress", f"rbd/{clone}@v1")
    assert run("fill", task(area / "g", access_of(cluster, clone))).result == "complete"
    assert equal(made, area / "g")
    cluster.run("rbd", "snap", "purge", "--no-progress", f"rbd/{clone}")
    cluster.run("rbd", "rm", "--no-progress", f"rbd/{clone}")
    cluster.run("rbd", "snap", "unprotect", f"rbd/{name}@v1")


@pytest.mark.parametrize("size", [2 * SIZE, SIZE // 4])
def test_image_that_was_resized_after_the_snapshot_is_copied_as_it_was(
    cluster: CephCluster, area: Path, made: Path, name: str, size: int
) -> None:
    rbdimage.imported(cluster, made, name)
    cluster.run(
        "rbd", "resize", "--no-progress", "--allow-shrink", "--size", str(size // MIB),
        f"rbd/{name}",
    )  # fmt: skip
    assert run("fill", task(area / "g", access_of(cluster, name))).result == "complete"
    assert equal(made, area / "g")


def test_copy_from_another_cluster_under_the_same_names_is_filled_anew(
    cluster: CephCluster, area: Path, made: Path, name: str
) -> None:
    """Ids of pools, images and snapshots may be the same there; the cluster's own id is not."""
    rbdimage.imported(cluster, made, name)
    given = task(area / "g", access_of(cluster, name))
    assert run("fill", given).result == "complete"
    records, copy = (area / "g" / each for each in (image_copy.CHUNKS, image_copy.IMAGE))
    fsid = image_copy.existing(area / "g").fsid
    there = bytes(reversed(fsid.encode()))
    records.write_bytes(records.read_bytes().replace(fsid.encode(), there))
    with copy.open("r+b") as stream:
        stream.seek(8 * MIB)
        stream.write(b"there" * 1000)
    assert run("fill", given).result == "complete"
    assert image_copy.existing(area / "g").fsid == fsid
    assert equal(made, area / "g")


def test_image_in_a_full_pool_is_copied(
    cluster: CephCluster, area: Path, made: Path, name: str
) -> None:
    """A full pool refuses writes, and a fill writes nothing there."""
    pool = f"full-{area.name}"
    cluster.run("ceph", "osd", "pool", "create", pool, "1")
    try:
        cluster.run("rbd", "pool", "init", pool)
        cluster.run("rbd", "import", "--no-progress", str(made), f"{pool}/{name}")
        cluster.run("rbd", "snap", "create", "--no-progress", f"{pool}/{name}@v1")
        cluster.run("ceph", "osd", "pool", "set-quota", pool, "max_bytes", "1")

        def full() -> bool:
            return f"pool '{pool}' is full" in cluster.run("ceph", "health", "detail")

        waiting.until(full, 60, "the pool to be full")
        access = dataclasses.replace(access_of(cluster, name), pool=pool)
        assert run("fill", task(area / "g", access)).result == "complete"
        assert equal(made, area / "g")
    finally:
        cluster.run("ceph", "osd", "pool", "rm", pool, pool, "--yes-i-really-really-mean-it")


def test_encrypted_image_is_refused(cluster: CephCluster, area: Path, name: str) -> None:
    file = area / "luks"
    with file.open("wb") as stream:
        stream.truncate(32 * MIB)
    subprocess.run(
        ["cryptsetup", "luksFormat", "-q", "--pbkdf", "pbkdf2", "--pbkdf-force-iterations", "1000",
         str(file), "-"],
        input=b"secret", check=True, timeout=waiting.limit(120),
    )  # fmt: skip
    rbdimage.imported(cluster, file, name)
    assert "it is encrypted (crypto_LUKS)" in refused(access_of(cluster, name))


def test_several_signatures_are_refused(cluster: CephCluster, area: Path, name: str) -> None:
    file = area / "two"
    with file.open("wb") as stream:
        stream.truncate(SIZE)
    rbdimage.sh("mkfs.ext4", "-q", "-F", file)
    other = area / "xfs"
    with other.open("wb") as stream:
        stream.truncate(SIZE)
    rbdimage.sh("mkfs.xfs", "-q", other)
    with file.open("r+b") as stream:  # the superblock of XFS is the first sector, ext4's the third
        stream.write(other.read_bytes()[:512])
    rbdimage.imported(cluster, file, name)
    assert "signatures of several file systems" in refused(access_of(cluster, name))


def test_what_is_not_there_is_named(cluster: CephCluster, made: Path, name: str) -> None:
    rbdimage.imported(cluster, made, name)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"image": "absent"}, "no such pool, image or snapshot"),
        ({"snapshot": "absent"}, "no such pool, image or snapshot"),
        ({"pool": "absent"}, "no such pool, image or snapshot"),
        ({"user": "nobody"}, "does not answer|is refused"),
    ]
    for changes, why in cases:
        said = refused(dataclasses.replace(access_of(cluster, name), **changes))
        assert re.search(why, said), changes


# --- while it is being copied


def filling(
    area: Path, access: ImageAccess, then: Callable[[], None], chunks: int = 2,
    rate: int = 8 * MIB,
) -> protocol.End:  # fmt: skip
    """A fill of ``rate`` bytes a second; ``then`` is called after ``chunks`` were read."""

    async def run_it() -> protocol.End:
        given = task(area / "g", access, bytes_per_second=rate)
        worker = kit.line_worker.LineWorker(
            "cache.fill.blocks:fill", protocol.Report, about="fill", largest=MIB, forked=True
        )
        done = False
        try:
            async with contextlib.aclosing(worker.listen(given, 200.0)) as reports:
                async for report in reports:
                    if report.end is not None:
                        assert done, f"it ended before: {report.end}"
                        return report.end
                    progress = report.progress
                    if not done and progress is not None and progress.copied_files >= chunks:
                        await asyncio.to_thread(then)
                        done = True
            raise AssertionError("it did not say how it ended")
        finally:
            await worker.close()

    return asyncio.run(run_it())


def test_osd_that_is_killed_and_started_anew_costs_time_only(
    cluster: CephCluster, area: Path, made: Path, name: str
) -> None:
    rbdimage.imported(cluster, made, name)
    access = access_of(cluster, name)
    end = filling(area, access, cluster.restart_osd)
    if end.result != "complete":  # a busy machine: away for longer than the deadline of a read
        assert end.result == "failed" and name in end.why
        assert image_copy.facts_of(area / "g") is not None  # what is stored is not read again
        end = run("fill", task(area / "g", access))
    assert (end.result, end.why) == ("complete", "")
    assert equal(made, area / "g")


def test_snapshot_that_is_deleted_while_it_is_copied_never_mixes(
    cluster: CephCluster, area: Path, made: Path, name: str
) -> None:
    """Reads of a deleted snapshot give later bytes, without an error: the copy is not complete."""
    rbdimage.imported(cluster, made, name)
    scratch = area / "scratch"

    def other_files(top: Path) -> None:
        (top / "random").write_bytes(os.urandom(60 * MIB))

    def delete() -> None:
        cluster.run("rbd", "snap", "rm", "--no-progress", f"rbd/{name}@v1")
        rbdimage.file_system(scratch, "ext4", SIZE, other_files)
        rbdimage.updated(cluster, scratch, name, "v2")

    # Slow: where it ends before the delete, nothing is mixed. It does not last until its end.
    end = filling(area, access_of(cluster, name), delete, rate=4 * MIB)
    assert end.result == "failed" and name in end.why
    # The second snapshot, in the same folder: nothing of the first is taken for it.
    access = dataclasses.replace(access_of(cluster, name), snapshot="v2")
    end = run("fill", task(area / "g", access))
    assert (end.result, end.why) == ("complete", "")
    assert equal(scratch, area / "g")


def test_key_that_is_taken_away_fails_by_name_and_goes_on_with_it(
    cluster: CephCluster, area: Path, made: Path, name: str
) -> None:
    rbdimage.imported(cluster, made, name)
    user = f"client.{name}"
    caps = ("mon", "profile rbd", "osd", "profile rbd-read-only")
    ring = area / "ring"
    ring.write_text(cluster.run("ceph", "auth", "get-or-create", user, *caps))
    conf = area / "ceph.conf"
    conf.write_text(f"[global]\nmon host = {cluster.monitor}\nkeyring = {ring}\nlog file =\n")
    access = dataclasses.replace(access_of(cluster, name), conf=str(conf), user=name)
    cluster.run("ceph", "auth", "caps", user, "mon", "allow r")
    said = refused(access)  # by OSDs of 16.2; those of 18.2 do not answer
    assert f"{user} " in said and "profile rbd-read-only" in said
    assert run("fill", task(area / "g", access)).result == "failed"
    cluster.run("ceph", "auth", "caps", user, *caps)
    assert run("fill", task(area / "g", access)).result == "complete"
    assert equal(made, area / "g")
    cluster.run("ceph", "auth", "rm", user)


# --- partitions


@pytest.fixture
def partitioned(cluster: CephCluster, area: Path, made: Path, name: str) -> Path:
    """The file of an image whose second partition holds ``made``."""
    file = area / "partitioned"
    with file.open("wb") as stream:
        stream.truncate(SIZE + 8 * MIB)
    end = 3 * MIB + SIZE - 1
    rbdimage.sh(
        "parted", "-s", file, "mklabel", "gpt", "mkpart", "a", "1MiB", "2MiB",
        "mkpart", "b", f"{3 * MIB}B", f"{end}B",
    )  # fmt: skip
    rbdimage.sh("dd", f"if={made}", f"of={file}", "bs=1M", "seek=3", "conv=notrunc,sparse")
    rbdimage.imported(cluster, file, name)
    return file


def test_file_system_in_a_partition_is_served(
    cluster: CephCluster, area: Path, made: Path, name: str, partitioned: Path
) -> None:
    whole = access_of(cluster, name)
    assert "say which one in source.partition" in refused(whole)
    assert "it has no partition 3" in refused(dataclasses.replace(whole, partition=3))
    assert "unformatted" in refused(dataclasses.replace(whole, partition=1))
    access = dataclasses.replace(whole, partition=2)
    look(access, "dataset d")
    assert run("fill", task(area / "g", access)).result == "complete"
    copy = area / "g" / image_copy.IMAGE
    assert equal(partitioned, area / "g")
    with (
        shown(copy, area / "view", image_copy.partition_of(area / "g")) as view,
        shown(made, area / "made") as wanted,
    ):
        assert digests(view) == digests(wanted)
