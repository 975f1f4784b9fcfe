"""Processes that do something to a mount and stay."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator


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
