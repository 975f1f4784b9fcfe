"""The bad files that a verify found and could not replace, until they are out of the tree.

One JSON line a file, [path of its directory, name], beside the index and not in it: an index may be
lost, and a bad file has the size and times of a good one, so that no scan would find it again.
Invariant: while there is such a list nothing is filled; see cache.work.
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kit.files

NAME = "unreplaced.jsonl"
_NAMES_AT_ONCE = 1000  # names of up to 255 bytes each in one job of a worker


def waiting(generation: str) -> bool:
    """Whether there are any. OSError."""
    try:
        return (Path(generation) / NAME).stat().st_size > 0
    except FileNotFoundError:
        return False


def keep(generation: Path, files: list[list[Any]]) -> None:
    """Replace the list, durably; no list when there is none. OSError."""
    if not files:
        (generation / NAME).unlink(missing_ok=True)
        return
    kit.files.save(generation / NAME, "".join(f"{json.dumps(f)}\n" for f in files).encode("ascii"))


def read(generation: Path) -> list[list[Any]]:
    """[path, name] of each; [] when there is no list. OSError."""
    try:
        lines = (generation / NAME).read_text(encoding="ascii").splitlines()
    except FileNotFoundError:
        return []
    files = []
    for line in lines:
        with contextlib.suppress(ValueError):  # agents before 2026-11 could tear the last one
            files.append(json.loads(line))
    return files


def by_directory(files: list[list[Any]]) -> Iterator[tuple[list[str], list[str]]]:
    """(path, names), a bounded number of names at once."""
    grouped: dict[tuple[str, ...], list[str]] = {}
    for path, name in files:
        grouped.setdefault(tuple(path), []).append(name)
    for key, names in grouped.items():
        for at in range(0, len(names), _NAMES_AT_ONCE):
            yield list(key), names[at : at + _NAMES_AT_ONCE]
