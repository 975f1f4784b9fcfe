"""What every kind of source has in common."""

import errno
import os
from dataclasses import dataclass
from typing import Any, Protocol

import kit.errors
from cache.fill import tree


@dataclass(frozen=True)
class Reached:
    """A source that answers now."""

    root: str  # directory to read
    device: str  # changes when the mount behind it is another one
    stamp: str  # st_dev:st_ino of the root; a pass that opens another one must not read it
    client: str  # how it is read, for people
    files: int | None = None  # estimates where the source keeps count (CephFS)
    bytes: int | None = None
    native: dict[str, Any] | None = None  # fields of cache.fill.native.Access


class Source(Protocol):
    """One dataset's source. Errors are SourceErrors: reported and tried again."""

    @property
    def identity(self) -> dict[str, Any]:
        """What makes a generation of it another one."""

    @property
    def immutable(self) -> bool:
        """Whether the source itself cannot change (a snapshot)."""

    async def reach(self, deadline: float) -> Reached:
        """Mount it if that is ours to do, and look whether it answers."""

    async def release(self) -> None:
        """Unmount what we mounted; nobody reads from it any more."""


def look(root: str) -> dict[str, Any]:
    """Whether ``root`` is a directory that can be listed, and what it says of itself.

    Runs in a child. OSError as the file system gives it.
    """
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        with os.scandir(descriptor) as entries:
            empty = next(entries, None) is None
        found: dict[str, Any] = {"stamp": tree.stamp(status), "empty": empty}
        for key, name in (("files", "rfiles"), ("bytes", "rbytes")):
            try:
                found[key] = int(os.getxattr(descriptor, f"ceph.dir.{name}"))
            except (OSError, ValueError):
                found[key] = None  # no CephFS
        return found
    finally:
        os.close(descriptor)


def explain(thing: str, error: OSError) -> kit.errors.SourceError:
    """An error of the file system as a person needs it."""
    again = "it is tried again"
    causes = {
        errno.ENOENT: ("there is no such directory", f"create or mount it; {again}"),
        errno.ENOTDIR: ("it is not a directory", f"name a directory; {again}"),
        errno.EACCES: ("permission denied", f"let root, or the Ceph user, read it; {again}"),
        errno.ENOTCONN: ("its FUSE daemon has died", f"mount it again; {again}"),
        errno.ESTALE: ("its mount is stale", f"mount it again; {again}"),
    }
    cause, remedy = causes.get(
        error.errno or 0, (f"it cannot be read ({error.strerror})", f"see the kernel log; {again}")
    )
    return kit.errors.SourceError(thing, cause, remedy)
