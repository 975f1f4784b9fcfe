"""Processes that do something to a mount and stay."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator

# Code for ``running``: a mount namespace of its own with private mounts. What other tests have
# mounted goes from it: it would be held as long as the process lives, and count as used.
APART = """
libc.unshare(0x20000); libc.mount(b'none', b'/', None, 1 << 14 | 1 << 18, None)
for line in reversed(open('/proc/self/mountinfo').readlines()):
    target = line.split()[4]
    if '/test-' in target and target != sys.argv[1]: libc.umount2(target.encode(), 2)
"""


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
