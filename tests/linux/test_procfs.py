"""Holders of a mount, made by real processes."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from linux import procfs

pytestmark = pytest.mark.real

HOLD = {
    "open": "kept = open(f'{target}/file')",
    "cwd": "os.chdir(target)",
    "mapped": "opened = os.open(f'{target}/file', 0); libc.mmap.restype = ctypes.c_void_p;"
    "assert libc.mmap(None, 4096, 1, 2, opened, 0) < 2 ** 63; os.close(opened)",
    "root": "os.chroot(target)",
    "copy": "libc.unshare(0x20000); libc.mount(b'none', b'/', None, 1 << 14 | 1 << 18, None)",
}


@pytest.fixture
def target(area: Path) -> Iterator[Path]:
    made = area / "mount"
    made.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(made)], check=True)
    (made / "file").write_bytes(b"x" * 5000)
    yield made
    subprocess.run(["umount", "-l", str(made)], check=True)


@contextlib.contextmanager
def holding(how: str, target: Path) -> Iterator[int]:
    code = (
        "import ctypes, os, sys, time\n"
        "libc = ctypes.CDLL(None); target = sys.argv[1]\n"
        f"{HOLD[how]}\nprint('ready', flush=True); time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(target)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"ready\n"
        yield process.pid
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("open", "has {}/file open"),
        ("cwd", "its working directory is {}"),
        ("mapped", "has {}/file mapped"),
        ("root", "its root is {}"),
        ("copy", "its mount namespace has a private copy at {}"),
    ],
)
def test_holders_of_mount_names_the_process_and_how(target: Path, how: str, text: str) -> None:
    assert procfs.holders_of_mount(str(target)) == []
    with holding(how, target) as pid:
        (found,) = procfs.holders_of_mount(str(target))
        assert (found.pid, found.how) == (pid, text.format(target))
        assert found.command.startswith("python")
        assert str(found) == f"pid {pid} ({found.command}): {found.how}"
    assert procfs.holders_of_mount(str(target)) == []


def test_holders_of_mount_leaves_out_a_family(target: Path) -> None:
    code = f"import subprocess; subprocess.run(['sleep', '60'], cwd={str(target)!r})"
    with subprocess.Popen([sys.executable, "-c", code]) as parent:
        deadline = time.monotonic() + 20
        while not (found := procfs.holders_of_mount(str(target))):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert found[0].command == "sleep"
        assert procfs.holders_of_mount(str(target), ours=parent.pid) == []
        os.kill(found[0].pid, 9)


def test_cgroup_path_of_an_id_and_of_one_that_is_gone() -> None:
    root = next(p for p in ("/sys/fs/cgroup/unified", "/sys/fs/cgroup") if _is_v2(p))
    made = Path(root, f"nodeagent-test-{os.getpid()}")
    made.mkdir()
    number = made.stat().st_ino
    mount = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        assert procfs.cgroup_path(mount, number) == str(made)
        made.rmdir()
        assert procfs.cgroup_path(mount, number) == ""
    finally:
        os.close(mount)


def _is_v2(path: str) -> bool:
    return Path(path, "cgroup.controllers").exists()
