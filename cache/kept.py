"""What is remembered of a dataset beside the store: that it was removed, what its view shows."""

from pathlib import Path
from typing import Any

import kit.formats

FORMAT = 1


def file_of(state_dir: Path, name: str) -> Path:
    return state_dir / "datasets" / f"{name}.json"


def load(path: Path) -> dict[str, Any]:
    """As ``kit.formats.load``."""
    return kit.formats.load(path, FORMAT)


def save(path: str, fields: dict[str, Any]) -> None:
    """As ``kit.formats.save``."""
    kit.formats.save(path, fields, FORMAT)
