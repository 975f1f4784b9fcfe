"""RBD images with a file system in them, made on a real cluster."""

import fcntl
import os
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

from tests.testbed import blockdev, waiting
from tests.testbed.ceph import CephCluster

_GOING_DOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN, the same number for XFS
_NO_LOG_FLUSH, _LOG_FLUSH = 2, 1


def sh(*command: str | Path) -> str:
    done = subprocess.run(
        [str(each) for each in command],
        capture_output=True,
        text=True,
        timeout=waiting.limit(240),
        check=False,
    )
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


def file_system(
    file: Path, kind: str, size: int, write: Callable[[Path], None], *, cut: bool = False
) -> None:
    """Make ``file`` an image with a file system of ``kind`` that ``write`` filled.

    ``cut``: the file system was cut off while it was in use, so its journal is to be replayed.
    """
    with file.open("wb") as stream:
        stream.truncate(size)
    force = "-F" if kind == "ext4" else "-f"
    sh(f"mkfs.{kind}", "-q", force, file)
    target = file.with_name(f"{file.name}.mount")
    target.mkdir()
    blockdev.mount_image(file, target)
    try:
        write(target)
        if cut:
            cut_off(target)  # what was written is in the journal only
    finally:
        sh("umount", target)
        target.rmdir()


def cut_off(top: Path, *, flush: bool = True) -> None:
    """The file system at ``top`` writes nothing any more; ``flush``: but its journal before."""
    descriptor = os.open(top, os.O_RDONLY)
    try:
        how = _LOG_FLUSH if flush else _NO_LOG_FLUSH
        fcntl.ioctl(descriptor, _GOING_DOWN, struct.pack("I", how))
    finally:
        os.close(descriptor)


def imported(cluster: CephCluster, file: Path, name: str, *options: str) -> None:
    """``file`` as image rbd/``name`` with a snapshot v1."""
    cluster.run("rbd", "import", "--no-progress", *options, str(file), f"rbd/{name}")
    cluster.run("rbd", "snap", "create", "--no-progress", f"rbd/{name}@v1")


# Blocks that differ between a file and an image are written to the image, in 64 KiB.
_WRITE = """
import rados, rbd, sys
cluster = rados.Rados(conffile=sys.argv[1], name='client.admin'); cluster.connect(timeout=30)
image = rbd.Image(cluster.open_ioctx('rbd'), sys.argv[2])
written, step = 0, 65536
with open(sys.argv[3], 'rb') as file:
    for offset in range(0, image.size(), step):
        wanted = file.read(step)
        if image.read(offset, len(wanted)) != wanted:
            image.write(wanted, offset)
            written += len(wanted)
image.create_snap(sys.argv[4])
image.close()
print(written)
"""


def changed(file: Path, write: Callable[[Path], None]) -> None:
    """Let ``write`` change the file system in ``file``."""
    target = file.with_name(f"{file.name}.mount")
    target.mkdir()
    blockdev.mount_image(file, target)
    try:
        write(target)
    finally:
        sh("umount", target)
        target.rmdir()


def updated(cluster: CephCluster, file: Path, name: str, snapshot: str) -> int:
    """Make image rbd/``name`` equal to ``file`` and snapshot it; the bytes that were written."""
    return int(
        cluster.run("/usr/bin/python3", "-c", _WRITE, str(cluster.conf), name, str(file), snapshot,
                    timeout=waiting.limit(240))
    )  # fmt: skip
