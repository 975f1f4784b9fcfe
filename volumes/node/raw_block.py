"""Which devices kubelet publishes to pods as raw block volumes (volumeMode: Block).

kubelet binds the device node below a volumeDevices directory, in its own mount namespace where it
has one. The node is a file of devtmpfs, or of tmpfs where somebody made it by mknod (a kubelet in a
container). A node of krbd in devtmpfs ends with its disk. Others stay, and so does a bind mount of
one that nobody removed: it was made for an earlier attachment and permits nothing of the next one.
"""

import contextlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from linux import mountinfo, procfs

NO_DISK = ""  # of nodes whose number no disk has now

_PLACE = "/volumeDevices/"  # in the path of what kubelet publishes

_NAMES = frozenset(name.encode() for name in procfs.KUBELETS)

BY = "raw block volume on "  # who permitted, in the ledger; the node follows


def gave(permitted_by: str) -> bool:
    """Whether this permission is of a publication."""
    return permitted_by.startswith(BY)


Table = Mapping[str, frozenset[int]]  # device name, or NO_DISK -> ids of its bind mounts


def is_published(mount: mountinfo.Mount) -> bool:
    """Whether kubelet may have bound a device node there."""
    return _PLACE in mount.target


def bound(table: bytes, fstype: bytes) -> list[mountinfo.Mount]:
    """Published files of such a file system, by a namespace's mountinfo; of thousands of lines few
    are worth parsing."""
    place, mark = _PLACE.encode(), b" - %s " % fstype
    lines = table.split(b"\n") if place in table else []
    mounts = (mountinfo.parse_line(line) for line in lines if mark in line and place in line)
    return [mount for mount in mounts if is_published(mount)]


def published(table: bytes) -> dict[str, frozenset[int]]:
    """By a namespace's mountinfo. Only nodes in devtmpfs are found, which has each under its
    device's name."""
    found: dict[str, frozenset[int]] = {}
    for mount in bound(table, b"devtmpfs"):
        name = mount.root.lstrip("/")
        found[name] = found.get(name, frozenset()) | {mount.mount_id}
    return found


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
    return [int(pid) for pid in os.listdir(proc) if pid.isdigit() and is_kubelet(proc, pid)]


def is_kubelet(proc: str, pid: int | str) -> bool:
    process = Path(proc, str(pid))
    try:
        # The kernel cuts names at 15 bytes, also within a character.
        if (process / "comm").read_bytes().strip() not in _NAMES:
            return False
        return not procfs.pod_of(process.name, process.parent)[0]
    except OSError:
        return False  # it ended


def spaces(proc: str = "/proc") -> tuple[frozenset[int], dict[bytes, int]]:
    """The kubelets, and the mount namespaces in which they may publish, each with a process in it:
    pid 1's, and a kubelet's where it has its own. OSError when pid 1's cannot be told.

    By the first mount, because some security modules hide pid 1's links.
    """
    found = {first_mount(proc, 1): 1}
    running = set()
    for pid in kubelets(proc):
        with contextlib.suppress(OSError):  # it ended, or it is a zombie that has no mounts
            found.setdefault(first_mount(proc, pid), pid)
            running.add(pid)
    return frozenset(running), found


def first_mount(proc: str, pid: int | str) -> bytes:
    """Its id is unique on a node: processes in one mount namespace have the same."""
    with Path(proc, str(pid), "mountinfo").open("rb") as stream:
        return stream.readline().split(b" ", 1)[0]


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
