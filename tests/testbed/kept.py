"""Keep the logs of a failed test: its folder goes with the test, and the reason with it.

Copied are logs, settings and journals below the run's folder and the test's ``tmp_path``, the
newest first, and how mounts, loop devices and processes are. Nothing on a mount is looked at: a
dead ceph-fuse would hold us for ever. Keys stay behind.
"""

import contextlib
import os
import re
import subprocess
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from linux import mountinfo
from tests.testbed import waiting

MOST_BYTES = 5 * 1024 * 1024  # a test
MOST_FILE_BYTES = 512 * 1024  # the last of each
MOST_FILES = 5000  # looked at
RUN_FOLDER = pytest.StashKey[Path]()  # set by the fixture run_folder
_KEPT = re.compile(r"(^|[.-])(log|json|jsonl|ya?ml|conf|stderr|stdout)$|^(console|ledger|actions)")
_SECRET = re.compile(r"keyring|secret|password|token|\.key$|pki|kubeconfig")
_LOOKS = {
    "mountinfo": ("cat", "/proc/self/mountinfo"),
    "loops": ("losetup", "--list"),
    "processes": ("ps", "-eo", "pid,ppid,stat,etimes,args", "--width", "300"),
    "kernel": ("sh", "-c", "dmesg | tail -n 200"),
    "load": ("cat", "/proc/loadavg", "/proc/meminfo"),
}


def folder(item: pytest.Item) -> Path:
    """Where the logs of a test are kept: build/report/NAME, readable by everybody."""
    name = re.sub(r"[^\w.=-]+", "_", item.nodeid.removeprefix("tests/"))[:150]
    return item.config.rootpath / "build" / "report" / name


def keep(item: pytest.Item, target: Path) -> None:
    """Never raises: a log that is lost must not hide why the test failed."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        target.mkdir(parents=True, exist_ok=True)
        for name, command in _LOOKS.items():
            with (target / name).open("wb") as out:
                subprocess.run(
                    command, stdout=out, stderr=out, timeout=waiting.limit(10), check=False
                )
        folders = {
            "files": item.config.stash.get(RUN_FOLDER, None),
            "tmp_path": getattr(item, "funcargs", {}).get("tmp_path"),
        }
        _copy({source: target / name for name, source in folders.items() if source}, MOST_BYTES)


def say_why(target: Path, report: pytest.TestReport) -> None:
    """What pytest prints of a failure at the end of a run, which may be an hour later. The reason
    comes last: of much output the beginning is left out."""
    with contextlib.suppress(OSError):
        printed = "".join(f"--- {name}\n{text}\n" for name, text in report.sections)
        text = f"{printed}\n{report.longreprtext}\n"[-MOST_FILE_BYTES:]
        (target / f"failure-{report.when}").write_text(text, errors="backslashreplace")


def _copy(folders: dict[Path, Path], left: int) -> None:
    """``folders``: where the files of each go. ``left``: so many bytes of all of them."""
    found = ((path, source) for source in folders for path in _files(source))
    of = dict(islice(found, MOST_FILES))
    for path in sorted(of, key=_written, reverse=True):
        if left <= 0:
            return
        with contextlib.suppress(OSError), path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            stream.seek(max(0, size - MOST_FILE_BYTES))
            data = stream.read(min(MOST_FILE_BYTES, left))
            to = folders[of[path]] / path.relative_to(of[path])
            to.parent.mkdir(parents=True, exist_ok=True)
            to.write_bytes(data)
            left -= len(data)


def _written(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0


def _files(source: Path) -> Iterator[Path]:
    mounts = {os.fsdecode(m.target) for m in mountinfo.read()}
    todo = [str(source)]
    while todo:
        with contextlib.suppress(OSError), os.scandir(todo.pop()) as entries:
            for entry in entries:
                if entry.path in mounts or _SECRET.search(entry.name):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    todo.append(entry.path)
                elif entry.is_file(follow_symlinks=False) and _KEPT.search(entry.name):
                    yield Path(entry.path)
