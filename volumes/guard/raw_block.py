"""Which devices kubelet publishes to pods as raw block volumes (volumeMode: Block).

kubelet binds the device node below a volumeDevices directory, in its own mount namespace where it
has one. The node is a file of devtmpfs, or of tmpfs where somebody made it by mknod (a kubelet in a
container). A node of krbd in devtmpfs ends with its disk. Others stay, and so does a bind mount of
one that nobody removed: it was made for an earlier attachment and permits nothing of the next one.
"""

import asyncio
import contextlib
import math
import os
import stat
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import structlog

import kit.child
import kit.errors
from linux import blockdev, mountinfo, procfs

log = structlog.get_logger("volumes")

MOUNT_SECONDS = 0.2  # from a mount to the look at what kubelet published
SEARCH_SECONDS = 60.0  # between two searches for kubelet, which may have started again
NODES_SECONDS = 5.0  # for the device numbers of nodes

BY = "raw block volume on "  # who permitted, in the ledger; the node follows


def gave(permitted_by: str) -> bool:
    """Whether this permission is of a publication."""
    return permitted_by.startswith(BY)


Table = Mapping[str, frozenset[int]]  # device name -> ids of its bind mounts


def published(table: bytes) -> dict[str, frozenset[int]]:
    """``table``: a namespace's mountinfo; of thousands of lines few are worth parsing. Only nodes
    in devtmpfs are found, which has each under its device's name."""
    if b"/volumeDevices/" not in table:
        return {}
    lines = (line for line in table.split(b"\n") if b" - devtmpfs " in line)
    found: dict[str, frozenset[int]] = {}
    for each in (mountinfo.parse_line(line) for line in lines if b"/volumeDevices/" in line):
        if "/volumeDevices/" in each.target:
            name = each.root.lstrip("/")
            found[name] = found.get(name, frozenset()) | {each.mount_id}
    return found


def _of_tmpfs(table: bytes) -> dict[int, str]:
    """Bind mounts of files of tmpfs that may be device nodes: by id, where they are. There the
    name of the file says nothing: somebody called mknod."""
    if b"/volumeDevices/" not in table:
        return {}
    lines = (line for line in table.split(b"\n") if b" - tmpfs " in line)
    mounts = (mountinfo.parse_line(line) for line in lines if b"/volumeDevices/" in line)
    return {each.mount_id: each.target for each in mounts if "/volumeDevices/" in each.target}


def block_nodes(root: str, targets: list[str]) -> list[tuple[int, int] | None]:
    """The device numbers of those that are block device nodes; ``root``: the paths are below it.
    For a child process: looking up a path can hang."""
    found: list[tuple[int, int] | None] = []
    for target in targets:
        try:
            status = _status(root, target)
        except FileNotFoundError:  # unmounted meanwhile
            found.append(None)
            continue
        number = os.major(status.st_rdev), os.minor(status.st_rdev)
        found.append(number if stat.S_ISBLK(status.st_mode) else None)
    return found


def _status(root: str, target: str) -> os.stat_result:
    try:
        return os.stat(root + target)
    except PermissionError:  # some security modules hide pid 1's files, which may be ours as well
        return os.stat(target)


def host_table() -> bytes:
    """The host's mountinfo, as far as this process may see it."""
    try:
        return Path("/proc/1/mountinfo").read_bytes()
    except OSError:
        return Path("/proc/self/mountinfo").read_bytes()


def kubelets(proc: str = "/proc") -> list[int]:
    """Processes that are kubelet. Reads all of /proc: milliseconds for a thousand processes."""
    found = []
    for entry in os.listdir(proc):
        with contextlib.suppress(OSError):
            if entry.isdigit() and Path(proc, entry, "comm").read_text().strip() in procfs.KUBELETS:
                found.append(int(entry))
    return found


def spaces(proc: str = "/proc") -> dict[bytes, int]:
    """The mount namespaces in which kubelet may publish, each with a process in it: pid 1's, and
    kubelet's where it has its own. OSError when one cannot be told.

    By the id of the first mount, which is unique on a node: some security modules hide pid 1's
    links.
    """
    found = {_first_mount(proc, 1): 1}
    for pid in kubelets(proc):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended
            found.setdefault(_first_mount(proc, pid), pid)
    return found


def _first_mount(proc: str, pid: int) -> bytes:
    with Path(proc, str(pid), "mountinfo").open("rb") as stream:
        return stream.readline().split(b" ", 1)[0]


class Watch:
    """Calls ``changed`` with what is published after mounts and unmounts. Hundreds may come at
    once; a pod takes longer to start than ``MOUNT_SECONDS``. OSError without the host's table.

    It follows pid 1's namespace and kubelet's own. What it cannot see, the doctor tells.
    """

    def __init__(self, changed: Callable[[Table], None]) -> None:
        self._changed = changed
        self._mounted = asyncio.Event()
        self._watches = {1: mountinfo.Watch("/proc/1/mountinfo", self._mounted.set)}
        self._searched = -math.inf
        self._gone: set[int] = set()  # missed by the last search
        self._trouble = ""
        self._numbers: dict[int, tuple[str, blockdev.Number | None]] = {}  # by mount of tmpfs
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Look for the first time; ends within ``NODES_SECONDS`` and what reading tables takes."""
        self._changed(await self._look())
        self._task = asyncio.create_task(self._run(), name="published raw block volumes")

    async def _run(self) -> None:
        while True:
            try:
                async with asyncio.timeout(SEARCH_SECONDS):
                    await self._mounted.wait()
            except TimeoutError:
                if not await self._search():
                    continue
            await asyncio.sleep(MOUNT_SECONDS)
            self._mounted.clear()
            self._changed(await self._look())

    async def _search(self) -> bool:
        """Follow kubelet into its namespace. Whether it has another one than before.

        While it starts again its namespace is kept for a search: what it published is still there.
        No longer, because that also keeps the namespace's mounts.
        """
        self._searched = time.monotonic()
        try:
            pids = set((await asyncio.to_thread(spaces)).values())
        except OSError as error:
            if str(error) != self._trouble:
                log.warning("raw block volumes in kubelet's namespace are missed", error=str(error))
            self._trouble = str(error)
            return False
        self._trouble = ""
        before = set(self._watches)
        gone = before - pids - {1}
        for pid in gone if pids - {1} else gone & self._gone:
            self._watches.pop(pid).close()
        self._gone = gone & self._watches.keys()
        for pid in pids - before:
            with contextlib.suppress(OSError):  # it ended; the next search finds its successor
                table = f"/proc/{pid}/mountinfo"
                self._watches[pid] = mountinfo.Watch(table, self._mounted.set)
        return before != self._watches.keys()

    async def _look(self) -> Table:
        if time.monotonic() - self._searched >= SEARCH_SECONDS:
            await self._search()
        found: dict[str, frozenset[int]] = {}
        there: dict[int, tuple[str, blockdev.Number | None]] = {}
        for pid, watch in list(self._watches.items()):
            try:
                table = await watch.read()
            except OSError as error:
                log.warning("a mount table cannot be read", pid=pid, error=str(error))
                continue
            for name, ids in published(table).items():
                found[name] = found.get(name, frozenset()) | ids
            there |= await self._nodes(pid, _of_tmpfs(table))
        self._numbers = there
        for mount, (_, number) in there.items():
            if number is not None and (name := blockdev.name_of(number)):
                found[name] = found.get(name, frozenset()) | {mount}
        return found

    async def _nodes(
        self, pid: int, targets: dict[int, str]
    ) -> dict[int, tuple[str, blockdev.Number | None]]:
        """Which devices those are; each mount is asked for once."""
        known = {
            mount: self._numbers[mount]
            for mount, target in targets.items()
            if mount in self._numbers and self._numbers[mount][0] == target
        }
        unknown = {mount: target for mount, target in targets.items() if mount not in known}
        if not unknown:
            return known
        try:
            numbers = await kit.child.call(
                block_nodes, f"/proc/{pid}/root", list(unknown.values()), deadline=NODES_SECONDS
            )
        except (kit.errors.AgentError, OSError, RuntimeError) as error:
            log.warning("device nodes of raw block volumes are not known", error=str(error))
            asyncio.get_running_loop().call_later(NODES_SECONDS, self._mounted.set)  # again
            return known
        for (mount, target), number in zip(unknown.items(), numbers, strict=True):
            known[mount] = target, (number[0], number[1]) if number else None
        return known

    async def close(self) -> None:
        for watch in self._watches.values():
            watch.close()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


class Published:
    """What is published now, and which bind mounts are of earlier attachments. Bounded by the mount
    table."""

    def __init__(self, now: Table) -> None:
        self._now = now
        self._stale: Table = {}

    def update(self, now: Table) -> frozenset[str]:
        """The names whose publications changed."""
        before, self._now = self._now, now
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
