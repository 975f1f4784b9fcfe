"""What /proc shows of processes: who uses a mount and how; cgroups and the pods they stand for.

A mount has holders in three ways: a process uses it (open files, working directory, root,
mappings), its mount namespace has a private copy of it, or its pod was given the directory above.
Only /proc is read, never the file system in question, so holders are found also when that hangs.
"""

import ctypes
import errno
import os
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from linux import mountinfo, syscalls

_FILEID_KERNFS = 0xFE  # name_to_handle_at(2): the file handle of a cgroup is its id
_MNT_ID = re.compile(rb"^mnt_id:\s*(\d+)", re.MULTILINE)
# cgroupfs and systemd write a pod's UID with '-' or '_'.
_POD = re.compile(r"pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12})")
_CONTAINER = re.compile(r"[0-9a-f]{64}")
_BOOT = Path("/proc/sys/kernel/random/boot_id")

# Names of processes that are kubelet or contain it.
KUBELETS = frozenset({"kubelet", "kubelite", "k3s-server", "k3s-agent"})


def boot_id() -> str:
    """Names the time since the kernel started; another one after each boot."""
    return _BOOT.read_text().strip()


@dataclass(frozen=True)
class Holder:
    """One process that holds a mount, and how."""

    pid: int
    command: str
    how: str
    pod: str = ""  # pod UID from its cgroup, if it is in one
    container: str = ""

    def __str__(self) -> str:
        where = f", pod {self.pod}" if self.pod else ""
        return f"pid {self.pid} ({self.command}{where}): {self.how}"


def holders_of_mount(target: str, *, ours: int = 0) -> list[Holder]:
    """Holders of what is mounted at ``target``, without this process and without ``ours`` (a pid)
    and its descendants.

    Device and root do not distinguish a bind mount from its source: our own workers, which read
    the source, would seem to use a view of it.
    """
    found = {pid: how for pid, _, how in reversed(list(_holding([target], ours)))}
    return [holder(pid, how) for pid, how in reversed(found.items())]


def held(targets: Sequence[str], *, ours: int = 0) -> dict[str, Holder]:
    """One holder of each of ``targets`` that has any, in one look through all processes."""
    found: dict[str, Holder] = {}
    for pid, target, how in _holding(targets, ours):
        if target not in found:
            found[target] = holder(pid, how)
    return found


def _holding(targets: Sequence[str], ours: int) -> Iterator[tuple[int, str, str]]:
    """Process, target and how, once or more for each pair of the first two."""
    seen = Targets(targets)
    own = os.stat("/proc/self/ns/mnt").st_ino
    left_out = family(ours) | {os.getpid()} if ours else {os.getpid()}
    for pid in pids():
        if pid in left_out:
            continue
        try:
            theirs, first = seen.by(pid)
        except OSError:
            continue  # just ended, or a kernel thread
        for target, how in _uses(pid, theirs):
            yield pid, target, how
        if first and theirs.namespace != own:
            for target, how in theirs.kept:
                yield pid, target, how


def mount_view(pid: int) -> tuple[int, str]:
    """Tells processes apart that see other mounts: mount namespace and root. OSError."""
    return os.stat(f"/proc/{pid}/ns/mnt").st_ino, os.readlink(f"/proc/{pid}/root")


class Targets:
    """What is mounted at targets here, and where processes see it."""

    def __init__(self, targets: Sequence[str]) -> None:
        self._places = _Places(targets)
        self._tables: dict[tuple[int, str], _Held] = {}

    def of(self, pid: int, path: str) -> tuple[str, str]:
        """The target that shows ``path``, which a process opened, and what lies below it there.

        Twice '' for none. ``path``: as our /proc shows it. One that a process opened here is known
        after its end, too.
        """
        try:
            theirs, _ = self.by(pid)
            return theirs.below(path)
        except OSError:
            theirs, _ = self.by(os.getpid())
            return theirs.below(path)

    def by(self, pid: int) -> "tuple[_Held, bool]":
        """What a process sees, and whether it is the first one that sees it. OSError."""
        key = mount_view(pid)
        first = key not in self._tables
        if first:
            table = mountinfo.read(Path(f"/proc/{pid}/mountinfo"))
            self._tables[key] = _Held(self._places, table, *key)
        return self._tables[key], first


class _Places:
    """What is mounted at targets, as device and path within its file system."""

    def __init__(self, targets: Sequence[str]) -> None:
        table = mountinfo.read()
        self.mounted: dict[tuple[tuple[int, int], str], str] = {}
        self.handed_out: dict[tuple[tuple[int, int], str], str] = {}  # directories pods are given
        tops = {mount.target: mount for mount in table}  # the last one lies on top
        wanted = set(targets)
        for mount in table:
            if mount.target in wanted:
                self.mounted[mount.device, mount.root] = mount.target
        for target in set(self.mounted.values()):
            parent = os.path.dirname(target)
            over = next((tops[each] for each in _upwards(parent) if each in tops), None)
            if over is not None:
                below = os.path.relpath(parent, over.target)
                place = over.device, os.path.normpath(os.path.join(over.root, below))
                self.handed_out[place] = target

    def shown_by(self, mount: mountinfo.Mount) -> tuple[str, str]:
        """The target that ``mount`` shows, and which part of it; twice '' for another mount."""
        for root in _upwards(mount.root):
            if target := self.mounted.get((mount.device, root), ""):
                part = os.path.relpath(mount.root, root)
                return target, "" if part == "." else part
        return "", ""


class _Held:
    """What a mount table has of targets. ``kept``: what unmounting here leaves there, and how."""

    def __init__(
        self, places: _Places, table: Sequence[mountinfo.Mount], namespace: int, root: str
    ) -> None:
        """``root``: of the processes, as our /proc shows it."""
        self.namespace, self._root = namespace, root
        pairs = ((mount, *places.shown_by(mount)) for mount in table)
        parts = [each for each in pairs if each[1]]
        shown = [(mount, target) for mount, target, _ in parts]
        self.by_id = {mount.mount_id: target for mount, target in shown}
        self._by_path = {mount.target: (target, part) for mount, target, part in parts}
        given = [
            (target, f"its pod was given the dataset at {mount.target}")
            for mount in table
            if (target := places.handed_out.get((mount.device, mount.root), ""))
        ]
        copies = [
            (target, f"its mount namespace has a private copy at {mount.target}")
            for mount, target in shown
            if mount.is_private
        ]
        self.kept = given + copies

    def at(self, path: str) -> str:
        """The target on whose mount ``path`` lies, which our own /proc shows; '' for none."""
        return self.below(path)[0]

    def below(self, path: str) -> tuple[str, str]:
        """The same, and the path below the target.

        Mount tables begin at the process's root. For a process that is only chrooted our /proc
        shows paths from our root; for one in another namespace, from the root of that.
        """
        if (root := self._root) != "/":
            if path != root and not path.startswith(root + "/"):
                return "", ""
            path = path[len(root) :] or "/"
        for each in _upwards(path):
            if each in self._by_path:
                target, part = self._by_path[each]
                return target, os.path.join(part, path[len(each) :].lstrip("/"))
        return "", ""


def _upwards(path: str) -> Iterator[str]:
    """``path`` and every directory above it."""
    yield path
    while path not in ("/", ""):
        path = os.path.dirname(path)
        yield path


def _uses(pid: int, theirs: _Held) -> Iterator[tuple[str, str]]:
    """Which targets a process uses now, and how."""
    if not theirs.by_id:
        return
    base = f"/proc/{pid}"
    try:
        for number in os.listdir(f"{base}/fdinfo"):
            try:
                match = _MNT_ID.search(Path(f"{base}/fdinfo/{number}").read_bytes())
                if match and (target := theirs.by_id.get(int(match[1]))):
                    yield target, f"has {os.readlink(f'{base}/fd/{number}')} open"
            except OSError:
                continue  # just closed
        for link, text in (("cwd", "its working directory is"), ("root", "its root is")):
            path = os.readlink(f"{base}/{link}")
            if target := theirs.at(path):
                yield target, f"{text} {path}"
        lines = Path(f"{base}/maps").read_bytes().split(b"\n")
        fields = (line.split(maxsplit=5) for line in lines)
        for mapped in dict.fromkeys(each[5] for each in fields if len(each) == 6):
            path = os.fsdecode(mapped)
            if path.startswith("/") and (target := theirs.at(path)):
                yield target, f"has {path} mapped"
    except OSError:
        pass  # just ended


def name_of(pid: int | str) -> str:
    """A process's own name. It chooses it, and the kernel cuts it at 15 bytes, also within a
    character; what is no UTF-8 is replaced. OSError when it has ended."""
    return Path(f"/proc/{pid}/comm").read_bytes().strip().decode(errors="replace")


def holder(pid: int, how: str) -> Holder:
    """With its command, pod and container."""
    try:
        command = name_of(pid)
        cgroup = Path(f"/proc/{pid}/cgroup").read_text(errors="replace")
    except OSError:
        command, cgroup = "ended", ""
    return Holder(pid, command, how, *pod_and_container(cgroup))


def pod_and_container(cgroup: str) -> tuple[str, str]:
    """The innermost pod UID and container id in paths of cgroups; '' for each that is missing."""
    pods, containers = _POD.findall(cgroup), _CONTAINER.findall(cgroup)
    return pods[-1].replace("_", "-") if pods else "", containers[-1] if containers else ""


def family(root: int) -> set[int]:
    """A process and its descendants."""
    children: dict[int, list[int]] = {}
    for pid in pids():
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
            parent = int(stat.rpartition(")")[2].split()[1])
        except OSError:
            continue  # just ended
        children.setdefault(parent, []).append(pid)
    found: set[int] = set()
    waiting = [root]
    while waiting:
        pid = waiting.pop()
        if pid not in found:
            found.add(pid)
            waiting += children.get(pid, [])
    return found


def pids() -> Iterator[int]:
    """Of all processes."""
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            yield int(entry)


def cgroup_path(mount: int, number: int) -> str:
    """The path of the cgroup with this id, below the hierarchy whose mount is open as ``mount``.

    BPF programs give the id. Empty when the cgroup is gone. Needs CAP_DAC_READ_SEARCH. OSError.
    """
    handle = ctypes.create_string_buffer(struct.pack("=IiQ", 8, _FILEID_KERNFS, number), 16)
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    opened = syscalls.libc.open_by_handle_at(mount, handle, flags)
    try:
        syscalls.checked(opened, f"cgroup {number}")
    except OSError as error:
        if error.errno in (errno.ESTALE, errno.ENOENT):
            return ""
        raise
    try:
        return str(Path(f"/proc/self/fd/{opened}").readlink())
    finally:
        os.close(opened)
