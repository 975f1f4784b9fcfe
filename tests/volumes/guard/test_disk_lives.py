"""Numbers that pass from disk to disk under leases, with the kernel's own programs.

The agent is dead, restarted or upgraded at any moment; what holds without one is the kernel's.
"""

import contextlib
import fcntl
import math
import os
import random
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import kit.errors
from linux import bpf
from tests.testbed import blockdev, cell, waiting
from volumes import settings
from volumes.guard import kernel, pins

pytestmark = pytest.mark.real

_ADD, _REMOVE = 0x4C80, 0x4C81
_LIVES = 200
_ENFORCE = kernel.wanted(
    settings.GuardSettings(drivers=("loop",)), kernel.Mode.ENFORCE, {7: "loop"}
)
# Opens what it is told, for writing, and says what came of it. The nodes are its own.
_OPENER = """
import os, sys
for line in sys.stdin:
    try:
        os.close(os.open(line.strip(), os.O_WRONLY | os.O_NONBLOCK)); print('open', flush=True)
    except PermissionError:
        print('EPERM', flush=True)
"""


@contextlib.contextmanager
def _opener(where: cell.Cell) -> Iterator[Callable[[str], bool]]:
    process = subprocess.Popen(
        ["sh", "-c", 'echo 0 > "$CELL/cgroup.procs" && exec "$@"', "sh", sys.executable, "-c",
         _OPENER],
        env={**os.environ, "CELL": str(where.path)},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None

    def opens(path: str) -> bool:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(f"{path}\n")
        return process.stdout.readline() == "open\n"

    try:
        yield opens
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()


@pytest.fixture
def disk() -> Iterator[tuple[int, Callable[[], None]]]:
    """A loop number, and a call that removes its disk and adds another."""
    number = random.randrange(900_000, 1_000_000)
    with open("/dev/loop-control", "rb+", buffering=0) as control:

        def anew() -> None:
            with contextlib.suppress(OSError):
                fcntl.ioctl(control, _REMOVE, number)
            fcntl.ioctl(control, _ADD, number)

        anew()
        try:
            yield number, anew
        finally:
            fcntl.ioctl(control, _REMOVE, number)


@pytest.mark.parametrize("program", ["as built", "upgraded"])
def test_a_new_disk_ends_the_lease_of_its_number_without_an_agent(
    where: cell.Cell, disk: tuple[int, Callable[[], None]], program: str
) -> None:
    number, anew = disk
    guard = where.guard()
    guard.apply(_ENFORCE)
    if program == "upgraded":  # another map of leases: the watch must be of the new one
        _forget(guard)
        guard.apply(_ENFORCE)
    assert guard.ends_with_disk, guard.no_watch
    for minor in (number, number + 1):
        guard.reserve((7, minor), 1)
        guard.grant((7, minor), math.inf, 1)
    guard.close()  # the agent is dead
    with _opener(where) as opens:
        assert opens(f"/dev/loop{number}")
        anew()
        assert not opens(f"/dev/loop{number}")
    after = where.guard()
    assert set(after.read().leases) == {(7, number + 1)}, "the neighbour keeps its own"
    after.detach()


def _forget(guard: kernel.Kernel) -> None:
    """As an upgrade to a program with other maps: nothing of the old ones is used again."""
    for each in guard.maps.values():
        each.close()
    for path in guard.pins.iterdir():
        if path.name != pins.DISKS:
            path.unlink()
    directory = os.open(guard.cgroup, os.O_RDONLY | os.O_DIRECTORY)
    for found in bpf.attached(directory):
        with contextlib.closing(bpf.Program.by_id(found)) as attached:
            attached.detach(directory)
    os.close(directory)
    guard.maps = {}
    guard._program_id = None


def test_no_write_open_of_another_disk_in_200_lives(
    where: cell.Cell, disk: tuple[int, Callable[[], None]]
) -> None:
    number, anew = disk
    choose = random.Random(15)
    opened = refused = ended = 0
    guard: kernel.Kernel | None = where.guard()
    assert guard is not None
    guard.apply(_ENFORCE)
    with _opener(where) as opens:
        for _ in range(_LIVES):
            leased = False
            anew()
            for _ in range(choose.randrange(3, 10)):
                match choose.randrange(12):
                    case 0 | 1 | 2 | 3 | 4 if guard is not None:
                        guard.reserve((7, number), 1)
                        another = choose.random() < 0.4
                        if another:
                            anew()
                        until = choose.choice([math.inf, time.monotonic() + 90])
                        with (
                            pytest.raises(kit.errors.RefusedError, match="another disk")
                            if another
                            else contextlib.nullcontext()
                        ):
                            guard.grant((7, number), until, 1)
                        leased = not another
                    case 5 | 6 | 7:
                        ended += leased
                        anew()
                        leased = False
                    case 8 if guard is not None:
                        guard.close()  # killed
                        guard = None
                    case 9:
                        guard = guard or where.guard()
                        guard.apply(_ENFORCE)  # started, or upgraded
                passed = opens(f"/dev/loop{number}")
                assert passed is leased
                opened, refused = opened + passed, refused + (not passed)
    assert opened > 100 and refused > 300 and ended > 30, (opened, refused, ended)
    guard = guard or where.guard()
    guard.detach()


@pytest.mark.parametrize(("ago", "guarded"), [(0, True), (50, True), (61, False)])
def test_a_pid_that_is_used_again_guards_no_disk(
    where: cell.Cell, disk: tuple[int, Callable[[], None]], ago: int, guarded: bool
) -> None:
    number, anew = disk
    guard = where.guard()
    guard.apply(_ENFORCE)
    connecting = guard.maps["connecting"]
    opened = time.monotonic_ns() - ago * 10**9
    connecting.set(struct.pack("=I", os.getpid()), struct.pack("=Q", opened))
    anew()
    assert ((7, number) in guard.read().devices) is guarded
    guard.detach()


def test_lost_pins_are_made_again(where: cell.Cell) -> None:
    guard = where.guard()
    guard.apply(_ENFORCE)
    for pin in Path(where.pins).iterdir():
        pin.unlink()
    assert not guard.read().pinned
    guard.repin()
    assert guard.read().pinned and guard.ends_with_disk
    guard.detach()


# A guard with a bpf file system that nobody else sees, as of a container without the host's.
_ALONE = """
import sys
from pathlib import Path
from tests.volumes.guard import test_disk_lives
from volumes.guard import kernel
guard = kernel.Kernel(Path(sys.argv[1]), Path(sys.argv[2]))
present = guard.apply(test_disk_lives._ENFORCE)
print(present.attached, present.pinned, guard.ends_with_disk, guard.no_watch)
"""


def test_a_watch_that_the_host_does_not_see_is_none(where: cell.Cell, tmp_path: Path) -> None:
    pin_folder = tmp_path / "bpf" / "nodeagent"
    done = subprocess.run(
        [
            *("unshare", "--mount", str(blockdev.APART), str(tmp_path), "--"),
            *(sys.executable, "-c", _ALONE, str(where.path), str(pin_folder)),
        ],
        capture_output=True, text=True, timeout=waiting.limit(60), check=False,
    )  # fmt: skip
    assert done.stdout == (
        f"True True False the host does not have the bpf file system of {pin_folder} mounted\n"
    ), done.stderr
    guard = where.guard()
    guard.apply(_ENFORCE)
    assert guard.ends_with_disk, guard.no_watch
    guard.detach()
