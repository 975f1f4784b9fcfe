"""What the guard keeps in the state directory: six files.

* ``guard-override.json``: the mode that an operator set over the settings, until it is cleared.
* ``guard-override-mode``: that mode alone, as a word. It counts as the least one while the file
  above cannot be used, and every version can read it.
* ``guard-wanted.json``: the guard's settings that were last in force. Settings that cannot be used,
  or that name no mode, never make the guard weaker than these.
* ``guard-own.json``: what was the node's own when the guard was first attached with a scope, by
  identity (``scope.first``). Written once.
* ``guard-rehearsal.json``: what would have been refused because of the scope (``rehearsal``).
* ``operator.log``: what operators did to the guard past the agent's own decisions, as JSON lines.

The disk may hang, so agents and commands call all this in child processes (``kit.child``).
"""

import contextlib
import time
from pathlib import Path
from typing import Any

import kit.errors
import kit.files
import kit.formats

FORMAT = 1
MOST_NOTED = 20
MOST_WORD = 32  # characters


def override_file(state_dir: Path) -> Path:
    return state_dir / "volumes" / "guard-override.json"


def word_file(state_dir: Path) -> Path:
    return state_dir / "volumes" / "guard-override-mode"


def wanted_file(state_dir: Path) -> Path:
    return state_dir / "volumes" / "guard-wanted.json"


def own_file(state_dir: Path) -> Path:
    return state_dir / "volumes" / "guard-own.json"


def rehearsal_file(state_dir: Path) -> Path:
    return state_dir / "volumes" / "guard-rehearsal.json"


def log(state_dir: Path) -> Path:
    return state_dir / "volumes" / "operator.log"


def read(state_dir: str) -> dict[str, Any]:
    """``override`` and ``wanted``: the files' fields, None without the file. ``errors``: by the
    same names, why a file cannot be used. ``noted``: the newest lines of the operator log, the
    oldest of them first. ``word``: the override's mode by the file that has it alone; whether the
    other can be used, its reader says: what is JSON may lack fields."""
    noted = kit.files.last_entries(log(Path(state_dir)), MOST_NOTED)
    found: dict[str, Any] = {
        "override": None, "wanted": None, "errors": {}, "noted": noted, "word": ""
    }  # fmt: skip
    files = {"override": override_file(Path(state_dir)), "wanted": wanted_file(Path(state_dir))}
    for name, file in files.items():
        # It stays where it is until another one is written: so it counts as damaged until then.
        try:
            fields = kit.formats.look(file, FORMAT, dict)
        except kit.errors.HostError as error:
            found["errors"][name] = str(error)
            continue
        if isinstance(fields, kit.formats.Damage):
            found["errors"][name] = f"{file} cannot be used ({fields.why})"
        else:
            found[name] = fields
    with contextlib.suppress(OSError, ValueError):
        found["word"] = word_file(Path(state_dir)).read_text()[:MOST_WORD].strip()
    return found


def read_own(state_dir: str) -> dict[str, str] | None:
    """Identities and why; None: nothing was written down yet. HostError when the file cannot be
    used: it stays, for another one would take volumes of today for the node's own."""
    file = own_file(Path(state_dir))
    found = kit.formats.look(file, FORMAT, _own)
    if isinstance(found, kit.formats.Damage):
        raise kit.errors.HostError(
            str(file), f"it cannot be used ({found.why})",
            "restore it; or remove it while no volume is attached, and it is written anew",
        )  # fmt: skip
    return found


def _own(fields: dict[str, Any]) -> dict[str, str]:
    return {str(identity): str(why) for identity, why in fields["own"].items()}


def write_own(state_dir: str, own: dict[str, str]) -> None:
    """Durable when it returns. OSError."""
    _write(own_file(Path(state_dir)), {"at": time.time(), "own": own})


def write_rehearsal(state_dir: str, fields: dict[str, Any]) -> None:
    """Durable when it returns. OSError."""
    _write(rehearsal_file(Path(state_dir)), fields)


def write_override(state_dir: str, fields: dict[str, Any] | None) -> None:
    """Durable when it returns; None removes the file. OSError."""
    file, word = override_file(Path(state_dir)), word_file(Path(state_dir))
    if fields is not None:  # first, so that no override is there without it
        word.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if word.is_dir():
            kit.formats.set_aside(word)
        kit.files.save(word, f"{fields['mode']}\n".encode())
    _write(file, fields)
    if fields is None:
        kit.formats.forget(word)


def write_wanted(state_dir: str, fields: dict[str, Any] | None) -> None:
    """Durable when it returns; None removes the file. OSError."""
    _write(wanted_file(Path(state_dir)), fields)


def _write(file: Path, fields: dict[str, Any] | None) -> None:
    if fields is None:
        kit.formats.forget(file)
    else:
        kit.formats.save(str(file), fields, FORMAT)


def write_line(state_dir: str, line: dict[str, Any]) -> None:
    """Durable when it returns. OSError."""
    kit.files.append(log(Path(state_dir)), line)
