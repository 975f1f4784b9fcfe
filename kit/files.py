"""Small durable files."""

import os
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
