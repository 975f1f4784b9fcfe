"""Local copies of block images: filled from a real cluster, verified, mounted, cut short."""

import asyncio
import contextlib
import dataclasses
import hashlib
import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kit.child
import kit.errors
import kit.line_worker
from cache.fill import protocol
from cache.sources import rbd_child
from cache.store import filesystem, generations, image_copy
from ceph.protocol import ImageAccess
from linux import mounts
from tests.cache import passes
from tests.testbed import blockdev, rbdimage, waiting
from tests.testbed.ceph import CephCluster

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

MIB = 2**20
SIZE = 320 * MIB  # the least of XFS is 300


def write(top: Path) -> None:
    """Many small files, and one of several chunks."""
    chosen = random.Random(7)
    for number in range(400):
        folder = top / f"d{number % 20}"
        folder.mkdir(exist_ok=True)
        (folder / f"f{number}").write_bytes(chosen.randbytes(chosen.randrange(1, 60_000)))
    (top / "large").write_bytes(chosen.randbytes(20 * MIB))


def digests(top: Path) -> dict[str, str]:
    return {
        str(each.relative_to(top)): hashlib.sha256(each.read_bytes()).hexdigest()
        for each in sorted(top.rglob("*"))
        if each.is_file()
    }


@pytest.fixture(scope="module", params=["ext4", "xfs"])
def original(
    cluster: CephCluster, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> tuple[str, Path]:
    """The name of an image, and the file that it was made of."""
    made = tmp_path_factory.mktemp("images") / request.param
    rbdimage.file_system(made, request.param, SIZE, write)
    rbdimage.imported(cluster, made, f"blocks-{request.param}")
    return f"blocks-{request.param}", made


def access_of(cluster: CephCluster, image: str) -> ImageAccess:
    return ImageAccess(str(cluster.conf), "admin", "rbd", "", image, "v1")


def look(access: ImageAccess, thing: str) -> dict[str, Any]:
    """As the agent looks at an image: in a child. Librados' threads would not stand later forks."""
    arguments = dataclasses.asdict(access), thing
    found: dict[str, Any] = asyncio.run(
        kit.child.call(rbd_child.look, *arguments, deadline=waiting.limit(90.0))
    )
    return found


def task(folder: Path, access: ImageAccess | None, **changes: Any) -> protocol.BlockTask:
    limits = dataclasses.replace(passes.LIMITS, **changes)
    return protocol.BlockTask(generation=str(folder), access=access, limits=limits)


def run(kind: str, given: protocol.BlockTask) -> protocol.End:
    return passes.run_module(f"cache.fill.blocks:{kind}", given)


@contextlib.contextmanager
def shown(copy: Path, at: Path, partition: int = 0) -> Iterator[Path]:
    """The copy, mounted as a view is."""
    at.mkdir()
    tree = filesystem.view_of(str(copy), partition)
    mounts.attach(tree, at)
    os.close(tree)
    try:
        yield at
    finally:
        mounts.unmount(at)
        at.rmdir()


def loops_of(copy: Path) -> str:
    return subprocess.run(
        ["losetup", "-j", str(copy)], capture_output=True, text=True, check=True
    ).stdout


def test_fill_makes_an_equal_copy_that_can_be_mounted(
    cluster: CephCluster, original: tuple[str, Path], area: Path
) -> None:
    name, made = original
    folder = area / "generation"
    end = run("fill", task(folder, access_of(cluster, name)))
    assert (end.result, end.why) == ("complete", "")
    copy = folder / image_copy.IMAGE
    assert subprocess.run(["cmp", str(made), str(copy)], check=False).returncode == 0
    assert copy.stat().st_blocks * 512 < SIZE  # zeros are holes
    with shown(copy, area / "view") as view, shown(made, area / "made") as wanted:
        assert digests(view) == digests(wanted)
        with pytest.raises(OSError, match="Read-only"):
            (view / "new").touch()
    assert loops_of(copy) == ""  # ended with its mount
    assert run("verify", task(folder, None)).result == "good"


def test_bad_chunk_is_found_and_read_anew(
    cluster: CephCluster, original: tuple[str, Path], area: Path
) -> None:
    name, made = original
    folder = area / "generation"
    access = access_of(cluster, name)
    assert run("fill", task(folder, access)).result == "complete"
    copy = folder / image_copy.IMAGE
    with copy.open("r+b") as stream:
        stream.seek(5)
        stream.write(b"rot")
    end = run("verify", task(folder, None))
    assert end.result == "bad" and end.verify is not None
    assert (end.verify.bad, end.verify.unreplaced) == (1, 1)
    assert generations.read_quarantined(folder) == [([], "0")]
    generations.write_quarantined(folder, [])  # as the agent does
    # Its record is forgotten: a fill reads it again, and nothing else.
    assert run("fill", task(folder, access)).result == "complete"
    assert subprocess.run(["cmp", str(made), str(copy)], check=False).returncode == 0
    with copy.open("r+b") as stream:
        stream.write(b"rot")
    end = run("verify", task(folder, access))
    assert end.result == "good" and end.verify is not None
    assert (end.verify.bad, end.verify.replaced) == (1, 1)
    assert subprocess.run(["cmp", str(made), str(copy)], check=False).returncode == 0
    assert run("verify", task(folder, None)).result == "good"


def test_nothing_is_stored_without_room_for_all(
    cluster: CephCluster, original: tuple[str, Path], area: Path
) -> None:
    end = run("fill", task(area / "g", access_of(cluster, original[0]), budget=16 * MIB))
    assert end.result == "partial" and "as a whole or not at all" in end.why
    assert end.fill is not None and end.fill.left_bytes > 0
    assert (area / "g" / image_copy.IMAGE).stat().st_blocks == 0


def test_killed_fill_continues_behind_its_last_batch(
    cluster: CephCluster, original: tuple[str, Path], area: Path
) -> None:
    """Killed at random; what it kept is never read again, and the copy is equal at the end."""
    name, made = original
    folder = area / "generation"
    given = task(folder, access_of(cluster, name), bytes_per_second=4 * MIB)
    kept = [0]

    def stored() -> int:
        with image_copy.existing_copy(folder) as held:
            return sum(state is image_copy.State.STORED for _, state in held.states())

    async def killed(after: int, least: int = 0) -> bool:
        """Whether the pass came to its end before ``after`` chunks were read and ``least`` kept."""
        worker = kit.line_worker.LineWorker(
            "cache.fill.blocks:fill", protocol.Report, about="fill", largest=MIB, forked=True
        )
        try:
            async with contextlib.aclosing(worker.listen(given, 60.0)) as reports:
                async for report in reports:
                    if report.end is not None:
                        return report.end.result == "complete"
                    progress = report.progress
                    read = progress.copied_files if progress is not None else 0
                    if read >= after and (not least or stored() >= least):
                        return False
            return False
        finally:
            await worker.close()

    for after, least in ((1, 0), (2, 0), (3, 1)):  # of ten chunks, or more
        assert not asyncio.run(killed(after, least))
        kept.append(stored())
        assert kept[-1] >= kept[-2]
    assert kept[-1] > 0
    given = task(folder, given.access)
    assert asyncio.run(killed(10**9))
    assert (
        subprocess.run(["cmp", str(made), str(folder / image_copy.IMAGE)], check=False).returncode
        == 0
    )


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_dirty_journal_is_replayed_on_the_copy(cluster: CephCluster, area: Path, kind: str) -> None:
    """A snapshot of a file system in use: the copy shows what a mount with replay shows."""
    made, name = area / "made", f"dirty-{kind}"
    rbdimage.file_system(made, kind, SIZE, write, cut=True)
    rbdimage.imported(cluster, made, name)
    folder, access = area / "generation", access_of(cluster, name)
    assert not filesystem.is_clean(str(made), "control")
    (area / "control").mkdir()
    assert run("fill", task(folder, access)).result == "complete"
    blockdev.mount_image(made, area / "control")
    try:
        wanted = digests(area / "control")
    finally:
        rbdimage.sh("umount", area / "control")
    assert "large" in wanted
    with shown(folder / image_copy.IMAGE, area / "view") as view:
        assert digests(view) == wanted
    assert run("verify", task(folder, None)).result == "good"
    assert run("fill", task(folder, access)).result == "complete"  # nothing is done again
    # Its blocks are not those of the source any more: a bad chunk has it filled anew as a whole.
    with (folder / image_copy.IMAGE).open("r+b") as stream:
        stream.write(b"rot")
    assert run("verify", task(folder, access)).result == "bad"
    assert run("fill", task(folder, access)).result == "complete"
    with shown(folder / image_copy.IMAGE, area / "view") as view:
        assert digests(view) == wanted


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (("true",), "unformatted"),
        (("mkfs.btrfs", "-q", "-f"), "it holds btrfs"),
        (("parted", "-s", "{}", "mklabel", "gpt"), "partitions"),
    ],
)
def test_image_that_cannot_be_served_is_refused_by_name(
    cluster: CephCluster, area: Path, make: tuple[str, ...], why: str
) -> None:
    made, name = area / "made", f"odd-{why.split()[-1]}"
    with made.open("wb") as stream:
        stream.truncate(SIZE)
    command = [word.format(made) for word in make]
    rbdimage.sh(*command, *(() if "{}" in make else (made,)))
    rbdimage.imported(cluster, made, name)
    with pytest.raises(kit.errors.SourceError, match=why) as refused:
        look(access_of(cluster, name), "dataset d: RBD image x")
    assert "dataset d" in str(refused.value)
