"""Which devices kubelet publishes to pods as raw block volumes (volumeMode: Block).

kubelet binds the device node, a file of devtmpfs, below a volumeDevices directory. A node of krbd
ends with its disk. One of nbd or loop stays, and so does a bind mount of it that nobody removed:
it was made for an earlier attachment and permits nothing of the next one.
"""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

from linux import mountinfo

MOUNT_SECONDS = 0.2  # from a mount to the look at what kubelet published

BY = "raw block volume on "  # who permitted, in the ledger; the node follows


def gave(permitted_by: str) -> bool:
    """Whether this permission is of a publication."""
    return permitted_by.startswith(BY)


Table = Mapping[str, frozenset[int]]  # device name -> ids of its bind mounts


def published(table: bytes) -> dict[str, frozenset[int]]:
    """``table``: the host's mountinfo; of thousands of lines few are worth parsing."""
    if b"/volumeDevices/" not in table:
        return {}
    lines = (line for line in table.split(b"\n") if b" - devtmpfs " in line)
    found: dict[str, frozenset[int]] = {}
    for each in (mountinfo.parse_line(line) for line in lines if b"/volumeDevices/" in line):
        if "/volumeDevices/" in each.target:
            name = each.root.lstrip("/")
            found[name] = found.get(name, frozenset()) | {each.mount_id}
    return found


def host_table() -> bytes:
    """The host's mountinfo, as far as this process may see it."""
    try:
        return Path("/proc/1/mountinfo").read_bytes()
    except OSError:
        return Path("/proc/self/mountinfo").read_bytes()


class Watch:
    """Calls ``changed`` with the host's mountinfo after mounts and unmounts. Hundreds may come at
    once; a pod takes longer to start than ``MOUNT_SECONDS``. OSError without the host's table.

    A thread reads it: with thousands of mounts, and others that mount, that takes long.
    """

    def __init__(self, changed: Callable[[bytes], None]) -> None:
        self._changed = changed
        self._mounted = asyncio.Event()
        self._watch = mountinfo.Watch("/proc/1/mountinfo", self._mounted.set)
        self._task = asyncio.create_task(self._run(), name="published raw block volumes")

    async def _run(self) -> None:
        while True:
            await self._mounted.wait()
            await asyncio.sleep(MOUNT_SECONDS)
            self._mounted.clear()
            self._changed(await asyncio.to_thread(host_table))

    async def close(self) -> None:
        self._watch.close()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


class Published:
    """What is published now, and which bind mounts are of earlier attachments. Bounded by the mount
    table."""

    def __init__(self, table: bytes) -> None:
        self._now: Table = published(table)
        self._stale: Table = {}

    def update(self, table: bytes) -> frozenset[str]:
        """The names whose publications changed."""
        before, self._now = self._now, published(table)
        self._stale = {
            name: still
            for name, ids in self._stale.items()
            if (still := ids & self._now.get(name, frozenset()))
        }
        names = before.keys() | self._now.keys()
        return frozenset(name for name in names if before.get(name) != self._now.get(name))

    def attached_anew(self, name: str) -> None:
        """Another medium is in the device: its present bind mounts were made for the one before."""
        if name in self._now:
            self._stale = {**self._stale, name: self._now[name]}

    def __contains__(self, name: str) -> bool:
        return bool(self._now.get(name, frozenset()) - self._stale.get(name, frozenset()))
