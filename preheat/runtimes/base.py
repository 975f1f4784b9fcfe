"""What the room and its adapter of the container runtime (``containerd``) speak of.

The runtime is the room's only database. A ``Hold`` is a record that the runtime keeps for us: a
pull and its bytes, a pinned image, or a note. A new agent finds the holds of the one before it.
"""

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import kit.errors
from preheat.image import manifest

OWN_PREFIX = "nodeagent-"  # of everything that we name in a runtime
Role = Literal["pull", "pin", "note"]
By = Literal["operator", "policy", "retained"]


class RuntimeCallError(kit.errors.AgentError):
    """The runtime refused a call or failed in it; ``code`` is the gRPC status name."""

    exit_code = 5

    def __init__(self, thing: str, cause: str, remedy: str, code: str = "UNKNOWN") -> None:
        super().__init__(thing, cause, remedy)
        self.code = code


LOOK = "check that it runs and that preheat.socket is its socket"


class RuntimeGoneError(RuntimeCallError):
    """No runtime listens on the socket, or it went away during the call."""


class RuntimeSlowError(RuntimeCallError):
    """The runtime did not answer before the call's deadline."""


class BreakerOpenError(RuntimeCallError):
    """The call was not sent: the runtime went away after an earlier changing call."""


class InvalidCallError(kit.errors.AgentError):
    """A changing call that is malformed; it was not sent (a bug of ours, or bad input)."""

    exit_code = 3


@contextlib.contextmanager
def allowing(code: str) -> Iterator[None]:
    """Pass over an answer with this gRPC status."""
    try:
        yield
    except RuntimeCallError as error:
        if error.code != code:
            raise


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
    says what to remember (``released``, ``paused``, ``done``, ``expired`` or ``dropped``). Each pin
    of an inventory has a ``target``.
    """

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
    id: str = ""  # the runtime's, see ``hold_id``; empty: not made yet

    @property
    def digest(self) -> str:
        """Of the target; empty without one."""
        return "" if self.target is None else self.target.digest


def hold_id(hold: Hold) -> str:
    """The same for equal holds of any agent: two agents make one. A note is of one state: that an
    image is paused says nothing of its release."""
    own = hold.digest if hold.role == "pin" else hold.state
    key = hashlib.sha256(f"{hold.ref}\n{own}".encode()).hexdigest()[:24]
    return f"{OWN_PREFIX}{hold.role}-{key}"


@dataclass(frozen=True)
class DiskUse:
    """What layers take on disk, unpacked."""

    bytes: int = 0
    inodes: int = 0


NO_USE = DiskUse()


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
class ImageInventory:
    """What the runtime has at one moment. ``shapes`` says, by top digest, what its images and pins
    consist of; the others are not readable, or were not read yet (``estimate.LocalImages``)."""

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
    asked: float = 0.0  # monotonic time before the runtime was asked
    images_path: str = ""  # the directory in which the runtime keeps images
    listed: frozenset[str] | None = None  # names that it tells the kubelet; None: all records
    shapes: Mapping[str, manifest.Shape] = field(default_factory=dict)

    def held(self, role: Role, ref: str | None = None) -> list[Hold]:
        """The holds of one role, of one reference or all."""
        return [h for h in self.holds if h.role == role and ref in (None, h.ref)]

    def notes(self, state: str) -> list[Hold]:
        return [hold for hold in self.held("note") if hold.state == state]

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
        """Whether ``ref`` names ``digest``, for the kubelet as well."""
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
