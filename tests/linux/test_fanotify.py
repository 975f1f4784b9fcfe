import os
import subprocess
from pathlib import Path

import pytest

from linux import fanotify

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
