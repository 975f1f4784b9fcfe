"""Notices when the settings file changes.

kubelet updates a ConfigMap by swapping a symbolic link beside the file, and an editor may replace
the file itself. So every directory in which a name on the way to the file's bytes could be replaced
is watched with inotify. What counts is that the bytes differ: a touch is not a change. A slow poll
finds what inotify misses.

Not in ``configfile``: the command line loads settings too, and must not pay for this.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import structlog
from asyncinotify import Inotify, Mask

from nodeagent import configfile

log = structlog.get_logger("settings")

# kubelet replaces a ConfigMap in two steps within milliseconds; editors write several times.
SETTLE_SECONDS = 0.2
# The net under inotify: a file on a network file system, or a queue that overflowed.
POLL_SECONDS = 60.0

_CHANGES = Mask.CLOSE_WRITE | Mask.MOVED_TO | Mask.CREATE | Mask.DELETE | Mask.MOVED_FROM


def _directories(path: Path) -> set[Path]:
    """Every directory in which a name on the way to the file's bytes could be replaced."""
    found = {path.parent}
    for _ in range(8):  # longer chains of links are followed no further
        if not path.is_symlink():
            break
        path = path.parent / path.readlink()
        found.add(path.parent)
    real = path.parent
    while real != real.parent:
        if real.is_symlink():
            found.add(real.parent)
        real = real.parent
    return {directory for directory in found if directory.is_dir()}


async def _read(path: Path) -> bytes | None:
    """None: there is no such file, or none that can be read."""
    try:
        return await asyncio.to_thread(configfile.read, path)
    except OSError:
        return None


async def _wait(path: Path, last: bytes | None) -> None:
    """Return when something happened to ``path``, or it is time to poll.

    OSError when the kernel gives no watch.
    """
    with Inotify() as inotify:
        for directory in _directories(path):
            inotify.add_watch(directory, _CHANGES)
        # What changed before the watches were in place raises no event.
        if await _read(path) == last:
            try:
                async with asyncio.timeout(POLL_SECONDS):
                    await inotify.get()
            except TimeoutError:
                return
        await asyncio.sleep(SETTLE_SECONDS)


async def changes(path: Path) -> AsyncIterator[None]:
    """One item whenever the bytes of ``path`` differ from those at the last item, or it is gone."""
    last = await _read(path)
    watched = True
    while True:
        try:
            await _wait(path, last)
            watched = True
        except OSError as error:
            # No descriptors or watches are left, or a directory has just been removed.
            if watched:
                log.warning(
                    "settings file cannot be watched; it is polled instead",
                    path=str(path), every_seconds=POLL_SECONDS, why=str(error),
                )  # fmt: skip
            watched = False
            await asyncio.sleep(POLL_SECONDS)
        now = await _read(path)
        if now != last:
            last = now
            yield
