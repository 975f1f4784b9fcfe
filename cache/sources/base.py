"""What every kind of source has in common."""

import contextlib
import errno
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import kit.child
import kit.errors
from cache.settings import Source as Settings
from cache.sources import roots
from ceph.protocol import Access, ImageAccess

if TYPE_CHECKING:
    from cache.fill.protocol import Manifest

AGAIN = "it is tried again"


class GoneError(kit.errors.SourceError):
    """Its directory answers, and has no such snapshot: what was cached of it has no source."""


@dataclass(frozen=True)
class Reached:
    """A source that answers now."""

    root: str  # directory to read; '' where only the store can be mounted
    device: str  # identifies the mount behind it; a new mount has another
    stamp: str  # of the root (tree.stamp); a pass that opens another directory must not read it
    client: str  # how it is read, for status
    files: int | None = None  # estimates, where the source counts (CephFS)
    bytes: int | None = None
    native: Access | None = None  # files can be read past the mount
    image: ImageAccess | None = None  # a block image
    mixes: bool = False  # what is mounted of it can show stored blocks too (cache.store.mixed)
    note: str = ""  # for operators
    # As in ``roots.Root``; '' of what the agent mounts itself.
    place: str = ""
    inside: tuple[str, ...] = ()
    server: str = ""
    marks: dict[str, str] = field(default_factory=dict)  # what it is (cache.store.identity)
    manifest: "Manifest | None" = None  # a published one that may be there


class Source(Protocol):
    """One dataset's source. It raises SourceError; everything is tried again later."""

    @property
    def identity(self) -> dict[str, Any]:
        """What the settings name; another one is another generation. ``Reached.marks`` tell what
        is there by that name."""

    @property
    def immutable(self) -> bool:
        """A snapshot, which cannot change."""

    @property
    def place(self) -> str:
        """Its path on this host, for who may pass the directories above it; '' when the agent
        mounts it."""

    @property
    def replaceable(self) -> bool:
        """Its marks tell when another one is there by its name."""

    @property
    def block(self) -> bool:
        """A block image: the store has a copy of it and no tree."""

    @property
    def note(self) -> str:
        """For operators, also while nothing of it is mounted; '' if there is none."""

    async def reach(self, deadline: float, *, serve: bool = True) -> Reached:
        """Mount it if the agent mounts it, and check that it answers.

        ``serve``: jobs are to read it; else its marks are enough.
        """

    def take(self, source: Settings) -> None:
        """Other settings of the same source: how it is reached, not what it is."""

    async def snapshots(self, deadline: float) -> dict[str, float]:
        """The snapshots of its directory, and when each was made (Unix time). SourceError."""

    async def release(self) -> None:
        """Unmount what the agent mounted. Nobody reads from it any more."""


@contextlib.contextmanager
def asked_once() -> Iterator[None]:
    """Somebody asks for it: when the source fails, it is not tried again by itself."""
    try:
        yield
    except kit.errors.SourceError as error:
        remedy = error.remedy.replace(AGAIN, "ask again once it answers")
        raise type(error)(error.thing, error.cause, remedy) from error


async def snapshots_of(
    directory: str, thing: str, deadline: float, failed: Callable[[OSError], Awaitable[None]]
) -> dict[str, float]:
    """As ``roots.snapshots``, but raises SourceError. ``failed`` gets an error of the directory."""
    try:
        found: dict[str, float] = await kit.child.call(
            roots.snapshots, directory, deadline=deadline
        )
        return found
    except kit.child.DeadlineError as error:
        why = f"its snapshots were not listed within {deadline:g}s"
        raise kit.errors.SourceError(thing, why, "it is tried again") from error
    except OSError as error:
        await failed(error)
        raise explain(f"{thing}: its snapshots", error) from error


def explain(thing: str, error: OSError) -> kit.errors.SourceError:
    """An error of the file system for operators."""
    again = AGAIN
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
