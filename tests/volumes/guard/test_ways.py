"""Ways to write to a guarded device that the guard cannot see: docs/guard.md lists each, and each
is tried here, on the kernel part alone and in mode enforce.

A way that is closed one day fails its test, and then leaves the list.
"""

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.testbed import blockdev, cell, guest, waiting
from volumes import settings
from volumes.guard import kernel

SIZE = 64 * blockdev.MiB
MARK = b"written by"
AT = 48 * blockdev.MiB  # where no file system of these tests has anything
WRITE = f"import os; f = os.open({{}}, os.O_RDWR); os.pwrite(f, {MARK!r}, {AT}); os.fsync(f)"
LIST = "## What the guard cannot see"


@dataclass
class Disk:
    """A device with an ext4. ``before``: its content when the guard was attached."""

    where: cell.Cell
    device: str
    image: Path
    folder: Path
    before: str = ""

    def attach(self) -> None:
        """Guard it by its number only, as rbd is guarded by its major."""
        rdev = os.stat(self.device).st_rdev
        parts = frozenset({(os.major(rdev), os.minor(rdev))})
        wanted = kernel.wanted(settings.GuardSettings(), kernel.Mode.ENFORCE, {}, parts)
        guard = self.where.guard()
        guard.apply(wanted)
        guard.close()
        done = self.run(sys.executable, "-c", WRITE.format(repr(self.device)))
        assert "PermissionError" in done.stderr
        self.before = blockdev.sha256(self.image)

    def run(self, *command: str) -> "subprocess.CompletedProcess[str]":
        return self.where.run(*command)

    def named(self, program: str, name: str) -> str:
        """A copy of the program under another name."""
        found = shutil.which(program)
        assert found is not None
        shutil.copy(os.path.realpath(found), self.folder / name)
        return str(self.folder / name)

    def write(self, path: str) -> None:
        done = self.run(sys.executable, "-c", WRITE.format(repr(path)))
        assert done.returncode == 0, done.stderr


@pytest.fixture
def disk(where: cell.Cell, tmp_path: Path) -> Iterator[Disk]:
    image = blockdev.blank(tmp_path / "image", SIZE)
    with blockdev.loop(image) as device:
        blockdev.run("mkfs.ext4", "-q", device, "32M")
        yield Disk(where, device, image, tmp_path)
        where.guard().detach()


def by_a_name(disk: Disk) -> None:
    disk.attach()
    program = disk.named("mkfs.ext4", "fsck")
    done = disk.run(program, "-q", "-F", disk.device)
    assert done.returncode == 0, done.stderr


def by_an_opener(disk: Disk) -> None:
    with blockdev.mounted(disk.device, disk.folder / "mnt") as target:
        (target / "file").write_bytes(b"x")
    blockdev.run("debugfs", "-w", "-R", "clri /file", disk.device)
    disk.attach()
    assert disk.run("fsck.ext4", "-f", "-y", disk.device).returncode == 1


def by_a_server(disk: Disk) -> None:
    """'qemu-nbd -k SOCKET DEVICE' is an opener, and writes what others tell it."""
    disk.attach()
    os.mkfifo(disk.folder / "socket")
    serve = f'exec "$1" of={disk.device} bs=1M seek=48 conv=notrunc,fsync <{disk.folder}/socket'
    server = disk.where.popen("sh", "-c", serve, "sh", disk.named("dd", "qemu-nbd"))
    assert disk.run("sh", "-c", f"printf written >{disk.folder}/socket").returncode == 0
    _, error = server.communicate(timeout=waiting.limit(20))
    assert server.returncode == 0, error


def by_a_descriptor(disk: Disk) -> None:
    """Opened before the guard; a child writes through it."""
    script = f"exec 3<>{disk.device}; echo open; read go; sh -c 'printf written >&3'"
    process = disk.where.popen("sh", "-c", script)
    assert process.stdout is not None
    assert process.stdout.readline() == "open\n"
    disk.attach()
    _, error = process.communicate("go\n", timeout=waiting.limit(20))
    assert process.returncode == 0, error


def by_a_loop_device(disk: Disk) -> None:
    """There before, as kubelet puts one on each raw block volume."""
    with blockdev.loop(Path(disk.device)) as above:
        disk.attach()
        disk.write(above)


def by_the_loop_device_of_mount(disk: Disk) -> None:
    """'mount -o loop DEVICE': an opener makes it, and it is nobody's."""
    disk.attach()
    losetup = disk.named("losetup", "mount")
    with _free_loop(disk) as above:
        done = disk.run(losetup, above, disk.device)
        assert done.returncode == 0, done.stderr
        disk.write(above)


@contextlib.contextmanager
def _free_loop(disk: Disk) -> Iterator[str]:
    with blockdev.loop(blockdev.blank(disk.folder / "other", blockdev.MiB)) as above:
        blockdev.run("losetup", "-d", above)
        try:
            yield above
        finally:
            blockdev.run("losetup", "-d", above, check=False)


def by_a_partition(disk: Disk) -> None:
    """Added through a read-only descriptor (BLKPG): its number is new."""
    disk.attach()
    done = disk.run("addpart", disk.device, "1", "2048", str((SIZE - 2 * blockdev.MiB) // 512))
    assert done.returncode == 0, done.stderr
    try:
        disk.write(f"{disk.device}p1")
    finally:
        blockdev.run("delpart", disk.device, "1")


def below_the_device(disk: Disk) -> None:
    """As librbd writes to an image, or another node."""
    disk.attach()
    disk.write(str(disk.image))


def by_a_journal(disk: Disk) -> None:
    """mount(2) read-only by a program that is no opener: ext4 replays its journal."""
    with blockdev.mounted(disk.device, disk.folder / "mnt") as target:
        (target / "file").write_bytes(b"x")
        blockdev.run("sync", "-f", str(target))
        dirty = disk.image.read_bytes()
    disk.image.write_bytes(dirty)
    blockdev.run("blockdev", "--flushbufs", disk.device)
    disk.attach()
    mount = disk.named("busybox", "busybox")
    done = disk.run("unshare", "-m", mount, "mount", "-t", "ext4", "-o", "ro", disk.device, "/mnt")
    assert done.returncode == 0, done.stderr


# The first words of the list's rows.
WAYS: dict[str, tuple[Callable[[Disk], None], ...]] = {
    "A program with the name of an opener": (by_a_name,),
    "An opener that repairs": (by_an_opener, by_a_journal),
    "An opener that serves others": (by_a_server,),
    "An open file descriptor": (by_a_descriptor,),
    "A loop device or MD array": (by_a_loop_device, by_the_loop_device_of_mount),
    "A partition": (by_a_partition,),
    "Writes below the device": (below_the_device,),
}
# Tried elsewhere: in the guest below, and in other modules.
ELSEWHERE = {
    "A dm device": "test_ways_of_the_device_mapper_and_scsi_in_a_guest",
    "SCSI and NVMe commands": "test_ways_of_the_device_mapper_and_scsi_in_a_guest",
    "A change of the read-only flag": "test_the_read_only_state_can_be_taken_back",
    "A raw block volume": "test_the_permission_follows_the_publication",
    "A new disk with the number of a leased disk": (
        "test_a_lease_of_a_disk_that_stays_ends_soon_after_its_agent"
    ),
    "The process that has the lease": "test_a_lease_belongs_to_the_first_process",
}


@pytest.mark.real
@pytest.mark.parametrize("way", [way for ways in WAYS.values() for way in ways])
def test_a_way_that_the_guard_cannot_see(disk: Disk, way: Callable[[Disk], None]) -> None:
    way(disk)
    blockdev.run("blockdev", "--flushbufs", disk.device)
    assert disk.before and blockdev.sha256(disk.image) != disk.before


@pytest.mark.real
def test_the_read_only_state_can_be_taken_back(disk: Disk) -> None:
    """BLKROSET needs no descriptor for writing; to write does."""
    blockdev.run("blockdev", "--setro", disk.device)
    disk.attach()
    assert disk.run("blockdev", "--setrw", disk.device).returncode == 0
    assert blockdev.run("blockdev", "--getro", disk.device).stdout.strip() == "0"
    done = disk.run(sys.executable, "-c", WRITE.format(repr(disk.device)))
    assert "PermissionError" in done.stderr


@pytest.mark.real
@pytest.mark.guest
@pytest.mark.timeout(600)
def test_ways_of_the_device_mapper_and_scsi_in_a_guest(tmp_path: Path) -> None:
    script = Path(__file__).with_name("guest_ways.py")
    modules = "modprobe -a dm_mod sd_mod sg; modprobe scsi_debug dev_size_mb=64"
    result = guest.program([str(script)], tmp_path, modules)
    assert result.exit == 0, result.text[-4000:]
    assert result.marked("check") == [
        "device refused", "open for writing by us: True", "open for writing by us: False",
        "SG_IO wrote", "dm from before wrote", "dm from now refused",
    ]  # fmt: skip


def test_the_list_in_the_docs_is_what_is_tried() -> None:
    page = (Path(__file__).parents[3] / "docs" / "guard.md").read_text()
    section = page.partition(f"{LIST}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| \*\*(.+?)\*\*", section, re.MULTILINE)
    assert sorted(rows) == sorted([*WAYS, *ELSEWHERE])
    tests = "".join(each.read_text() for each in Path(__file__).parent.glob("test_*.py"))
    for test in ELSEWHERE.values():
        assert f"def {test}(" in tests
