"""The file system inside a block image: what it is, mounting it, replaying its journal.

The journal is never skipped: what a mount without it shows may be torn. A file system whose journal
must be replayed cannot be mounted from a read-only device; the kernel refuses it (EROFS). The local
copy may be written, so its journal is replayed there, by a writable mount that nobody sees.

Everything here runs in a child process: devices may hang.
"""

import contextlib
import errno
import os
from collections.abc import Iterator
from typing import NoReturn

import kit.errors
import kit.files
from linux import blkid, loop, mounts

SUPPORTED = ("ext4", "xfs")
_XFS_FLAGS = ("nouuid",)  # source and copy, or two snapshots, are mounted at the same time


class JournalError(Exception):
    """The journal must be replayed, and the device is read-only."""


def part_of(device: str, thing: str, partition: int) -> tuple[int, int]:
    """Offset and size in bytes of where the file system lies; 0 and 0: on all of the device.

    ``partition`` from 1, 0 for none. SourceError when there is no such partition; OSError.
    """
    if not partition:
        return 0, 0
    with kit.files.closing(os.open(device, os.O_RDONLY | os.O_CLOEXEC)) as descriptor:
        found = blkid.partition(descriptor, partition)
    if found is None:
        _refuse(thing, f"it has no partition {partition}", "correct source.partition")
    return found


def kind_of(device: str, thing: str, partition: int = 0) -> str:
    """Its type, one of ``SUPPORTED``. SourceError names what else is on it; OSError."""
    part = part_of(device, thing, partition)
    with kit.files.closing(os.open(device, os.O_RDONLY | os.O_CLOEXEC)) as descriptor:
        result, values = blkid.probe(descriptor, *part)
    if result < 0:
        ambivalent = result == blkid.AMBIVALENT
        if not ambivalent:
            raise OSError(-result, os.strerror(-result), device)
        _refuse(thing, "it has signatures of several file systems", "keep one (wipefs)")
    if result == blkid.NOTHING:
        _refuse(thing, "it is unformatted", "make a file system in it, then a new snapshot")
    found = values.get("TYPE", "")
    if "PTTYPE" in values and not found:
        _refuse(
            thing, f"it has partitions ({values['PTTYPE']})", "say which one in source.partition"
        )
    if found.startswith("crypto_"):
        _refuse(thing, f"it is encrypted ({found})", "use an image that is not")
    if found not in SUPPORTED:
        known = " and ".join(SUPPORTED)
        _refuse(
            thing, f"it holds {found}; {known} can be served", "copy the files into one of them"
        )
    return found


def _refuse(thing: str, cause: str, remedy: str) -> NoReturn:
    raise kit.errors.SourceError(thing, cause, remedy)


def mounted(device: str, thing: str, *, writable: bool = False) -> int:
    """A detached mount of the file system on ``device``; a descriptor, whose end unmounts it.

    JournalError, SourceError (see ``kind_of``) or OSError.
    """
    kind = kind_of(device, thing)
    flags = (_XFS_FLAGS if kind == "xfs" else ()) + (() if writable else ("ro",))
    attributes = 0 if writable else mounts.READ_ONLY_DATA
    try:
        return mounts.new_filesystem(kind, {"source": device}, flags, attributes)
    except OSError as error:
        if error.errno == errno.EROFS:
            raise JournalError(f"{thing}: its journal must be replayed first") from error
        raise


@contextlib.contextmanager
def _part(path: str, thing: str, partition: int, *, writable: bool = False) -> Iterator[str]:
    """A loop device that shows where the file system lies in a device or file."""
    offset, size = part_of(path, thing, partition)
    with loop.attached(path, read_only=not writable, offset=offset, size=size) as part:
        yield part


def mounted_part(device: str, thing: str, partition: int) -> int:
    """As ``mounted``, of a partition; the loop device that shows it ends with the mount."""
    if not partition:
        return mounted(device, thing)
    with _part(device, thing, partition) as part:
        return mounted(part, thing)


def is_clean(image: str, thing: str, partition: int = 0) -> bool:
    """Whether the copy ``image`` can be mounted as it is. SourceError, OSError."""
    try:
        with _part(image, thing, partition) as device:
            os.close(mounted(device, thing))
    except JournalError:
        return False
    return True


def replay(image: str, thing: str, partition: int = 0) -> None:
    """Have the kernel replay the journal of the copy ``image``; durable. SourceError, OSError."""
    with _part(image, thing, partition, writable=True) as device:
        os.close(mounted(device, thing, writable=True))
    with kit.files.closing(os.open(image, os.O_RDWR | os.O_CLOEXEC)) as descriptor:
        os.fsync(descriptor)


def view_of(image: str, partition: int = 0) -> int:
    """A detached read-only mount of the file system in ``image``; a descriptor. OSError."""
    thing = f"copy {image}"
    try:
        with _part(image, thing, partition) as device:
            return mounted(device, thing)
    except (JournalError, kit.errors.SourceError) as error:
        raise OSError(errno.EUCLEAN, str(error), image) from error
