"""Mode and kill switch, straight at the kernel: they work whether or not an agent runs.

An operator in an incident must be able to stop the guard although the agent hangs or its settings
file is wrong. So ``set_mode`` and ``detach`` change the kernel themselves, and write an *override*
into the state directory, which the agent respects from then on, also after a restart, until
``set-mode settings`` clears it. Each action is a line in the operator log (``note``).
"""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import kit.errors
import kit.files
import kit.formats
from volumes import settings
from volumes.guard import cgroups, kernel

FORMAT = 1


@dataclass(frozen=True)
class Override:
    """``mode``: in force until it is cleared; off means detached. ``at``: Unix seconds."""

    mode: kernel.Mode
    by: str
    reason: str
    at: float

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "mode": str(self.mode)}


def path(state_dir: Path) -> Path:
    return state_dir / "volumes" / "guard-override.json"


def load(state_dir: Path) -> Override | None:
    """None without an override. HostError when the file is damaged, or of a newer agent."""
    file = path(state_dir)
    try:
        data = json.loads(file.read_text())
        kit.formats.check(str(file), data, FORMAT)
        return Override(
            kernel.Mode(data["mode"]), str(data["by"]), str(data["reason"]), float(data["at"])
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise kit.errors.HostError(
            str(file), f"cannot be used ({error})", "set the mode again, or remove the file"
        ) from error


def store(state_dir: Path, mode: kernel.Mode, by: str, reason: str) -> Override:
    """Durable when it returns. HostError when it cannot be written."""
    new = Override(mode, by, reason, time.time())
    file = path(state_dir)
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        text = json.dumps({kit.formats.KEY: FORMAT, **new.as_json()})
        kit.files.save(file, text.encode())
    except OSError as error:
        raise kit.errors.HostError(
            str(file), str(error.strerror), "make the state directory writable"
        ) from error
    return new


def clear(state_dir: Path) -> None:
    path(state_dir).unlink(missing_ok=True)


def log(state_dir: Path) -> Path:
    """What operators did to the guard past the agent's own decisions: JSON lines."""
    return state_dir / "volumes" / "operator.log"


def note(state_dir: Path, action: str, by: str, reason: str, **fields: Any) -> None:
    """On disk when it returns. OSError otherwise: what cannot be written down must not be done."""
    line = {"at": time.time(), "action": action, "by": by, "reason": reason, **fields}
    kit.files.append(log(state_dir), line)


def noted(state_dir: Path) -> list[dict[str, Any]]:
    """The newest lines of the operator log, the oldest of them first."""
    return kit.files.last_entries(log(state_dir), 20)


def handle(wanted: settings.GuardSettings) -> kernel.Kernel:
    """The guard of the settings' cgroup. HostError without a cgroup v2 hierarchy."""
    return kernel.Kernel(
        wanted.cgroup or cgroups.find(), wanted.pins, wanted.object_file or kernel.OBJECT
    )


def wanted_mode(wanted: settings.GuardSettings, state_dir: Path) -> kernel.Mode:
    """The mode that must be in force: an operator's override, else the settings."""
    found = load(state_dir)
    return found.mode if found else kernel.Mode(wanted.mode)


def set_mode(
    wanted: settings.GuardSettings, state_dir: Path, mode: str, by: str, reason: str
) -> kernel.Mode:
    """Change the kernel at once, and remember the mode for the agent.

    ``settings`` returns to the settings file; ``off`` detaches. RefusedError when nothing is
    attached that could be changed; the mode is remembered all the same.
    """
    if mode == "settings":
        clear(state_dir)
        new = kernel.Mode(wanted.mode)
    else:
        new = kernel.Mode(mode)
    guard = handle(wanted)
    try:
        if new is kernel.Mode.OFF:
            guard.detach()
        elif guard.read().attached:
            guard.set_mode(new)
        elif mode != "settings":
            store(state_dir, new, by, reason)
            raise kit.errors.RefusedError(
                f"guard of {guard.cgroup}",
                "is not attached, so nothing was changed in the kernel",
                f"the agent will attach it in mode {new} when it starts",
            )
    finally:
        guard.close()
    if mode != "settings":
        store(state_dir, new, by, reason)
    return new


def detach(wanted: settings.GuardSettings, state_dir: Path, by: str, reason: str) -> int:
    """The kill switch: detach first, then remember it. Returns the number of programs."""
    guard = handle(wanted)
    count = guard.detach()
    store(state_dir, kernel.Mode.OFF, by, reason)
    return count
