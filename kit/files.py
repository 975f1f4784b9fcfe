"""Small durable files, and locks between processes."""

import errno
import fcntl
import os
import time
from pathlib import Path


def save(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Replace ``path`` by ``data``: after a power cut it holds either the old or the new bytes.

    Written beside it, fsynced, renamed, and the directory fsynced. Raises OSError and leaves the
    old file and no litter when any step fails.
    """
    temporary = path.with_name(f".{path.name}.new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


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
