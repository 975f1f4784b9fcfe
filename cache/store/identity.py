"""What a generation was filled from, by what it is and not by its name.

A snapshot that is deleted and made again has the same name and other bytes; another cluster may
answer at the same address. So the agent keeps the *marks* of the source with the generation and
compares them with those of the source that answers:

    cluster     fsid of the cluster
    pool        its id in the cluster, of a block image
    image       id of the image in its pool
    filesystem  its id in the cluster
    root        inode number of the dataset's root directory
    snapshot    id of the snapshot, which no other snapshot ever gets
    made        when the snapshot was made, to the nanosecond

A source shows what it can: without Ceph's bindings no ids, a directory outside Ceph no marks.
Marks that both sides have must be equal.
"""

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

import kit.files
from cache.store import tree

Marks = Mapping[str, str]

CLUSTER, FILESYSTEM, ROOT, SNAPSHOT, MADE = "cluster", "filesystem", "root", "snapshot", "made"
POOL, IMAGE = "pool", "image"
_WORDS = {
    CLUSTER: "it is in another cluster",
    FILESYSTEM: "it is in another file system of that name",
    POOL: "it is in another pool of that name",
    IMAGE: "it is another image of that name",
    ROOT: "its root directory is another one of that name",
    SNAPSHOT: "its snapshot was deleted and made again",
    MADE: "its snapshot was deleted and made again",
}
# Of a root directory, names that are compared to prove what an older agent filled from.
MOST_COMPARED = 10_000
# Clocks of a node and of the cluster may differ by this much.
CLOCK_SECONDS = 60.0


class Match(Enum):
    SAME = auto()
    OTHER = auto()
    UNPROVEN = auto()  # one side has no marks to compare


def compare(kept: Marks, found: Marks) -> Match:
    """Whether the source that answers is the one that the generation was filled from."""
    common = kept.keys() & found.keys()
    if any(kept[key] != found[key] for key in common):
        return Match.OTHER
    return Match.SAME if common or (not found and not kept) else Match.UNPROVEN


def difference(kept: Marks, found: Marks) -> str:
    """What is another one now, for operators; '' when nothing that both sides know differs."""
    for key, words in _WORDS.items():
        if key in kept and key in found and kept[key] != found[key]:
            return f"{words} ({key} {kept[key]} before, {found[key]} now)"
    return ""


@dataclass(frozen=True)
class _Looks:
    kind: int
    size: int
    mtime_ns: int


def _looks(status: os.stat_result) -> _Looks:
    kind = stat.S_IFMT(status.st_mode)
    return _Looks(kind, 0 if kind == stat.S_IFDIR else status.st_size, status.st_mtime_ns)


def doubts(folder: str, source: str, created: float, made: str) -> str:
    """Why a generation without marks may be of another source; '' when it is proven to be of this.

    An agent of November 2026 and before kept no marks. The proof: the snapshot was made before the
    generation was begun, and everything in the root directory of the tree has the type, size and
    modification time that it has in the source. In a child process: a source may hang. OSError.
    """
    if made and float(made) + CLOCK_SECONDS > created:
        return "its snapshot is not older than what is stored"
    with (
        kit.files.closing(tree.open_root(f"{folder}/tree")) as stored,
        kit.files.closing(tree.open_root(source)) as origin,
    ):
        if os.fstat(stored).st_mtime_ns != os.fstat(origin).st_mtime_ns:
            return "the root directory of the source has another modification time"
        for name in os.listdir(stored)[:MOST_COMPARED]:
            kept = os.stat(name, dir_fd=stored, follow_symlinks=False)
            try:
                now = os.stat(name, dir_fd=origin, follow_symlinks=False)
            except FileNotFoundError:
                return f"the source has no {name!r}"
            if _looks(kept) != _looks(now):
                return f"{name!r} is another one in the source"
    return ""
