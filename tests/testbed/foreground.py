"""File systems by programs that stay in the foreground (ceph-fuse -f, bindfs, rclone)."""

import contextlib
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.testbed import waiting

END_SECONDS = 40  # of a program after its mount has gone: umount returns before


@contextlib.contextmanager
def mounted(command: Sequence[str], target: Path, log: Path, **environment: str) -> Iterator[Path]:
    """What ``command`` mounts at ``target`` while the block runs. ``log`` gets what it prints."""
    target.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as said:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=said, stderr=said,
            env={**os.environ, **environment}, start_new_session=True,
        )  # fmt: skip
    try:
        waiting.until(
            lambda: os.path.ismount(target) or process.poll() is not None,
            60, f"{command[0]} to mount {target}",
        )  # fmt: skip
        assert process.poll() is None, log.read_text()
        yield target
    finally:
        subprocess.run(["umount", str(target)], check=False, timeout=waiting.limit(60))
        if os.path.ismount(target):
            subprocess.run(["umount", "-l", str(target)], check=False, timeout=waiting.limit(60))
        try:
            process.wait(waiting.limit(END_SECONDS))
        except subprocess.TimeoutExpired:
            process.kill()
            raise
