"""A worker's part of a published manifest: read the file, and compare some of it with the source.

Whoever can write the file decides what the store takes for the owner and mode of a file, as long as
its bytes are read past the mount. So only a file that root alone can write is read, and some
directories by chance are listed at the source: a manifest that differs there is refused whole.
"""

import contextlib
import errno
import os
import sqlite3
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import kit.files
import kit.units
from cache.fill.protocol import Fetch, Fetched
from cache.store import published, tree
from cache.store.published import ManifestError
from cache.store.tree import Entry

_BUFFER = 2**20

Listing = Callable[[Sequence[str]], Iterable[Entry | tuple[str, OSError]]]


def fetch(
    job: Fetch, generation: str, listing: Listing, beat: Callable[[], None], *, exact: bool
) -> Fetched:
    """Never an error of the manifest: the answer says why it cannot be used.

    ``listing``: a directory at the source. ``exact``: that tells whether entries have xattrs.
    OSError of a source that has gone.
    """
    held = Path(generation) / published.HELD
    try:
        try:
            with _opened(job) as file:
                size = os.fstat(file).st_size
                if size > job.allowance:
                    raise _no_room(size)
                with open(file, "rb", buffering=_BUFFER, closefd=False) as stream:
                    header, records = published.read(stream)
                    _compare_identity(header, job)
                    sample = published.Held.make(
                        held, header, records, beat, allowance=job.allowance
                    )
        except OSError as error:
            remedy = (
                "publish it ('nodeagent dataset publish-manifest NAME --to FILE'), or correct the "
                "path"
            )
            raise ManifestError(f"it cannot be read ({error.strerror})", remedy) from error
        except sqlite3.Error as error:
            if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
                raise _no_room(size) from error
            raise ManifestError(f"the store cannot hold it ({error})", "see the log") from error
        with contextlib.closing(published.Held(held)) as found:
            for path in sample:
                _compare(path, found, listing, beat, exact=exact)
    except ManifestError as error:
        held.unlink(missing_ok=True)
        return Fetched(why=str(error), remedy=error.remedy)
    return Fetched(directories=header.directories, bytes=held.stat().st_size)


def held(generation: str, path: Sequence[str], stack: contextlib.ExitStack) -> published.Listed:
    """A directory as the manifest has it. In the ``stack``, what is wrong with it is an OSError,
    EBADMSG."""
    stack.enter_context(_errors())
    found = published.Held(Path(generation) / published.HELD)
    return stack.enter_context(contextlib.closing(found)).directory(path)


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except (ManifestError, sqlite3.Error) as error:
        raise OSError(errno.EBADMSG, str(error)) from error


@contextlib.contextmanager
def _opened(job: Fetch) -> Iterator[int]:
    *above, name = job.manifest.path
    with (
        tree.opened_root(job.manifest.folder) as root,
        tree.opened(root, above) as directory,
        kit.files.closing(tree.open_file(directory, name)) as file,
    ):
        status = os.fstat(file)
        if status.st_uid != 0 or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ManifestError(
                "others than root may write it", "chown it to root, chmod it to 0644"
            )
        yield file


def _compare_identity(header: published.Header, job: Fetch) -> None:
    wanted = {key: job.manifest.marks.get(key, "") for key in published.MARKS}
    if not all(wanted.values()):
        raise ManifestError(
            "the source shows no ids to compare with it", "install Ceph's bindings (python3-cephfs)"
        )
    for key, value in wanted.items():
        if header.identity.get(key) != value:
            raise ManifestError(
                f"it is of another {key} ({header.identity.get(key)}, here {value})",
                "publish the manifest of this snapshot",
            )


def _compare(
    path: Sequence[str], held: published.Held, listing: Listing, beat: Callable[[], None],
    *, exact: bool,
) -> None:  # fmt: skip
    """ManifestError unless the source lists what the manifest has."""
    expected = {entry.name: entry for entry in held.directory(path).entries}
    where = "/".join(path) or "its root"
    try:
        for item in listing(path):
            beat()
            if not isinstance(item, Entry):
                raise item[1]
            if item.is_directory or item.is_file or item.is_link:
                known = expected.pop(item.name, None)
                hides_xattrs = known is not None and exact and item.xattrs and not known.xattrs
                if known is None or _metadata(known) != _metadata(item) or hides_xattrs:
                    raise _other(f"{where}: {item.name!r}")
    except OSError as error:
        tree.raise_if_gone(error)
        raise _other(f"{where} cannot be listed ({error.strerror})") from error
    if expected:
        raise _other(f"{where}: {next(iter(expected))!r}")


def _no_room(size: int) -> ManifestError:
    said = kit.units.format_size(size)
    return ManifestError(f"its {said} do not fit on the SSD", "raise cache.budget")


def _other(where: str) -> ManifestError:
    return ManifestError(f"the snapshot differs from it in {where}")


def _metadata(entry: Entry) -> tuple[int, ...]:
    size = 0 if entry.is_directory else entry.size
    who = (entry.mode, entry.uid, entry.gid)
    return (*who, size, entry.mtime_ns, entry.ino & tree.INODE_BITS)
