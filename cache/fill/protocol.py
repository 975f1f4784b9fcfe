"""What the agent, a coordinator and its workers exchange.

The agent gives a coordinator one ``Task`` and then ``Command``s; the coordinator answers with
``Report``s. These are JSON lines (``kit.line_worker``), at most a few per second.

A coordinator gives each worker a ``Setup`` and then one ``Job`` at a time; the worker answers with
``Answer``s. These carry up to 256 entries each, thousands per second, and go through a pipe per
direction, each behind its length. Names are str by ``os.fsdecode``; their lone surrogates
survive because the standard library writes the JSON (see ``kit.messages``).

What changes while a job runs goes through the control page instead (``cache.fill.control``).
"""

import dataclasses
import os
import struct
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, NamedTuple, TypeVar, cast

import msgspec

import kit.messages
from cache.store import subset
from cache.store.manifest import Counts
from cache.store.tree import Entry
from ceph.protocol import Access, ImageAccess

Phase = Literal["", "scanning", "filling", "verifying", "evicting", "withdrawing"]  # of a pass

# What a verify has its workers do, and what they find.


class Verify(msgspec.Struct, tag=True, kw_only=True):
    """Read the files of a directory against their checksums, on request against the source."""

    directory: int
    path: list[str]
    entries: int | None  # that it must have, when it is sealed
    against_source: bool
    reachable: bool = False  # lost names can be told from the source
    relist: bool = False  # the index lost it: tell what the tree has
    after: str = ""  # names up to this one were read
    patience: float = 0.0  # seconds until the rest is left for another job; 0: none
    afresh: bool = False  # nothing that memory has of the files is believed
    ahead: list[str] = []  # as in the task
    also: list[str] = []


class Relisted(msgspec.Struct, kw_only=True):
    """What the tree has in a directory, for an index that lost it."""

    opaque: bool
    entries: int = 0
    files: int = 0
    bytes: int = 0
    allocated: int = 0  # SSD bytes
    folders: list[Entry] = []


class Verified(msgspec.Struct, tag=True, kw_only=True):
    checked_files: int = 0
    checked_bytes: int = 0
    shared_files: int = 0  # those that another generation's scrub reads
    fault: str = ""  # of the directory itself: it cannot be read, or names are lost
    unreadable: bool = False  # nothing of the directory could be read
    listed: Relisted | None = None
    bad: list[tuple[Entry, str]] = []
    also: list[tuple[int, str]] = []  # bad ones that others have, too: which one, and the name
    repaired: list[tuple[str, int]] = []  # large files; how many extents were bad
    uncompared: int = 0
    named: list[tuple[str, str]] = []  # some of the uncompared, with the reason
    folders: int = 0  # subdirectories that the tree has
    left_after: str | None = None  # names after this one were left
    cached: int = 0  # files that could be read through the page cache only


# What fills, evictions and verifies leave behind.


@dataclass(frozen=True)
class FillEnd:
    """Of the generation: its SSD bytes and inodes, and what is left to copy."""

    used: int
    left_files: int
    left_bytes: int
    shared: int = 0  # SSD bytes that the generation before has too
    shared_files: int = 0
    inodes: int = 0
    room: int = 0  # SSD bytes that are left; 0 when something of the share did not fit
    short: bool = False  # something of the share did not fit
    outside: int = 0  # symbolic links that lead out of the tree
    leads_out: str = ""  # one of them

    def record(self) -> dict[str, Any]:
        """What generation.json keeps of it."""
        kept = dataclasses.asdict(self)
        del kept["room"], kept["short"]
        return kept


@dataclass(frozen=True)
class EvictEnd:
    """``fill``: as after a fill."""

    fill: FillEnd
    share: int  # that fits
    beyond: int  # stored files that it takes out
    evicted: int  # files, or marks, that were taken out


@dataclass
class VerifyEnd:
    checked_files: int = 0
    checked_bytes: int = 0
    bad: int = 0
    not_compared: int = 0
    replaced: int = 0
    unreplaced: int = 0
    shared_files: int = 0  # that were not read, because another generation's scrub reads them
    also: dict[str, int] = field(default_factory=dict)  # bad ones of other generations, by folder

    def counts(self) -> dict[str, int]:
        """As the API has them."""
        shown = ("checked_files", "checked_bytes", "bad", "not_compared", "replaced")
        return {name: getattr(self, name) for name in shown}


# --- the agent and a coordinator


@dataclass(frozen=True)
class Least:
    """What stays free, whatever the settings say: of bytes and of inodes a share and an amount."""

    share: float = 0.0
    bytes: int = 0
    inodes_share: float = 0.0
    inodes: int = 0


@dataclass(frozen=True)
class Limits:
    """How hard a pass may work and how much it may store."""

    workers: int
    bytes_per_second: int  # 0: no limit
    files_per_second: int  # 0: no limit
    budget: int
    reserve: float
    others: int  # SSD bytes of the store that are not this dataset's
    inodes: int = 2**62  # as ``budget`` and ``others``
    other_inodes: int = 0
    wanted: int = 0  # SSD bytes that are to be left over, for another dataset
    wanted_inodes: int = 0
    least: Least = field(default_factory=Least)  # beside ``reserve``; the larger of both counts
    disk: bool = True  # what it has free counts, beside the budgets
    own: bool = False  # the budget is the dataset's own, which ends before the node's
    own_inodes: bool = False


@dataclass(frozen=True, kw_only=True)
class Task:
    """What every kind of pass needs to know."""

    generation: str  # its folder
    source: str  # directory to read
    stamp: str  # of the source's root when it was reached; '' accepts any
    immutable: bool  # the source is a snapshot
    limits: Limits
    beside: bool = False  # the generation that it shares files with is stored, too


@dataclass(frozen=True)
class Manifest:
    """Where a published manifest may be, and what it must be of."""

    folder: str  # an absolute path; symbolic links on the way to it are followed
    path: list[str]  # names below it; no link is followed
    marks: dict[str, str]  # of the source (cache.store.identity)

    def __str__(self) -> str:
        return "/".join((self.folder.rstrip("/"), *self.path))


@dataclass(frozen=True, kw_only=True)
class FillTask(Task):
    native: Access | None = None  # reads past the mount are possible
    mounted: list[str] = field(default_factory=list)  # mount points inside the source
    used: int = 0  # SSD bytes of the generation as last known
    inodes: int = 0  # the same
    share: int = subset.ALL  # of the files that are kept
    before: str = ""  # folder of the generation whose unchanged files are shared
    before_made_ns: int = 0  # when its snapshot was made
    manifest: Manifest | None = None  # read instead of listing directories


@dataclass(frozen=True, kw_only=True)
class VerifyTask(Task):
    against_source: bool
    reachable: bool  # bad files can be replaced from the source
    scrub: str = ""  # the round that it continues (``store.cursor``); '': all at once
    # Folders of other generations that may have the same files, by links. ``ahead``: their own
    # scrub reads what they share with this one. ``also``: what is bad is bad there, too.
    ahead: list[str] = field(default_factory=list)
    also: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class WithdrawTask(Task):
    part: str  # "marks" or "files"; "hide": files that stay on the list, for want of a source


@dataclass(frozen=True, kw_only=True)
class BlockTask:
    """Fill or verify the local copy of a block image (``cache.fill.blocks``)."""

    generation: str  # its folder
    access: ImageAccess | None  # None: the source does not answer, verify only
    limits: Limits
    partly: bool = False  # jobs can read a part from the copy and the rest from the source


AnyTask = Task | BlockTask


@dataclass(frozen=True)
class Command:
    """What the agent tells a running pass."""

    limits: Limits | None = None
    cancel: bool = False


@dataclass(frozen=True)
class Progress:
    phase: Phase
    counts: Counts  # what it works through and how far it is
    sealed: int
    copied_files: int  # by the workers, before they are committed
    copied_bytes: int
    beats: int  # signs of life of the workers
    commits: int
    used: int  # SSD bytes of the generation
    syncing: bool  # waits for the SSD
    shared: int = 0  # those of ``used`` that the generation before has too


@dataclass(frozen=True)
class End:
    """``result``: complete, partial, good, bad, withdrawn, chosen, evicted, cancelled or failed;
    refused when the source does not let root open something, crossed when it mounts another file
    system where one is opened (``why``: the path)."""

    result: str
    why: str = ""
    fill: FillEnd | None = None
    verify: VerifyEnd | None = None
    evict: EvictEnd | None = None
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
    refused: bool = False  # the source does not let root open it


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
    shared: int = 0  # those of files that the generation before has too
    shared_files: int = 0


class Message(msgspec.Struct, tag=True, kw_only=True):
    """Base of what goes through the pipes."""


class Setup(Message):
    source: str
    stamp: str
    generation: str
    immutable: bool
    native: Access | None
    before: str = ""  # as in the task
    before_made_ns: int = 0


class Scan(Message):
    """List a directory of the source and make its subdirectories in the tree."""

    directory: int
    path: list[str]
    mounted: list[str]  # names that are mount points
    again: bool  # look for what the tree has already
    extras: bool  # remove from the tree what the source lacks
    published: bool = False  # the published manifest tells the entries, not the source
    allowance: int = 2**62  # new directories; with more to make it ends cancelled


class Copy(Message):
    """Copy files and links of one directory into the staging folder ``folder``."""

    folder: str
    path: list[str]
    entries: list[Entry]
    location: tuple[str, int] | None = None
    patient: bool = False  # wait for objects that did not answer before


class Extents(Message):
    """Copy extents of a large file into its part, and make them durable there."""

    key: str  # of the part
    path: list[str]
    entry: Entry
    extents: list[int]
    patient: bool = False  # wait for objects that did not answer before


class Whole(Message):
    """Every extent of a large file is in its part: give it what else the source's file has."""

    key: str
    path: list[str]
    entry: Entry


class StagedFolder(Message):
    """A staging folder to rename into the tree."""

    folder: str
    directory: int
    path: list[str]
    links: list[Link]
    mtime_ns: int  # of the directory
    part: str = ""  # instead of a folder: a large file, by its key
    name: str = ""  # of that file


class Listed(NamedTuple):
    """A directory, how many entries it must have, and the time that it gets with its seal."""

    directory: int
    path: list[str]
    entries: int
    mtime_ns: int = 0


class Commit(Message):
    """Make staged files durable, rename them into the tree, then seal directories."""

    folders: list[StagedFolder]
    seals: list[Listed]


class Recheck(Message):
    """Look for the marks and the entries of directories that the index says are sealed."""

    directories: list[Listed]


class Finish(Message):
    """Delete the spare links and make the whole generation durable."""


class Fetch(Message):
    """Read a published manifest into the generation's folder, and compare a sample of it."""

    manifest: Manifest
    allowance: int  # SSD bytes that it may take


Job = Scan | Copy | Extents | Whole | Commit | Recheck | Finish | Verify | Fetch


class Done(Message):
    """The start, or a job without a result, is done."""


class NotDone(Message):
    """The job came to nothing."""

    error: str = ""
    errno: int | None = None
    cancelled: bool = False
    refused: bool = False  # the source does not let root open it


class ScanPart(Message):
    """Some entries of a directory that is being scanned; more answers follow."""

    directory: int
    chunk: list[Entry] = []  # to be copied
    stored: list[tuple[Entry, str]] = []  # the tree has them already; their checksums
    folders: list[Entry] = []  # subdirectories
    unmade: list[str] = []  # those that are not in the tree: mount points, failures
    failed: list[Failure] = []
    made: int = 0  # SSD bytes of new directories
    new: int = 0  # how many
    location: tuple[str, int] | None = None  # where the objects of its files are


class Scanned(Message):
    stored: Stored
    entries: int = 0
    files: int = 0
    bytes: int = 0
    skipped: int = 0  # sockets, fifos and devices
    outside: int = 0  # symbolic links that lead out of the tree
    leads_out: str = ""  # the name of one
    note: str = ""  # for the log


SUM = 32  # characters of a checksum


class Copied(Message):
    files: int = 0
    bytes: int = 0
    allocated: int = 0
    failed: list[Failure] = []
    links: list[Link] = []
    sums: str = ""  # of each entry of the job 32 characters: its checksum, or spaces
    left: list[str] = []  # names that were not tried
    silent: list[str] = []  # those of them whose objects did not answer at once
    full: bool = False  # stopped because the disk is full
    objects: int = 0  # files that were read past the mount, by their objects
    newer: list[Entry] = []  # files that had changed since they were listed, as they were copied
    note: str = ""  # for the log


class ExtentsCopied(Message):
    left: list[int] = []  # not tried
    silent: list[int] = []  # their objects did not answer at once
    written: int = 0  # SSD bytes at most
    objects: int = 0  # extents that were read past the mount
    full: bool = False  # stopped because the disk is full
    failed: Failure | None = None  # the file cannot be copied
    changed: bool = False  # for the source has another one now
    note: str = ""  # for the log


class Completed(Message):
    """A large file is ready to enter the tree, or failed."""

    checksum: str = ""
    allocated: int = 0
    link: Link | None = None  # its name is the part's
    failed: Failure | None = None
    changed: bool = False


class Committed(Message):
    sealed: list[int]
    missing: list[int]  # not sealed, the tree lacks entries
    lost: list[int]  # directories that are not in the tree


class Rechecked(Message):
    missing: list[int]


class Fetched(Message):
    why: str = ""  # it cannot be used
    remedy: str = ""
    directories: int = 0
    bytes: int = 0  # SSD bytes that it takes


Answer = (
    Done | NotDone | ScanPart | Scanned | Copied | ExtentsCopied | Completed
    | Committed | Rechecked | Verified | Fetched
)  # fmt: skip

# --- the pipes

# A worker gets jobs on standard input and answers on standard output.
JOBS, ANSWERS = 0, 1
_LENGTH = struct.Struct("<I")
READ_BYTES = 1024 * 1024
# A chunk of entries with 255-byte names is below 1 MiB; a longer message is a broken stream.
LONGEST = 64 * 1024 * 1024

T = TypeVar("T")


def pack(message: msgspec.Struct) -> bytes:
    body = kit.messages.encode(message).encode()
    return _LENGTH.pack(len(body)) + body


def send(descriptor: int, message: msgspec.Struct) -> None:
    """Write one message; blocks while the pipe is full. OSError when nobody reads it."""
    view = memoryview(pack(message))
    while view:
        view = view[os.write(descriptor, view) :]


class MessageStream(Generic[T]):
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


def receive(descriptor: int, kind: type[T]) -> T | None:
    """The next message, None at the end of the stream; blocks. ValueError on a broken stream.

    For a worker, which gets a message only after it answered the one before.
    """
    stream = MessageStream(kind)
    while data := os.read(descriptor, READ_BYTES):
        if found := stream.feed(data):
            return found[0]
    return None


def answer(message: Answer) -> None:
    """A worker's answer to its coordinator."""
    send(ANSWERS, message)


def answers() -> MessageStream[Answer]:
    return MessageStream(cast(Any, Answer))


def next_job() -> Job | None:
    return receive(JOBS, cast(Any, Job))
