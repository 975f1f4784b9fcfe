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
from dataclasses import dataclass, field
from pathlib import Path

import structlog

import kit.child
import kit.errors
from linux import blockdev, mountinfo, procfs

log = structlog.get_logger("volumes")

MOUNT_SECONDS = 0.2  # from a mount to the look at what kubelet published
SEARCH_SECONDS = 60.0  # between two searches for kubelet, which may have started again
NODES_SECONDS = 5.0  # for the device numbers of nodes

NO_DISK = ""  # of nodes whose number no disk has now

_NAMES = frozenset(name.encode() for name in procfs.KUBELETS)

BY = "raw block volume on "  # who permitted, in the ledger; the node follows


def gave(permitted_by: str) -> bool:
    """Whether this permission is of a publication."""
    return permitted_by.startswith(BY)


Table = Mapping[str, frozenset[int]]  # device name, or NO_DISK -> ids of its bind mounts


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


def block_nodes(root: str, targets: list[str]) -> dict[str, tuple[int, int] | None]:
    """Each target's device number, None when it is no block device node; without those that are not
    there any more. ``root``: the paths are below it. For a child process: a look can hang."""
    found: dict[str, tuple[int, int] | None] = {}
    for target in targets:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # unmounted, or it ended
            status = _status(root, target)
            number = os.major(status.st_rdev), os.minor(status.st_rdev)
            found[target] = number if stat.S_ISBLK(status.st_mode) else None
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
    """Processes that are this node's kubelet, and not that of a cluster in a pod. Reads all of
    /proc: milliseconds for a thousand processes."""
    return [int(pid) for pid in os.listdir(proc) if pid.isdigit() and _is_kubelet(Path(proc, pid))]


def _is_kubelet(process: Path) -> bool:
    try:
        # The kernel cuts names at 15 bytes, also within a character.
        if (process / "comm").read_bytes().strip() not in _NAMES:
            return False
        return not procfs.pod_and_container((process / "cgroup").read_text(errors="replace"))[0]
    except OSError:
        return False  # it ended


def spaces(proc: str = "/proc") -> tuple[frozenset[int], dict[bytes, int]]:
    """The kubelets, and the mount namespaces in which they may publish, each with a process in it:
    pid 1's, and a kubelet's where it has its own. OSError when pid 1's cannot be told.

    By the id of the first mount, which is unique on a node: some security modules hide pid 1's
    links.
    """
    found = {_first_mount(proc, 1): 1}
    running = set()
    for pid in kubelets(proc):
        with contextlib.suppress(OSError):  # it ended, or it is a zombie that has no mounts
            found.setdefault(_first_mount(proc, pid), pid)
            running.add(pid)
    return frozenset(running), found


def _first_mount(proc: str, pid: int) -> bytes:
    with Path(proc, str(pid), "mountinfo").open("rb") as stream:
        return stream.readline().split(b" ", 1)[0]


@dataclass
class _Space:
    """A mount namespace, and what was seen in it last. ``watch``: None once its process ended."""

    watch: mountinfo.Watch | None
    names: Table = field(default_factory=dict)
    nodes: dict[int, tuple[str, blockdev.Number | None]] = field(default_factory=dict)  # in tmpfs


class Watch:
    """Calls ``changed`` with what is published after mounts and unmounts. Hundreds may come at
    once; a pod takes longer to start than ``MOUNT_SECONDS``. OSError without the host's table.

    It follows pid 1's namespace and kubelet's own. What cannot be seen for a while counts as it was
    seen last: a pod must not lose its permission because of that. What it cannot see at all, the
    doctor tells.
    """

    def __init__(self, changed: Callable[[Table, bool], None]) -> None:
        """``changed``: gets the table, and whether it was once whole, with a kubelet: what an
        earlier agent knew of may be in the namespace of a kubelet that does not run now, or in a
        table that could not be read yet."""
        self._changed = changed
        self._seen_kubelet = False
        self._whole = False
        self._complete = self._followed = False  # the last look; the last search
        self._mounted = asyncio.Event()
        self._spaces = {1: _Space(mountinfo.Watch("/proc/1/mountinfo", self._mounted.set))}
        self._searched = -math.inf
        self._running: frozenset[int] = frozenset()  # kubelets, at the last search
        self._trouble = ""
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Look for the first time; ends within ``NODES_SECONDS`` and what reading tables takes."""
        await self._tell()
        self._task = asyncio.create_task(self._run(), name="published raw block volumes")

    async def _run(self) -> None:
        while True:
            try:
                async with asyncio.timeout(SEARCH_SECONDS):
                    await self._mounted.wait()
            except TimeoutError:
                pass
            else:
                await asyncio.sleep(MOUNT_SECONDS)
            self._mounted.clear()
            await self._tell()

    async def _tell(self) -> None:
        """Whatever is wrong with a look ends neither the guard nor the looks that follow."""
        try:
            found = await self._look()
            # Afterwards what cannot be read counts as it was read last.
            self._whole |= self._seen_kubelet and self._complete
            self._changed(found, self._whole)
            self._trouble = ""
        except Exception as error:
            if str(error) != self._trouble:
                log.exception("raw block volumes cannot be looked for")
            self._trouble = str(error)

    def _again_soon(self) -> None:
        asyncio.get_running_loop().call_later(NODES_SECONDS, self._mounted.set)

    async def _search(self) -> None:
        """Follow kubelets into their namespaces. OSError when they cannot be told."""
        first, self._searched = self._searched == -math.inf, time.monotonic()
        running, found = await asyncio.to_thread(spaces)
        pids = set(found.values())
        for pid in self._spaces.keys() - pids:
            space = self._spaces[pid]
            if space.watch is not None:
                space.watch.close()  # it would keep the namespace, and so its mounts
                space.watch = None
            # Nobody unpublishes without a kubelet. One that runs has had a search's time to tell.
            if running & self._running:
                del self._spaces[pid]
        # At the start its table is read now; one that starts later has a search's time, as above.
        self._seen_kubelet |= bool(running if first else running & self._running)
        self._running = running
        for pid in pids - self._spaces.keys():
            with contextlib.suppress(OSError):  # it ended; the next search finds its successor
                table = f"/proc/{pid}/mountinfo"
                self._spaces[pid] = _Space(mountinfo.Watch(table, self._mounted.set))
        self._followed = pids <= self._spaces.keys()

    async def _look(self) -> Table:
        if time.monotonic() - self._searched >= SEARCH_SECONDS:
            try:
                await self._search()
            except OSError as error:
                self._followed = False
                log.warning("kubelet's mount namespace is not looked for", error=str(error))
        self._complete = self._followed
        found: dict[str, frozenset[int]] = {}
        for pid, space in list(self._spaces.items()):
            if space.watch is not None:
                await self._read(pid, space, space.watch)
            for name, ids in space.names.items():
                found[name] = found.get(name, frozenset()) | ids
            for mount, (_, number) in space.nodes.items():
                if number is not None:
                    name = blockdev.name_of(number) or NO_DISK
                    found[name] = found.get(name, frozenset()) | {mount}
        return found

    async def _read(self, pid: int, space: _Space, watch: mountinfo.Watch) -> None:
        try:
            table = await watch.read()
        except OSError as error:
            log.warning("a mount table cannot be read", pid=pid, error=str(error))
            self._complete = False
            self._again_soon()
            return
        space.names = published(table)
        space.nodes = await self._nodes(pid, space.nodes, _of_tmpfs(table))

    async def _nodes(
        self,
        pid: int,
        before: Mapping[int, tuple[str, blockdev.Number | None]],
        targets: Mapping[int, str],
    ) -> dict[int, tuple[str, blockdev.Number | None]]:
        """Which devices those are; each mount is asked for once."""
        known = {
            mount: before[mount]
            for mount, target in targets.items()
            if mount in before and before[mount][0] == target
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
            self._complete = False
            numbers = {}
        for mount, target in unknown.items():
            if target in numbers:
                number = numbers[target]
                known[mount] = target, (number[0], number[1]) if number else None
        if len(known) < len(targets):
            self._again_soon()
        return known

    async def close(self) -> None:
        for space in self._spaces.values():
            if space.watch is not None:
                space.watch.close()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


class PublishedDevice:
    """What is published now, and which bind mounts are of earlier attachments. Bounded by the mount
    table."""

    def __init__(self, now: Table) -> None:
        self.whole = True  # False: what an earlier agent saw may be out of sight, and still there
        self._now = now
        self._stale = now.get(NO_DISK, frozenset())

    def update(self, now: Table) -> frozenset[str]:
        """The names whose publications changed."""
        before, self._now = self._now, now
        there = frozenset().union(*now.values())
        # Without a disk a bind mount is one of an earlier disk, whatever gets its number next.
        self._stale = (self._stale | now.get(NO_DISK, frozenset())) & there
        names = before.keys() | self._now.keys()
        return frozenset(name for name in names if before.get(name) != self._now.get(name))

    def attached_anew(self, name: str) -> None:
        """Another medium is in the device: its present bind mounts were made for the one before."""
        self._stale |= self._now.get(name, frozenset())

    def __contains__(self, name: str) -> bool:
        return bool(self._now.get(name, frozenset()) - self._stale)
