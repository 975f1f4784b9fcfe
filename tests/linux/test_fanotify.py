import os
import select
import shlex
import shutil
import subprocess
import threading
import time
from pathlib import Path

import pytest

from linux import fanotify
from tests.testbed import waiting

pytestmark = pytest.mark.real


def test_open_watch_reports_opens_of_one_file_system(tmpfs: Path, area: Path) -> None:
    (tmpfs / "in").write_bytes(b"x")
    (area / "out").write_bytes(b"x")
    with fanotify.OpenWatch() as watch:
        watch.watch_filesystem(tmpfs)
        assert list(watch.events()) == []
        for path in (tmpfs / "in", area / "out"):
            subprocess.run(["cat", str(path)], check=True, stdout=subprocess.DEVNULL)
        seen = {}
        for descriptor, pid in watch.events():
            seen[os.readlink(f"/proc/self/fd/{descriptor}")] = pid
            os.close(descriptor)
    assert seen.keys() == {str(tmpfs / "in")}
    assert seen[str(tmpfs / "in")] not in (0, os.getpid())


def test_events_that_nobody_took_leave_no_open_files(tmpfs: Path) -> None:
    for number in range(5):
        (tmpfs / str(number)).write_bytes(b"x")
    with fanotify.OpenWatch() as watch:
        watch.watch_filesystem(tmpfs)
        for number in range(5):
            (tmpfs / str(number)).read_bytes()
        before = len(os.listdir("/proc/self/fd"))
        for descriptor, _ in watch.events():
            os.close(descriptor)
            break
        assert len(os.listdir("/proc/self/fd")) == before


def _answered(guard: fanotify.ExecPermission, allow: bool, seen: list[list[str]]) -> None:
    deadline = time.monotonic() + 60
    while not seen and time.monotonic() < deadline:
        for request in guard.read():
            seen.append(fanotify.exec_arguments(request.tid))
            guard.answer(request, allow)
        time.sleep(0.01)


@pytest.mark.parametrize("allow", [True, False])
def test_exec_permission_decides_and_shows_the_arguments(area: Path, allow: bool) -> None:
    program = shutil.copy("/bin/true", area / "program")
    guard = fanotify.ExecPermission()
    seen: list[list[str]] = []
    try:
        guard.mark(str(program))
        assert guard.read() == []
        answering = threading.Thread(target=_answered, args=(guard, allow, seen))
        answering.start()
        # The shell executes it: a thread of this process could not answer to its own vfork.
        done = subprocess.run(
            ["sh", "-c", f"{shlex.quote(str(program))} one 'two words'"], capture_output=True
        )
        answering.join()
    finally:
        os.close(guard.fd)
    assert (done.returncode == 0) is allow
    assert seen == [[str(program), "one", "two words"]]


def test_a_closed_guard_allows_what_waits(area: Path) -> None:
    program = shutil.copy("/bin/true", area / "program")
    guard = fanotify.ExecPermission()
    guard.mark(str(program))
    with subprocess.Popen(["sh", "-c", shlex.quote(str(program))]) as asking:
        assert select.select([guard.fd], [], [], waiting.limit(20))[0]  # it asks
        assert asking.poll() is None
        os.close(guard.fd)
        assert asking.wait(waiting.limit(20)) == 0


def test_exec_arguments_of_a_task_elsewhere_are_unknown() -> None:
    assert fanotify.exec_arguments(os.getpid()) == []
    assert fanotify.exec_arguments(2**22 + 1) == []
