"""Mounts of a CephFS as child processes make them (``cephfs_mount``). Imports little: the process
that calls fork from keeps what they load as long as the agent runs.
"""

import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import kit.files
from linux import mountinfo, mounts

SAID = "ceph-fuse.log"  # what ceph-fuse and the programs that it starts print
_LOOK_SECONDS = (0.01, 0.25)


def mount_fuse(target: str, command: Sequence[str], seconds: float) -> tuple[bool, str]:
    """Start ceph-fuse and wait until it has mounted ``target``: whether it did, and what it said.

    Runs in a child of the agent; ceph-fuse outlives both. TimeoutError after ``seconds``, with
    ceph-fuse killed; FileNotFoundError when there is none.
    """
    said = Path(target).with_name(SAID)
    said.unlink(missing_ok=True)  # an earlier one may still write to it
    before = mountinfo.top(target)
    # The agent's environment may have Ceph settings or secrets.
    environment = {"PATH": os.environ.get("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")}
    with os.fdopen(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "wb") as log_file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log_file, stderr=log_file, env=environment,
            cwd="/", start_new_session=True,
        )  # fmt: skip
    end, pause = time.monotonic() + seconds, _LOOK_SECONDS[0]
    while process.poll() is None:
        if mountinfo.top(target) != before:
            return True, ""
        if time.monotonic() >= end:
            process.kill()
            raise TimeoutError
        time.sleep(pause)
        pause = min(2 * pause, _LOOK_SECONDS[1])
    return False, said.read_text(errors="replace")


def mount_kernel(target: str, strings: dict[str, str]) -> None:
    """Mount with the kernel client, which is told ``strings``. OSError."""
    tree = mounts.new_filesystem("ceph", strings, ("ro",), mounts.READ_ONLY_DATA)
    with kit.files.closing(tree):
        mounts.attach(tree, target)
