"""Who uses a directory tree of a local disk, through whatever mount, also one that was detached.

A mount that was detached lazily is in no mount table, but open files, working directories and
mappings still go through it. They are told by inode: /proc shows the path below the root of their
mount and the inode number, and the tree has that inode at that path, or has not. Nothing but /proc
and the tree itself is read, so that no other file system can hang this.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from linux import mountinfo, procfs

_MNT_ID = re.compile(rb"^mnt_id:\s*(\d+)", re.MULTILINE)
_INO = re.compile(rb"^ino:\s*(\d+)", re.MULTILINE)


class _Tree:
    def __init__(self, path: str) -> None:
        self.path = os.path.realpath(path)
        status = os.stat(self.path)
        self.device = os.major(status.st_dev), os.minor(status.st_dev)
        disk = mountinfo.containing(self.path, mountinfo.read())
        below = os.path.relpath(self.path, disk.target) if disk is not None else self.path
        self.root = os.path.normpath(os.path.join(disk.root if disk is not None else "/", below))

    def shown_by(self, mount: mountinfo.Mount) -> bool:
        """Whether a mount shows it or a part of it."""
        inside = mount.root == self.root or mount.root.startswith(f"{self.root}/")
        return mount.device == self.device and inside

    def holds(self, path: str) -> bool:
        """Whether it has anything at ``path``."""
        return os.path.lexists(self.path + path)

    def has(self, path: str, inode: int) -> bool:
        """Whether ``path``, as a detached mount of the tree shows it, is that inode."""
        try:
            return os.lstat(self.path + path).st_ino == inode
        except OSError:
            return False


def users(tree: str, besides: Sequence[str] = (), ours: int = 0) -> list[procfs.Holder]:
    """Processes that use the tree, and mounts that show it elsewhere than at ``besides``. OSError.

    A copy of a mount at one of ``besides`` that another namespace received does not count, for it
    goes when ours is unmounted. Neither do this process, nor ``ours`` (a pid) and its descendants.
    """
    wanted = _Tree(tree)
    own, namespace = mountinfo.read(), os.stat("/proc/self/ns/mnt").st_ino
    received = {_place(mount, own) for each in besides for mount in mountinfo.at(each, own)}
    left_out = (procfs.family(ours) if ours else set()) | {os.getpid()}
    found: list[procfs.Holder] = []
    tables: dict[tuple[int, str], list[mountinfo.Mount]] = {}
    for pid in procfs.pids():
        if pid in left_out:
            continue
        try:
            key = procfs.mount_view(pid)
            first = key not in tables
            if first:
                tables[key] = mountinfo.read(Path(f"/proc/{pid}/mountinfo"))
        except OSError:
            continue  # just ended, or a kernel thread
        theirs = tables[key]
        how = _uses(pid, wanted, theirs)
        if not how and first:
            how = _shows(wanted, theirs, received, here=key[0] == namespace)
        if how:
            found.append(procfs.holder(pid, how))
    return found


_Place = tuple[tuple[int, int], str] | None


def _place(mount: mountinfo.Mount, table: Sequence[mountinfo.Mount]) -> _Place:
    """On which directory of which file system it is mounted; None below a root that is hidden."""
    for parent in table:
        if parent.mount_id == mount.parent_id:
            below = os.path.relpath(mount.target, parent.target)
            return parent.device, os.path.normpath(os.path.join(parent.root, below))
    return None


def _shows(
    wanted: _Tree, table: Sequence[mountinfo.Mount], received: set[_Place], *, here: bool
) -> str:
    """A mount of the tree that does not go with ours; '' when there is none."""
    for mount in table:
        if not wanted.shown_by(mount):
            continue
        place = _place(mount, table)
        stays = mount.is_private and not here
        if stays or place is None or place not in received:
            return f"it is mounted at {mount.target}"
    return ""


def _uses(pid: int, wanted: _Tree, table: Sequence[mountinfo.Mount]) -> str:
    """How a process uses the tree; '' when it does not, or has ended."""
    attached = {mount.mount_id for mount in table}
    shown = [mount for mount in table if wanted.shown_by(mount)]
    base = f"/proc/{pid}"
    try:
        for number in os.listdir(f"{base}/fdinfo"):
            try:
                link = os.readlink(f"{base}/fd/{number}")
                inside = [each for each in shown if _is_below(link, each.target)]
                if not inside and not (link.startswith("/") and wanted.holds(link)):
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
            if _stands_in(f"{base}/{name}", path, wanted, shown):
                return f"{text} {path}"
        for line in Path(f"{base}/maps").read_bytes().split(b"\n"):
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and _is_device(fields[3], wanted.device):
                path = os.fsdecode(fields[5])
                for inside_tree in (path, *_below_mounts(path, wanted, shown)):
                    if wanted.has(inside_tree, int(fields[4])):
                        return f"has {path} mapped"
    except OSError:
        pass  # just ended
    return ""


def _is_below(path: str, target: str) -> bool:
    return path == target or path.startswith(f"{target}/")


def _is_device(field: bytes, device: tuple[int, int]) -> bool:
    major, _, minor = field.partition(b":")
    return (int(major, 16), int(minor, 16)) == device


def _below_mounts(path: str, wanted: _Tree, shown: Sequence[mountinfo.Mount]) -> list[str]:
    """``path`` as it lies below the root of the tree, for mounts that show the tree."""
    found = []
    for mount in shown:
        if path.startswith(f"{mount.target}/"):
            part = os.path.relpath(mount.root, wanted.root)
            inside = path[len(mount.target) :]
            found.append(inside if part == "." else f"/{part}{inside}")
    return found


def _stands_in(link: str, path: str, wanted: _Tree, shown: Sequence[mountinfo.Mount]) -> bool:
    """Whether a working directory lies in the tree.

    Through a detached mount it is told by device and inode; only a path that the tree has is looked
    up, because another one could hang.
    """
    if any(_is_below(path, mount.target) for mount in shown):
        return True
    try:
        inode = os.lstat(wanted.path + path).st_ino
        status = os.stat(link)
    except OSError:
        return False
    device = os.major(status.st_dev), os.minor(status.st_dev)
    return (device, status.st_ino) == (wanted.device, inode)
