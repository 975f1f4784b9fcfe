"""Small files: read bounded, replaced whole, appended to, locked; descriptors that are closed
again; sockets by their paths."""

import contextlib
import errno
import fcntl
import json
import os
import stat
import time
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import kit.errors

LARGEST_LOG = 2**20  # bytes; then the file becomes NAME.1 and a new one begins
LARGEST_SMALL = 2**20  # bytes of a file of settings, certificates or logins (a ConfigMap)


@contextlib.contextmanager
def closing(descriptor: int) -> Iterator[int]:
    """The descriptor while the block runs."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def new(path: Path, option: str) -> Iterator[IO[bytes]]:
    """A file of its owner alone, which did not exist, and is gone again when the block fails.
    ``option``: of the command that names it. RefusedError, HostError."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError as error:
        remedy = f"remove it, or name another with {option}"
        raise kit.errors.RefusedError(str(path), "it exists", remedy) from error
    except OSError as error:
        cause = f"cannot be written ({error.strerror})"
        raise kit.errors.HostError(str(path), cause, f"name another with {option}") from error
    try:
        with os.fdopen(descriptor, "wb") as stream:
            yield stream
    except BaseException:
        path.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def regular(path: str | Path) -> Iterator[str]:
    """A path of the regular file ``path`` that leads nowhere else while the block runs.

    OSError, with the cause as its text, for anything else, which is not opened: a pipe waits for a
    writer, and opening a device may begin what it does. Links are followed, as those of a
    Kubernetes Secret are.
    """
    with closing(os.open(path, os.O_PATH | os.O_CLOEXEC)) as found:
        if not stat.S_ISREG(os.fstat(found).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        yield f"/proc/self/fd/{found}"


@contextlib.contextmanager
def small(path: str | Path, most: int = LARGEST_SMALL) -> Iterator[str]:
    """As ``regular``, of at most ``most`` bytes, for libraries that read what a path names."""
    with regular(path) as found:
        if os.stat(found).st_size > most:
            raise _too_large(path, most)
        yield found


def read_small(path: str | Path, most: int = LARGEST_SMALL) -> bytes:
    """A regular file of at most ``most`` bytes: the one way to read what somebody else named.

    OSError as ``regular``. A dead network file system hangs it: call it in a child where the path
    may lead to one (``kit.child.read_small``).
    """
    with small(path, most) as found, Path(found).open("rb") as stream:
        data = stream.read(most + 1)
    if len(data) > most:  # it grew, or it is one of /proc
        raise _too_large(path, most)
    return data


def content(path: str, most: int) -> str:
    """The same for a child: as os.fsdecode makes it."""
    return os.fsdecode(read_small(path, most))


def _too_large(path: str | Path, most: int) -> OSError:
    return OSError(errno.EFBIG, f"it has more than {most} bytes", str(path))


def save(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Replace ``path`` by ``data``: after a power cut it holds either the old or the new bytes.

    Written beside it, fsynced, renamed, and the directory fsynced. Raises OSError that names
    ``path``, and leaves the old file and no litter when any step fails.
    """
    temporary = path.with_name(f".{path.name}.new")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(temporary, flags, mode)
        try:
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    with closing(os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as directory:
        os.fsync(directory)


def keep(path: str, text: str) -> None:
    """``save``, with its folder, where it does not say so already. OSError."""
    copy, data = Path(path), text.encode()
    if not copy.exists() or copy.read_bytes() != data:
        copy.parent.mkdir(parents=True, exist_ok=True)
        save(copy, data)


def lock(path: Path, seconds: float) -> int:
    """An exclusive lock on ``path``, held until the descriptor is closed or the process ends.

    A file is made when it is missing; a directory can be locked too. OSError EBUSY when another
    process holds it for longer than ``seconds``.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY if path.is_dir() else os.O_RDWR | os.O_CREAT
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if time.monotonic() >= deadline:
                os.close(descriptor)
                raise OSError(errno.EBUSY, "another process holds the lock", str(path)) from None
            time.sleep(0.02)


def existing(path: str) -> str:
    """The directory ``path``, or the nearest one above it that is there."""
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    return path


def grpc_address(socket: Path) -> str:
    """The address of a unix socket for gRPC, which decodes the percent signs of an address."""
    return f"unix:{urllib.parse.quote(str(socket))}"


def append(path: Path, entry: Mapping[str, Any], largest: int | None = None) -> None:
    """Append one JSON line; it is on disk when this returns. OSError: it may not be.

    Bounded: two files of ``largest`` bytes, or of ``LARGEST_LOG``. The directory is made when it is
    missing.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if path.exists() and path.stat().st_size > (largest or LARGEST_LOG):
        os.replace(path, path.with_name(f"{path.name}.1"))
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
    with closing(os.open(path, flags, 0o600)) as descriptor:
        try:
            os.write(descriptor, json.dumps(entry).encode() + b"\n")
            os.fsync(descriptor)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error


def last_entries(path: Path, most: int) -> list[dict[str, Any]]:
    """The newest entries of an appended file, oldest first; a damaged line is left out."""
    try:
        return entries(path.read_bytes().splitlines()[-most:])
    except OSError:
        return []


def entries(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    """What was appended; a damaged line is left out."""
    found = []
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(entry := json.loads(line), dict):
                found.append(entry)
    return found
