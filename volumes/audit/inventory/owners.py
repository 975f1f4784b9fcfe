"""Processes by mount namespace, and the pod of a process. Runs in the scan child only."""

import json
import os
from collections.abc import Sequence

from linux import procfs
from volumes.audit.inventory.model import Owner

_LARGEST_CONFIG = 1 << 20


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

    def named(self, comm: str) -> list[int]:
        return [
            pid
            for pids in self.by_space.values()
            for pid in pids
            if self._read(pid, "comm") == comm
        ]

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
        for space, pids in self.by_space.items():
            for pid in pids:
                try:
                    threads = os.listdir(f"{self._proc}/{pid}/task")
                except OSError:
                    continue
                if len(threads) < 2:
                    continue
                for thread in threads:
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
        for pids in self.by_space.values():
            for pid in pids:
                home = f"{self._proc}/{pid}/fd"
                try:
                    descriptors = os.listdir(home)
                except OSError:
                    continue
                for descriptor in descriptors:
                    try:
                        link = os.readlink(f"{home}/{descriptor}")
                    except OSError:
                        continue
                    if link.startswith("mnt:[") and int(link[5:-1]) in wanted:
                        name = f"fd {descriptor} of pid {pid} ({self._read(pid, 'comm')})"
                        found.setdefault(int(link[5:-1]), []).append(name)
        return found


def host_space(proc: str, candidates: Sequence[int | str]) -> int:
    """Inode of pid 1's mount namespace; 0 when unknown.

    Some security modules hide pid 1's links. Mount ids are unique on a node, so a process whose
    mount table begins with the same mount as pid 1's is in the same namespace.
    """
    try:
        return Processes.space(f"{proc}/1/ns/mnt")
    except OSError:
        first = _first_mount(proc, 1)
    for pid in ["self", *candidates]:
        try:
            if _first_mount(proc, pid) == first:
                return Processes.space(f"{proc}/{pid}/ns/mnt")
        except OSError:
            continue  # it ended
    return 0


def _first_mount(proc: str, pid: int | str) -> bytes:
    with open(f"{proc}/{pid}/mountinfo", "rb") as stream:  # noqa: PTH123
        return stream.readline().split(b" ", 1)[0]
