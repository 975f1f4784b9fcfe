"""A published manifest: all entries of one snapshot in one file, so that nodes need not list it.

One node that has the snapshot complete writes the file; the others read it instead of asking the
MDS for each directory. It is a stream:

    magic    a line
    header   a line of JSON: format, identity, directories, entries
    records  the length (4 bytes, little-endian) and msgpack of a ``Record``: up to 256 entries
             of one directory, packed as ``cache.store.manifest`` does, at most its LARGEST bytes; a
             directory comes after the one that it is in, its records one after the other
    end      length 0, then BLAKE2b-256 of everything before

The identity is what no other snapshot has: cluster, file system, inode of the root, snapshot id.

Invariant: nothing of the stream is used before its last byte agreed (``Held`` is made whole or not
at all), so a file that was cut, damaged or is still being written is as good as none.
"""

import contextlib
import errno
import fcntl
import hashlib
import itertools
import json
import os
import random
import sqlite3
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

import kit.errors
import kit.files
from cache.store import identity, index, manifest, tree
from cache.store.tree import Entry
from ceph.protocol import Access

MAGIC = b"nodeagent manifest of a snapshot\n"
FORMAT = 1
HELD = "published.sqlite"  # beside the index, while a fill needs it
LONGEST_HEADER = 2**16
SAMPLE = 16  # directories that are listed to compare them, none of more entries than this:
MOST_COMPARED = 4096
MARKS = (identity.CLUSTER, identity.FILESYSTEM, identity.ROOT, identity.SNAPSHOT)
_FILL_AGAIN = (
    "fill it again with this agent ('nodeagent dataset remove NAME', then 'nodeagent dataset warm "
    "NAME'), then publish"
)
_LENGTH = struct.Struct("<I")
_DIGEST_BYTES = 32


class ManifestError(ValueError):
    """The file cannot be used: ``str`` is why, ``remedy`` what an operator can do."""

    def __init__(self, cause: str, remedy: str = "publish it again") -> None:
        super().__init__(cause)
        self.remedy = remedy


class Record(msgspec.Struct, array_like=True, frozen=True):
    """Some entries of one directory."""

    path: list[bytes]  # names from the root
    entries: int  # that all records of the directory have together
    skipped: int  # sockets, fifos and devices, which it has beside them
    pool: str  # where the objects of its files are; '' when that is not known
    part: bytes


@dataclass(frozen=True)
class Header:
    identity: dict[str, str]
    directories: int
    entries: int


# --- writing


def write(
    target: str, folder: str, marks: dict[str, str], agents: Sequence[str] = ()
) -> dict[str, int]:
    """Publish the manifest of the complete generation ``folder`` as the file ``target``.

    In a child process. The file appears whole, in the place of another manifest, and not below
    the directories ``agents``. The answer counts ``directories``, ``entries``, ``bytes``, and as
    ``through_mount`` the files that every node reads through its mount. RefusedError when it cannot
    be published; OSError.
    """
    wanted = {key: marks[key] for key in MARKS if key in marks}
    try:
        if len(wanted) != len(MARKS):
            raise ManifestError(
                "the source shows no ids of cluster, file system, directory and snapshot",
                "publish a snapshot of a CephFS, where python3-cephfs is installed",
            )
        return _replace(target, folder, wanted, agents)
    except ManifestError as error:
        raise kit.errors.RefusedError(f"manifest {target}", str(error), error.remedy) from error


def _replace(
    target: str, folder: str, marks: dict[str, str], agents: Sequence[str]
) -> dict[str, int]:
    parent, name = os.path.split(target)
    fresh = f".{name}.new"
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tree.opened_root(parent))
        _refuse_within(directory, agents)
        if (older := _manifest_at(directory, name)) is not None:
            os.close(older)
        file = os.fdopen(_new(directory, fresh), "wb")
        stack.enter_context(file)  # and so its lock, until the file has its name
        try:
            os.fchmod(file.fileno(), 0o644)  # whatever the umask
            written = _write(folder, marks, file)
            file.flush()
            os.fsync(file.fileno())
            os.rename(fresh, name, src_dir_fd=directory, dst_dir_fd=directory)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(fresh, dir_fd=directory)
            raise
        os.fsync(directory)
    return written


def _refuse_within(directory: int, places: Sequence[str]) -> None:
    where = Path(os.readlink(f"/proc/self/fd/{directory}"))  # as it is, past symbolic links
    for place in map(os.path.realpath, places):
        if where.is_relative_to(place):
            raise ManifestError(f"it would be in {place}", "choose a path outside of it")


def _manifest_at(directory: int, name: str, *, may_be_empty: bool = False) -> int | None:
    """A descriptor of the manifest of this name, None when there is nothing. ManifestError."""
    try:
        file = tree.open_file(directory, name)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise _no_manifest(name) from error
    begins = os.pread(file, len(MAGIC), 0)
    if begins == MAGIC or (may_be_empty and not begins):
        return file
    os.close(file)
    raise _no_manifest(name)


def _no_manifest(name: str) -> ManifestError:
    return ManifestError(
        f"{name!r} is something that is no manifest", "remove it, or choose another path"
    )


def _new(directory: int, name: str) -> int:
    """A new file with a lock that lasts as long as its descriptor, for writing.

    What a publish left that was killed is taken away; nobody has a lock on that. ManifestError.
    """
    left = _manifest_at(directory, name, may_be_empty=True)
    if left is not None:
        with kit.files.closing(left):
            if os.fstat(left).st_uid != 0:
                raise ManifestError(f"{name!r} beside it is not root's", "remove that")
            _lock(left)
            if not _is_named(left, directory, name):
                raise _busy()  # another publish was quicker
            os.unlink(name, dir_fd=directory)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        file = os.open(name, flags, 0o644, dir_fd=directory)
    except FileExistsError as error:
        raise _busy() from error
    try:
        _lock(file)
    except BaseException:
        os.close(file)
        raise
    return file


def _is_named(file: int, directory: int, name: str) -> bool:
    try:
        found = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(found, os.fstat(file))


def _lock(file: int) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise _busy() from error


def _busy() -> ManifestError:
    return ManifestError("it is being published already", "wait until that has ended")


def _write(folder: str, marks: dict[str, str], file: BinaryIO) -> dict[str, int]:
    """ManifestError when the index cannot tell all, OSError."""
    path = Path(folder) / index.NAME
    if not path.exists():
        raise ManifestError("its index is lost", _FILL_AGAIN)
    try:
        return _copy(path, marks, file)
    except sqlite3.Error as error:
        raise ManifestError(f"its index is damaged ({error})", _FILL_AGAIN) from error


def _copy(path: Path, marks: dict[str, str], file: BinaryIO) -> dict[str, int]:
    counts = {"directories": 0, "entries": 0, "through_mount": 0}
    with (
        contextlib.closing(index.Index.read_only(path)) as known,
        known.transaction(),  # all of it as it is now
    ):
        totals = known.totals()
        total = totals.files + totals.directories - 1
        header = {"format": FORMAT, "identity": marks, "directories": totals.directories}
        head = MAGIC + json.dumps(header | {"entries": total}).encode() + b"\n"

        def every() -> Iterator[Record]:
            for number in known.every_directory():
                counts["directories"] += 1
                counts["entries"] += known.directory(number).entries
                for record, others in _records(known, number):
                    counts["through_mount"] += others
                    yield record

        size = seal(file, head, every())
        if (counts["directories"], counts["entries"]) != (totals.directories, total):
            raise _changed()
    return counts | {"bytes": size}


def seal(file: BinaryIO, head: bytes, records: Iterable[Record]) -> int:
    """Write the stream of these records behind ``head``; its bytes."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    size = 0

    def put(data: bytes) -> None:
        nonlocal size
        digest.update(data)
        size += file.write(data)

    put(head)
    for record in records:
        data = msgspec.msgpack.encode(record)
        put(_LENGTH.pack(len(data)) + data)
    put(_LENGTH.pack(0))
    return size + file.write(digest.digest())


def _changed() -> ManifestError:
    return ManifestError(
        "its index does not know all of its files: it was made again after a loss, or it changes",
        _FILL_AGAIN,
    )


def _records(known: index.Index, number: int) -> Iterator[tuple[Record, int]]:
    """Of one directory, each with the number of its files that are read through mounts."""
    directory = known.directory(number)
    path = [os.fsencode(name) for name in known.path(number)]
    pool = directory.location[0] if directory.location else ""
    found = 0
    items: list[manifest.Item] = []

    def record() -> tuple[Record, int]:
        part = manifest.pack(items)
        others = sum(not _past_the_mount(item.entry) for item in items)
        items.clear()
        return Record(path, directory.entries, directory.skipped, pool, part), others

    for item in _items(known, number):
        found += 1
        items.append(item)
        if len(items) == index.CHUNK_ENTRIES:
            yield record()
    if items or not found:
        yield record()
    if found != directory.entries:
        raise _changed()


def _items(known: index.Index, number: int) -> Iterator[manifest.Item]:
    for entry in known.subdirectories(number):
        yield manifest.Item(entry, manifest.State.AT_SOURCE)
    for item in known.kept(number):
        yield manifest.Item(item.entry, manifest.State.AT_SOURCE, item.checksum)


def _past_the_mount(entry: Entry) -> bool:
    return entry.is_directory or (entry.is_file and not entry.xattrs and entry.nlink == 1)


# --- reading


def read(file: BinaryIO) -> tuple[Header, Iterator[Record]]:
    """The header, and the records in order. ManifestError, OSError.

    The iterator raises at the end of a file that is damaged: nothing counts before it has ended.
    """
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)

    def take(count: int) -> bytes:
        data = file.read(count)
        if len(data) != count:
            raise ManifestError("it is cut off")
        digest.update(data)
        return data

    found = file.read(len(MAGIC))
    if found != MAGIC:
        raise ManifestError("it is cut off" if MAGIC.startswith(found) else "it is no manifest")
    digest.update(MAGIC)
    line = file.readline(LONGEST_HEADER)
    digest.update(line)
    header = _header(line)
    return header, _stream(header, take, digest.digest, file)


def _header(line: bytes) -> Header:
    if not line.endswith(b"\n"):
        raise ManifestError("it is cut off")
    try:
        fields = json.loads(line)
        known = fields["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise ManifestError("its header is damaged") from error
    if known != FORMAT:
        raise ManifestError(
            f"it has format {known!r}, this agent knows {FORMAT}",
            "publish it with the version of the agent that the nodes run",
        )
    try:
        return msgspec.convert(fields, Header)
    except msgspec.ValidationError as error:
        raise ManifestError("its header is damaged") from error


def _stream(
    header: Header, take: Callable[[int], bytes], digest: Callable[[], bytes], file: BinaryIO
) -> Iterator[Record]:
    while length := _LENGTH.unpack(take(_LENGTH.size))[0]:
        if length > manifest.LARGEST:
            raise ManifestError("it is damaged: a record is too long")
        data = take(length)
        try:
            record = msgspec.msgpack.decode(data, type=Record)
        except (msgspec.MsgspecError, ValueError) as error:
            raise ManifestError("it is damaged: a record cannot be read") from error
        yield record
    if file.read(_DIGEST_BYTES + 1) != digest():
        raise ManifestError("its checksum is wrong")


def entries_of(record: Record) -> list[Entry]:
    """ManifestError for names that no directory has, and for what is damaged."""
    try:
        found = [item.entry for item in manifest.unpack(record.part)]
    except ValueError as error:
        raise ManifestError(str(error)) from error
    names = [*record.path, *(os.fsencode(entry.name) for entry in found)]
    for name in names:
        if not 0 < len(name) <= 255 or b"/" in name or b"\0" in name or name in (b".", b".."):
            raise ManifestError(f"it has the name {name!r}, which no directory can have")
    for entry in found:
        if not (entry.is_file or entry.is_link or entry.is_directory):
            raise ManifestError(f"it says that {entry.name!r} is neither file, link nor directory")
    return found


# --- at hand while a fill needs it


@dataclass(frozen=True)
class Listed:
    """One directory as the manifest has it."""

    skipped: int
    pool: str
    entries: Iterator[Entry]

    def location(self, access: Access | None) -> tuple[str, int] | None:
        """Where the objects of its files are, in the snapshot that ``access`` is for."""
        known = access is not None and access.snapshot > 0 and self.pool
        return (self.pool, access.snapshot) if access is not None and known else None


class Held:
    """A manifest that agreed to its last byte, by directory; a file in the generation's folder."""

    def __init__(self, path: Path) -> None:
        """OSError, sqlite3.Error when it is not there."""
        uri = f"{path.absolute().as_uri()}?mode=ro&immutable=1"
        self._db = sqlite3.connect(uri, uri=True, isolation_level=None)

    @staticmethod
    def make(
        path: Path, header: Header, records: Iterator[Record], beat: Callable[[], None],
        *, allowance: int,
    ) -> list[list[str]]:  # fmt: skip
        """Write the file; some directories by chance, the root first. ManifestError, OSError.

        Takes at most twice the bytes that the manifest has. With more than ``allowance`` bytes it
        is a sqlite3.Error, SQLITE_FULL. ``beat`` is called for every record.
        """
        path.unlink(missing_ok=True)
        chance, directories = random.Random(), 0
        sample: list[list[bytes]] = []
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
            db.execute("PRAGMA journal_mode=OFF")  # after a crash it is made again
            db.execute("PRAGMA synchronous=OFF")
            (page,) = db.execute("PRAGMA page_size").fetchone()
            db.execute(f"PRAGMA max_page_count={max(1, allowance // page)}")
            # Not WITHOUT ROWID: there rows of more than a quarter of a page take a page each.
            db.execute(
                "CREATE TABLE records (path BLOB, number INTEGER, record BLOB,"
                " UNIQUE (path, number))"
            )
            db.execute("BEGIN")
            number, before = 0, None
            for record in records:
                key = _key(record.path)
                number = number + 1 if key == before else 0
                row = (key, number, msgspec.msgpack.encode(record))
                try:
                    db.execute("INSERT INTO records VALUES (?, ?, ?)", row)
                except sqlite3.IntegrityError as error:
                    raise ManifestError("it has a directory twice") from error
                if key != before and record.entries <= MOST_COMPARED:
                    # Each of those before has the same chance to be kept (a reservoir).
                    at = len(sample) if len(sample) < SAMPLE else chance.randint(1, directories)
                    sample[at : at + 1] = [record.path] if at < SAMPLE else []
                directories += key != before
                before = key
                beat()
            if directories != header.directories:
                raise ManifestError("it lacks directories")
            db.execute("COMMIT")
        return [[os.fsdecode(name) for name in path] for path in sample]

    def close(self) -> None:
        self._db.close()

    def directory(self, path: Sequence[str]) -> Listed:
        """ManifestError when it does not have the directory."""
        wanted = [os.fsencode(name) for name in path]
        records = self._records(_key(wanted))
        first = next(records, None)
        if first is None or first.path != wanted:
            raise ManifestError(f"it lacks the directory {'/'.join(path)!r}")

        def entries() -> Iterator[Entry]:
            count = 0
            for record in itertools.chain([first], records):
                found = entries_of(record)
                count += len(found)
                yield from found
            if count != first.entries:
                raise ManifestError(f"it lacks entries of the directory {'/'.join(path)!r}")

        return Listed(first.skipped, first.pool, entries())

    def _records(self, key: bytes) -> Iterator[Record]:
        query = "SELECT record FROM records WHERE path = ? ORDER BY number"
        for (record,) in self._db.execute(query, (key,)):
            yield msgspec.msgpack.decode(record, type=Record)


def _key(path: Sequence[bytes]) -> bytes:
    return b"".join(b"/" + name for name in path)
