"""What every kind of source has in common. Imports little: ``look`` runs in a child process."""

import contextlib
import errno
import os
from dataclasses import dataclass
from typing import Any, Protocol

import kit.errors
from cache.store import tree
from ceph.protocol import Access


@dataclass(frozen=True)
class Reached:
    """A source that answers now."""

    root: str  # directory to read
    device: str  # identifies the mount behind it; a new mount has another
    stamp: str  # of the root (tree.stamp); a pass that opens another directory must not read it
    client: str  # how it is read, for status
    files: int | None = None  # estimates, where the source counts (CephFS)
    bytes: int | None = None
    native: Access | None = None  # files can be read past the mount


class Source(Protocol):
    """One dataset's source. It raises SourceError; everything is tried again later."""

    @property
    def identity(self) -> dict[str, Any]:
        """Identifies the source; another identity is another generation."""

    @property
    def immutable(self) -> bool:
        """A snapshot, which cannot change."""

    async def reach(self, deadline: float) -> Reached:
        """Mount it if the agent mounts it, and check that it answers."""

    async def release(self) -> None:
        """Unmount what the agent mounted. Nobody reads from it any more."""


@dataclass(frozen=True)
class Root:
    """What a source's root directory says of itself."""

    stamp: str
    empty: bool
    files: int | None
    bytes: int | None


def look(root: str) -> dict[str, Any]:
    """The fields of ``Root``. In a child process: a source may hang. OSError."""
    counts: dict[str, int | None] = {"files": None, "bytes": None}
    with tree.opened_root(root) as descriptor:
        with os.scandir(descriptor) as entries:
            empty = next(entries, None) is None
        for key in counts:
            with contextlib.suppress(OSError, ValueError):  # not a CephFS
                counts[key] = int(os.getxattr(descriptor, f"ceph.dir.r{key}"))
        return {"stamp": tree.stamp(os.fstat(descriptor)), "empty": empty, **counts}


def explain(thing: str, error: OSError) -> kit.errors.SourceError:
    """An error of the file system for operators."""
    again = "it is tried again"
    causes = {
        errno.ENOENT: ("the directory does not exist", f"create or mount it; {again}"),
        errno.ENOTDIR: ("it is not a directory", f"set the path of a directory; {again}"),
        errno.EACCES: ("permission denied", f"let root, or the Ceph user, read it; {again}"),
        errno.ENOTCONN: ("its FUSE daemon has died", f"mount it again; {again}"),
        errno.ESTALE: ("its mount is stale", f"mount it again; {again}"),
    }
    cause, remedy = causes.get(
        error.errno or 0, (f"it cannot be read ({error.strerror})", f"see the kernel log; {again}")
    )
    return kit.errors.SourceError(thing, cause, remedy)
