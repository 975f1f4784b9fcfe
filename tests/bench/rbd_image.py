"""An image on a real Ceph cluster, and what is done with it to compare a fill with."""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import kit.files
from cache.fill import protocol
from cache.store import filesystem, image_copy
from ceph.protocol import ImageAccess
from linux import mounts
from tests.bench import harness, trees
from tests.cache import passes
from tests.testbed import ceph, rbdimage, waiting

SMALLEST, LARGEST = 4096, 128 * 1024
MIB = 2**20
SNAPSHOT = "v1"
PEER_SECONDS = 300


class Image:
    """An image with files and a snapshot."""

    def __init__(
        self,
        cluster: ceph.CephCluster,
        room: Path,
        kind: str,
        size: int,
        files: int,
        *,
        spread: bool = False,
    ) -> None:
        """``spread``: its folders lie all over the image (ext4), not one behind the other."""
        self.cluster, self.room, self.name = cluster, room, f"{kind}{size // MIB}"
        made = room / "made"
        self.bytes = 0

        def write(top: Path) -> None:
            (top / "files").mkdir()
            if spread:
                rbdimage.sh("chattr", "+T", top / "files")
            self.bytes = trees.make(top / "files", files, SMALLEST, LARGEST, threads=2)

        rbdimage.file_system(made, kind, size, write)
        rbdimage.imported(cluster, made, self.name, "--sparse-size", "64K")
        made.unlink()
        self.folder = room / "generation"

    def fill(self) -> tuple[float, float]:
        """Seconds and seconds of CPU of a fill of its copy, anew."""
        shutil.rmtree(self.folder, ignore_errors=True)
        harness.drop_caches()
        access = ImageAccess(str(self.cluster.conf), "admin", "rbd", "", self.name, SNAPSHOT)
        task = protocol.BlockTask(
            generation=str(self.folder), access=access,
            limits=protocol.Limits(4, 0, 0, budget=2**50, reserve=0.01, others=0),
        )  # fmt: skip
        cpu, began = _cpu(), time.monotonic()
        end = passes.run_module("cache.fill.blocks:fill", task)
        seconds = time.monotonic() - began
        if end.result != "complete":
            raise RuntimeError(f"the fill ended {end}")
        # The process that it was a fork of has waited for it, a moment after its end was told.
        waiting.until(lambda: _cpu() > cpu, 10, "the end of the process that filled")
        return seconds, _cpu() - cpu

    def export(self) -> float:
        """Seconds of ``rbd export`` to a file."""
        target = self.room / "exported"
        target.unlink(missing_ok=True)
        harness.drop_caches()
        began = time.monotonic()
        self.cluster.run(
            "rbd", "export", "--no-progress", f"rbd/{self.name}@{SNAPSHOT}", str(target),
            timeout=PEER_SECONDS,
        )  # fmt: skip
        seconds = time.monotonic() - began
        target.unlink()
        return seconds

    def reads(self) -> float:
        """Seconds of a program that does the same reads and stores nothing."""
        harness.drop_caches()
        began = time.monotonic()
        subprocess.run(
            [sys.executable, "-m", "tests.bench.image_reads", str(self.cluster.conf), self.name,
             SNAPSHOT],
            check=True, timeout=PEER_SECONDS, cwd=harness.ROOT, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        return time.monotonic() - began

    def files(self) -> float:
        """Seconds of ``cp -a`` from the image, mounted anew."""
        shown, target, copy = (self.room / name for name in ("fuse", "mapped", "copied"))
        shutil.rmtree(copy, ignore_errors=True)
        shown.mkdir(exist_ok=True)
        target.mkdir(exist_ok=True)
        self.cluster.run("rbd-fuse", "-c", str(self.cluster.conf), "-p", "rbd", str(shown))
        try:
            options = "ro,loop,noload" if self.name.startswith("ext4") else "ro,loop,norecovery"
            rbdimage.sh("mount", "-o", options, shown / self.name, target)
            try:
                harness.drop_caches()
                began = time.monotonic()
                rbdimage.sh("cp", "-a", target / "files", copy)
                return time.monotonic() - began
            finally:
                rbdimage.sh("umount", target)
        finally:
            rbdimage.sh("umount", "-l", shown)

    @contextlib.contextmanager
    def shown(self) -> Iterator[Path]:
        """The complete copy, mounted as a view is."""
        at = self.room / "view"
        at.mkdir(exist_ok=True)
        with kit.files.closing(filesystem.view_of(str(self.folder / image_copy.IMAGE))) as tree:
            mounts.attach(tree, at)
        try:
            yield at / "files"
        finally:
            mounts.unmount(at)


def _cpu() -> float:
    """Of the forks of the prepared process (a child of this one) that have ended."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # ended meanwhile
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[1]) == os.getpid():
                ticks += int(fields[13]) + int(fields[14])  # cutime, cstime
    return ticks / os.sysconf("SC_CLK_TCK")
