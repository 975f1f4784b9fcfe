"""Processes that do something to a mount and stay."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.testbed import blockdev


def apart(keep: Path) -> tuple[str, ...]:
    """For ``running``: within a mount namespace of its own with private mounts, without those that
    other tests have."""
    unshare = ("unshare", "--mount", "--propagation", "private")
    return (*unshare, str(blockdev.APART), str(keep), "--")


@contextlib.contextmanager
def running(code: str, *arguments: str, within: tuple[str, ...] = ()) -> Iterator[int]:
    """The pid of a Python process that has run ``code``; it has ``libc``, ``os`` and ``sys``.

    ``within``: a command that starts it.
    """
    lines = (
        "import ctypes, os, sys, time",
        "libc = ctypes.CDLL(None)",
        *(code, "print('ready', flush=True)", "time.sleep(60)"),
    )
    process = subprocess.Popen(
        [*within, sys.executable, "-c", "\n".join(lines), *arguments], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"ready\n"
        yield process.pid
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
