"""Real block devices that can be made to fail: loop devices over a fault-injecting FUSE file."""

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from tests.testbed import waiting

MiB = 2**20


def run(
    *command: str, check: bool = True, timeout: float = waiting.limit(60.0)
) -> subprocess.CompletedProcess[str]:
    """As kubelet and CSI drivers run them: no terminal, output captured."""
    done = subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=timeout,
        check=False,
    )  # fmt: skip
    if check and done.returncode:
        raise RuntimeError(f"{command}: rc {done.returncode}: {done.stderr[-2000:]}")
    return done


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# For new mount namespaces: it lets go of other tests' disks.
APART = Path(__file__).with_name("apart.sh")

# Loop devices of this run have numbers of their own, so that an agent under test can be set to
# look at them only (NAMES), and the machine's other loop devices are left alone.
_PREFIX = random.Random().randrange(1000, 9999)
NAMES = f"loop{_PREFIX}??"
_LOOP_CTL_ADD, _LOOP_CTL_REMOVE = 0x4C80, 0x4C81
_numbers = itertools.count()


def blank(file: Path, size: int) -> Path:
    """Make ``file`` a hole of ``size`` bytes."""
    with file.open("wb") as stream:
        stream.truncate(size)
    return file


@contextlib.contextmanager
def loop(file: Path, number: int | None = None, *, options: Sequence[str] = ()) -> Iterator[str]:
    """/dev/loopN over ``file``, read-write; detached and removed afterwards. ``number``: one that
    was free a moment ago. ``options``: more of losetup's."""
    with open("/dev/loop-control", "rb+", buffering=0) as control:
        number = _added(control, number)
        device, folder = f"/dev/loop{number}", os.path.realpath(file.parent)
        try:
            run("losetup", *options, device, str(file))
            yield device
        finally:
            detach(device, folder)
            _remove(control, number)


def mount_image(image: Path, target: Path, options: str = "rw") -> None:
    """Mount a file; its loop device goes with the unmount.

    Not "mount -o loop", which asks every other loop device of the machine for its file first, also
    one whose file hangs.
    """
    read_only = ["--read-only"] if "ro" in options.split(",") else []
    device = run("losetup", "--find", "--show", *read_only, str(image)).stdout.strip()
    try:
        run("mount", "-o", options, device, str(target))
    finally:
        run("losetup", "--detach", device)


def detach(device: str, folder: str) -> None:
    """Detach ``device`` as long as it shows a file below ``folder``. A device that somebody
    detached before is free for every 'losetup -f' of the machine, and may be a stranger's now."""
    backing = Path("/sys/block", Path(device).name, "loop/backing_file")
    with contextlib.suppress(OSError):
        if backing.read_text().startswith(f"{folder}/"):
            run("losetup", "-d", device, check=False)


def _added(control: BinaryIO, number: int | None) -> int:
    """Add the device ``number``, or one of ours. A number that an earlier test's device still has
    is passed over."""
    for _ in range(1 if number is not None else 100):
        wanted = _PREFIX * 100 + next(_numbers) % 100 if number is None else number
        with contextlib.suppress(FileExistsError):
            fcntl.ioctl(control, _LOOP_CTL_ADD, wanted)
            return wanted
    raise FileExistsError(f"loop device {wanted} is still there, and so are the others of this run")


def _remove(control: BinaryIO, number: int) -> None:
    """losetup -d is lazy while something holds the device."""

    def removed() -> bool:
        try:
            fcntl.ioctl(control, _LOOP_CTL_REMOVE, number)
        except OSError:
            return False
        return True

    waiting.until(removed, 30, f"loop device {number} to be free")


@contextlib.contextmanager
def mounted(device: str, target: Path, *options: str) -> Iterator[Path]:
    target.mkdir(exist_ok=True)
    run("mount", *options, device, str(target))
    try:
        yield target
    finally:
        run("umount", str(target))


@dataclass
class FaultyDisk:
    """``device`` reads and writes ``backing`` through a FUSE file; ``fault`` makes reads fail."""

    device: str
    backing: Path
    control: Path
    size: int

    @property
    def name(self) -> str:
        return Path(self.device).name

    @property
    def number(self) -> tuple[int, int]:
        rdev = os.stat(self.device).st_rdev
        return os.major(rdev), os.minor(rdev)

    @property
    def hangs(self) -> Path:
        """Exists when a read hangs, or hung since the faults were set."""
        return Path(f"{self.control}.hangs")

    def fault(self, *faults: dict[str, Any]) -> None:
        """Make reads fail like this from now on, cached ones too."""
        self.hangs.unlink(missing_ok=True)
        new = self.control.with_suffix(".new")
        new.write_text(json.dumps(faults))
        os.replace(new, self.control)
        if not any(fault.get("hang") for fault in faults):
            run("blockdev", "--flushbufs", self.device)

    def clear(self) -> None:
        self.fault()


@contextlib.contextmanager
def faulty_disk(
    folder: Path,
    size: int = 400 * MiB,
    backing: Path | None = None,
    faults: Sequence[dict[str, Any]] = (),
) -> Iterator[FaultyDisk]:
    """A blank disk of ``size`` bytes (or what ``backing`` holds), without faults at first."""
    folder.mkdir(parents=True, exist_ok=True)
    if backing is None:
        backing = folder / "backing"
        with backing.open("wb") as stream:
            stream.truncate(size)
    control, mountpoint = folder / "faults.json", folder / "fuse"
    control.write_text(json.dumps(list(faults)))
    mountpoint.mkdir(exist_ok=True)
    server = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("faultfs.py")), str(mountpoint),
         str(backing), str(control)],
        stdout=subprocess.PIPE, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        assert server.stdout is not None and server.stdout.readline() == b"ready\n"
        with loop(mountpoint / "disk") as device:
            disk = FaultyDisk(device, backing, control, backing.stat().st_size)
            try:
                yield disk
            finally:
                disk.clear()  # a hanging read must come back before detaching
    finally:
        run("umount", "-l", str(mountpoint), check=False)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(timeout=waiting.limit(5))
        server.kill()
        server.wait()
        assert server.stdout is not None
        server.stdout.close()
