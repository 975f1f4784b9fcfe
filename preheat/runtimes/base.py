"""The port to a container runtime: everything that this room asks of it, in the room's own words.

Two adapters implement ``Runtime``: ``containerd`` (leases, resumable pulls, events) and ``crio``
(CRI and a drop-in file). ``Abilities`` says what a runtime can do. The rest of the room asks for an
ability and never for the name or version of a runtime.

The runtime is the room's only database. A ``Hold`` is a record that the runtime keeps for us: a
pull and its bytes, a pinned image, or a note. A new agent finds the holds of the one before it.
"""

import hashlib
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import kit.errors
from preheat import manifest

OWN_PREFIX = "nodeagent-"  # of everything that we name in a runtime
Role = Literal["pull", "pin", "note"]
By = Literal["operator", "policy", "retained"]


class RuntimeCallError(kit.errors.AgentError):
    """The runtime refused a call or failed in it; ``code`` is the gRPC status name."""

    exit_code = 5

    def __init__(self, thing: str, cause: str, remedy: str, code: str = "UNKNOWN") -> None:
        super().__init__(thing, cause, remedy)
        self.code = code


class RuntimeGoneError(RuntimeCallError):
    """No runtime listens on the socket, or it went away during the call."""


class RuntimeSlowError(RuntimeCallError):
    """The runtime did not answer before the call's deadline."""


class BreakerOpenError(RuntimeGoneError):
    """The call was not sent: the runtime went away after an earlier changing call."""


class InvalidCallError(kit.errors.AgentError):
    """A changing call that is malformed; it was not sent (a bug of ours, or bad input)."""

    exit_code = 3


@dataclass(frozen=True)
class Abilities:
    """What a runtime can do."""

    watches: bool  # reports at once that an image record was made, changed or removed
    ingests: bool  # takes blobs from us and unpacks them, so that we can limit the rate
    estimates: bool  # lists the blobs and snapshots that it has


@dataclass(frozen=True)
class Record:
    """One image record: a name that the runtime resolves to a top-level digest.

    ``pinned``: it says so to the kubelet; ``ours``: we made it say so.
    """

    name: str
    target: manifest.Target
    pinned: bool = False
    ours: bool = False


@dataclass(frozen=True)
class Change:
    """One image record was made, changed (it may name another image now) or removed."""

    name: str
    how: Literal["made", "moved", "removed"]


@dataclass(frozen=True)
class Hold:
    """What the runtime keeps or remembers for us.

    ``pull``: a running or interrupted pull with all its bytes; it ends by itself at ``expires``.
    ``pin``: an image that garbage collection must not take. ``note``: keeps no bytes; its ``state``
    says what to remember (``released``, ``paused``, ``done``, ``expired`` or ``dropped``).
    """

    id: str
    role: Role
    ref: str
    by: By
    target: manifest.Target | None = None
    image_id: str = ""
    names: tuple[str, ...] = ()  # image records to restore when somebody removes them
    state: str = ""
    keep: str = ""  # the pin rule as desired.Request writes it
    created: float = 0.0
    expires: float | None = None


def hold_id(hold: Hold) -> str:
    """The same for equal holds of any agent: two agents make one.

    A note that the settings dropped an image stands beside what an operator said about it.
    """
    own = hold.target.digest if hold.role == "pin" and hold.target is not None else ""
    if hold.role == "note" and hold.state == "dropped":
        own = hold.state
    key = hashlib.sha256(f"{hold.ref}\n{own}".encode()).hexdigest()[:24]
    return f"{OWN_PREFIX}{hold.role}-{key}"


@dataclass(frozen=True)
class Ingest:
    """A blob that is being fetched, or was left half-fetched; offsets in bytes.

    ``ours`` was written by the agent under a rate limit, ``theirs`` by the runtime. Neither can
    continue with the other's bytes.
    """

    ours: int | None = None
    theirs: int | None = None

    @property
    def offset(self) -> int:
        return max(self.ours or 0, self.theirs or 0)


@dataclass(frozen=True)
class Inventory:
    """What the runtime has at one moment."""

    records: tuple[Record, ...] = ()
    content: Mapping[str, int] = field(default_factory=dict)  # digest -> bytes
    snapshots: frozenset[str] = frozenset()  # chain ids of unpacked layers
    remote: frozenset[str] = (
        frozenset()
    )  # those of them whose files come from the registry when read
    durable: frozenset[str] = frozenset()  # chain ids of layers that a power cut leaves whole
    ingests: Mapping[str, Ingest] = field(default_factory=dict)  # by digest
    holds: tuple[Hold, ...] = ()
    newer_holds: int = 0  # holds that a newer agent made: not understood, left alone
    unknown_holds: tuple[str, ...] = ()  # ids of holds of agents that are not understood
    in_use: frozenset[str] = frozenset()  # image ids of containers and of their image volumes
    last_used: Mapping[str, float] = field(default_factory=dict)  # top digest -> Unix time
    images_path: str = ""  # the directory in which the runtime keeps images
    listed: frozenset[str] | None = None  # names that it tells the kubelet; None: all records

    def held(self, role: Role, ref: str | None = None) -> list[Hold]:
        """The holds of one role, of one reference or all."""
        return [h for h in self.holds if h.role == role and ref in (None, h.ref)]

    def target_of(self, ref: str) -> manifest.Target | None:
        """What ``ref`` names in the runtime now."""
        return next((record.target for record in self.records if record.name == ref), None)

    def digest_of(self, ref: str) -> str:
        """The top digest that ``ref`` names in the runtime now; empty without a record."""
        target = self.target_of(ref)
        return "" if target is None else target.digest

    def served(self, ref: str) -> str:
        """The digest that pods get under ``ref``, if CRI lists that image; else empty. containerd
        keeps the record of a pull that failed, and CRI does not list it."""
        digest = self.digest_of(ref)
        return digest if digest and self.has(ref, digest) else ""

    def has(self, ref: str, digest: str) -> bool:
        """Whether ``ref`` names ``digest``, for the kubelet as well.

        CRI-O has several records for one name.
        """
        if self.listed is not None and ref not in self.listed:
            return False
        return any(r.name == ref and r.target.digest == digest for r in self.records)


def image_ids(images: Iterable[str], records: Sequence[Record]) -> frozenset[str]:
    """``images`` with what their names resolve to: digests, and so image ids."""
    found = set(images)
    found |= {record.target.digest for record in records if record.name in found}
    found |= {record.name for record in records if record.target.digest in found}
    return frozenset(each for each in found if manifest.is_digest(each))


@dataclass(frozen=True)
class LayerState:
    """``here``: bytes fetched. ``theirs``: how many of them a running fetch of the runtime has.
    ``remote``: it is mounted, and nothing of it was fetched."""

    here: int
    unpacked: bool
    theirs: int | None = None
    remote: bool = False


@dataclass(frozen=True, repr=False)
class Login:
    """Credentials for one registry. Without a repr, so that no log or traceback shows them."""

    username: str = ""
    password: str = ""
    identity_token: str = ""
    registry_token: str = ""


class Runtime(Protocol):
    """One container runtime. Every coroutine raises RuntimeCallError or a subclass."""

    @property
    def abilities(self) -> Abilities: ...

    @property
    def honours_pins(self) -> bool | None:
        """Whether it tells the kubelet which images are pinned; None while not known."""

    release_after: float | None
    """Seconds after which the runtime itself ends pins and notes that no agent renews."""

    @property
    def trips(self) -> int:
        """How often the runtime went away on a changing call."""

    @property
    def rests(self) -> float:
        """Seconds until changing calls are allowed again; 0 when they are."""

    async def connect(self) -> str:
        """Call the runtime; its name and version."""

    async def close(self) -> None: ...

    async def inventory(self) -> Inventory: ...

    async def read(self, digest: str) -> bytes:
        """A manifest or config from the runtime's store; at most 8 MiB."""

    async def usage(self, chain_id: str) -> int:
        """Bytes that one unpacked layer takes on disk."""

    async def begin(self, hold: Hold) -> Hold:
        """Make a hold, or return the equal one that exists."""

    async def end(self, hold: Hold) -> None:
        """Remove a hold and what only it kept; nothing if it is gone already."""

    async def pull(self, ref: str, login: Login | None, hold: Hold, deadline: float) -> str:
        """Pull through CRI under ``hold``; the image id. The hold keeps the bytes if cancelled."""

    async def ingests(self) -> Mapping[str, Ingest]:
        """Half-fetched blobs by digest, whoever fetches them; empty when it does not say."""

    async def progress(self, layers: Sequence[manifest.Layer]) -> Mapping[str, LayerState]:
        """The state of each layer, by digest; empty when the runtime does not say."""

    async def write(
        self,
        digest: str,
        size: int,
        source: manifest.Blobs,
        hold: Hold,
        origin: tuple[str, str],
    ) -> None:
        """Write a blob into the store under ``hold``, from where an earlier attempt stopped.

        ``origin``: the registry and the repository that have it, too.
        """

    async def drop_partials(self, digests: frozenset[str], *, ours_only: bool = False) -> None:
        """Delete half-fetched blobs."""

    async def pin(self, hold: Hold) -> Hold:
        """Keep ``hold.target``; the hold, completed with its record names and image id."""

    async def unpin(self, hold: Hold) -> None:
        """Remove a pin and its marks on records. Garbage collection may take the image again."""

    async def clear_marks(self, records: Sequence[Record]) -> None:
        """Clear marks of ours on records."""

    async def tend(self, inventory: Inventory) -> bool:
        """Put right what an interrupted or removed agent left: pins without their content or mark,
        marks without a pin, holds that expire too soon. Whether holds or records changed.
        """

    async def heal(self, hold: Hold) -> int:
        """Restore missing records of a pinned image; how many were missing."""

    async def note_use(self, digest: str, when: float | None) -> None:
        """Store when the image was last used (Unix time)."""

    async def note_durable(self, chain_ids: Iterable[str], *, durable: bool = True) -> None:
        """Store that these layers are durable, or that nothing is known of them."""

    async def unpack_again(
        self, layers: Sequence[manifest.Layer], which: Collection[str], deadline: float
    ) -> None:
        """Unpack the layers ``which`` (chain ids) of an image again, or remove them with those on
        top of them for a pull to bring them. ``deadline``: seconds for one layer."""

    async def target_of(self, name: str) -> manifest.Target | None:
        """What an image record names now; None without one."""

    def changes(self) -> AsyncIterator[Change]:
        """Image records as they are made, changed and removed, until the connection ends."""
