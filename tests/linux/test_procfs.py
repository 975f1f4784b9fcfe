"""Holders of a mount, made by real processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from linux import in_use, procfs
from tests.linux import scripts
from tests.testbed.waiting import until

pytestmark = pytest.mark.real

HOLD = {
    "open": "kept = open(f'{target}/file')",
    "cwd": "os.chdir(target)",
    "mapped": "opened = os.open(f'{target}/file', 0); libc.mmap.restype = ctypes.c_void_p;"
    "assert libc.mmap(None, 4096, 1, 2, opened, 0) < 2 ** 63; os.close(opened)",
    "root": "os.chroot(target)",
    "copy": "pass",  # the namespace that it runs within
}


def holders(mount: Path, *, ours: int = 0) -> dict[int, in_use.Holder]:
    """By pid; tests of others may copy our namespace at the same time."""
    return {holder.pid: holder for holder in in_use.of_mount(str(mount), ours=ours)}


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
def test_holders_of_mount_names_the_process_and_how(tmpfs: Path, how: str, text: str) -> None:
    (tmpfs / "file").write_bytes(b"x" * 5000)
    within = scripts.apart(tmpfs) if how == "copy" else ()
    with scripts.running(f"target = sys.argv[1]\n{HOLD[how]}", str(tmpfs), within=within) as pid:
        found = holders(tmpfs)[pid]
        assert found.how == text.format(tmpfs) and found.command.startswith("python")
        assert str(found) == f"pid {pid} ({found.command}): {found.how}"
    with scripts.running("pass") as idle:
        assert not {pid, idle} & holders(tmpfs).keys()


def test_holders_of_mount_leaves_out_a_family(tmpfs: Path) -> None:
    code = f"import subprocess; subprocess.run(['sleep', '60'], cwd={str(tmpfs)!r})"
    with subprocess.Popen([sys.executable, "-c", code]) as parent:
        child = until(lambda: [h.pid for h in holders(tmpfs).values() if h.command == "sleep"])[0]
        assert child not in holders(tmpfs, ours=parent.pid)
        os.kill(child, 9)


def test_a_name_that_is_cut_within_a_character_hides_no_process() -> None:
    """As the kernel does with names of more than 15 bytes: any job can have one."""
    script = (
        "import ctypes, sys; name = '日本語日本'.encode()[:14]; "
        "print(ctypes.CDLL(None).prctl(15, name, 0, 0, 0), flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == b"0\n"
        with pytest.raises(UnicodeDecodeError):
            Path(f"/proc/{process.pid}/comm").read_text(encoding="utf-8")
        assert procfs.name_of(process.pid) == "日本語日\ufffd"
        assert in_use.holder(process.pid, "").command == "日本語日\ufffd"
        assert process.pid in procfs.family(os.getpid())
    finally:
        process.kill()
        process.communicate()


def test_cgroup_path_of_an_id_and_of_one_that_is_gone() -> None:
    root = next(p for p in ("/sys/fs/cgroup/unified", "/sys/fs/cgroup") if _is_v2(p))
    made = Path(root, f"nodeagent-test-{os.urandom(4).hex()}")
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


UID = "0a1b2c3d-1111-2222-3333-444455556666"


@pytest.mark.parametrize(
    ("cgroup", "pod", "container"),
    [
        (f"/kubepods/besteffort/pod{UID}/{'ab' * 32}", UID, "ab" * 32),
        (
            f"/kubepods-pod{UID.replace('-', '_')}.slice/cri-containerd-{'cd' * 32}.scope",
            *(UID, "cd" * 32),
        ),
        (
            f"0::/kubepods/pod{UID}/{'ab' * 32}/system.slice/docker-{'cd' * 32}.scope",
            UID,
            "cd" * 32,
        ),
        ("/system.slice/kubelet.service", "", ""),
        ("", "", ""),
    ],
)
def test_pod_and_container_of_a_cgroup(cgroup: str, pod: str, container: str) -> None:
    assert procfs.pod_and_container(cgroup) == (pod, container)
