"""Snapshots of file systems that were being written: what is served is what a mount with replay
shows.

JOURNALS: how many images; the suite cuts a few, ``make test-faults`` fifty.
"""

import contextlib
import os
import random
import threading
from pathlib import Path

import pytest

from cache.store import filesystem, image_copy
from tests.cache.fill import test_blocks as blocks
from tests.testbed import blockdev, rbdimage, waiting
from tests.testbed.ceph import CephCluster

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

JOURNALS = int(os.environ.get("JOURNALS", "2"))


def change(top: Path, chosen: random.Random, number: int) -> None:
    """One of the things that programs do with files."""
    path = top / f"d{chosen.randrange(8)}" / f"f{chosen.randrange(60)}"
    match chosen.randrange(6):
        case 0:
            path.unlink(missing_ok=True)
        case 1:
            other = top / f"d{chosen.randrange(8)}" / f"g{chosen.randrange(60)}"
            if path.exists():
                path.rename(other)
        case 2:
            with path.open("ab") as stream:
                stream.write(chosen.randbytes(chosen.randrange(1, 20_000)))
                os.fsync(stream.fileno())
        case 3:
            with contextlib.suppress(FileExistsError):
                (top / f"d{chosen.randrange(8)}" / f"s{number}").symlink_to(path.name)
        case _:
            path.write_bytes(chosen.randbytes(chosen.randrange(1, 60_000)))


def write_and_cut(top: Path, chosen: random.Random) -> None:
    """Cut the file system off while a thread writes to it."""
    for number in range(8):
        (top / f"d{number}").mkdir()
    enough = threading.Event()
    least = chosen.randrange(20, 400)

    def write() -> None:
        with contextlib.suppress(OSError):  # it was cut off
            for number in range(100_000):
                change(top, chosen, number)
                if number == least:
                    enough.set()
        enough.set()

    writer = threading.Thread(target=write)
    writer.start()
    assert enough.wait(waiting.limit(120))
    rbdimage.cut_off(top, flush=random.Random(least).random() < 0.5)
    writer.join()


def everything(top: Path) -> dict[str, tuple[int, str]]:
    """Modes and targets of all names, beside the bytes of the files."""
    return {
        str(each.relative_to(top)): (
            each.lstat().st_mode,
            str(each.readlink()) if each.is_symlink() else "",
        )
        for each in top.rglob("*")
    }


@pytest.mark.parametrize("number", range(JOURNALS))
def test_an_image_cut_while_it_was_written_shows_what_its_journal_says(
    cluster: CephCluster, area: Path, number: int
) -> None:
    kind, chosen = ("ext4", "xfs")[number % 2], random.Random(number)
    made, name = area / "made", f"cut-{number}"
    rbdimage.file_system(made, kind, blocks.SIZE, lambda top: write_and_cut(top, chosen))
    rbdimage.imported(cluster, made, name)
    assert not filesystem.is_clean(str(made), "control")
    folder, control = area / "generation", area / "control"
    end = blocks.run("fill", blocks.task(folder, blocks.access_of(cluster, name)))
    assert end.result == "complete", end
    control.mkdir()
    blockdev.mount_image(made, control)
    try:
        wanted = blocks.digests(control), everything(control)
    finally:
        rbdimage.sh("umount", control)
    assert len(wanted[0]) > 5
    with blocks.shown(folder / image_copy.IMAGE, area / "view") as view:
        assert (blocks.digests(view), everything(view)) == wanted
    cluster.run("rbd", "snap", "purge", "--no-progress", f"rbd/{name}")
    cluster.run("rbd", "rm", "--no-progress", f"rbd/{name}")
