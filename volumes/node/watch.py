"""What the kernel tells of devices and mounts, heard once for the guard and the audit: uevents, and
the mount tables in which kubelet publishes raw block volumes."""

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import structlog

import kit.child
import kit.errors
import kit.tasks
from linux import blockdev, mountinfo, netlink
from volumes.node import raw_block

log = structlog.get_logger("volumes")


MOUNT_SECONDS = 0.2  # from a mount to the look at what kubelet published
SEARCH_SECONDS = 60.0  # between two searches for kubelet, which may have started again
NODES_SECONDS = 5.0  # for the device numbers of nodes


@dataclass
class _Space:
    """A mount namespace, and what was seen in it last. ``watch``: None once its process ended."""

    watch: mountinfo.Watch | None
    names: raw_block.Table = field(default_factory=dict)
    nodes: dict[int, tuple[str, blockdev.Number | None]] = field(default_factory=dict)  # in tmpfs


class RawBlockWatch:
    """Calls ``changed`` with what is published after mounts and unmounts. Hundreds may come at
    once; a pod takes longer to start than ``MOUNT_SECONDS``. OSError without the host's table.

    It follows pid 1's namespace and kubelet's own. What cannot be seen for a while counts as it was
    seen last: a pod must not lose its permission because of that. What it cannot see at all, the
    doctor tells.
    """

    def __init__(
        self,
        changed: Callable[[raw_block.Table, bool], None],
        mounted: Callable[[], None] = lambda: None,
    ) -> None:
        """``changed``: gets the table, and whether it was once whole, with a kubelet: what an
        earlier agent knew of may be in the namespace of a kubelet that does not run now, or in a
        table that could not be read yet. ``mounted``: called after each mount and unmount."""
        self._changed = changed
        self._heard = mounted
        self._seen_kubelet = False
        self._whole = False
        self._complete = self._followed = False  # the last look; the last search
        self._mounted = asyncio.Event()
        self._spaces = {1: _Space(mountinfo.Watch("/proc/1/mountinfo", self._hear))}
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
            if await kit.tasks.until(self._mounted, SEARCH_SECONDS):
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

    def _hear(self) -> None:
        self._mounted.set()
        self._heard()

    def _again_soon(self) -> None:
        asyncio.get_running_loop().call_later(NODES_SECONDS, self._mounted.set)

    async def _search(self) -> None:
        """Follow kubelets into their namespaces. OSError when they cannot be told."""
        first, self._searched = self._searched == -math.inf, time.monotonic()
        running, found = await asyncio.to_thread(raw_block.spaces)
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
                self._spaces[pid] = _Space(mountinfo.Watch(table, self._hear))
        self._followed = pids <= self._spaces.keys()

    async def _look(self) -> raw_block.Table:
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
                    name = blockdev.name_of(number) or raw_block.NO_DISK
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
        space.names = raw_block.published(table)
        # Of tmpfs the name of the file says nothing: somebody called mknod.
        by_hand = {mount.mount_id: mount.target for mount in raw_block.bound(table, b"tmpfs")}
        space.nodes = await self._nodes(pid, space.nodes, by_hand)

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
            root, places = f"/proc/{pid}/root", list(unknown.values())
            numbers = await kit.child.call(
                raw_block.block_nodes, root, places, deadline=NODES_SECONDS
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
        await kit.tasks.end(self._task)


def _tell(what: str, listeners: Sequence[Callable[..., None]], *told: object) -> None:
    for listener in listeners:
        try:
            listener(*told)
        except Exception:  # the others must hear all the same
            log.exception("not heeded", what=what)


class NodeWatch:
    """Whoever listens adds a function. ``devices``: gets what uevents say, None where some may be
    lost; ``mounts``: called after each mount and unmount of the host's; ``published``: see
    ``RawBlockWatch``."""

    def __init__(self) -> None:
        self.devices: list[Callable[[Sequence[netlink.Uevent] | None], None]] = []
        self.mounts: list[Callable[[], None]] = []
        self.published: list[Callable[[raw_block.Table, bool], None]] = []
        self.blind = ""  # why no mounts are heard of
        self._users: set[object] = set()
        self._uevents: netlink.Uevents | None = None
        self._tables: RawBlockWatch | None = None

    @property
    def hears_devices(self) -> bool:
        return self._uevents is not None

    async def start(self, user: object) -> None:
        """Look for the first time, unless another user has started it."""
        first = not self._users
        self._users.add(user)
        if not first:
            return
        try:
            self._uevents = netlink.Uevents()
            asyncio.get_running_loop().add_reader(self._uevents.fd, self._read)
        except OSError as error:
            log.warning("no uevents: devices are found by scanning", error=str(error))
        try:
            self._tables = RawBlockWatch(self._published, self._mounted)
        except OSError as error:
            log.warning("no watch of mounts: raw block volumes are found late", error=str(error))
            self.blind = error.strerror or str(error)
        else:
            await self._tables.start()

    def hear(self) -> None:
        """Tell of all uevents that wait, before a look that may miss none."""
        while self._read():
            pass

    def _read(self) -> bool:
        """Whether there may be more."""
        found: Sequence[netlink.Uevent] | None = None
        try:
            found = self._uevents.read() if self._uevents is not None else ()
        except netlink.Overflow:
            pass
        except OSError as error:
            log.warning("uevents cannot be read", error=str(error))
        if found is None or found:
            _tell("uevents", self.devices, found)
        return bool(found)

    def _mounted(self) -> None:
        _tell("mounts", self.mounts)

    def _published(self, table: raw_block.Table, whole: bool) -> None:
        _tell("raw block volumes", self.published, table, whole)

    async def stop(self, user: object) -> None:
        """The last user closes it."""
        self._users.discard(user)
        if self._users:
            return
        if self._uevents is not None:
            asyncio.get_running_loop().remove_reader(self._uevents.fd)
            self._uevents.close()
            self._uevents = None
        if self._tables is not None:
            await self._tables.close()
            self._tables = None
