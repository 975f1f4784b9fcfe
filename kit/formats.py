"""Formats of what an agent leaves on disk: an older agent leaves alone what a newer one wrote.

Each JSON file of ours says its format under ``KEY``. A file without it is of format 1. A format is
raised when an older agent would misread the file, not when a field is added.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import kit.errors
import kit.files

KEY = "format"
REMEDY = "run the agent version that wrote it; this agent leaves it as it is"


def check(thing: str, fields: Mapping[str, Any], known: int) -> None:
    """HostError when a newer agent wrote ``thing``. ``known``: the newest format that we read."""
    found = fields.get(KEY, 1)
    if not isinstance(found, int) or found > known:
        raise kit.errors.HostError(
            thing, f"a newer agent wrote it (format {found!r}, this agent knows {known})", REMEDY
        )


def load(path: Path, known: int) -> dict[str, Any]:
    """The fields of a small file of ours. {} if the file is missing or damaged.

    HostError when a newer agent wrote it. ``known``: the newest format that we read.
    """
    try:
        fields = dict(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return {}
    check(str(path), fields, known)
    return fields


def save(path: str, fields: Mapping[str, Any], known: int) -> None:
    """Replace such a file durably; makes its directory. Call it in a child process: the disk may
    hang. OSError."""
    Path(path).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    kit.files.save(Path(path), json.dumps({KEY: known, **fields}).encode())
