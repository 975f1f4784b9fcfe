"""Files for the support bundle, read in child processes: a disk or a mount may hang, and the bundle
is for that moment. Imports little: each file is a child of its own."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import kit.files
from linux import mountinfo

_TEXTS = (".json", ".jsonl", ".log")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def part(path: str, most: int, newest: bool) -> str:
    """The beginning of a regular file, or its end from the begin of a line. OSError."""
    with kit.files.regular(path) as shown, Path(shown).open("rb") as file:
        if newest:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - most))
            if size > most:
                file.readline()  # the rest of a line whose begin may name a secret
        return file.read(most).decode("utf-8", "replace")


def state(
    folder: str, leave_out: Sequence[str], most_files: int, most: int, most_bytes: int
) -> dict[str, Any]:
    """The files of a state directory: ``listed``, ``texts`` by name (of JSON files and logs, at
    most ``most`` bytes of each and about ``most_bytes`` in all), and ``lacks``, by name why not.

    Left out, and never touched: the directories ``leave_out``, whatever is mounted there (a source
    of a dataset), links, and what has 'secret' in its name. OSError.
    """
    listed, texts, lacks = [], {}, {}
    top = os.path.realpath(folder)
    left_out = {os.path.join(top, os.path.relpath(each, folder)) for each in leave_out}
    names = sorted(_walk(top, left_out | _mounted(), 100 * most_files))
    for name in names[:most_files]:
        path = os.path.join(folder, name)
        try:
            status = os.lstat(path)
            listed.append({"name": name, "bytes": status.st_size, "changed": status.st_mtime})
            if name.endswith(_TEXTS) and "secret" not in name and most_bytes > 0:
                texts[name] = part(path, most, not name.endswith(".json"))
                most_bytes -= len(texts[name])
        except OSError as error:
            lacks[name] = error.strerror or str(error)
    return {"listed": listed, "texts": texts, "lacks": lacks}


def _mounted() -> set[str]:
    return {mount.target for mount in mountinfo.read()}


def _walk(folder: str, leave_out: set[str], most: int) -> Iterator[str]:
    """Names of regular files below ``folder`` on its file system, of ``most`` entries."""
    device = os.stat(folder).st_dev
    folders = [folder]
    while folders:
        path = folders.pop()
        with kit.files.closing(os.open(path, _DIRECTORY)) as opened:
            if os.fstat(opened).st_dev != device:
                continue  # mounted since
            for entry in os.scandir(opened):
                most -= 1
                if most < 0:
                    return
                below = os.path.join(path, entry.name)
                if below in leave_out:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    folders.append(below)
                elif entry.is_file(follow_symlinks=False):
                    yield os.path.relpath(below, folder)
