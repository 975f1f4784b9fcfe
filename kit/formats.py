"""Files that an agent leaves for the next one: newer ones are left alone, damaged ones kept.

Each JSON file of ours says its format under ``KEY``. A file without it is of format 1. A format is
raised when an older agent would misread the file, not when a field is added.

Damaged is not missing: what the file said is lost, and each reader takes the reading that can do no
harm. The file is kept as NAME.damaged, one for each name, for a person to look at. Until it is
written anew it counts as damaged, also for the next agent.
"""

import contextlib
import errno
import json
import os
import shutil
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import kit.errors
import kit.files

T = TypeVar("T")

KEY = "format"
REMEDY = "run the agent version that wrote it; this agent leaves it as it is"
SUFFIX = ".damaged"
LARGEST = 64 * 2**20  # bytes of a file that is read
_WRONG = (ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError)


@dataclass(frozen=True)
class Damage:
    """A file is there, or was, and does not say what it should."""

    path: str
    why: str
    unread: bool = False  # nothing says that its content is damaged: it stays where it is

    def __str__(self) -> str:
        return f"{self.path} is damaged ({self.why})"


def check(thing: str, fields: Mapping[str, Any], known: int) -> None:
    """HostError when a newer agent wrote ``thing``. ``known``: the newest format that we read."""
    found = fields.get(KEY, 1)
    if not isinstance(found, int) or found > known:
        raise kit.errors.HostError(
            thing, f"a newer agent wrote it (format {found!r}, this agent knows {known})", REMEDY
        )


def read(path: Path, known: int | None, take: Callable[[Any], T]) -> T | Damage | None:
    """What ``take`` makes of a file of ours; it may raise whatever a wrong shape leads to.

    None: there is none. HostError when a newer agent wrote it. A damaged one is kept aside; a link
    counts as one, and is not followed. ``known``: the newest format that we read; None: any.
    """
    found = look(path, known, take)
    if isinstance(found, Damage) and not found.unread:
        set_aside(path)
    return found


def look(path: Path, known: int | None, take: Callable[[Any], T]) -> T | Damage | None:
    """As ``read``; a damaged file stays where it is."""
    try:
        value = json.loads(_content(path))
        if isinstance(value, dict) and known is not None:
            check(str(path), value, known)
        return take(value)
    except FileNotFoundError:
        if os.path.lexists(aside(path)):
            return Damage(str(path), "an earlier look found that")
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            return Damage(str(path), "it is a link")
        if error.errno == errno.ENXIO:
            return Damage(str(path), "it is a socket")
        return Damage(str(path), error.strerror or str(error), unread=True)
    except _WRONG as error:
        return Damage(str(path), _short(error))


def _content(path: Path) -> bytes:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with kit.files.closing(os.open(path, flags)) as descriptor:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise ValueError("it is a directory")
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is no file")
        if status.st_size > LARGEST:
            raise ValueError(f"it has {status.st_size} bytes")
        with os.fdopen(descriptor, "rb", closefd=False) as stream:
            content = stream.read(LARGEST)
    if not content:
        raise ValueError("it is empty")
    return content


def _short(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    text = f"it has no field {error}" if isinstance(error, KeyError) else str(error)
    return text[:200] or type(error).__name__


def aside(path: Path) -> Path:
    """Where a damaged file is kept."""
    return path.with_name(f"{path.name}{SUFFIX}")


def what_was_wrong(kept: Path) -> str:
    """Of a file that was kept aside, as far as it tells without its reader."""
    found = look(kept, None, lambda value: value)
    return found.why if isinstance(found, Damage) else "its fields are not what an agent writes"


def set_aside(path: Path) -> None:
    """Keep what is at ``path`` as NAME.damaged, in place of an earlier one. One that cannot be
    moved stays: its next reader finds it damaged, too."""
    kept = aside(path)
    if not os.path.lexists(path):
        return
    with contextlib.suppress(OSError):
        if kept.is_dir() and not kept.is_symlink():
            shutil.rmtree(kept)  # neither a file nor a directory can take its place
        elif path.is_dir() and not path.is_symlink():
            kept.unlink(missing_ok=True)
        path.rename(kept)


def forget(path: Path) -> None:
    """Delete such a file on purpose: it is missing from now on. OSError."""
    for each in (path, aside(path)):
        if each.is_dir() and not each.is_symlink():
            shutil.rmtree(each)
        else:
            each.unlink(missing_ok=True)


def load(path: Path, known: int) -> dict[str, Any]:
    """The fields of a small file of ours. {} if the file is missing, or damaged: for what can be
    learned again. HostError, and ``known``: as ``read``."""
    found = read(path, known, dict)
    return {} if found is None or isinstance(found, Damage) else found


def save(path: str, fields: Mapping[str, Any], known: int) -> None:
    """Replace such a file durably; makes its directory. What is damaged there is kept aside.
    Call it in a child process: the disk may hang. OSError."""
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with contextlib.suppress(kit.errors.HostError):
        if os.path.lexists(file):
            read(file, known, dict)
    kit.files.save(file, json.dumps({KEY: known, **fields}).encode())
