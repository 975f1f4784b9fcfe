"""Small durable files, and locks between processes."""

import errno
import fcntl
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


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


class LineLog:
    """A bounded, durable log of JSON objects, one on each line.

    At ``largest`` bytes the file becomes ``<name>.1`` and a new one begins, so there are never more
    than two. A line torn by a crash is skipped by ``last``.
    """

    def __init__(self, path: Path, largest: int = 2**20) -> None:
        self.path = path
        self.largest = largest

    def append(self, entry: Mapping[str, Any]) -> None:
        """Blocks until the line is on disk. OSError otherwise."""
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self.path.exists() and self.path.stat().st_size > self.largest:
            self.path.replace(self.path.with_name(f"{self.path.name}.1"))
        descriptor = os.open(
            self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
        try:
            os.write(descriptor, json.dumps(entry).encode() + b"\n")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def last(self, count: int = 20) -> list[dict[str, Any]]:
        """The newest entries, the oldest of them first; empty when there is no file."""
        try:
            lines = self.path.read_bytes().splitlines()[-count:]
        except OSError:
            return []
        found = []
        for line in lines:
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
        return found
