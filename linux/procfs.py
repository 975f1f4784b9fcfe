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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from linux import mountinfo, syscalls

_FILEID_KERNFS = 0xFE  # name_to_handle_at(2): the file handle of a cgroup is its id
_MNT_ID = re.compile(rb"^mnt_id:\s*(\d+)", re.MULTILINE)
# cgroupfs and systemd write a pod's UID with '-' or '_'.
_POD = re.compile(r"pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12})")
_CONTAINER = re.compile(r"[0-9a-f]{64}")


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
    visible = mountinfo.at(target, mountinfo.read())
    if not visible:
        return []
    wanted = {(mount.device, mount.root) for mount in visible}
    handed_out = _parent_directory(target)
    own = os.stat("/proc/self/ns/mnt").st_ino
    found: list[Holder] = []
    by_namespace: dict[tuple[int, str], list[mountinfo.Mount]] = {}
    left_out = _family(ours) | {os.getpid()} if ours else {os.getpid()}
    for pid in _pids():
        if pid in left_out:
            continue
        try:
            namespace = os.stat(f"/proc/{pid}/ns/mnt").st_ino
            root = os.readlink(f"/proc/{pid}/root")
            first = (namespace, root) not in by_namespace
            if first:
                by_namespace[namespace, root] = mountinfo.read(Path(f"/proc/{pid}/mountinfo"))
        except OSError:
            continue  # just ended, or a kernel thread
        theirs = by_namespace[namespace, root]
        held = [m for m in theirs if _is_part(m, wanted)]
        how = _uses(pid, held)
        if not how and first and namespace != own:
            how = _keeps(theirs, held, handed_out)
        if how:
            found.append(_holder(pid, how))
    return found


def _is_part(mount: mountinfo.Mount, wanted: set[tuple[tuple[int, int], str]]) -> bool:
    """Whether ``mount`` shows a wanted mount or a part of it."""
    return any(
        mount.device == device and (mount.root == root or mount.root.startswith(root + "/"))
        for device, root in wanted
    )


def _parent_directory(target: str) -> tuple[tuple[int, int], str] | None:
    """The directory that pods are given, as device and path within its file system."""
    parent = os.path.dirname(target)
    mount = mountinfo.containing(parent, mountinfo.read())
    if mount is None:
        return None
    below = os.path.relpath(parent, mount.target)
    return mount.device, os.path.normpath(os.path.join(mount.root, below))


def _uses(pid: int, held: list[mountinfo.Mount]) -> str:
    """How a process uses one of the mounts now; '' when it does not."""
    if not held:
        return ""
    ids = {mount.mount_id for mount in held}
    base = f"/proc/{pid}"
    try:
        for number in os.listdir(f"{base}/fdinfo"):
            try:
                match = _MNT_ID.search(Path(f"{base}/fdinfo/{number}").read_bytes())
                if match and int(match[1]) in ids:
                    return f"has {os.readlink(f'{base}/fd/{number}')} open"
            except OSError:
                continue  # just closed
        root = os.readlink(f"{base}/root")
        for link, text in (("cwd", "its working directory is"), ("root", "its root is")):
            path = os.readlink(f"{base}/{link}")
            if any(_lies_on(path, root, mount) for mount in held):
                return f"{text} {path}"
        for line in Path(f"{base}/maps").read_bytes().split(b"\n"):
            fields = line.split(maxsplit=5)
            path = os.fsdecode(fields[5]) if len(fields) == 6 else ""
            if path.startswith("/") and any(_lies_on(path, root, mount) for mount in held):
                return f"has {path} mapped"
    except OSError:
        pass  # just ended
    return ""


def _lies_on(path: str, root: str, mount: mountinfo.Mount) -> bool:
    """Whether ``path``, which our own /proc shows, is at or below the process's own mount.

    Mount tables begin at the process's ``root``. For a process that is only chrooted our /proc
    shows paths from our root; for one in another namespace, from the root of that.
    """
    if root != "/":
        if path != root and not path.startswith(root + "/"):
            return False
        path = path[len(root) :] or "/"
    return path == mount.target or path.startswith(mount.target.rstrip("/") + "/")


def _keeps(
    theirs: list[mountinfo.Mount],
    held: list[mountinfo.Mount],
    handed_out: tuple[tuple[int, int], str] | None,
) -> str:
    """How another mount namespace keeps the mount; '' when unmounting here empties it there."""
    for mount in theirs:
        if handed_out is not None and (mount.device, mount.root) == handed_out:
            return f"its pod was given the dataset at {mount.target}"
    for mount in held:
        if mount.is_private:
            return f"its mount namespace has a private copy at {mount.target}"
    return ""


def _holder(pid: int, how: str) -> Holder:
    """With its command, pod and container."""
    try:
        command = Path(f"/proc/{pid}/comm").read_text().strip()
        cgroup = Path(f"/proc/{pid}/cgroup").read_text()
    except OSError:
        command, cgroup = "ended", ""
    return Holder(pid, command, how, *pod_and_container(cgroup))


def pod_and_container(cgroup: str) -> tuple[str, str]:
    """The innermost pod UID and container id in paths of cgroups; '' for each that is missing."""
    pods, containers = _POD.findall(cgroup), _CONTAINER.findall(cgroup)
    return pods[-1].replace("_", "-") if pods else "", containers[-1] if containers else ""


def _family(root: int) -> set[int]:
    """A process and its descendants."""
    children: dict[int, list[int]] = {}
    for pid in _pids():
        try:
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
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


def _pids() -> Iterator[int]:
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
