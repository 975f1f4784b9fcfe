"""The port to a container runtime: what the room asks of it, in the room's own words.

Two adapters stand behind it: ``preheat.containerd`` (leases, resumable pulls, events) and
``preheat.crio`` (CRI and a drop-in file). ``Abilities`` says what the one at hand can do; the
plan and the pull ask those, never a name or a version.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import kit.errors
from preheat import manifest

Role = Literal["pull", "pin", "note"]
By = Literal["operator", "policy", "retained"]


class RuntimeCallError(kit.errors.AgentError):
    """The runtime refused or failed a call; ``code`` is the gRPC status name."""

    exit_code = 5

    def __init__(self, thing: str, cause: str, remedy: str, code: str = "UNKNOWN") -> None:
        super().__init__(thing, cause, remedy)
        self.code = code


class RuntimeGoneError(RuntimeCallError):
    """No runtime behind the socket, or it went away during the call."""


class RuntimeSlowError(RuntimeCallError):
    """No answer before the call's deadline."""


class BreakerOpenError(RuntimeGoneError):
    """Not called at all: the runtime went away after an earlier changing call."""


class InvalidCallError(kit.errors.AgentError):
    """A changing call that would be malformed; it was never sent (a bug of ours, or bad input)."""

    exit_code = 3


@dataclass(frozen=True)
class Abilities:
    """What the runtime behind the port can do."""

    name: str
    resumes: bool  # a cancelled pull keeps its bytes
    watches: bool  # tells at once when an image record goes
    ingests: bool  # takes blobs from us, so that a rate limit can be kept
    estimates: bool  # says which blobs and snapshots it has


@dataclass(frozen=True)
class Record:
    """One image record: a name that the runtime resolves to a top-level digest."""

    name: str
    target: manifest.Target
    pinned_label: bool = False


@dataclass(frozen=True)
class Hold:
    """What we made the runtime keep, or remember. It lives in the runtime, nowhere else.

    ``pull``: a running or interrupted pull and all its bytes; ends by itself at ``expires``.
    ``pin``: an image that no garbage collection may take. ``note``: no bytes, a memory only
    (``state`` says of what: ``released``, ``paused`` or ``done``).
    """

    id: str
    role: Role
    ref: str
    by: By
    target: manifest.Target | None = None
    image_id: str = ""
    names: tuple[str, ...] = ()
    state: str = ""
    keep: str = ""  # the pin rule that the request asked for, as preheat.settings writes it
    created: float = 0.0
    expires: float | None = None


@dataclass(frozen=True)
class Ingest:
    """A blob that is being fetched or was left half-fetched; offsets in bytes.

    ``ours``: written by us under a rate limit; ``theirs``: by the runtime. Each goes on only with
    its own bytes.
    """

    total: int = 0
    ours: int | None = None
    theirs: int | None = None

    @property
    def offset(self) -> int:
        return max(self.ours or 0, self.theirs or 0)


@dataclass(frozen=True)
class Inventory:
    """Everything the plan needs to know of the runtime, at one moment."""

    records: tuple[Record, ...] = ()
    content: Mapping[str, int] = field(default_factory=dict)  # digest -> bytes
    snapshots: frozenset[str] = frozenset()  # chain ids of unpacked layers
    ingests: Mapping[str, Ingest] = field(default_factory=dict)  # by digest
    holds: tuple[Hold, ...] = ()
    in_use: frozenset[str] = frozenset()  # image ids of containers
    last_used: Mapping[str, float] = field(default_factory=dict)  # top digest -> Unix time
    images_path: str = ""  # where the runtime keeps images

    def digest_of(self, ref: str) -> str | None:
        """The top digest that ``ref`` names here now."""
        return next((r.target.digest for r in self.records if r.name == ref), None)

    def names(self, ref: str, digest: str) -> bool:
        """Whether ``ref`` names ``digest`` here (some runtimes know an image by several)."""
        return any(r.name == ref and r.target.digest == digest for r in self.records)


@dataclass(frozen=True)
class LayerState:
    """``here``: bytes fetched. ``theirs``: of those, by a fetch of the runtime in progress."""

    here: int
    unpacked: bool
    theirs: int | None = None


@dataclass(frozen=True, repr=False)
class Login:
    """Credentials for one registry. No repr: they must not get into a log or a traceback."""

    username: str = ""
    password: str = ""
    identity_token: str = ""
    registry_token: str = ""


class Runtime(Protocol):
    """One container runtime. Every method raises RuntimeCallError or one of its kinds."""

    @property
    def abilities(self) -> Abilities: ...

    async def connect(self) -> str:
        """Probe it; what it says it is. Closes the breaker after an outage."""

    async def close(self) -> None: ...

    async def inventory(self) -> Inventory: ...

    async def read(self, digest: str) -> bytes:
        """A small blob (manifest, config) of the local store; at most 8 MiB."""

    async def usage(self, chain_id: str) -> int:
        """Bytes that one unpacked layer takes on disk."""

    async def begin(self, hold: Hold) -> Hold:
        """Make a hold, or return the one that is there already."""

    async def end(self, hold: Hold) -> None:
        """Let go of a hold and what only it kept; nothing happens when it is gone already."""

    async def pull(self, ref: str, login: Login | None, hold: Hold, deadline: float) -> str:
        """Pull through CRI under ``hold``; the image id. Cancelling keeps the bytes."""

    async def progress(self, layers: Sequence[manifest.Layer]) -> Mapping[str, LayerState]:
        """How far each of ``layers`` is, by digest; nothing of a runtime that does not tell."""

    async def write(
        self, digest: str, size: int, source: manifest.Blobs, hold: Hold, origin: tuple[str, str]
    ) -> None:
        """Put one blob into the store under ``hold``, resuming where an earlier try ended."""

    async def drop_partials(self, digests: frozenset[str], *, ours_only: bool = False) -> None:
        """Forget half-fetched blobs: bad ones, or our own that the runtime fetches itself."""

    async def pin(self, hold: Hold) -> Hold:
        """Keep ``hold.target`` for good; the hold completed with its names and image id."""

    async def unpin(self, hold: Hold) -> None:
        """Let go, marks on records included; garbage collection may take the image again."""

    async def heal(self, hold: Hold) -> int:
        """Put missing records of a pinned image back; how many."""

    async def note_use(self, digest: str, when: float) -> None:
        """Remember that the image was last used at ``when`` (Unix time)."""

    def removals(self) -> AsyncIterator[str]:
        """Names of image records that were removed. Ends or raises when the connection does."""
