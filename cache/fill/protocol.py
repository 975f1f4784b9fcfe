"""What the agent, a coordinator and its workers exchange.

The agent gives a coordinator one ``Task`` and then ``Command``s; the coordinator answers with
``Report``s. These are JSON lines (``kit.line_worker``), at most a few per second.

A coordinator gives each worker a ``Setup`` and then one ``Job`` at a time; the worker answers with
``Answer``s. These carry up to 256 entries each, thousands per second, and go through a pipe per
direction, each message behind its length. Names are str by ``os.fsdecode``; their lone surrogates
survive because the standard library writes the JSON (see ``kit.messages``).

What changes while a job runs goes through the control page instead (``cache.fill.control``).
"""

import os
import struct
import sys
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar, cast

import msgspec

import kit.messages
from cache.store.index import Counts
from cache.store.tree import Entry
from ceph.protocol import Access

# --- the agent and a coordinator


@dataclass(frozen=True)
class Limits:
    """How hard a pass may work and how much it may store."""

    workers: int
    bytes_per_second: int  # 0: no limit
    files_per_second: int  # 0: no limit
    budget: int
    reserve: float
    others: int  # SSD bytes of the store that are not this dataset's


@dataclass(frozen=True, kw_only=True)
class Task:
    """What every kind of pass needs to know."""

    generation: str  # its folder
    source: str  # directory to read
    stamp: str  # of the source's root when it was reached; '' accepts any
    immutable: bool  # the source is a snapshot
    limits: Limits


@dataclass(frozen=True, kw_only=True)
class FillTask(Task):
    native: Access | None = None  # reads past the mount are possible
    mounted: list[str] = field(default_factory=list)  # mount points inside the source
    used: int = 0  # SSD bytes of the generation as last known


@dataclass(frozen=True, kw_only=True)
class VerifyTask(Task):
    against_source: bool
    reachable: bool  # bad files can be replaced from the source


@dataclass(frozen=True, kw_only=True)
class WithdrawTask(Task):
    part: str  # "marks" or "files"


@dataclass(frozen=True)
class Command:
    """What the agent tells a running pass."""

    limits: Limits | None = None
    hints: list[str] = field(default_factory=list)  # paths that a job opened
    cancel: bool = False


@dataclass(frozen=True)
class Progress:
    phase: str
    counts: Counts  # what it works through and how far it is
    sealed: int
    copied_files: int  # by the workers, before they are committed
    copied_bytes: int
    beats: int  # signs of life of the workers
    commits: int
    used: int  # SSD bytes of the generation
    syncing: bool  # waits for the SSD


@dataclass(frozen=True)
class FillEnd:
    used: int
    left_files: int
    left_bytes: int


@dataclass
class VerifyEnd:
    checked_files: int = 0
    checked_bytes: int = 0
    bad: int = 0
    not_compared: int = 0
    replaced: int = 0
    unreplaced: int = 0


@dataclass(frozen=True)
class End:
    """``result``: complete, partial, good, bad, withdrawn, cancelled or failed."""

    result: str
    why: str = ""
    fill: FillEnd | None = None
    verify: VerifyEnd | None = None
    withdrawn: int = 0


@dataclass(frozen=True)
class Report:
    """One message of a coordinator: one of its fields is set."""

    progress: Progress | None = None
    skeleton: bool = False  # every directory of the source is in the tree
    note: str = ""  # for the log
    end: End | None = None


class AgentChannel:
    """Commands on standard input, reports on standard output.

    Reading never blocks. Writing blocks while the agent does not read, which slows the pass down
    and loses nothing.
    """

    def __init__(self) -> None:
        self._input = b""
        os.set_blocking(0, False)

    @staticmethod
    def say(report: Report) -> None:
        sys.stdout.write(f'{{"result":{kit.messages.encode(report)}}}\n')
        sys.stdout.flush()

    def commands(self) -> list[Command] | None:
        """Commands that have arrived; None when the agent has closed the pipe."""
        try:
            data = os.read(0, 65536)
        except BlockingIOError:
            return []
        if not data:
            return None
        *lines, self._input = (self._input + data).split(b"\n")
        return [kit.messages.decode(line, Command) for line in lines]


# --- a coordinator and its workers


class Failure(NamedTuple):
    name: str
    reason: str
    lasting: bool  # trying again soon is pointless


class Link(NamedTuple):
    """A copied name of a hard-linked file; names with the same key are links of one file."""

    name: str
    key: str


@dataclass
class Stored:
    """What the tree had already."""

    files: int = 0
    bytes: int = 0
    allocated: int = 0  # SSD bytes, names included


class Message(msgspec.Struct, tag=True, kw_only=True):
    """Base of what goes through the pipes."""


class Setup(Message):
    source: str
    stamp: str
    generation: str
    immutable: bool
    native: Access | None


class Scan(Message):
    """List a directory of the source and make its subdirectories in the tree."""

    directory: int
    path: list[str]
    mounted: list[str]  # names that are mount points
    again: bool  # look for what the tree has already
    extras: bool  # remove from the tree what the source lacks


class Copy(Message):
    """Copy files and links of one directory into the staging folder ``folder``."""

    folder: str
    path: list[str]
    entries: list[Entry]
    location: tuple[str, int] | None = None
    hinted: bool = False  # some may be in the tree already


class Hint(Message):
    """Copy names that a job opened, ahead of their chunk; at most ``allowance`` SSD bytes."""

    folder: str
    path: list[str]
    names: list[str]
    allowance: int


class StagedFolder(Message):
    """A staging folder to rename into the tree."""

    folder: str
    directory: int
    path: list[str]
    links: list[Link]
    mtime_ns: int  # of the directory


class Seal(Message):
    directory: int
    path: list[str]
    entries: int
    mtime_ns: int


class Commit(Message):
    """Make staged files durable, rename them into the tree, then seal directories."""

    folders: list[StagedFolder]
    seals: list[Seal]


class Listed(NamedTuple):
    """A directory and how many entries it must have."""

    directory: int
    path: list[str]
    entries: int


class Recheck(Message):
    """Look for the marks and the entries of directories that the index says are sealed."""

    directories: list[Listed]


class Finish(Message):
    """Delete the spare links and make the whole generation durable."""


class Verify(Message):
    """Read the files of a directory against their checksums, on request against the source."""

    directory: int
    path: list[str]
    entries: int | None  # that it must have, when it is sealed
    against_source: bool


class Unseal(Message):
    """Remove the marks of ``path`` and of every directory above it."""

    path: list[str]
    names: list[str]  # bad files there, for the coordinator


class Prune(Message):
    """Delete names from a directory of the tree."""

    directory: int | None
    path: list[str]
    names: list[str]


Job = Scan | Copy | Hint | Commit | Recheck | Finish | Verify | Unseal | Prune


class Done(Message):
    """The start, or a job without a result, is done."""


class NotDone(Message):
    """The job came to nothing."""

    error: str = ""
    errno: int | None = None
    cancelled: bool = False


class ScanPart(Message):
    """Some entries of a directory that is being scanned; more answers follow."""

    directory: int
    chunk: list[Entry] = []  # to be copied
    folders: list[Entry] = []  # subdirectories
    failed: list[Failure] = []
    made: int = 0  # SSD bytes of new directories
    location: tuple[str, int] | None = None  # where the objects of its files are


class Scanned(Message):
    stored: Stored
    entries: int = 0
    files: int = 0
    bytes: int = 0
    skipped: int = 0  # sockets, fifos and devices
    folders: list[str] = []


class Copied(Message):
    files: int = 0
    bytes: int = 0
    allocated: int = 0
    failed: list[Failure] = []
    links: list[Link] = []
    left: list[str] = []  # names that were not tried
    full: bool = False  # stopped because the disk is full


class Hinted(Message):
    taken: dict[str, int]  # name: SSD bytes


class Committed(Message):
    sealed: list[int]
    missing: list[int]  # not sealed, the tree lacks entries
    lost: list[int]  # directories that are not in the tree


class Rechecked(Message):
    missing: list[int]


class Verified(Message):
    checked_files: int = 0
    checked_bytes: int = 0
    bad: list[tuple[Entry, str]] = []
    uncompared: int = 0
    named: list[tuple[str, str]] = []  # some of the uncompared, with the reason


Answer = (
    Done | NotDone | ScanPart | Scanned | Copied | Hinted
    | Committed | Rechecked | Verified
)  # fmt: skip

# --- framing

# A worker gets jobs on standard input and answers on standard output.
JOBS, ANSWERS = 0, 1
_LENGTH = struct.Struct("<I")
READ_BYTES = 1024 * 1024
# A chunk of entries with 255-byte names is below 1 MiB; a longer message is a broken stream.
LONGEST = 64 * 1024 * 1024

T = TypeVar("T")


def pack(message: Message) -> bytes:
    body = kit.messages.encode(message).encode()
    return _LENGTH.pack(len(body)) + body


def send(descriptor: int, message: Message) -> None:
    """Write one message; blocks while the pipe is full. OSError when nobody reads it."""
    view = memoryview(pack(message))
    while view:
        view = view[os.write(descriptor, view) :]


def answer(message: Answer) -> None:
    """A worker's answer to its coordinator."""
    send(ANSWERS, message)


class Stream(Generic[T]):
    """Messages out of bytes as they arrive, for a reader that must not block."""

    def __init__(self, kind: type[T]) -> None:
        self._kind = kind
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[T]:
        """The messages that ``data`` completes. ValueError on a broken stream."""
        self._buffer += data
        found = []
        while len(self._buffer) >= _LENGTH.size:
            length = int(_LENGTH.unpack_from(self._buffer)[0])
            if length > LONGEST:
                raise ValueError(f"message of {length} bytes: the stream is broken")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                break
            found.append(kit.messages.decode(bytes(self._buffer[_LENGTH.size : end]), self._kind))
            del self._buffer[:end]
        return found


def answers() -> Stream[Answer]:
    return Stream(cast(Any, Answer))


def receive(descriptor: int, kind: type[T]) -> T | None:
    """The next message, None at the end of the stream; blocks. ValueError on a broken stream.

    For a worker, which gets a message only after it answered the one before.
    """
    stream = Stream(kind)
    while data := os.read(descriptor, READ_BYTES):
        if found := stream.feed(data):
            return found[0]
    return None


def next_job() -> Job | None:
    return receive(JOBS, cast(Any, Job))
