"""What an operator has set past the settings file: the kill switch, or another mode."""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import kit.errors
import kit.files
from volumes.guard import layout


@dataclass(frozen=True)
class Override:
    """``mode``: in force until it is cleared; off means detached. ``at``: Unix seconds."""

    mode: layout.Mode
    by: str
    reason: str
    at: float


def path(state_dir: Path) -> Path:
    return state_dir / "volumes" / "guard-override.json"


def load(state_dir: Path) -> Override | None:
    """None when there is none. HostError when the file is damaged: it is not guessed at."""
    file = path(state_dir)
    try:
        data = json.loads(file.read_text())
        return Override(
            layout.Mode(data["mode"]), str(data["by"]), str(data["reason"]), float(data["at"])
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise kit.errors.HostError(
            str(file), f"cannot be used ({error})", "set the mode again, or remove the file"
        ) from error


def store(state_dir: Path, mode: layout.Mode, by: str, reason: str) -> Override:
    """Durable when it returns. HostError when it cannot be written."""
    new = Override(mode, by, reason, time.time())
    file = path(state_dir)
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        kit.files.save(file, json.dumps({**asdict(new), "mode": str(mode)}).encode())
    except OSError as error:
        raise kit.errors.HostError(
            str(file), str(error.strerror), "make the state directory writable"
        ) from error
    return new


def clear(state_dir: Path) -> None:
    path(state_dir).unlink(missing_ok=True)
