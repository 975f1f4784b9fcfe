"""Large files of a generation: copied in extents, known by them, whole in the tree or not at all.

<generation>/parts/<key>     a large file that is not whole yet
             extents/<key>   its records (``cache.store.extents``), which stay when it is whole

The key stands for the path and one version of the file; a changed file has another one. The file
enters the tree by a rename when all of it is durable. There ``KEY`` names its records, and its
checksum is the one of its records, so that it can be made from the bytes alone.
"""

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence

import xxhash

import kit.files
import kit.formats
from cache.store import extents, tree
from cache.store.tree import Entry

# Bytes. A file above this is copied in extents.
LARGEST_SMALL = 64 * 1024 * 1024
FORMAT = 1
PARTS, RECORDS = "parts", "extents"
KEY = "trusted.nodeagent.extents"
_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC


def is_large(item: Entry) -> bool:
    return item.is_file and item.size > LARGEST_SMALL


def key_of(path: Sequence[str], item: Entry) -> str:
    """``path``: of its directory. A file name, always the same for this version of the file."""
    summed = xxhash.xxh3_128()
    for part in (*path, item.name):
        summed.update(os.fsencode(part) + b"\0")
    summed.update(f"/{item.size} {item.mtime_ns} {item.ctime_ns}".encode())
    return summed.hexdigest()


def _below(folder: str, key: str) -> str:
    return f"{folder}/{key}"


@contextlib.contextmanager
def part(generation: int, key: str, item: Entry) -> Iterator[extents.Extents]:
    """The part of a large file, made when it is new. ``generation``: descriptor of its folder.

    Data without records, or records without data, are worth nothing: both are made anew. OSError.
    """
    flags = _FLAGS | os.O_CREAT
    with (
        kit.files.closing(os.open(_below(PARTS, key), flags, 0o600, dir_fd=generation)) as data,
        kit.files.closing(
            os.open(_below(RECORDS, key), flags, 0o600, dir_fd=generation)
        ) as records,
    ):
        known = os.pread(records, extents.HEADER_BYTES, 0)
        page = _page(item.size, key)
        if os.fstat(data).st_size != item.size or known != page:
            os.ftruncate(data, 0)
            os.ftruncate(records, 0)
            os.ftruncate(data, item.size)
            os.fdatasync(data)
            os.pwrite(records, page, 0)
        yield extents.Extents(item.size, data, records)


@contextlib.contextmanager
def records_of(generation: int, stored: int) -> Iterator[extents.Extents | None]:
    """The extents of a stored large file; None when its records are lost.

    ``stored``: its descriptor, open for writing too where an extent is to be put.
    """
    size = os.fstat(stored).st_size
    with contextlib.ExitStack() as stack:
        found = None
        with contextlib.suppress(OSError):
            key = _key(stored)
            descriptor = os.open(_below(RECORDS, key), _FLAGS, dir_fd=generation)
            records = stack.enter_context(kit.files.closing(descriptor))
            if os.pread(records, extents.HEADER_BYTES, 0) == _page(size, key):
                found = extents.Extents(size, stored, records)
        yield found


def make_records(generation: int, stored: int, records: bytes) -> None:
    """Those of a stored file whose own were lost, or are in another generation. OSError."""
    key = _key(stored)
    flags = _FLAGS | os.O_CREAT | os.O_TRUNC
    with kit.files.closing(os.open(_below(RECORDS, key), flags, 0o600, dir_fd=generation)) as made:
        page = _page(os.fstat(stored).st_size, key)
        extents.write_all(made, memoryview(page + records), 0)


def _key(stored: int) -> str:
    """OSError."""
    key = os.getxattr(stored, KEY).decode("ascii", "replace")
    if "/" in key:
        raise OSError(errno.EINVAL, "not the name of a file")
    return key


def _page(size: int, key: str) -> bytes:
    return extents.header({kit.formats.KEY: FORMAT, "size": size, "version": key})


def is_stored_so(stored: int) -> bool:
    """Whether an open file of the tree is known by its extents."""
    try:
        return bool(os.getxattr(stored, KEY))
    except OSError:
        return False


def present(generation: int, key: str, item: Entry) -> int:
    """SSD bytes of a part, 0 when there is none."""
    try:
        status = os.stat(_below(PARTS, key), dir_fd=generation, follow_symlinks=False)
    except FileNotFoundError:
        return 0
    return status.st_blocks * 512 if status.st_size == item.size else 0


def used(generation: int) -> int:
    """SSD bytes of what is not in the tree yet, and of all records."""
    total = 0
    for folder in (PARTS, RECORDS):
        with contextlib.suppress(FileNotFoundError), tree.opened(generation, [folder]) as found:
            for name in os.listdir(found):
                with contextlib.suppress(FileNotFoundError):
                    total += os.stat(name, dir_fd=found, follow_symlinks=False).st_blocks * 512
    return total


def discard(generation: int, key: str) -> None:
    """Delete a part and its records. The records go first: without them the part is nothing."""
    for folder in (RECORDS, PARTS):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(_below(folder, key), dir_fd=generation)


def forget(generation: int, directory: int, name: str, *, but: str = "") -> None:
    """Delete the records of a stored file that is about to go, unless they are those of ``but``.

    Nothing when it is no large file, or has other names.
    """
    path = f"/proc/self/fd/{directory}/{name}"
    with contextlib.suppress(OSError):
        key = os.getxattr(path, KEY, follow_symlinks=False).decode("ascii", "replace")
        single = os.stat(name, dir_fd=directory, follow_symlinks=False).st_nlink == 1
        if key != but and single and "/" not in key:
            os.unlink(_below(RECORDS, key), dir_fd=generation)


def discard_parts(generation: int) -> None:
    """Delete all of them: nobody goes on with them."""
    with contextlib.suppress(FileNotFoundError), tree.opened(generation, [PARTS]) as found:
        for key in os.listdir(found):
            discard(generation, key)
