"""One scan of the node: from a Request to an Inventory.

Reading /proc, /sys and mount tables can hang in the kernel, for example in a dead network file
system. So ``scan`` runs in a child process (``main``) that lives as long as the agent and answers
one request after the other; ``Scanner`` is the agent's end of it. A child that does not answer in
time is killed and abandoned, and the next scan starts another one.
"""

import asyncio
import contextlib
import dataclasses
import gc
import os
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import kit.child
import kit.errors
import kit.line_worker
import kit.messages
import kit.pause
import kit.processes
from linux import blockdev, loop, mountinfo, rbd_sysfs, stack
from volumes.audit.inventory import holders, records
from volumes.audit.inventory.holders import Processes, host_space
from volumes.audit.inventory.model import FsErrors, Inventory, Place, User, Volume, related
from volumes.node import raw_block

_ABOUT = "scan of the node"
# Children that hang in the kernel at the same time; one more would only hang beside them.
MOST_ABANDONED = 3
_LARGEST_ANSWER = 32 * 2**20
_MOST_GAPS = 50
LOOPS_SECONDS, _LOOP_SECONDS = 5.0, 2.0  # for all loop devices, and for one of a server
_MOST_LOOPS_HANG, MOST_NAMES = 4, 8

Tables = Mapping[int, list[mountinfo.Mount]]  # by inode of the mount namespace


@dataclass(frozen=True)
class Request:
    drivers: tuple[str, ...]
    kubelet: str
    proc: str
    sys: str
    containers: str  # containerd's bundles, for pods' names
    deep: bool  # visit every mount namespace
    users_of: tuple[str, ...] = ()  # devices whose open files are searched
    kubelet_set: bool = False  # the settings say where kubelet's directory is
    changed: tuple[str, ...] | None = None  # devices named by uevents; None: read all
    known: int = 0  # the number of the answer that the agent has; 0: none
    names: tuple[str, ...] = ("*",)  # shell patterns of the devices that are watched


# -- what changed between two inventories ------------------------------------------------------

# The child sends an inventory after every mount of the node. With thousands of mounts that are
# megabytes, of which one line is new. So it sends ``Changes``: an inventory whose long lists hold
# only what is new, and how much of the list before stays in front of that and behind it.
# Invariant: ``applied(before, between(before, after, n)) == after``.

LISTS = ("devices", "related", "host", "spaces", "users", "users_of", "volumes")


@dataclass(frozen=True)
class Changes:
    """``number``: of this answer of a child. ``kept``: of each list, how many entries stay at its
    beginning and at its end; empty when nothing is known of an earlier inventory."""

    number: int
    inventory: Inventory
    kept: Mapping[str, tuple[int, int]] = field(default_factory=dict)


def between(before: Inventory | None, after: Inventory, number: int) -> Changes:
    """``before``: what the receiver has; None: nothing."""
    if before is None:
        return Changes(number, after)
    kept: dict[str, tuple[int, int]] = {}
    new: dict[str, Any] = {}
    for name in LISTS:
        old, now = getattr(before, name), getattr(after, name)
        head, tail = _same(old, now)
        kept[name] = head, tail
        new[name] = now[head : len(now) - tail]
    return Changes(number, dataclasses.replace(after, **new), kept)


def applied(before: Inventory | None, changes: Changes) -> Inventory:
    """The whole inventory. ValueError when it needs a ``before`` that is missing or too short."""
    if not changes.kept:
        return changes.inventory
    if before is None:
        raise ValueError("changes of an inventory that is not known")
    whole: dict[str, Any] = {}
    for name, (head, tail) in changes.kept.items():
        old, new = getattr(before, name), getattr(changes.inventory, name)
        if head + tail > len(old):
            raise ValueError(f"changes of another inventory: {name} has {len(old)} entries")
        unchanged = not new and head + tail == len(old)
        whole[name] = old if unchanged else (*old[:head], *new, *old[len(old) - tail :])
    return dataclasses.replace(changes.inventory, **whole)


def _same(old: Sequence[Any], now: Sequence[Any]) -> tuple[int, int]:
    """How many entries are equal at the beginning, and of the others at the end."""
    most = min(len(old), len(now))
    head = 0
    while head < most and _equal(old[head], now[head]):
        head += 1
    tail = 0
    while tail < most - head and _equal(old[-1 - tail], now[-1 - tail]):
        tail += 1
    return head, tail


def _equal(one: Any, other: Any) -> bool:
    return one is other or bool(one == other)


# -- the agent's end ---------------------------------------------------------------------------


class BlindError(kit.errors.AgentError):
    """The node could not be scanned. What was known stays, and nothing counts as fine."""


class Scanner:
    """Scans one at a time, each with a deadline."""

    def __init__(self) -> None:
        self._child = kit.line_worker.LineWorker(
            f"{__name__}:{main.__name__}",
            Changes,
            about=_ABOUT,
            largest=_LARGEST_ANSWER,
            backoff=kit.pause.Backoff(first=0.0),  # the scheduler decides when to try again
        )
        self._last: Inventory | None = None
        self._number = 0  # of the child's last answer
        self.scans = 0
        self.failures = 0
        self.cpu_seconds = 0.0

    @property
    def stuck(self) -> int:
        return kit.processes.hanging(_ABOUT)

    async def scan(self, request: Request, deadline: float) -> Inventory:
        """BlindError when it takes longer than ``deadline`` seconds or fails."""
        self.scans += 1
        until = time.monotonic() + deadline
        try:
            if self.stuck >= MOST_ABANDONED:
                raise kit.processes.DeadlineError(
                    _ABOUT, f"{self.stuck} earlier scans still hang in the kernel", ""
                )
            known = dataclasses.replace(request, known=self._number)
            answer = await self._child.ask(known, deadline)
            inventory = applied(self._last, answer)
            self._last, self._number = inventory, answer.number
        except kit.processes.DeadlineError as error:
            self.failures += 1
            raise BlindError(
                "volume audit",
                f"the scan of the node did not end: {error.cause}",
                "something that it reads hangs in the kernel; see 'nodeagent volume audit'",
            ) from error
        except (OSError, ValueError, kit.line_worker.ChildError) as error:
            self.failures += 1
            raise BlindError(
                "volume audit",
                f"the scan of the node failed: {error}",
                "run the agent as root with the host's /proc and /sys",
            ) from error
        self.cpu_seconds += inventory.cpu
        return await _with_loops(inventory, until) if request.users_of else inventory

    async def close(self) -> None:
        """End the child; one that hangs is left to the kernel."""
        await self._child.close()


async def _with_loops(inventory: Inventory, until: float) -> Inventory:
    """With the loop devices among the users. The kernel may wait for the server of a loop device's
    file, which the scan must not. ``until``: CLOCK_MONOTONIC, the end of the scan's deadline."""
    left = min(LOOPS_SECONDS, until - time.monotonic())
    try:
        found, silent = await backings(max(left, 0.0))
    except (kit.errors.AgentError, OSError, RuntimeError) as error:
        gaps = (*inventory.gaps, f"loop devices: {error}")
        return dataclasses.replace(inventory, gaps=gaps)
    users = inventory.users + tuple(holders.loops(found, set(inventory.users_of)))
    gaps = inventory.gaps
    if silent:
        gaps += (f"loop devices: no answer of {kit.errors.some(silent, MOST_NAMES)}",)
    return dataclasses.replace(inventory, users=users, gaps=gaps)


async def backings(deadline: float) -> tuple[list[loop.Backing], list[str]]:
    """What each loop device lies on; and the names of those that did not answer. One whose file may
    have a dead server is asked by a child of its own. AgentError, OSError, RuntimeError."""
    until = time.monotonic() + deadline
    found, served = await kit.child.call(loop.backings, deadline=deadline)
    names = [name for name in served if not await kit.child.hangs(loop.backing, name)]
    most, silent = _MOST_LOOPS_HANG - (len(served) - len(names)), set(served)
    random.shuffle(names)  # those with a dead server take the turns of other ones each time

    async def ask() -> None:
        while names and (left := until - time.monotonic()) > 0:
            name, wait = names.pop(), min(left, _LOOP_SECONDS)
            try:
                found.extend(await kit.child.call(loop.backing, name, deadline=wait))
                silent.remove(name)
            except (kit.errors.AgentError, OSError, RuntimeError):
                left = max(0.0, until - time.monotonic())
                if await kit.child.hangs(loop.backing, name, seconds=left):
                    return

    await asyncio.gather(*(ask() for _ in range(most)))
    return list(found), sorted(silent)


# -- the child ---------------------------------------------------------------------------------


def main() -> None:
    """The child's function; see kit.messages."""
    try:
        os.nice(5)
    except OSError:
        pass  # a limit forbids it
    gc.freeze()
    child = _Child()
    kit.messages.serve(Request, child.answer)


class _Child:
    """Answers with what changed since the answer that the agent has."""

    def __init__(self) -> None:
        self._kept = Kept()
        self._last: Inventory | None = None
        self._number = 0

    def answer(self, request: Request) -> Changes:
        before = self._last if request.known == self._number else None
        self._last = scan(request, self._kept)
        self._number += 1
        return between(before, self._last, self._number)


@dataclass
class Kept:
    """What was read before, so that a scan reads and parses only what is new."""

    devices: blockdev.Scans = field(default_factory=blockdev.Scans)
    files: records.Files = field(default_factory=records.Files)
    tables: dict[int, mountinfo.Parser] = field(default_factory=dict)  # by namespace
    places: dict[int, tuple[mountinfo.Mount, Place]] = field(default_factory=dict)  # by mount id
    visited: holders.Relevant = field(default_factory=holders.Relevant)
    disks: dict[str, stack.StackedDevice] = field(default_factory=dict)  # of volumes, by name
    kubelets: list[int] = field(default_factory=list)  # when the processes were read last


def scan(request: Request, kept: Kept | None = None) -> Inventory:
    """The node now. OSError only when /proc or /sys themselves cannot be read."""
    began, cpu = time.time(), time.process_time()
    kept = kept or Kept()
    present = kept.devices.scan(request.drivers, request.changed, request.sys, request.proc)
    devices = [each for each in present if blockdev.is_named(each.name, request.names)]
    others = [each for each in present if not blockdev.is_named(each.name, request.names)]
    watched = {number for device in devices for number in device.numbers}
    gaps: list[str] = []
    processes: Processes | None = None
    if request.deep or request.users_of:
        processes = Processes(request.proc, request.containers)
    tables = _host_tables(request.proc, processes, gaps, kept)
    everything = [mount for table in tables.values() for mount in table]
    host = _on(watched, tables, kept)
    root = records.host_root(request.proc)
    directory = records.host_path(request.kubelet, root)
    kubelet = _kubelet(directory, root, tables)
    # A kubelet with a mount namespace of its own shows raw block volumes below its own root.
    roots = [root, *(f"{request.proc}/{pid}/root" for pid in kept.kubelets)]
    volumes, missing = records.volumes(
        directory, everything, devices, roots=roots, files=kept.files, quick=not request.deep,
        sys=request.sys, proc=request.proc,
    )  # fmt: skip
    _forget(kept.disks, request)
    volumes, unseen = records.on_disks(volumes, kept.disks, request.sys, request.proc)
    gaps += missing + unseen
    nodes = _tmpfs_nodes(roots, everything)
    no_records = ""
    # Not on a node without kubelet.
    runs = processes is not None and bool(processes.kubelets)
    if kubelet is None and (request.kubelet_set or runs):
        no_records = f"no kubelet directory at {request.kubelet}"
        gaps.append(f"{no_records}: mount it, or set kubelet.root_dir to its path")
    hidden = _hidden(processes)
    visited = holders.Visited()
    users: list[User] = []
    numbers: list[blockdev.Number] = []
    if processes is not None:
        if request.deep:
            unexplained = {n for d in devices for n in d.live} - {p.device for p in host}
            visited = holders.Namespaces(
                processes, request.proc, set(tables), watched, kubelet, kept.visited
            ).visit(unexplained)
            # What was mounted during the visit shows in the namespaces visited after it. Without
            # the host's own mount of it, it would look like one that the host has left behind.
            again = _on(watched, _host_tables(request.proc, processes, [], kept), kept)
            same = {id(place) for place in host}
            host += [place for place in again if id(place) not in same]
        numbers = [n for d in devices if d.name in request.users_of for n in sorted(d.numbers)]
        servers = {
            d.number: rbd_sysfs.nbd_server(d.name, request.sys) for d in devices
            if d.driver == "nbd"
        }  # fmt: skip
        users = holders.users(processes, request.proc, set(numbers), set(tables), servers)
    watching = _named(devices, volumes)
    return Inventory(
        taken=began,
        cpu=time.process_time() - cpu,
        deep=request.deep,
        devices=tuple(watching),
        related=tuple(related(watching, others)),
        raw=_raw(devices, everything, nodes, volumes),
        fs_errors=_fs_errors(devices, request.sys, request.proc),
        host=tuple(host),
        host_spaces=tuple(tables),
        kubelet=kubelet[0] if kubelet else None,
        no_records=no_records,
        spaces=tuple(visited.spaces),
        spaces_at=time.time() if request.deep else 0.0,
        users=tuple(users),
        users_of=tuple(numbers),
        volumes=tuple(volumes),
        supported_features=rbd_sysfs.supported_features(request.sys),
        kernel=os.uname().release,
        namespaces=visited.count,
        processes=processes.count if processes else 0,
        gaps=tuple((gaps + ([] if request.deep else hidden))[:_MOST_GAPS]),
        deep_gaps=tuple((hidden + visited.gaps)[:_MOST_GAPS]) if request.deep else (),
        space_gaps=tuple((visited.gaps + (hidden if visited.by_processes else []))[:_MOST_GAPS]),
    )


def _on(watched: set[blockdev.Number], tables: Tables, kept: Kept) -> list[Place]:
    """The mounts of watched devices."""
    found: dict[int, tuple[mountinfo.Mount, Place]] = {}
    for inode, table in tables.items():
        for mount in table:
            if mount.device in watched:
                known = kept.places.get(mount.mount_id)
                same = known is not None and known[0] is mount
                found[mount.mount_id] = (
                    known if known and same else (mount, holders.place(inode, mount))
                )
    kept.places = found
    return [place for _, place in found.values()]


def _host_tables(
    proc: str, processes: Processes | None, gaps: list[str], kept: Kept
) -> dict[int, list[mountinfo.Mount]]:
    """The mount tables of the host's namespaces: pid 1's, and kubelet's where it has its own. A
    kubelet that started since the processes were read last is not known yet."""
    if processes is None:
        kept.kubelets = [pid for pid in kept.kubelets if raw_block.is_kubelet(proc, pid)]
        homes = {host_space(proc, kept.kubelets): 1}
    else:
        homes = {processes.host_space(): 1}
        kept.kubelets = processes.kubelets
    for pid in kept.kubelets:
        with contextlib.suppress(OSError):  # it ended
            homes.setdefault(Processes.space(f"{proc}/{pid}/ns/mnt"), pid)
    tables: dict[int, list[mountinfo.Mount]] = {}
    for inode, pid in homes.items():
        tables[inode] = []
        try:
            with open(f"{proc}/{pid}/mountinfo", "rb") as stream:  # noqa: PTH123
                parser = kept.tables.setdefault(inode, mountinfo.Parser())
                tables[inode] = parser.parse(stream.read())
        except OSError as error:
            gaps.append(f"mount table of pid {pid}: {error.strerror}")
    kept.tables = {inode: each for inode, each in kept.tables.items() if inode in tables}
    return tables


def _fs_errors(devices: list[blockdev.BlockDevice], sys: str, proc: str) -> dict[str, FsErrors]:
    """By name of the device or layer. None of this waits for the device."""
    found = {}
    live = [device for device in devices if "ext4" in device.active]
    names = [name for d in live for name in (d.name, *(layer.name for layer in d.layers))]
    for name in names:
        home = f"{sys}/fs/ext4/{name}"
        if count := rbd_sysfs.integer(rbd_sysfs.text(f"{home}/errors_count")):
            last = rbd_sysfs.integer(rbd_sysfs.text(f"{home}/last_error_time"))
            options = rbd_sysfs.text(f"{proc}/fs/ext4/{name}/options").split("\n")
            found[name] = FsErrors(count, float(last), "errors=remount-ro" in options)
    return found


def _hidden(processes: Processes | None) -> list[str]:
    if processes is None or processes.hidden <= 1:
        return []
    return [f"{processes.hidden} processes may not be read; does the agent have CAP_SYS_PTRACE?"]


def _raw(
    devices: list[blockdev.BlockDevice],
    host: list[mountinfo.Mount],
    nodes: Mapping[blockdev.Number, list[str]],
    volumes: list[Volume],
) -> dict[str, tuple[str, ...]]:
    """Device name -> where its node, or that of a layer, is bind-mounted, and kubelet's record."""
    bound: dict[str, list[str]] = {}
    noted = {volume.device: volume.staging for volume in volumes if volume.is_raw}
    for mount in host:
        if mount.fstype == "devtmpfs" and mount.root != "/":
            bound.setdefault(mount.root.removeprefix("/"), []).append(mount.target)
    found = {}
    for device in devices:
        names = (device.name, *(layer.name for layer in device.layers))
        targets = [target for name in names for target in bound.get(name, ())]
        targets += [target for number in sorted(device.numbers) for target in nodes.get(number, ())]
        targets += [noted[device.name]] if device.name in noted else []
        if targets:
            found[device.name] = tuple(targets)
    return found


def _tmpfs_nodes(roots: list[str], host: list[mountinfo.Mount]) -> dict[blockdev.Number, list[str]]:
    """Bind mounts of device nodes that somebody made by mknod in a tmpfs, as a kubelet in a
    container has them: there the name says nothing, the number does."""
    found: dict[blockdev.Number, list[str]] = {}
    for mount in host:
        if mount.fstype != "tmpfs" or not raw_block.is_published(mount):
            continue
        for each in roots:
            try:
                number = raw_block.block_nodes(each, [mount.target]).get(mount.target)
            except OSError:
                continue
            if number is not None:
                found.setdefault(number, []).append(mount.target)
                break
    return found


def _kubelet(real: str, root: str, tables: Tables) -> tuple[Place, str] | None:
    """The host mount that kubelet's directory is on, and its path in that file system."""
    if not os.path.isdir(root + real):
        return None
    for inode, table in tables.items():
        mount = mountinfo.containing(real, table)
        if mount is not None:
            below = real[len(mount.target.rstrip("/")) :]
            return holders.place(inode, mount), (mount.root.rstrip("/") + below).rstrip("/") or "/"
    return None


def _forget(known: dict[str, stack.StackedDevice], request: Request) -> None:
    """Devices below volumes that are to be read again: when an uevent names them. None comes for
    one that shrinks to nothing, so a deep scan asks."""

    def is_old(name: str) -> bool:
        if request.changed is None or name in request.changed:
            return True
        if not request.deep:
            return False
        size = rbd_sysfs.text(f"{request.sys}/class/block/{name}/size")
        return (size in ("", "0")) is bool(known[name].size)

    for name in list(filter(is_old, known)):
        del known[name]


def _named(
    devices: list[blockdev.BlockDevice], volumes: list[Volume]
) -> list[blockdev.BlockDevice]:
    """Devices whose driver does not show the image get it from ceph-csi's record of what is mounted
    there, if anything is: other records may be of earlier attachments, and of raw block volumes
    nothing says which."""
    surest = sorted(volumes, key=lambda volume: volume.number is None)
    images = {v.device: v.image for v in surest[::-1] if v.device and v.image and not v.is_raw}
    return [
        dataclasses.replace(device, image=images[device.name])
        if device.image is None and device.name in images
        else device
        for device in devices
    ]
