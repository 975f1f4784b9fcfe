"""What the cache leaves on a node, and how it is taken off. In child processes.

Jobs may read a view without the agent, so each view names its users. Nobody is cut off.
"""

import asyncio
import contextlib
import errno
import os
import time
from pathlib import Path
from typing import Any

import kit.errors
import kit.formats
from cache.csi import mounts as csi_mounts
from cache.csi import records, volumes
from cache.settings import CacheSettings
from cache.sources import cephfs_mount, claims, kinds
from cache.store import disk, generations, tree
from cache.views import by_id, view
from kit.traces import Trace
from linux import mountinfo, mounts

_STATE = (
    *("datasets", "scratch", kinds.MEMORIES, records.FOLDER),
    *("cache-disk.json", "cache-trust.json", "dataset-uses.json"),
)
CLIENT_SECONDS = 10.0  # for ceph-fuse to end after its mount has gone


def find(section: dict[str, Any], state_dir: str) -> list[dict[str, Any]]:
    settings = CacheSettings.of_json(section)
    views, store = os.path.realpath(settings.views), os.path.realpath(settings.store)
    table = mountinfo.read()
    found = _volumes(settings.this_node.kubelet.root_dir, Path(state_dir), table)
    # A volume that no pod uses any more is removed before the view that it shows.
    left = tuple(f" at {each.name}" for each in found if each.kind == "volume" and not each.users)
    for folder in _folders(Path(views)):
        data = str(folder / "data")
        if mountinfo.at(data, table):
            users = [user for user in by_id.all_users(data) if not user.endswith(left)]
            found.append(Trace("view", data, tuple(users)))
        elif {entry.name for entry in folder.iterdir()} <= {"data", by_id.FOLDER}:
            found.append(Trace("view", data))
    if _own_bind(views, table):
        found.append(Trace("shared mount", views))
    sources = kinds.home(Path(os.path.realpath(state_dir)))
    found += [Trace("source mount", str(folder)) for folder in _folders(sources)]
    found += [
        Trace("cgroup", str(folder)) for folder in cephfs_mount.cgroups()
        if folder.name == cephfs_mount.CGROUP and _only_ours(folder, sources)
    ]  # fmt: skip
    if (Path(store) / disk.MARKER).exists():
        found.append(Trace("store", store))
    files = [Path(state_dir, name) for name in _STATE]
    kept = (sources, *files, *map(kit.formats.aside, files))
    found += [Trace("state", str(path)) for path in kept if path.exists()]
    found += [Trace("folder", path) for path in (views, store) if os.path.isdir(path)]
    return [trace.as_json() for trace in found]


def _volumes(kubelet: Path, state_dir: Path, table: list[mountinfo.Mount]) -> list[Trace]:
    """Volumes that are mounted for pods, and what kubelet knows the driver by."""
    mounted = {mount.target for mount in table}
    found = [
        Trace("volume", each.target, tuple(csi_mounts.users(each.target)))
        for each in records.read(records.folder_of(state_dir))
        if each.target in mounted
    ]
    csi, registration = volumes.sockets(kubelet)
    paths = (registration, csi)  # kubelet forgets the driver first
    found += [Trace("socket", str(path)) for path in paths if os.path.lexists(path)]
    return found + ([Trace("folder", str(csi.parent))] if csi.parent.is_dir() else [])


def _only_ours(cgroup: Path, sources: Path) -> bool:
    """Whether it is there and no ceph-fuse of another agent is in it."""
    try:
        pids = (cgroup / "cgroup.procs").read_text().split()
    except OSError:
        return False
    mine = os.fsencode(f"{sources}/")
    for pid in pids:
        with contextlib.suppress(OSError):
            if mine not in Path(f"/proc/{pid}/cmdline").read_bytes():
                return False
    return True


def _folders(parent: Path) -> list[Path]:
    if not parent.is_dir():
        return []
    return sorted(each for each in parent.iterdir() if each.is_dir() and not each.is_symlink())


def _own_bind(views: str, table: list[mountinfo.Mount]) -> bool:
    """Whether the agent has mounted ``views``: a tmpfs, or itself, to share it."""
    stacked = mountinfo.at(views, table)
    below = mountinfo.containing(views, [m for m in table if m.target != views])
    if stacked and view.is_memory(stacked[-1]):
        return True
    if not stacked or below is None or stacked[-1].device != below.device:
        return False
    path = os.path.normpath(os.path.join(below.root, os.path.relpath(views, below.target)))
    return stacked[-1].root == path


def remove(section: dict[str, Any], state_dir: str, kind: str, name: str) -> None:
    match kind:
        case "volume":
            csi_mounts.unpublish(name)
        case "socket":
            Path(name).unlink(missing_ok=True)
        case "view":
            by_id.take_down_all(name)
            view.take_down(name)
        case "shared mount":
            while _own_bind(name, mountinfo.read()):
                mounts.unmount(name)
        case "source mount":
            asyncio.run(claims.release(Path(name)))
            if mountinfo.stacked(f"{name}/mount"):
                raise kit.errors.InUseError(
                    f"source mount {name}", "it cannot be unmounted", "see who uses it: fuser -vm"
                )
        case "cgroup":
            _remove_cgroup(Path(name))
        case "store":
            _remove_store(name)
        case "state":
            _delete(Path(name))
            if Path(name).parent == kinds.PLAIN:
                _rmdir(kinds.PLAIN)
        case "folder":
            with contextlib.suppress(FileNotFoundError):
                _rmdir(Path(name))


def _remove_cgroup(path: Path) -> None:
    deadline = time.monotonic() + CLIENT_SECONDS
    while path.exists():
        try:
            path.rmdir()
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _remove_store(path: str) -> None:
    """Its generations, then what marks it as ours. What is not ours stays."""
    store = Path(path)
    if not (store / disk.MARKER).exists():
        return
    for folder in map(Path, generations.inventory(path)):
        if generations.load(str(folder)) is not None or (folder / "tree").is_dir():
            _delete(folder)
            _rmdir(folder.parent)
    for name in (generations.TRASH, ".probe"):
        _delete(store / name)
    _delete(kit.formats.aside(store / disk.MARKER))
    _delete(store / disk.MARKER)


def _delete(path: Path) -> None:
    if any(m.target.startswith(f"{path}/") for m in mountinfo.read()):
        raise kit.errors.InUseError(str(path), "something is mounted below it", "unmount it")
    if path.parent.is_dir():
        with tree.opened_root(path.parent) as parent:
            tree.remove(parent, path.name)


def _rmdir(path: Path) -> None:
    """Stays when somebody put something there."""
    try:
        path.rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EBUSY):
            raise
