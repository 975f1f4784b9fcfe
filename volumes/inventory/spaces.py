"""Every mount namespace, and what of the watched devices is mounted in it. In the scan child only.

Invariant: a namespace is held open only while its own table is read (a held namespace keeps its
mounts, and so the devices, busy).
"""

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass, field

from linux import mount_namespaces, mountinfo
from volumes.inventory.model import Number, Owner, Place, Space
from volumes.inventory.processes import Processes

MOST_PLACES = 512  # of one namespace
MOST_SPACES = 1024  # with something in them that matters
OWNERS_NAMED = 4


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
class Found:
    """``gaps``: namespaces that could not be looked at. ``by_processes``: the kernel does not list
    namespaces, those of hidden processes were not seen."""

    spaces: list[Space] = field(default_factory=list)
    gaps: list[str] = field(default_factory=list)
    count: int = 0
    by_processes: bool = False


def _note(found: Found, inode: int, error: OSError) -> None:
    """A namespace that ended meanwhile is no gap: nothing is mounted in it any more."""
    if error.errno not in (errno.ESRCH, errno.ENOENT):
        found.gaps.append(f"mount namespace {inode}: {error.strerror}")


@dataclass
class _Sight:
    inode: int
    id: int
    places: list[Place]
    bound: dict[int, list[str]]  # namespaces bound to files in this one


def covers(mount: mountinfo.Mount, kubelet: Place, inside: str) -> bool:
    """Whether ``mount`` shows kubelet's directory (at ``inside`` of its file system) or its tree.

    True for the file system's root, the directories on the way, the directory itself, and the
    directories in it that hold volumes.
    """
    if mount.device != kubelet.device:
        return False
    volumes = [inside, f"{inside}/pods", f"{inside}/plugins", f"{inside}/plugins/kubernetes.io"]
    return any(_is_above(mount.root, path) for path in volumes)


def _is_above(upper: str, path: str) -> bool:
    return path == upper or path.startswith(upper.rstrip("/") + "/")


class Scan:
    """One visit to all namespaces."""

    def __init__(
        self,
        processes: Processes,
        proc: str,
        host: set[int],
        watched: set[Number],
        kubelet: tuple[Place, str] | None,
    ) -> None:
        self._processes = processes
        self._proc = proc
        self._host = host
        self._watched = watched
        self._kubelet = kubelet
        self._visitor = mount_namespaces.Visitor(proc)
        self._threads: dict[int, list[tuple[int, int]]] | None = None

    def run(self, unexplained: set[Number]) -> Found:
        """``unexplained``: active devices without a host mount; looked for twice if need be."""
        found = Found()
        sights: list[_Sight] = []
        bound: dict[int, list[str]] = {}
        for inode, identity, descriptor in self._all(found):
            found.count += 1
            try:
                sight = self._look(inode, identity, self._visitor.table(descriptor))
            except OSError as error:
                _note(found, inode, error)
                continue
            for other, targets in sight.bound.items():
                bound.setdefault(other, []).extend(targets)
            if sight.places and inode not in self._host:
                sights.append(sight)
        seen = {p.device for sight in sights for p in sight.places}
        if unexplained - seen:
            sights += self._below(unexplained - seen)
        found.spaces = self._owned(sights[:MOST_SPACES], bound)
        self._visitor.close()
        return found

    def _all(self, found: Found) -> Iterator[tuple[int, int, int]]:
        """(inode, id, descriptor) of each namespace; the descriptor only until the next."""
        try:
            for listed in mount_namespaces.walk():
                yield listed.inode, listed.id, listed.descriptor
            return
        except OSError as error:
            if error.errno not in (errno.ENOTTY, errno.EINVAL):
                raise
        found.by_processes = True
        self._threads = self._processes.threads_apart()
        homes = {inode: f"{pids[0]}" for inode, pids in self._processes.by_space.items()}
        homes |= {i: f"{pid}/task/{tid}" for i, ((pid, tid), *_) in self._threads.items()}
        for inode, home in homes.items():
            try:
                with mount_namespaces.opened(f"{self._proc}/{home}/ns/mnt") as descriptor:
                    if os.fstat(descriptor).st_ino == inode:
                        yield inode, 0, descriptor
            except OSError as error:
                _note(found, inode, error)

    def _look(self, inode: int, identity: int, table: bytes) -> _Sight:
        places: list[Place] = []
        bound: dict[int, list[str]] = {}
        wanted = {b"%d:%d" % number for number in self._watched}
        covering = b"%d:%d" % self._kubelet[0].device if self._kubelet else b""
        for line in table.split(b"\n"):
            fields = line.split(b" ", 4)
            if len(fields) < 5:
                continue
            if fields[3].startswith(b"mnt:["):
                mount = mountinfo.parse_line(line)
                bound.setdefault(int(mount.root[5:-1]), []).append(f"bind mount {mount.target}")
            elif fields[2] in wanted:
                places.append(place(inode, mountinfo.parse_line(line)))
            elif fields[2] == covering and self._kubelet is not None:
                mount = mountinfo.parse_line(line)
                if covers(mount, *self._kubelet):
                    places.append(place(inode, mount))
            if len(places) >= MOST_PLACES:
                break
        return _Sight(inode, identity, places, bound)

    def _below(self, numbers: set[Number]) -> list[_Sight]:
        """Mounts hidden below another one on a namespace's root: mountinfo leaves them out."""
        sights = []
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
                    sights.append(_Sight(listed.inode, listed.id, places, {}))
        except OSError:
            pass  # before 6.12: said in the limits
        return sights

    def _owned(self, sights: list[_Sight], bound: dict[int, list[str]]) -> list[Space]:
        empty = {s.inode for s in sights if s.inode not in self._processes.by_space}
        if empty and self._threads is None:
            self._threads = self._processes.threads_apart()
        threads = self._threads or {}
        unowned = empty - threads.keys()
        holding = self._processes.holding_descriptors(unowned) if unowned else {}
        spaces = []
        for sight in sights:
            pids = sorted(self._processes.by_space.get(sight.inode, []))
            owners: list[Owner] = [self._processes.owner(pid) for pid in pids[:OWNERS_NAMED]]
            for pid, thread in threads.get(sight.inode, [])[:OWNERS_NAMED]:
                owners.append(self._processes.owner(pid, thread=thread))
            kept = bound.get(sight.inode, []) + holding.get(sight.inode, [])
            spaces.append(
                Space(
                    inode=sight.inode,
                    id=sight.id,
                    owners=tuple(owners),
                    processes=len(pids) + len(threads.get(sight.inode, [])),
                    kept_by=tuple(kept[:8]),
                    places=tuple(sight.places),
                )
            )
        return spaces
