"""What a test of the scan calls in a child: only a process with one thread may enter namespaces."""

import errno
from collections.abc import Iterator

from linux import mount_namespaces
from volumes.audit.inventory import holders


def both_ways(major: int, minor: int) -> list[list[tuple[int, bool, int]]]:
    """Who holds the device in other namespaces: by the kernel's list of them, then without it.

    Each: pid of the first owner, whether a thread of it is meant, inode of the namespace.
    """
    found = [_visit(major, minor)]
    mount_namespaces.walk = _not_there
    found.append(_visit(major, minor))
    return found


def _visit(major: int, minor: int) -> list[tuple[int, bool, int]]:
    processes = holders.Processes("/proc", "/nonexistent")
    host = {processes.host_space()}
    visited = holders.Namespaces(processes, "/proc", host, {(major, minor)}, None).visit(set())
    return [(s.owners[0].pid, s.owners[0].thread != 0, s.inode) for s in visited.spaces]


def _not_there(start: str = "") -> Iterator[mount_namespaces.Listed]:
    raise OSError(errno.ENOTTY, "before Linux 6.12")
