"""Who uses a mount or a directory tree, and how. Three questions, answered from /proc.

* ``of_mount``, ``held``, ``Targets``: what is mounted at a place. A process uses it (open files,
  working directory, root, mappings), its mount namespace has a private copy of it, or its pod was
  given the directory above. Only /proc is read, so holders are found also when the file system
  hangs.
* ``of_tree``: a directory of a local disk, through whatever mount, also one that was detached
  lazily and is in no mount table. Its users are told by inode: /proc shows the path below the root
  of their mount and the inode number, and the tree has that inode at that path, or has not. Nothing
  but /proc and the tree is read, so that no other file system can hang this.
* ``of_layer``: who still looks into a layer through anything but the overlay that shows it now. A
  process keeps a mount that another one has replaced with its working directory, its root, or an
  open directory: what it opens from there goes through the old mount. Other mounts show the tree,
  too: a copy in a mount namespace that mounts do not reach, a volume that was made earlier. Open
  files alone do not matter: they stay what they are.
"""

import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from linux import mountinfo, mounts, procfs, syscalls

_MNT_ID = re.compile(rb"^mnt_id:\s*(\d+)", re.MULTILINE)
_INO = re.compile(rb"^ino:\s*(\d+)", re.MULTILINE)


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


def holder(pid: int, how: str) -> Holder:
    """With its command, pod and container."""
    try:
        return Holder(pid, procfs.name_of(pid), how, *procfs.pod_of(pid))
    except OSError:
        return Holder(pid, "ended", how)


def of_mount(target: str, *, ours: int = 0) -> list[Holder]:
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
    for pid, _ in procfs.views(procfs.own(ours)):
        try:
            theirs, first = seen.by(pid)
        except OSError:
            continue  # just ended
        for target, how in _uses(pid, theirs):
            yield pid, target, how
        if first and theirs.namespace != own:
            for target, how in theirs.kept:
                yield pid, target, how


class Targets:
    """What is mounted at targets here, and where processes see it."""

    def __init__(self, targets: Sequence[str]) -> None:
        self._tables: dict[tuple[int, str], _Held] = {}
        table = mountinfo.read()
        self.mounted: dict[mountinfo.Place, str] = {}
        self.handed_out: dict[mountinfo.Place, str] = {}  # directories pods are given
        tops = {mount.target: mount for mount in table}  # the last one lies on top
        wanted = set(targets)
        for mount in table:
            if mount.target in wanted:
                self.mounted[mount.device, mount.root] = mount.target
        for target in set(self.mounted.values()):
            parent = os.path.dirname(target)
            over = next((tops[each] for each in _upwards(parent) if each in tops), None)
            if over is not None:
                self.handed_out[over.below(parent)] = target

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
        key = procfs.mount_view(pid)
        first = key not in self._tables
        if first:
            table = mountinfo.of(pid)
            self._tables[key] = _Held(self, table, *key)
        return self._tables[key], first

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
        self, targets: Targets, table: Sequence[mountinfo.Mount], namespace: int, root: str
    ) -> None:
        """``root``: of the processes, as our /proc shows it."""
        self.namespace, self._root = namespace, root
        pairs = ((mount, *targets.shown_by(mount)) for mount in table)
        parts = [each for each in pairs if each[1]]
        shown = [(mount, target) for mount, target, _ in parts]
        self.by_id = {mount.mount_id: target for mount, target in shown}
        self._by_path = {mount.target: (target, part) for mount, target, part in parts}
        given = [
            (target, f"its pod was given the dataset at {mount.target}")
            for mount in table
            if (target := targets.handed_out.get((mount.device, mount.root), ""))
        ]
        copies = [
            (target, f"its mount namespace has a private copy at {mount.target}")
            for mount, target in shown
            if mount.is_private
        ]
        self.kept = given + copies

    def below(self, path: str) -> tuple[str, str]:
        """The target on whose mount ``path`` lies, which our own /proc shows, and the path below
        the target; twice '' for none.

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
            if target := theirs.below(path)[0]:
                yield target, f"{text} {path}"
        lines = Path(f"{base}/maps").read_bytes().split(b"\n")
        fields = (line.split(maxsplit=5) for line in lines)
        for mapped in dict.fromkeys(each[5] for each in fields if len(each) == 6):
            path = os.fsdecode(mapped)
            if path.startswith("/") and (target := theirs.below(path)[0]):
                yield target, f"has {path} mapped"
    except OSError:
        pass  # just ended


# --- a tree of a local disk


class _Tree:
    def __init__(self, path: str) -> None:
        self.path = os.path.realpath(path)
        status = os.stat(self.path)
        self.device = os.major(status.st_dev), os.minor(status.st_dev)
        place = mountinfo.place(self.path, mountinfo.read())
        self.root = self.path if place is None else place[1]

    def shown_by(self, mount: mountinfo.Mount) -> bool:
        """Whether a mount shows it or a part of it."""
        return mount.shows(self.device, self.root)

    def has(self, path: str, inode: int) -> bool:
        """Whether ``path``, as a detached mount of the tree shows it, is that inode."""
        try:
            return os.lstat(self.path + path).st_ino == inode
        except OSError:
            return False


def of_tree(tree: str, besides: Sequence[str] = (), ours: int = 0) -> list[Holder]:
    """Processes that use the tree, and mounts that show it elsewhere than at ``besides``. OSError.

    A copy of a mount at one of ``besides`` that another namespace received does not count, for it
    goes when ours is unmounted. Neither do this process, nor ``ours`` (a pid) and its descendants.
    """
    wanted = _Tree(tree)
    own, namespace = mountinfo.read(), os.stat("/proc/self/ns/mnt").st_ino
    received = {_place(mount, own) for each in besides for mount in mountinfo.at(each, own)}
    found: list[Holder] = []
    tables: dict[tuple[int, str], list[mountinfo.Mount]] = {}
    for pid, key in procfs.views(procfs.own(ours)):
        first = key not in tables
        try:
            if first:
                tables[key] = mountinfo.of(pid)
        except OSError:
            continue  # just ended
        theirs = tables[key]
        how = _uses_tree(pid, wanted, theirs)
        if not how and first:
            how = _shows_tree(wanted, theirs, received, here=key[0] == namespace)
        if how:
            found.append(holder(pid, how))
    return found


def _place(mount: mountinfo.Mount, table: Sequence[mountinfo.Mount]) -> mountinfo.Place | None:
    """On which directory of which file system it is mounted; None below a root that is hidden."""
    parent = next((each for each in table if each.mount_id == mount.parent_id), None)
    return None if parent is None else parent.below(mount.target)


def _shows_tree(
    wanted: _Tree,
    table: Sequence[mountinfo.Mount],
    received: set[mountinfo.Place | None],
    *,
    here: bool,
) -> str:
    """A mount of the tree that stays when ours is unmounted; '' when there is none."""
    for mount in table:
        if not wanted.shown_by(mount):
            continue
        place = _place(mount, table)
        stays = mount.is_private and not here
        if stays or place is None or place not in received:
            return f"it is mounted at {mount.target}"
    return ""


def _uses_tree(pid: int, wanted: _Tree, table: Sequence[mountinfo.Mount]) -> str:
    """How a process uses the tree; '' when it does not, or has ended."""
    attached = {mount.mount_id for mount in table}
    shown = [mount for mount in table if wanted.shown_by(mount)]
    base = f"/proc/{pid}"
    try:
        for number in os.listdir(f"{base}/fdinfo"):
            try:
                link = os.readlink(f"{base}/fd/{number}")
                inside = [each for each in shown if mountinfo.within(link, each.target)]
                if not inside and not (link[:1] == "/" and os.path.lexists(wanted.path + link)):
                    continue
                said = Path(f"{base}/fdinfo/{number}").read_bytes()
            except OSError:
                continue  # just closed
            mount, inode = _MNT_ID.search(said), _INO.search(said)
            if mount is None or inode is None:
                continue
            if any(each.mount_id == int(mount[1]) for each in inside):
                return f"has {link} open"
            if int(mount[1]) not in attached and wanted.has(link, int(inode[1])):
                return f"has {link} of a mount that was replaced open"
        for name, text in (("cwd", "its working directory is"), ("root", "its root is")):
            path = os.readlink(f"{base}/{name}")
            if _stands_in_tree(f"{base}/{name}", path, wanted, shown):
                return f"{text} {path}"
        for line in Path(f"{base}/maps").read_bytes().split(b"\n"):
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[3] == b"%02x:%02x" % wanted.device:
                path = os.fsdecode(fields[5])
                for inside_tree in (path, *_below_mounts(path, wanted, shown)):
                    if wanted.has(inside_tree, int(fields[4])):
                        return f"has {path} mapped"
    except OSError:
        pass  # just ended
    return ""


def _below_mounts(path: str, wanted: _Tree, shown: Sequence[mountinfo.Mount]) -> list[str]:
    """``path`` as it lies below the root of the tree, for mounts that show the tree."""
    found = []
    for mount in shown:
        if path.startswith(f"{mount.target}/"):
            part = os.path.relpath(mount.root, wanted.root)
            inside = path[len(mount.target) :]
            found.append(inside if part == "." else f"/{part}{inside}")
    return found


def _stands_in_tree(link: str, path: str, wanted: _Tree, shown: Sequence[mountinfo.Mount]) -> bool:
    """Whether a working directory lies in the tree.

    Through a detached mount it is told by device and inode; only a path that the tree has is looked
    up, because another one could hang.
    """
    if any(mountinfo.within(path, mount.target) for mount in shown):
        return True
    try:
        inode = os.lstat(wanted.path + path).st_ino
        status = os.stat(link)
    except OSError:
        return False
    device = os.major(status.st_dev), os.minor(status.st_dev)
    return (device, status.st_ino) == (wanted.device, inode)


# --- a layer


def of_layer(layer: str, now: tuple[int, int], ours: int = 0) -> Iterator[str]:
    """Who may still look into ``layer``, a directory, through anything but the overlay ``now``.

    A line for each mount that shows it or a part of it in any mount namespace, and for each process
    that stands in one of its directories in a mount that was replaced, of its disk or of a device
    without a disk (an overlay). ``now``: device of the overlay, (0, 0) when there is none.
    Processes of ``ours`` (a pid) and its descendants stand in no view: those that fill keep a
    mount of their source that is nowhere attached, and whose device looks like that of an overlay.
    """
    left_out = procfs.own(ours)
    shown = mountinfo.place(layer, mountinfo.read())
    assert shown is not None
    device, _ = shown
    known: dict[tuple[int, str], set[int]] = {}  # mounts of a namespace and root
    place = syscalls.Statx(syscalls.PLACE)
    for pid, key in procfs.views():
        try:
            if key not in known:
                theirs = mountinfo.of(pid)
                top = {mount.target: mount for mount in theirs}.values()  # the last one covers
                known[key] = {mount.mount_id for mount in top}
                for mount in top:
                    if _shows_layer(mount, layer, shown, now):
                        yield str(holder(pid, f"sees it at {mount.target}"))
        except OSError:
            continue  # just ended
        if pid not in left_out and (how := _stands_in_layer(place, pid, layer, device, known[key])):
            yield str(holder(pid, how))


def _shows_layer(
    mount: mountinfo.Mount, layer: str, place: mountinfo.Place, now: tuple[int, int]
) -> bool:
    if mount.fstype == "overlay":
        return mount.device != now and mounts.shows_layer(mount.super_options, layer)
    return mount.shows(*place)


def _stands_in_layer(
    place: syscalls.Statx, pid: int, layer: str, device: tuple[int, int], attached: set[int]
) -> str:
    base = f"/proc/{pid}"
    links = [f"{base}/cwd", f"{base}/root"]
    try:
        links += [f"{base}/fd/{number}" for number in os.listdir(f"{base}/fd")]
    except OSError:
        return ""  # just ended
    for link in links:
        found = place(link)
        if found is None or not stat.S_ISDIR(found.mode) or found.mount in attached:
            continue  # just closed, a file, or a mount that still is there
        if found.device[0] not in (0, device[0]):
            continue
        try:
            # Of a detached mount the kernel shows the path from the mount's own root.
            there = os.stat(layer + os.readlink(link))
        except OSError:
            continue  # just closed, or no directory of the layer
        if (found.device == device and there.st_ino == found.inode) or found.device[0] == 0:
            return f"its {link.removeprefix(base + '/')} is a directory of an earlier mount"
    return ""
