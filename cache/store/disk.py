"""Whether the SSD that the store is to lie on is mounted.

Below a mount point whose disk is missing lies the root disk. A store made there would fill it, and
kubelet would evict pods. So a store that once lay on a disk of its own is used only while
that is mounted; ``cache.disk`` says so for the first time, too.

Where the mount table cannot tell, the store's UUID does: it is remembered in ``state_dir``.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kit.errors
import kit.files
import kit.formats
from linux import mountinfo

# One agent uses a store: two would fill, withdraw and delete under one another.

LOCK_SECONDS = 2.0  # for an agent that was killed to end
_held: dict[str, int] = {}  # of this process


def lock(store: str) -> None:
    """Lock the store until the process ends. HostError when another agent has it. OSError.

    The directory is locked, not a file in it: a file that is open for writing would keep the disk
    from becoming read-only. Locked anew each time, because another disk may lie there now.
    """
    unlock(store)
    try:
        _held[store] = kit.files.lock(Path(store), LOCK_SECONDS)
    except OSError as error:
        if error.strerror != "another process holds the lock":
            raise
        raise kit.errors.HostError(
            f"cache.store {store}", "another agent uses it",
            "end that agent, or give each agent a store of its own",
        ) from error  # fmt: skip


def unlock(store: str) -> None:
    if store in _held:
        os.close(_held.pop(store))


MARKER = "nodeagent.json"  # format and UUID of the store
STORE_FORMAT = 1
FORMAT = 1  # of what is remembered in the state directory
_HOST = Path("/proc/1/mountinfo")


def shares_disk(store: str, folders: Sequence[str]) -> list[bool]:
    """Of each folder whether it is on the store's file system. One that cannot be seen may be.
    Blocking, for as long as a disk hangs."""
    return [_shares(store, each) for each in folders]


def _shares(store: str, folder: str) -> bool:
    try:
        return os.stat(store).st_dev == os.stat(folder).st_dev
    except OSError:
        return True


def apart(own: Sequence[mountinfo.Mount]) -> list[mountinfo.Mount]:
    """The host's mounts, when they are another namespace's than ``own``, and can be read."""
    try:
        host = mountinfo.read(_HOST)
    except OSError:
        return []
    return [] if {m.mount_id for m in host} & {m.mount_id for m in own} else host


def in_container(
    path: str, own: Sequence[mountinfo.Mount], host: Sequence[mountinfo.Mount]
) -> bool:
    """Whether ``path`` lies in a container's own layer. ``host``: what ``apart`` gave; without it
    nobody can tell.

    A pod sees the host's directories as mounts below its root. Its root is a whole file system that
    is not the host's root. A directory that systemd or chroot made a root is the host's own.
    """
    mount = mountinfo.containing(path, own)
    root = mountinfo.containing("/", host)
    if mount is None or root is None or mount.target != "/":
        return False
    return mount.root == "/" and mount.device != root.device


def fleeting(path: str, own: Sequence[mountinfo.Mount], host: Sequence[mountinfo.Mount]) -> str:
    """Why what is stored at ``path`` does not stay on the host's disk; '' when nothing says so."""
    mount = mountinfo.containing(path, own)
    if mount is not None and mount.fstype in ("tmpfs", "ramfs"):
        return f"it is on {mount.fstype} mounted at {mount.target}: that is memory, not a disk"
    if in_container(path, own, host):
        return "it is in the container's own layer: that fills the runtime's disk and goes with it"
    return ""


def place(store: str) -> str:
    """The mount point of the file system that the store lies on, as the host sees it.

    A pod sees a directory of the host as a mount even when no disk is mounted there. The host's own
    table tells, where we see it; else a mount of a whole file system counts as it is.
    """
    table = mountinfo.read()
    own = mountinfo.containing(store, table)
    if own is None:
        return "/"
    theirs = apart(table)
    host = mountinfo.containing(store, theirs) if theirs else None
    if own.root != "/" and host is not None and host.device == own.device:
        return host.target
    return own.target


def problem(found: str, wanted: str) -> str:
    """Why a store on the disk mounted at ``found`` is not on the one at ``wanted``; '' if it is."""
    if wanted == "/" or found == wanted or found.startswith(wanted + "/"):
        return ""
    return f"no disk is mounted at {wanted}; it would fill the one mounted at {found}"


def _memory(state_dir: Path) -> Path:
    return state_dir / "cache-disk.json"


def _kept(state_dir: Path, store: str) -> dict[str, str] | kit.formats.Damage:
    """HostError when a newer agent wrote it."""
    found = kit.formats.read(_memory(state_dir), FORMAT, _places)
    if isinstance(found, kit.formats.Damage):
        return found
    return found if found is not None and found["store"] == store else {}


def _places(value: Any) -> dict[str, str]:
    kept = dict(value)
    for name in ("store", "disk", "uuid"):
        if not isinstance(kept[name], str):
            raise ValueError(f"its {name} is no text")
    return {key: str(kept[key]) for key in kept if key != kit.formats.KEY}


def marker_of(store: Path) -> dict[str, Any] | kit.formats.Damage | None:
    """What nodeagent.json of a store says, of whatever format; it stays where it is."""
    return kit.formats.look(store / MARKER, None, _marked)


def _marked(value: Any) -> dict[str, Any]:
    marked = dict(value)
    marked["format"]
    if marked["format"] == STORE_FORMAT and not isinstance(marked["uuid"], str):
        raise ValueError("its uuid is no text")
    return marked


def has_generations(store: Path) -> bool:
    """Whether what lies there is a store, by what datasets left there."""
    for path in store.glob("*/*/generation.json"):
        found = kit.formats.look(path, None, dict)
        if isinstance(found, dict) and {"dataset", "identity"} <= found.keys():
            return True
    return False


def _lost_marker(store: Path) -> bool:
    """Its marker is to be made anew: that store is not gone."""
    return not isinstance(marker_of(store), dict) and has_generations(store)


def kept_uuid(store: str, state_dir: Path) -> str:
    """Of the store that was there last; '' when that is not known. HostError as ``check``."""
    kept = _kept(state_dir, store)
    return "" if isinstance(kept, kit.formats.Damage) else kept.get("uuid", "")


def uuid_of(store: str) -> str:
    """The UUID of the store that lies there; '' when there is none."""
    found = marker_of(Path(store))
    return str(found.get("uuid", "")) if isinstance(found, dict) else ""


def check(store: str, disk: Path | None, state_dir: Path) -> None:
    """HostError unless the store's disk is mounted, and is a disk of the host."""
    own = mountinfo.read()
    host = apart(own)
    if why := fleeting(store, own, host):
        raise kit.errors.HostError(
            f"cache.store {store}", why,
            "put it on an ext4 or XFS of the SSD; in a pod mount that directory of the host",
        )  # fmt: skip
    kept = _kept(state_dir, store)
    if isinstance(kept, kit.formats.Damage):
        if disk is None and not (
            isinstance(marker_of(Path(store)), dict) or has_generations(Path(store))
        ):
            raise kit.errors.HostError(
                f"cache.store {store}",
                f"{kept}, and no store is there: the disk that it lay on may not be mounted",
                "mount the SSD, or set cache.disk: / for a store on the root disk",
            )
        kept = {}
    wanted = kept.get("disk", "/") if disk is None else os.path.realpath(disk)
    if why := problem(place(store), wanted):
        remedy = f"mount the SSD at {wanted}"
        if disk is None:
            remedy += ", or set cache.disk to / if the store may lie on another disk now"
        raise kit.errors.HostError(f"cache.store {store}", why, remedy)
    uuid, mount = kept.get("uuid", ""), mountinfo.containing(store, own)
    # A pod that does not see the host's mount table sees a directory of the host as a mount,
    # whether or not the SSD is mounted there.
    unsure = mount is not None and mount.root != "/" and not host
    if uuid and uuid_of(store) != uuid and unsure and not _lost_marker(Path(store)):
        raise kit.errors.HostError(
            f"cache.store {store}",
            f"the store {uuid} that was there is gone, and this pod cannot see whether a disk is "
            "mounted",
            "mount the SSD on the host; if it was replaced, delete "
            f"{_memory(state_dir)}, or run the pod with hostPID",
        )


def remember(store: str, state_dir: Path) -> None:
    """Note where the store lies and which it is, after it was made there. OSError."""
    kept = {"store": store, "disk": place(store), "uuid": uuid_of(store)}
    if kept != _kept(state_dir, store):
        state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        kit.formats.save(str(_memory(state_dir)), kept, FORMAT)
