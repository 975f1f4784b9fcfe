"""Locks between processes, with a deadline."""

import errno
import fcntl
import os
import time
from pathlib import Path


def lock(path: Path, seconds: float) -> int:
    """An exclusive lock on ``path``, held until the descriptor is closed or the process ends.

    OSError EBUSY when another process holds it for longer than ``seconds``.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if time.monotonic() >= deadline:
                os.close(descriptor)
                raise OSError(errno.EBUSY, "another process holds the lock", str(path)) from None
            time.sleep(0.02)
