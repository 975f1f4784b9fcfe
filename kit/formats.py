"""Formats of what an agent leaves on disk: an older agent leaves alone what a newer one wrote.

Each JSON file of ours says its format under ``KEY``. A file without it is of format 1. A format is
raised when an older agent would misread the file, not when a field is added.
"""

from collections.abc import Mapping
from typing import Any

import kit.errors

KEY = "format"
REMEDY = "run the agent version that wrote it; this agent leaves it as it is"


def check(thing: str, fields: Mapping[str, Any], known: int) -> None:
    """HostError when a newer agent wrote ``thing``. ``known``: the newest format that we read."""
    found = fields.get(KEY, 1)
    if not isinstance(found, int) or found > known:
        raise kit.errors.HostError(
            thing, f"a newer agent wrote it (format {found!r}, this agent knows {known})", REMEDY
        )
