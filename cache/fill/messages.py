"""What the agent, a coordinator and its workers exchange.

The agent gives a coordinator one ``Task`` and then ``Command``s; the coordinator answers with
``Report``s. These are JSON lines (``kit.worker``), at most a few per second.

A coordinator gives each worker a ``Setup`` and then one ``Job`` at a time; the worker answers with
``Answer``s. These carry up to 256 entries each, thousands per second, and go through a pipe per
direction, each message behind its length. Names are str by ``os.fsdecode``; their lone surrogates
survive because the standard library writes the JSON (see ``kit.messages``).

What changes while a job runs goes through the control page instead, a page of memory that all of
them share: limits, cancel, and the counters of each worker.
"""

import mmap
import os
import struct
import time
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar, cast

import msgspec

import kit.messages
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
class Counts:
    """What a pass works through and how far it is."""

    files_total: int
    bytes_total: int
    files_done: int
    bytes_done: int
    failed: int


@dataclass(frozen=True)
class Progress:
    phase: str
    counts: Counts
    skipped: int
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


@dataclass(frozen=True)
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


# --- a coordinator and its workers


class Failure(NamedTuple):
    name: str
    reason: str
    lasting: bool  # trying again soon is pointless


class Link(NamedTuple):
    """A copied name of a hard-linked file; names with the same key are links of one file."""

    name: str
    key: str


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
    """The job is done: the start, Finish, Unseal or Prune."""


class NotDone(Message):
    """The job came to nothing."""

    error: str = ""
    errno: int | None = None
    cancelled: bool = False


class ScanPart(Message):
    """Some entries of a directory that is being scanned; more answers follow."""

    directory: int
    chunk: list[Entry]  # to be copied
    folders: list[Entry]  # subdirectories
    failed: list[Failure]
    made: int  # SSD bytes of new directories
    location: tuple[str, int] | None


class Scanned(Message):
    entries: int
    files: int
    bytes: int
    skipped: int  # sockets, fifos and devices
    stored: tuple[int, int, int]  # files, bytes, SSD bytes that the tree had already
    names: list[str]  # of its subdirectories


class Copied(Message):
    files: int
    bytes: int
    allocated: int
    failed: list[Failure]
    links: list[Link]
    left: list[str]  # names that were not tried
    full: bool  # stopped because the disk is full


class Hinted(Message):
    taken: dict[str, int]  # name: SSD bytes


class Committed(Message):
    sealed: list[int]
    missing: list[int]  # not sealed, the tree lacks entries
    lost: list[int]  # directories that are not in the tree


class Rechecked(Message):
    missing: list[int]


class Verified(Message):
    checked_files: int
    checked_bytes: int
    bad: list[tuple[Entry, str]]
    uncompared: int
    named: list[tuple[str, str]]  # some of the uncompared, with the reason


Answer = (
    Done | NotDone | ScanPart | Scanned | Copied | Hinted
    | Committed | Rechecked | Verified
)  # fmt: skip

# --- framing

# A worker gets jobs on standard input and answers on standard output.
JOBS, ANSWERS = 0, 1
_LENGTH = struct.Struct("<I")
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


def receive(descriptor: int, kind: type[T]) -> T | None:
    """The next message, None at the end of the stream; blocks. ValueError on a broken stream."""
    head = _exactly(descriptor, _LENGTH.size)
    if head is None:
        return None
    body = _exactly(descriptor, _length(head))
    return None if body is None else kit.messages.decode(body, kind)


def next_job() -> Job | None:
    return receive(JOBS, cast(Any, Job))


def _length(head: bytes) -> int:
    length = int(_LENGTH.unpack(head)[0])
    if length > LONGEST:
        raise ValueError(f"message of {length} bytes: the stream is broken")
    return length


def _exactly(descriptor: int, count: int) -> bytes | None:
    parts = []
    while count:
        part = os.read(descriptor, count)
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


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
            end = _LENGTH.size + _length(bytes(self._buffer[: _LENGTH.size]))
            if len(self._buffer) < end:
                break
            found.append(kit.messages.decode(bytes(self._buffer[_LENGTH.size : end]), self._kind))
            del self._buffer[:end]
        return found


def answers() -> Stream[Answer]:
    return Stream(cast(Any, Answer))


# --- the control page

_U64, _F64 = struct.Struct("<Q"), struct.Struct("<d")
_CANCEL, _CRAMPED, _BYTES_RATE, _FILES_RATE = 0, 8, 16, 24
_SLOT = 64
MOST_WORKERS = 65  # as many as settings allow, and the one that commits

_NAP_SECONDS = 0.05
# What a worker may copy at once after a rest, in seconds of its rate.
_BURST_SECONDS = 0.5


class Cancelled(Exception):
    """The pass is cancelled; what was copied so far is kept."""


class Control:
    """The control page. Each field has one writer: the coordinator, or the worker of a slot.

    offset  0  u64  cancel (1: stop soon)
    offset  8  u64  cramped (1: no room for more directories)
    offset 16  f64  bytes per second for one worker, 0: no limit
    offset 24  f64  files per second for one worker, 0: no limit
    offset 64 + 64 * n: worker n's   u64 files copied, u64 bytes copied, u64 signs of life
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._page = mmap.mmap(descriptor, _SLOT * (1 + MOST_WORKERS))

    @classmethod
    def create(cls) -> "Control":
        descriptor = os.memfd_create("nodeagent-control", 0)
        os.ftruncate(descriptor, _SLOT * (1 + MOST_WORKERS))
        return cls(descriptor)

    def set_limits(self, bytes_per_second: float, files_per_second: float) -> None:
        """Of each worker; 0 is no limit."""
        _F64.pack_into(self._page, _BYTES_RATE, bytes_per_second)
        _F64.pack_into(self._page, _FILES_RATE, files_per_second)

    def limits(self) -> tuple[float, float]:
        return (
            _F64.unpack_from(self._page, _BYTES_RATE)[0],
            _F64.unpack_from(self._page, _FILES_RATE)[0],
        )

    def cancel(self) -> None:
        _U64.pack_into(self._page, _CANCEL, 1)

    @property
    def cancelled(self) -> bool:
        return bool(_U64.unpack_from(self._page, _CANCEL)[0])

    def set_cramped(self, cramped: bool) -> None:
        """While it is set, a scan that would make a directory ends with ENOSPC."""
        _U64.pack_into(self._page, _CRAMPED, int(cramped))

    @property
    def cramped(self) -> bool:
        return bool(_U64.unpack_from(self._page, _CRAMPED)[0])

    def count(self, worker: int, files: int, size: int) -> None:
        """Add to the counters of a worker; only that worker may."""
        at = _SLOT * (1 + worker)
        _U64.pack_into(self._page, at, _U64.unpack_from(self._page, at)[0] + files)
        _U64.pack_into(self._page, at + 8, _U64.unpack_from(self._page, at + 8)[0] + size)

    def beat(self, worker: int) -> None:
        """A sign of life where nothing is counted: an entry was listed, a limit delays it."""
        at = _SLOT * (1 + worker) + 16
        _U64.pack_into(self._page, at, _U64.unpack_from(self._page, at)[0] + 1)

    def beats(self) -> int:
        slots = (_SLOT * (1 + worker) + 16 for worker in range(MOST_WORKERS))
        return sum(int(_U64.unpack_from(self._page, at)[0]) for at in slots)

    def counted(self) -> tuple[int, int]:
        """Files and bytes that all workers copied, uncommitted ones included."""
        slots = [_SLOT * (1 + worker) for worker in range(MOST_WORKERS)]
        files = sum(_U64.unpack_from(self._page, at)[0] for at in slots)
        return files, sum(_U64.unpack_from(self._page, at + 8)[0] for at in slots)


class Throttle:
    """The pace of one worker, which calls ``step`` with what it has just read."""

    def __init__(self, control: Control, worker: int) -> None:
        self._control = control
        self._worker = worker
        self._ready = [0.0, 0.0]  # when the next byte and the next file are due

    def step(self, files: int, size: int) -> None:
        """Count, and wait as the limits demand. Raises Cancelled."""
        self._control.count(self._worker, files, size)
        rates = self._control.limits()
        if rates != (0.0, 0.0):
            now = time.monotonic()
            for i, (rate, amount) in enumerate(zip(rates, (size, files), strict=True)):
                if rate > 0:
                    # Due times are at most a burst in the past: a rest does not add up.
                    self._ready[i] = max(self._ready[i], now - _BURST_SECONDS) + amount / rate
                else:
                    self._ready[i] = 0.0
            self._wait(rates)
        self.check()

    def _wait(self, rates: tuple[float, float]) -> None:
        while (left := max(self._ready) - time.monotonic()) > 0:
            if self._control.cancelled:
                return
            if self._control.limits() != rates:
                self._ready = [0.0, 0.0]  # these due times follow from the old limits
                return
            self.beat()
            time.sleep(min(left, _NAP_SECONDS))

    def beat(self) -> None:
        self._control.beat(self._worker)

    def check(self) -> None:
        """Raises Cancelled."""
        if self._control.cancelled:
            raise Cancelled
