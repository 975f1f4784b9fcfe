"""Clear what a test, or a run that was killed, left below its folder.

That is mounts and loop devices below the folder, and processes that have the folder in their
command line or, as ``MARK``, in their environment. Nothing else on the machine is touched.
"""

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from linux import mountinfo
from tests.testbed import waiting

MARK = "NODEAGENT_TEST_FOLDER"
DISCONNECT_SECONDS = 5.0


def processes(folder: Path) -> list[int]:
    """Processes that belong to ``folder``, except this one and its ancestors."""
    text = os.fsencode(folder)
    return [pid for pid in _others() if _belongs(pid, text)]


def commands() -> Iterator[tuple[int, list[str]]]:
    """Every process on the machine with the words of its command."""
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{entry}/cmdline").read_bytes().decode(errors="replace")
                yield int(entry), text.split("\0")


def _program(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _others() -> Iterator[int]:
    ours = set()
    pid = os.getpid()
    while pid > 1:
        ours.add(pid)
        status = Path(f"/proc/{pid}/stat").read_text()
        pid = int(status.rpartition(")")[2].split()[1])
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) not in ours:
            yield int(entry)


def _belongs(pid: int, text: bytes) -> bool:
    for name, prefix in (("cmdline", b""), ("environ", MARK.encode() + b"=")):
        try:
            words = Path(f"/proc/{pid}/{name}").read_bytes().split(b"\0")
        except OSError:
            continue
        for word in words:
            if prefix and not word.startswith(prefix):
                continue
            at = word.find(text)
            if at >= 0 and word[at + len(text) : at + len(text) + 1] in (b"", b"/"):
                return True
    return False


def end(folder: Path, seconds: float = 10.0, *, spare: str = "") -> None:
    """Continue and kill the processes of ``folder``; those in D state are left to the kernel.

    ``spare``: a program that is continued but not killed.
    """
    deadline = time.monotonic() + waiting.limit(seconds)
    for pid in processes(folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    while time.monotonic() < deadline:
        pids = [pid for pid in processes(folder) if _program(pid) != spare]
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.05)


def unmount(folder: Path) -> None:
    """Every mount at or below ``folder``, the latest first."""
    for _ in range(5):
        below = [
            m.target
            for m in mountinfo.read()
            if m.target == str(folder) or m.target.startswith(f"{folder}/")
        ]
        if not below:
            return
        for target in reversed(below):
            subprocess.run(
                ["umount", "-l", target],
                check=False,
                capture_output=True,
                timeout=waiting.limit(30),
            )
    raise RuntimeError(f"mounts below {folder} do not go: {below}")


def detach_loops(folder: Path) -> None:
    for block in Path("/sys/block").glob("loop*"):
        with contextlib.suppress(OSError):
            backing = (block / "loop" / "backing_file").read_text().strip()
            if backing.startswith(f"{folder}/"):
                command = ["losetup", "-d", f"/dev/{block.name}"]
                subprocess.run(command, check=False, capture_output=True, timeout=waiting.limit(30))


def make_mutable(folder: Path) -> None:
    """Places of views are immutable, so that nobody writes below a mount that is missing."""
    subprocess.run(
        ["chattr", "-R", "-f", "-i", str(folder)],
        check=False, capture_output=True, timeout=waiting.limit(300),
    )  # fmt: skip


def clear(folder: Path, *, keep: bool = False) -> None:
    """Processes, mounts, loops, then the files (unless ``keep``)."""
    # A ceph-fuse that is killed leaves a session at the MDS, and other clients wait for what it
    # holds. Unmounted, it gives its capabilities back and ends by itself.
    end(folder, spare="ceph-fuse")
    unmount(folder)
    with contextlib.suppress(AssertionError):
        waiting.until(lambda: not processes(folder), DISCONNECT_SECONDS)
    detach_loops(folder)
    end(folder)
    if not keep and folder.exists():
        shutil.rmtree(folder, ignore_errors=True)
        if folder.exists():  # paths too long for rmtree, immutable places of views
            make_mutable(folder)
            subprocess.run(["rm", "-rf", str(folder)], check=False, timeout=waiting.limit(300))


@contextlib.contextmanager
def run_folder(build: Path) -> Iterator[Path]:
    """``build``/test-<id>, cleared at the end; first clears those whose run has died.

    A live run holds a lock on its folder. Folders are made and cleared under one lock, so that no
    run clears another one's folder before it is locked. The id is no pid: containers that share a
    clone count their own.
    """
    build.mkdir(exist_ok=True)
    with contextlib.ExitStack() as held:
        with locked(build):
            for folder in build.glob("test-*"):
                with contextlib.suppress(BlockingIOError), locked(folder, fcntl.LOCK_NB):
                    clear(folder)
            made = _made(build)
            held.enter_context(locked(made))
        try:
            yield made
        finally:
            clear(made)


def _made(build: Path) -> Path:
    """A folder with a name of its own. The name is short: sockets lie below it."""
    while True:
        made = build / f"test-{os.urandom(2).hex()}"
        with contextlib.suppress(FileExistsError):
            made.mkdir(mode=0o755)
            return made


@contextlib.contextmanager
def locked(folder: Path, flags: int = 0) -> Iterator[None]:
    """``folder`` locked against other processes; BlockingIOError with LOCK_NB when it is."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | flags)
        yield
    finally:
        os.close(descriptor)
