"""What is remembered of a dataset beside the store: that it was removed, what its view shows.

Where that is lost and nothing is stored, an operator may have removed the dataset: it is not filled
until somebody says so (``unsure``).
"""

from pathlib import Path
from typing import Any

import kit.formats

FORMAT = 1
_KINDS = {"removed": bool, "unsure": str, "device": str, "chosen": dict, "shown": dict}


def file_of(state_dir: Path, name: str) -> Path:
    return state_dir / "datasets" / f"{name}.json"


def load(path: Path) -> dict[str, Any] | kit.formats.Damage | None:
    """As ``kit.formats.read``."""
    return kit.formats.read(path, FORMAT, _checked)


def _checked(value: Any) -> dict[str, Any]:
    """ValueError, TypeError for what no agent wrote."""
    fields = dict(value)
    fields["removed"]
    for name, kind in _KINDS.items():
        if not isinstance(fields.get(name, kind()), kind):
            raise ValueError(f"{name} is {str(fields[name])[:40]!r}")
    shown = fields.get("shown") or {}
    texts = [*(fields.get("chosen") or {}).values(), shown.get("device", ""), shown.get("root", "")]
    if any(not isinstance(each, str) for each in texts):
        raise ValueError("a name in it is no text")
    return fields
