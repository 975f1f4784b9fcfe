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

from collections.abc import Mapping
from enum import Enum, auto

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
