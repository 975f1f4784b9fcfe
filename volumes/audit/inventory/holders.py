"""Who keeps a device in use: other mount namespaces, and processes with open files.

Runs in the scan child only. Namespaces are visited one after the other (``Namespaces``): the kernel
lists them (Linux 6.12) or, before that, processes and threads lead to them. A mount table is read
from inside the namespace, so that a chrooted process hides nothing. Open files are found through
/proc (``users``); statx with AT_STATX_DONT_SYNC tells a file's device, so that a dead network file
system does not stop the scan.

Invariant: a namespace is held open only while its own table is read, because a held namespace keeps
its mounts, and so the devices, busy.
"""

import ctypes
import errno
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

from linux import blockdev, mount_namespaces, mountinfo, syscalls
from volumes.audit.inventory.model import Owner, Place, Space, User
from volumes.audit.inventory.owners import Processes

_MOST_PLACES = 512  # of one namespace
_MOST_SPACES = 1024  # with relevant mounts in them
_OWNERS_NAMED = 4
_MOST_USERS = 256
_AT_FDCWD = -100
_DONT_SYNC = 0x4000
_NO_AUTOMOUNT = 0x800
_BLOCK = 0o060000
_TYPE = 1  # STATX_TYPE, the cheapest request
# struct statx: mode at 28; rdev and dev numbers at 128
_MODE = struct.Struct("=28xH")
_NUMBERS = struct.Struct("=128xIIII")


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


@dataclass
class _Table:
    """What is relevant of one namespace's mount table."""

    inode: int
    id: int
    places: list[Place]
    bound: dict[int, list[str]]  # namespaces bound to files in this one


def _shows_kubelet(mount: mountinfo.Mount, kubelet: Place, inside: str) -> bool:
    """Whether ``mount`` shows kubelet's directory, which is at ``inside`` of its file system, or a
    directory above it or one in it that holds volumes."""
    if mount.device != kubelet.device:
        return False
    volumes = [inside, f"{inside}/pods", f"{inside}/plugins", f"{inside}/plugins/kubernetes.io"]
    return any(_is_above(mount.root, path) for path in volumes)


def _is_above(upper: str, path: str) -> bool:
    return path == upper or path.startswith(upper.rstrip("/") + "/")


class Namespaces:
    """One visit to all mount namespaces."""

    def __init__(
        self,
        processes: Processes,
        proc: str,
        host: set[int],
        watched: set[blockdev.Number],
        kubelet: tuple[Place, str] | None,
    ) -> None:
        self._processes = processes
        self._proc = proc
        self._host = host
        self._watched = watched
        self._kubelet = kubelet
        self._visitor = mount_namespaces.Visitor(proc)
        self._threads: dict[int, list[tuple[int, int]]] | None = None

    def visit(self, unexplained: set[blockdev.Number]) -> Visited:
        """``unexplained``: devices in use without a host mount. If no namespace shows one of them,
        mounts hidden below other mounts are searched too."""
        found = Visited()
        tables: list[_Table] = []
        bound: dict[int, list[str]] = {}
        for inode, identity, descriptor in self._all(found):
            found.count += 1
            try:
                table = self._read(inode, identity, self._visitor.table(descriptor))
            except OSError as error:
                found.note(inode, error)
                continue
            for other, targets in table.bound.items():
                bound.setdefault(other, []).extend(targets)
            if table.places and inode not in self._host:
                tables.append(table)
        seen = {p.device for table in tables for p in table.places}
        if unexplained - seen:
            tables += self._hidden(unexplained - seen)
        found.spaces = self._owned(tables[:_MOST_SPACES], bound)
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

    def _read(self, inode: int, identity: int, table: bytes) -> _Table:
        places: list[Place] = []
        bound: dict[int, list[str]] = {}
        wanted = {b"%d:%d" % number for number in self._watched}
        kubelet = b"%d:%d" % self._kubelet[0].device if self._kubelet else b""
        for line in table.split(b"\n"):
            fields = line.split(b" ", 4)
            if len(fields) < 5:
                continue
            if fields[3].startswith(b"mnt:["):
                mount = mountinfo.parse_line(line)
                bound.setdefault(int(mount.root[5:-1]), []).append(f"bind mount {mount.target}")
            elif fields[2] in wanted:
                places.append(place(inode, mountinfo.parse_line(line)))
            elif fields[2] == kubelet and self._kubelet is not None:
                mount = mountinfo.parse_line(line)
                if _shows_kubelet(mount, *self._kubelet):
                    places.append(place(inode, mount))
            if len(places) >= _MOST_PLACES:
                break
        return _Table(inode, identity, places, bound)

    def _hidden(self, numbers: set[blockdev.Number]) -> list[_Table]:
        """Mounts below another mount on a namespace's root, which mountinfo leaves out."""
        tables = []
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
                    tables.append(_Table(listed.inode, listed.id, places, {}))
        except OSError:
            pass  # before Linux 6.12; docs/audit.md names this limit
        return tables

    def _owned(self, tables: list[_Table], bound: dict[int, list[str]]) -> list[Space]:
        """The namespaces with who is in them, and what keeps those without a process."""
        empty = {t.inode for t in tables if t.inode not in self._processes.by_space}
        if empty and self._threads is None:
            self._threads = self._processes.threads_apart()
        threads = self._threads or {}
        unowned = empty - threads.keys()
        holding = self._processes.holding_descriptors(unowned) if unowned else {}
        spaces = []
        for table in tables:
            pids = sorted(self._processes.by_space.get(table.inode, []))
            owners: list[Owner] = [self._processes.owner(pid) for pid in pids[:_OWNERS_NAMED]]
            for pid, thread in threads.get(table.inode, [])[:_OWNERS_NAMED]:
                owners.append(self._processes.owner(pid, thread=thread))
            kept = bound.get(table.inode, []) + holding.get(table.inode, [])
            spaces.append(
                Space(
                    inode=table.inode,
                    id=table.id,
                    owners=tuple(owners),
                    processes=len(pids) + len(threads.get(table.inode, [])),
                    kept_by=tuple(kept[:8]),
                    places=tuple(table.places),
                )
            )
        return spaces


def users(
    processes: Processes, proc: str, wanted: set[blockdev.Number], host_spaces: set[int]
) -> list[User]:
    """Every process with a file, directory or mapping on ``wanted``, or with the device open."""
    statx = _Statx()
    found: list[User] = []
    for space, pids in processes.by_space.items():
        for pid in pids:
            ways: dict[blockdev.Number, list[str]] = {}
            for name, path in _paths(proc, pid):
                answer = statx(path)
                if answer is None:
                    continue
                on, node = answer
                if on in wanted:
                    ways.setdefault(on, []).append(name)
                if node is not None and node in wanted:
                    ways.setdefault(node, []).append(f"device {name}")
            for number in _mapped(proc, pid, wanted):
                ways.setdefault(number, []).append("map")
            for number, names in ways.items():
                owner = processes.owner(pid, host=space in host_spaces)
                found.append(User(owner, number, tuple(names[:8]), space))
                if len(found) >= _MOST_USERS:
                    return found
    return found


class _Statx:
    def __init__(self) -> None:
        self._buffer = ctypes.create_string_buffer(256)
        self._statx = syscalls.libc.statx

    def __call__(self, path: str) -> tuple[blockdev.Number, blockdev.Number | None] | None:
        """(device of the file system, number of a block device node or None)."""
        flags = _DONT_SYNC | _NO_AUTOMOUNT
        if self._statx(_AT_FDCWD, os.fsencode(path), flags, _TYPE, self._buffer) < 0:
            return None
        raw = self._buffer.raw
        rmajor, rminor, major, minor = _NUMBERS.unpack_from(raw)
        is_block = _MODE.unpack_from(raw)[0] & 0o170000 == _BLOCK
        return (major, minor), ((rmajor, rminor) if is_block else None)


def _paths(proc: str, pid: int) -> list[tuple[str, str]]:
    home = f"{proc}/{pid}"
    paths = [(name, f"{home}/{name}") for name in ("cwd", "root", "exe")]
    try:
        paths += [(f"fd {fd}", f"{home}/fd/{fd}") for fd in os.listdir(f"{home}/fd")]
    except OSError:
        pass  # it ended
    return paths


def _mapped(proc: str, pid: int, wanted: set[blockdev.Number]) -> set[blockdev.Number]:
    """File systems of mapped files: a mapping outlives its descriptor."""
    try:
        with open(f"{proc}/{pid}/maps", "rb") as stream:  # noqa: PTH123
            maps = stream.read()
    except OSError:
        return set()
    return {number for number in wanted if b" %02x:%02x " % number in maps}
