"""Whether a directory that shows no marks of its own still has the files that were stored from it.

Other things may come by its name: another volume after a reboot, another copy behind an NFS server.
Neither the device number nor the id of a file system can tell: NFS and FUSE have none that
outlasts a mount, XFS takes it from the number of its disk, and numbers are given again. What lasts
is the *ctime* of a file: no copy has it, and a remount or a reboot keeps it. So some of the files
that were stored, or that wait to be, are looked at.

One with the ctime of before settles it: this is the source. Where all have others, something may
have touched them all (chmod -R, a backup by hard links), and what is stored must not be thrown away
for that: some bytes are compared then.
"""

import contextlib
import os
import sqlite3
import stat
import time
from collections.abc import Iterator, Sequence
from enum import StrEnum, auto
from pathlib import Path
from typing import NamedTuple

import kit.files
from cache.store import index, manifest, sample, tree
from cache.store.identity import Match
from cache.store.tree import Entry

# What is looked at: a few entries each of so many parts of the listing, spread over all of it.
PARTS, OF_A_PART = 16, 4
# Bytes that are compared of a file, at its start and at its end.
WINDOW = 256 * 1024
LOOK_SECONDS = 10.0  # a slow source is asked no longer


class Look(StrEnum):
    SAME = auto()  # as it was listed
    GONE = auto()
    CHANGED = auto()  # its type, size or mtime is another one
    TOUCHED = auto()  # its ctime is, and its bytes were not compared
    EQUAL = auto()  # its ctime is, its bytes are not
    OTHER = auto()  # its ctime is, and its bytes


_WORDS = {
    Look.OTHER: "has other bytes",
    Look.CHANGED: "has another size or time",
    Look.GONE: "is not there",
    Look.TOUCHED: "has another ctime",
}


def judge(looks: Sequence[Look]) -> Match:
    """Pure. UNPROVEN: most names are missing, so perhaps nothing is mounted there."""
    if not looks or Look.SAME in looks:
        return Match.SAME
    if 2 * looks.count(Look.GONE) > len(looks):
        return Match.UNPROVEN
    if Look.EQUAL in looks and Look.OTHER not in looks:
        return Match.SAME
    return Match.OTHER


def look_of(kept: Entry, now: os.stat_result | None) -> Look:
    """By its status alone. Pure."""
    if now is None:
        return Look.GONE
    if not tree.same_content(kept, now):
        return Look.CHANGED
    return Look.TOUCHED if kept.ctime_ns != now.st_ctime_ns else Look.SAME


class _Kept(NamedTuple):
    path: list[str]  # of its directory
    entry: Entry
    stored: bool


def compare(folder: str, source: str, stamp: str) -> dict[str, str]:
    """``match``: the name of a ``Match``. ``why``: an example. ``refused``: what root may not open.

    In a child process: the source may hang. OSError, ESHUTDOWN when another directory is there.
    """
    try:
        with contextlib.closing(index.Index.read_only(Path(folder) / index.NAME)) as opened:
            kept = list(_chosen(opened))
    except (FileNotFoundError, sqlite3.Error, ValueError):
        return _answer()  # nothing was listed, or what was is lost and is made again
    with (
        tree.opened_root(Path(folder) / "tree") as stored,
        kit.files.closing(tree.open_source(source, stamp)) as root,
        tree.quiet(root) as origin,
    ):
        until = time.monotonic() + LOOK_SECONDS
        seen: list[tuple[_Kept, Look]] = []
        refused = ""
        for each in kept:
            if time.monotonic() >= until:
                break
            try:
                seen.append((each, _look(each, origin)))
            except PermissionError as error:
                refused = refused or f"{_shown(each)} ({error.strerror})"
            except OSError as error:
                tree.raise_if_gone(error)
        if not refused and judge([look for _, look in seen]) is Match.OTHER:
            for at, (each, look) in enumerate(seen):
                if look is Look.TOUCHED and each.stored and time.monotonic() < until:
                    seen[at] = each, _bytes_of(each, stored, origin)
    return _answer(seen, refused)


def _answer(seen: Sequence[tuple[_Kept, Look]] = (), refused: str = "") -> dict[str, str]:
    looks = [look for _, look in seen]
    match, why = judge(looks), ""
    if match is not Match.SAME:
        worst = next(look for look in _WORDS if look in looks)
        example = _shown(seen[looks.index(worst)][0])
        why = f"{example} {_WORDS[worst]}, and none of {len(looks)} is as it was"
    return {"match": match.name, "why": why, "refused": refused}


def _chosen(opened: index.Index) -> Iterator[_Kept]:
    """Some of what is stored; where nothing is, of what waits."""
    found = False
    for number in sample.coming(opened, "manifest", 0, PARTS):
        part = opened.part(number)
        items = manifest.unpack(part[1]) if part is not None else []
        stored = [item.entry for item in items if item.state is manifest.State.STORED]
        for entry in stored[:: max(1, len(stored) // OF_A_PART)][:OF_A_PART]:
            found = True
            assert part is not None
            yield _Kept(opened.path(part[0]), entry, True)
    for number in sample.coming(opened, "chunks", 0, 0 if found else PARTS):
        chunk = opened.chunk(number)
        if chunk is not None:
            path = opened.path(chunk.directory)
            yield from (_Kept(path, entry, False) for entry in chunk.entries[:OF_A_PART])


def _look(kept: _Kept, origin: int) -> Look:
    """OSError; PermissionError when root may not open it."""
    try:
        with tree.opened(origin, kept.path) as directory:
            now = os.stat(kept.entry.name, dir_fd=directory, follow_symlinks=False)
            if stat.S_ISREG(now.st_mode):
                os.close(tree.open_file(directory, kept.entry.name))
    except (FileNotFoundError, NotADirectoryError):
        return Look.GONE
    return look_of(kept.entry, now)


def _bytes_of(kept: _Kept, stored: int, origin: int) -> Look:
    try:
        ours, theirs = (_windows(root, kept) for root in (stored, origin))
    except OSError as error:
        tree.raise_if_gone(error)
        return Look.TOUCHED
    if not ours:
        return Look.TOUCHED  # nothing tells empty files apart
    return Look.EQUAL if ours == theirs else Look.OTHER


def _windows(root: int, kept: _Kept) -> bytes:
    with (
        tree.opened(root, kept.path) as directory,
        kit.files.closing(tree.open_file(directory, kept.entry.name)) as file,
    ):
        end = max(WINDOW, kept.entry.size - WINDOW)
        return os.pread(file, WINDOW, 0) + os.pread(file, WINDOW, end)


def _shown(kept: _Kept) -> str:
    return repr("/".join([*kept.path, kept.entry.name]))
