"""The store: one folder a generation, below one folder a dataset, on the SSD.

<store>/nodeagent.json                      format of the store
<store>/<dataset>/<generation>/tree/        the layer: same names, modes, owners, times
                               staging/     batches not yet in the tree
                               links/       spare names of hard-linked files while filling
                               index.sqlite what there is and what is left (rebuildable)
                               generation.json
<store>/.trash/                             on its way out
"""

import contextlib
import errno
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kit.errors
import kit.files
from cache.fill import index, tree

FORMAT = 1
MARKER = "nodeagent.json"
TRASH = ".trash"
_PROBE = ".probe"
LOCK_SECONDS = 2.0  # for the pass of a killed agent to end


@dataclass(frozen=True)
class Generation:
    """generation.json. ``complete`` is written only after everything it stands for is durable."""

    dataset: str
    identity: str  # JSON of what makes a source another source
    state: str = "new"  # new, filling, partial, complete
    skeleton: bool = False  # every directory of the source is in the tree
    wanted: bool = False  # somebody asked for it to be warmed
    held: str = ""  # paused or cancelled: does not go on by itself
    why: str = ""  # of a partial one
    created: float = 0.0  # Unix time
    completed: float = 0.0
    used: int = 0  # bytes of the SSD
    files: int = 0
    bytes: int = 0
    done_files: int = 0
    done_bytes: int = 0
    failed: int = 0
    skipped: int = 0
    left_files: int = 0  # what did not fit
    left_bytes: int = 0


def prepare(path: str) -> None:
    """Make the store usable, or say why it cannot be. HostError; nothing is half made then.

    Runs in a child: the disk may hang.
    """
    store = Path(path)
    made = []
    missing = store
    while not missing.exists():
        made.append(missing)
        missing = missing.parent
    try:
        store.mkdir(parents=True, exist_ok=True, mode=0o700)
        _check_abilities(store)
        _check_format(store)
    except BaseException:
        for directory in made:
            with contextlib.suppress(OSError):
                directory.rmdir()
        raise
    store.chmod(0o700)  # jobs read by views; nobody bypasses them
    (store / TRASH).mkdir(mode=0o700, exist_ok=True)


def _check_abilities(store: Path) -> None:
    remedy = "put cache.store on an ext4 or XFS file system of the SSD"
    probe = store / _PROBE
    try:
        probe.mkdir(exist_ok=True)
        os.setxattr(probe, tree.OPAQUE, b"y")
        os.setxattr(probe, tree.CHECKSUM, b"0" * 32)
        if os.getxattr(probe, tree.OPAQUE) != b"y":
            raise OSError(errno.EOPNOTSUPP, "xattrs do not come back as they were set")
    except OSError as error:
        cause = f"it cannot hold trusted xattrs ({error.strerror})"
        if error.errno == errno.EROFS:
            cause = "it is read-only"
        elif error.errno == errno.ENOSPC:
            cause, remedy = "it is full", "free some space there"
        elif error.errno not in (errno.EOPNOTSUPP, errno.EPERM, errno.EINVAL):
            cause = f"it cannot be written ({error.strerror})"
        raise kit.errors.HostError(f"cache.store {store}", cause, remedy) from error
    finally:
        with contextlib.suppress(OSError):
            probe.rmdir()


def _check_format(store: Path) -> None:
    marker = store / MARKER
    if marker.exists():
        try:
            found = json.loads(marker.read_text())["format"]
        except (ValueError, KeyError, TypeError) as error:
            raise kit.errors.HostError(
                f"cache.store {store}",
                f"its {MARKER} is damaged",
                "name an empty directory, or delete what is in this one: it is only a cache",
            ) from error
        if found != FORMAT:
            raise kit.errors.HostError(
                f"cache.store {store}",
                f"it is of format {found}, this agent knows {FORMAT}",
                "use the agent that made it, or an empty directory",
            )
        return
    # What an agent killed in its very first moment left is none.
    ours = ("lost+found", f".{MARKER}.new", _PROBE)
    strangers = [entry.name for entry in store.iterdir() if entry.name not in ours]
    if strangers:
        raise kit.errors.HostError(
            f"cache.store {store}",
            f"it is not empty and not a store of ours (there is {strangers[0]!r})",
            "name an empty directory",
        )
    kit.files.save(marker, json.dumps({"format": FORMAT}).encode())


def load(folder: str) -> dict[str, Any] | None:
    """generation.json of a folder as a dict, None when there is none or it is damaged."""
    try:
        return dict(json.loads((Path(folder) / "generation.json").read_bytes()))
    except (OSError, ValueError):
        return None


def adopt(folders: list[str]) -> list[dict[str, Any] | None]:
    """``load`` each, and no litter of a pass that was killed: what it had staged goes.

    Runs in a child.
    """
    return [_adopt(folder) for folder in folders]


def _adopt(folder: str) -> dict[str, Any] | None:
    fields = load(folder)
    if fields is not None:
        try:
            os.close(kit.files.lock(Path(folder) / "lock", LOCK_SECONDS))
            directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                tree.remove(directory, "staging")
            finally:
                os.close(directory)
        except OSError:
            pass  # the next pass clears it too, and says what is wrong
    return _with_figures(fields, folder)


def _with_figures(fields: dict[str, Any] | None, folder: str) -> dict[str, Any] | None:
    """``fields``; of a generation whose pass did not come to write its own figures, its index's.

    The index knows less of what is used while directories are listed anew.
    """
    if fields is not None and fields.get("state") == "filling":
        used = int(fields.get("used", 0))
        fields |= index.totals_of(Path(folder))
        fields["used"] = max(used, int(fields.get("used", 0)))
    return fields


def save(folder: str, fields: dict[str, Any]) -> None:
    """Write generation.json, durably; makes the folder. Runs in a child."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    kit.files.save(path / "generation.json", json.dumps(fields, indent=1).encode())


def generation_of(fields: dict[str, Any]) -> Generation:
    """From a loaded dict; fields of another version are passed over."""
    known = Generation.__dataclass_fields__
    return Generation(**{key: value for key, value in fields.items() if key in known})


def inventory(path: str) -> list[dict[str, Any]]:
    """Every generation in the store: its generation.json and its folder. Runs in a child.

    Of one whose pass was ended, the figures are those of its index.
    """
    found = []
    for dataset in sorted(Path(path).iterdir()):
        if dataset.is_dir() and not dataset.name.startswith(".") and dataset.name != "lost+found":
            for folder in sorted(dataset.iterdir()):
                fields = _with_figures(load(str(folder)), str(folder))
                found.append({"dataset": dataset.name, "folder": str(folder), "fields": fields})
    return found


def discard(store: str, folder: str) -> None:
    """Take a generation out of the store at once; its bytes go with ``empty_trash``."""
    target = Path(store) / TRASH / f"{Path(folder).parent.name}-{time.time_ns()}"
    try:
        Path(folder).rename(target)
    except FileNotFoundError:
        return
    with contextlib.suppress(OSError):
        Path(folder).parent.rmdir()  # the last generation of its dataset


def trash(store: str) -> int:
    """Bytes of the SSD that what was discarded still takes. Runs in a child."""
    used = 0
    for folder in (Path(store) / TRASH).iterdir():
        fields = _with_figures(load(str(folder)), str(folder))
        if fields is not None:
            used += int(fields.get("used", 0))
    return used


def empty_trash(store: str) -> None:
    """Delete what was discarded; may take minutes for millions of files.

    Of each generation the tree goes first: until then ``trash`` knows what it takes.
    """
    trash = os.open(Path(store) / TRASH, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in os.listdir(trash):
            with contextlib.suppress(OSError):  # the next line says it
                folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=trash)
                try:
                    tree.remove(folder, "tree")
                finally:
                    os.close(folder)
            tree.remove(trash, name)
    finally:
        os.close(trash)
