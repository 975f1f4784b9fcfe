"""What operators did past the agent's own decisions: appended, fsynced, bounded."""

import json
import os
import time
from pathlib import Path
from typing import Any

MOST_BYTES = 2**20  # then the file becomes .1 and a new one begins
SHOWN = 20


def path(state_dir: Path) -> Path:
    return state_dir / "volumes" / "operator.log"


def append(state_dir: Path, action: str, by: str, reason: str, **fields: Any) -> None:
    """One line, on disk when it returns. OSError: what cannot be written down is not done."""
    file = path(state_dir)
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if file.exists() and file.stat().st_size > MOST_BYTES:
        os.replace(file, file.with_suffix(".log.1"))
    line = {"at": time.time(), "action": action, "by": by, "reason": reason, **fields}
    fd = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, json.dumps(line).encode() + b"\n")
        os.fsync(fd)
    finally:
        os.close(fd)


def last(state_dir: Path) -> list[dict[str, Any]]:
    """The newest entries, the oldest of them first; a torn line is left out."""
    try:
        lines = path(state_dir).read_bytes().splitlines()[-SHOWN:]
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found
