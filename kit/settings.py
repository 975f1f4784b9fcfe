"""The base of every settings model."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Frozen; unknown keys are refused, so that a misspelt setting never passes silently."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def absolute(path: Path) -> Path:
    """``path`` as it is when absolute; ValueError otherwise (the agent's directory is no base)."""
    if not path.is_absolute():
        raise ValueError(f"{str(path)!r} is relative; give an absolute path")
    return path
