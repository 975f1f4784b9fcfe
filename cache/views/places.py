"""Where views are mounted: <views>/<name>/data, and what else lies in <views>/<name>.

A pod may have <views>/<name> as a directory of the host that it can write to, when nobody demanded
readOnly of it. So nothing here is believed to be what the agent made: links are not followed, what
is not root's is refused, and so is a mount point that has files in it: whenever nothing is mounted
there, jobs would take them for the dataset. Empty mount points become immutable where the file
system can do that, and none but root enters them.

The functions run in child processes. Those that make something raise HostError and OSError.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import kit.errors
import kit.files
from linux import mountinfo, mounts

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


@contextlib.contextmanager
def parent(view: str) -> Iterator[int]:
    """A descriptor of <views>/<name>, which is made if it is missing."""
    folder = Path(view).parent
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
    with kit.files.closing(os.open(folder.parent, _DIRECTORY)) as views:
        _check_owner(views, str(folder.parent))
        with kit.files.closing(_opened(views, folder.name, 0o700, str(folder))) as found:
            yield found


@contextlib.contextmanager
def folder(above: int, name: str, path: str, mode: int = 0o755) -> Iterator[int]:
    """A descriptor of root's directory ``name`` of ``above``, which is made if it is missing.

    ``path``: its path, for errors.
    """
    with kit.files.closing(_opened(above, name, mode, path)) as found:
        _check_owner(found, path)
        yield found


def mount_point(above: int, name: str, path: str) -> str:
    """The place to mount at, as a path that leads nowhere else while ``above`` is open."""
    if mountinfo.top(path) is None:  # else what is seen there is the dataset's, and may hang
        with folder(above, name, path, mode=0) as found:
            # From here on it is what it is, so what follows is true when it is mounted on.
            mounts.set_immutable(found, True)
            if inside := os.listdir(found):
                mounts.set_immutable(found, False)
                raise kit.errors.HostError(
                    path, f"somebody has put {inside[0]!r} where the dataset is to be mounted",
                    "see who may write there (hostPath without readOnly), and take it away: jobs "
                    "would read it whenever the dataset is not mounted",
                )  # fmt: skip
            named = os.stat(name, dir_fd=above, follow_symlinks=False)
            if not os.path.samestat(named, os.fstat(found)):
                mounts.set_immutable(found, False)
                raise kit.errors.HostError(
                    path, "somebody has put another directory in its place just now",
                    "see who may write there (hostPath without readOnly)",
                )  # fmt: skip
    return f"/proc/self/fd/{above}/{name}"


def remove(path: str | Path, levels: int = 1) -> None:
    """Remove a mount point with nothing mounted; stays when it is not empty or not there.

    ``levels``: how many directories above it are below the views.
    """
    place = Path(path)
    with contextlib.suppress(OSError), contextlib.ExitStack() as opened:
        above = opened.enter_context(kit.files.closing(os.open(place.parents[levels], _DIRECTORY)))
        for name in place.parts[-levels - 1 : -1]:
            found = os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
            above = opened.enter_context(kit.files.closing(found))
        with kit.files.closing(os.open(place.name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=above)) as it:
            mounts.set_immutable(it, False)
        os.rmdir(place.name, dir_fd=above)


def clear(views: str) -> list[str]:
    """Remove the empty places that a reboot has left; paths of what is no empty place.

    Nothing is mounted below ``views``.
    """
    left = []
    for entry in sorted({*os.listdir(views)} - {"lost+found"}):
        folder = Path(views, entry)
        ids = folder / "by-id"
        with contextlib.suppress(OSError):
            if not folder.is_symlink():
                for name in [] if ids.is_symlink() else os.listdir(ids):
                    remove(ids / name, levels=2)
        with contextlib.suppress(OSError):
            remove(folder / "data")
            remove(ids)
            os.rmdir(folder)
        if os.path.lexists(folder):
            left.append(str(folder))
    return left


def _opened(above: int, name: str, mode: int, path: str) -> int:
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, mode, dir_fd=above)
    try:
        return os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR):
            raise
        raise kit.errors.HostError(
            path, "it is a link or a file, which the agent did not make",
            "see who may write there (hostPath without readOnly), and remove it",
        ) from None  # fmt: skip


def is_roots(folder: str) -> bool:
    """Whether nobody else may make or remove anything in it."""
    status = os.lstat(folder)
    return status.st_uid == 0 and not status.st_mode & _OTHERS_WRITE


def _check_owner(descriptor: int, path: str) -> None:
    status = os.fstat(descriptor)
    why = ""
    if status.st_uid != 0:
        why = f"it belongs to uid {status.st_uid}"
    elif status.st_mode & _OTHERS_WRITE:
        why = f"others than root may write to it (mode {stat.S_IMODE(status.st_mode):04o})"
    if why:
        raise kit.errors.HostError(
            path, f"{why}: others could change what is mounted there",
            f"chown root and chmod go-w {path}, or remove it",
        )  # fmt: skip
