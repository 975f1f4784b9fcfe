"""Who keeps a device in use: other mount namespaces, and processes with open files.

Runs in the scan child only. ``Processes`` are all processes by mount namespace, with their pods.
Namespaces are visited one after the other (``Namespaces``): the kernel
lists them (Linux 6.12) or, before that, processes and threads lead to them. A mount table is read
from inside the namespace, so that a chrooted process hides nothing. Open files are found through
/proc (``users``); statx with AT_STATX_DONT_SYNC tells a file's device, so that a dead network file
system does not stop the scan.

Invariant: a namespace is held open only while its own table is read, because a held namespace keeps
its mounts, and so the devices, busy.
"""

import dataclasses
import errno
import functools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from linux import blockdev, mount_namespaces, mountinfo, procfs, rbd_sysfs, syscalls
from volumes.audit.inventory.model import Owner, Place, Space, User
from volumes.node import raw_block

_LARGEST_CONFIG = 1 << 20  # of a container's bundle
_MOST_PLACES = 512  # of one namespace
_MOST_SPACES = 1024  # with relevant mounts in them
_OWNERS_NAMED = 4
_MOST_USERS = 256


# -- processes ---------------------------------------------------------------------------------


class Processes:
    """All processes at one moment, by mount namespace."""

    def __init__(self, proc: str, containers: str) -> None:
        self._proc = proc
        self._containers = containers
        self.by_space: dict[int, list[int]] = {}
        self.count = 0
        self.hidden = 0  # not readable for us (CAP_SYS_PTRACE, a security module)
        self._names: dict[str, str] = {}
        for entry in os.listdir(proc):
            if not entry.isdigit():
                continue
            try:
                space = self.space(f"{proc}/{entry}/ns/mnt")
            except PermissionError:
                self.hidden += 1
                continue
            except OSError:
                continue  # it ended, or is a zombie
            self.count += 1
            self.by_space.setdefault(space, []).append(int(entry))

    @staticmethod
    def space(path: str) -> int:
        """Inode from ``mnt:[4026531832]``. Reads the link, opens nothing."""
        return int(os.readlink(path)[5:-1])

    def host_space(self) -> int:
        """The mount namespace of pid 1; see ``host_space``."""
        return host_space(self._proc, [pids[0] for pids in self.by_space.values()])

    @functools.cached_property
    def kubelets(self) -> list[int]:
        """This node's kubelet, under whatever name."""
        return raw_block.kubelets(self._proc)

    def _read(self, pid: int, file: str) -> str:
        try:
            path = f"{self._proc}/{pid}/{file}"
            with open(path, encoding="utf-8", errors="replace") as stream:  # noqa: PTH123
                return stream.read(65536).strip()
        except OSError:
            return ""

    def owner(self, pid: int, *, thread: int = 0, host: bool = False) -> Owner:
        """A process with its pod; empty texts if it ended meanwhile."""
        groups = [line.split(":", 2)[2] for line in self._read(pid, "cgroup").splitlines()]
        cgroup = max(groups, key=len, default="")
        pod_uid, container = procfs.pod_and_container(" ".join(groups))
        stat = self._read(pid, "stat").rpartition(")")[2].split()
        return Owner(
            pid=pid,
            started=int(stat[19]) if len(stat) > 19 else 0,
            comm=self._read(pid, "comm"),
            cgroup=cgroup,
            container=container,
            pod_uid=pod_uid,
            pod=self._pod_name(container) if container else "",
            thread=thread,
            host=host,
        )

    def _pod_name(self, container: str) -> str:
        """namespace/name from containerd's bundle; empty without one."""
        if container not in self._names:
            self._names[container] = ""
            path = f"{self._containers}/{container}/config.json"
            try:
                with open(path, encoding="utf-8") as stream:  # noqa: PTH123
                    notes = json.loads(stream.read(_LARGEST_CONFIG)).get("annotations", {})
                space = notes.get("io.kubernetes.cri.sandbox-namespace", "")
                name = notes.get("io.kubernetes.cri.sandbox-name", "")
                self._names[container] = f"{space}/{name}" if name else ""
            except (OSError, ValueError, AttributeError):
                pass  # not containerd, or an unusual configuration
        return self._names[container]

    def threads_apart(self) -> dict[int, list[tuple[int, int]]]:
        """Namespaces with threads but no process in them: inode -> (pid, thread).

        Reads a link for every thread of the node.
        """
        found: dict[int, list[tuple[int, int]]] = {}
        for space, pid in self.each():
            threads = rbd_sysfs.listed(f"{self._proc}/{pid}/task")
            for thread in threads if len(threads) > 1 else ():
                try:
                    own = self.space(f"{self._proc}/{pid}/task/{thread}/ns/mnt")
                except OSError:
                    continue
                if own != space and own not in self.by_space:
                    found.setdefault(own, []).append((pid, int(thread)))
        return found

    def holding_descriptors(self, wanted: set[int]) -> dict[int, list[str]]:
        """Which descriptors hold these namespaces open: inode -> "fd N of pid P (comm)"."""
        found: dict[int, list[str]] = {}
        for _, pid in self.each():
            home = f"{self._proc}/{pid}/fd"
            for descriptor in rbd_sysfs.listed(home):
                try:
                    link = os.readlink(f"{home}/{descriptor}")
                except OSError:
                    continue
                if link.startswith("mnt:[") and int(link[5:-1]) in wanted:
                    name = f"fd {descriptor} of pid {pid} ({self._read(pid, 'comm')})"
                    found.setdefault(int(link[5:-1]), []).append(name)
        return found

    def each(self) -> Iterator[tuple[int, int]]:
        """Mount namespace and pid of each process."""
        return ((space, pid) for space, pids in self.by_space.items() for pid in pids)


def host_space(proc: str, candidates: Sequence[int | str]) -> int:
    """Inode of pid 1's mount namespace; 0 when unknown.

    Some security modules hide pid 1's links. A process whose mount table begins with the same mount
    as pid 1's is in the same namespace.
    """
    try:
        return Processes.space(f"{proc}/1/ns/mnt")
    except OSError:
        first = raw_block.first_mount(proc, 1)
    for pid in ["self", *candidates]:
        try:
            if raw_block.first_mount(proc, pid) == first:
                return Processes.space(f"{proc}/{pid}/ns/mnt")
        except OSError:
            continue  # it ended
    return 0


# -- mount namespaces --------------------------------------------------------------------------


def place(inode: int, mount: mountinfo.Mount) -> Place:
    propagation = "shared" if mount.shared is not None else "slave"
    return Place(
        namespace=inode,
        target=mount.target,
        root=mount.root,
        device=mount.device,
        fstype=mount.fstype,
        read_only=mount.read_only,
        super_read_only="ro" in mount.super_options.split(","),
        options=tuple(sorted(mount.options)),
        super_options=tuple(mount.super_options.split(",")),
        propagation="private" if mount.is_private else propagation,
    )


@dataclass
class Visited:
    """The result of a visit. ``gaps``: namespaces that could not be read. ``by_processes``: the
    kernel does not list namespaces, so those of hidden processes were not seen."""

    spaces: list[Space] = field(default_factory=list)
    gaps: list[str] = field(default_factory=list)
    count: int = 0
    by_processes: bool = False

    def note(self, inode: int, error: OSError) -> None:
        """Record a gap. A namespace that ended meanwhile is not one: nothing is mounted in it."""
        if error.errno not in (errno.ESRCH, errno.ENOENT):
            self.gaps.append(f"mount namespace {inode}: {error.strerror}")


# Namespaces bound to files: inode -> where.
Bound = dict[int, list[str]]
_Found = tuple[list[Place], list[tuple[int, str]]]


def _shows_kubelet(mount: mountinfo.Mount, kubelet: Place, inside: str) -> bool:
    """Whether ``mount`` shows kubelet's directory, which is at ``inside`` of its file system, or a
    directory above it or one in it that holds volumes."""
    if mount.device != kubelet.device:
        return False
    volumes = [inside, f"{inside}/pods", f"{inside}/plugins", f"{inside}/plugins/kubernetes.io"]
    return any(mountinfo.within(path, mount.root) for path in volumes)


class Relevant:
    """What matters in each namespace's mount table. The same table is not parsed again."""

    def __init__(self) -> None:
        self._for: object = None  # the devices and the directory that matter
        self._wanted: set[bytes] = set()
        self._kubelet: tuple[Place, str] | None = None
        self._before: dict[int, tuple[int, _Found]] = {}  # by inode, with a hash of the table
        self._now: dict[int, tuple[int, _Found]] = {}

    def begin(self, watched: set[blockdev.Number], kubelet: tuple[Place, str] | None) -> None:
        self._before, self._now = self._now, {}
        if self._for != (watched, kubelet):
            self._for, self._before = (watched, kubelet), {}
            self._wanted = {b"%d:%d" % number for number in watched}
            self._kubelet = kubelet

    def of(self, inode: int, table: bytes) -> "_Found":
        """The mounts of a namespace, and the namespaces that are bound to files in it."""
        known, mark = self._before.get(inode), hash(table)
        found = known[1] if known is not None and known[0] == mark else self._read(inode, table)
        self._now[inode] = mark, found
        return found

    def _read(self, inode: int, table: bytes) -> "_Found":
        places: list[Place] = []
        bound: list[tuple[int, str]] = []
        kubelet = b"%d:%d" % self._kubelet[0].device if self._kubelet else b""
        for line in table.split(b"\n"):
            fields = line.split(b" ", 4)
            if len(fields) < 5:
                continue
            if fields[3].startswith(b"mnt:["):
                mount = mountinfo.parse_line(line)
                bound.append((int(mount.root[5:-1]), f"bind mount {mount.target}"))
            elif fields[2] in self._wanted:
                places.append(place(inode, mountinfo.parse_line(line)))
            elif fields[2] == kubelet and self._kubelet is not None:
                mount = mountinfo.parse_line(line)
                if _shows_kubelet(mount, *self._kubelet):
                    places.append(place(inode, mount))
            if len(places) >= _MOST_PLACES:
                break
        return places, bound


class Namespaces:
    """One visit to all mount namespaces."""

    def __init__(
        self,
        processes: Processes,
        proc: str,
        host: set[int],
        watched: set[blockdev.Number],
        kubelet: tuple[Place, str] | None,
        relevant: "Relevant | None" = None,
    ) -> None:
        self._processes = processes
        self._proc = proc
        self._host = host
        self._relevant = relevant or Relevant()
        self._relevant.begin(watched, kubelet)
        self._visitor = mount_namespaces.Visitor(proc)
        self._threads: dict[int, list[tuple[int, int]]] | None = None

    def visit(self, unexplained: set[blockdev.Number]) -> Visited:
        """``unexplained``: devices in use without a host mount. If no namespace shows one of them,
        mounts hidden below other mounts are searched too."""
        found = Visited()
        spaces: list[Space] = []
        bound: Bound = {}
        for inode, identity, descriptor in self._all(found):
            found.count += 1
            try:
                table = self._visitor.table(descriptor)
                places, files = self._relevant.of(inode, table)
            except OSError as error:
                found.note(inode, error)
                continue
            for held, where in files:
                bound.setdefault(held, []).append(where)
            if places and inode not in self._host:
                spaces.append(Space(inode, identity, places=tuple(places)))
        seen = {p.device for space in spaces for p in space.places}
        if unexplained - seen:
            spaces += self._hidden(unexplained - seen)
        found.spaces = self._owned(spaces[:_MOST_SPACES], bound)
        self._visitor.close()
        return found

    def _all(self, found: Visited) -> Iterator[tuple[int, int, int]]:
        """(inode, id, descriptor) of each namespace; the descriptor is open until the next one."""
        visited: set[int] = set()
        try:
            for listed in mount_namespaces.walk():
                visited.add(listed.inode)
                yield listed.inode, listed.id, listed.descriptor
            return
        except OSError as error:
            # EPERM: the node has a PID namespace of its own (it runs in a container).
            if error.errno not in (errno.ENOTTY, errno.EINVAL, errno.EPERM):
                raise
        found.by_processes = True
        self._threads = self._processes.threads_apart()
        homes = {inode: f"{pids[0]}" for inode, pids in self._processes.by_space.items()}
        homes |= {i: f"{pid}/task/{tid}" for i, ((pid, tid), *_) in self._threads.items()}
        for inode, home in homes.items():
            if inode in visited:
                continue
            try:
                with mount_namespaces.opened(f"{self._proc}/{home}/ns/mnt") as descriptor:
                    if os.fstat(descriptor).st_ino == inode:
                        yield inode, 0, descriptor
            except OSError as error:
                found.note(inode, error)

    def _hidden(self, numbers: set[blockdev.Number]) -> list[Space]:
        """Mounts below another mount on a namespace's root, which mountinfo leaves out."""
        spaces = []
        try:
            for listed in mount_namespaces.walk():
                if listed.inode in self._host:
                    continue
                places = [
                    Place(
                        namespace=listed.inode,
                        target=mount.target,
                        root="/",
                        device=mount.device,
                        fstype=mount.fstype,
                        read_only=mount.read_only,
                        super_read_only=mount.read_only,
                        options=(),
                        super_options=(),
                        propagation=mount.propagation,
                    )
                    for mount in mount_namespaces.mounts(listed.id)
                    if mount.device in numbers
                ]
                if places:
                    spaces.append(Space(listed.inode, listed.id, places=tuple(places)))
        except OSError:
            pass  # before Linux 6.12; docs/audit.md names this limit
        return spaces

    def _owned(self, spaces: list[Space], bound: Bound) -> list[Space]:
        """The namespaces with who is in them, and what keeps those without a process."""
        empty = {s.inode for s in spaces if s.inode not in self._processes.by_space}
        if empty and self._threads is None:
            self._threads = self._processes.threads_apart()
        threads = self._threads or {}
        unowned = empty - threads.keys()
        holding = self._processes.holding_descriptors(unowned) if unowned else {}
        found = []
        for space in spaces:
            pids = sorted(self._processes.by_space.get(space.inode, []))
            apart = threads.get(space.inode, [])
            owners = [self._processes.owner(pid) for pid in pids[:_OWNERS_NAMED]]
            owners += [self._processes.owner(p, thread=t) for p, t in apart[:_OWNERS_NAMED]]
            kept = bound.get(space.inode, []) + holding.get(space.inode, [])
            found.append(
                dataclasses.replace(
                    space,
                    owners=tuple(owners),
                    processes=len(pids) + len(apart),
                    kept_by=tuple(kept[:8]),
                )
            )
        return found


# -- open files --------------------------------------------------------------------------------


def users(
    processes: Processes,
    proc: str,
    wanted: set[blockdev.Number],
    host_spaces: set[int],
    servers: Mapping[blockdev.Number, int | None] | None = None,
) -> list[User]:
    """Every process with a file, directory or mapping on ``wanted``, or with the device open.

    ``servers``: who serves a device (rbd-nbd) has it open, too, and is no user of it.
    """
    if not wanted:
        return []
    servers = servers or {}
    place = syscalls.Statx(syscalls.TYPE)
    found: list[User] = []
    for space, pid in processes.each():
        ways: dict[blockdev.Number, list[str]] = {}
        for name, path in _paths(proc, pid):
            answer = place(path)
            if answer is None:
                continue
            on, node = answer.device, answer.node
            if on in wanted:
                ways.setdefault(on, []).append(name)
            if answer.is_block and node in wanted and servers.get(node) != pid:
                ways.setdefault(node, []).append(f"device {name}")
        for number in _mapped(proc, pid, wanted):
            ways.setdefault(number, []).append("map")
        for number, names in ways.items():
            owner = processes.owner(pid, host=space in host_spaces)
            found.append(User(owner, number, tuple(names[:8]), space))
            if len(found) >= _MOST_USERS:
                return found
    return found


def loops(
    backings: Iterable[tuple[str, str, list[list[int]]]], wanted: set[blockdev.Number]
) -> list[User]:
    """The loop devices on one of ``wanted``. ``backings``: of ``linux.loop``."""
    return [
        User(Owner(0, 0, name, "", host=True), (major, minor), (file,), 0)
        for name, file, numbers in backings
        for major, minor in numbers
        if (major, minor) in wanted
    ][:_MOST_USERS]


def _paths(proc: str, pid: int) -> list[tuple[str, str]]:
    home = f"{proc}/{pid}"
    paths = [(name, f"{home}/{name}") for name in ("cwd", "root", "exe")]
    return paths + [(f"fd {fd}", f"{home}/fd/{fd}") for fd in rbd_sysfs.listed(f"{home}/fd")]


def _mapped(proc: str, pid: int, wanted: set[blockdev.Number]) -> set[blockdev.Number]:
    """File systems of mapped files: a mapping outlives its descriptor."""
    try:
        with open(f"{proc}/{pid}/maps", "rb") as stream:  # noqa: PTH123
            maps = stream.read()
    except OSError:
        return set()
    return {number for number in wanted if b" %02x:%02x " % number in maps}
