"""A source's root directory: what it says of itself, its snapshots, a part of it shown elsewhere.

In child processes: a source may hang.
"""

import contextlib
import errno
import os
from dataclasses import dataclass
from typing import Any

import kit.errors
import kit.files
from cache.store import identity, tree
from cache.views import closed
from linux import mountinfo, mounts, syscalls

# Which file systems let more than modes and POSIX ACLs decide who may read.

# By Kerberos, NFSv4 or Windows ACLs, squashing and maps of users.
SERVERS = frozenset(
    (
        "nfs", "nfs4", "lustre", "lustre_tgt", "gpfs", "cifs", "smb3", "smbfs", "afs", "beegfs",
        "beegfs_nodev", "panfs", "wekafs", "9p", "pvfs2", "vboxsf", "prl_fs",
    )
)  # fmt: skip


def server_decides(mount: mountinfo.Mount) -> bool:
    """Pure."""
    if mount.fstype.startswith("fuse"):
        # The daemon decides, unless it has the kernel check modes. That of CephFS knows no more.
        kernel = "default_permissions" in mount.super_options.split(",")
        return not kernel and mount.fstype != "fuse.ceph-fuse"
    return mount.fstype in SERVERS


# Of one directory; CephFS allows 100 by default.
MOST_SNAPSHOTS = 4096
MOST_INSIDE = 100  # mounts that are told


@dataclass(frozen=True)
class Root:
    """What a source's root directory says of itself."""

    stamp: str
    empty: bool
    files: int | None
    bytes: int | None
    marks: dict[str, str]
    # Of a directory of this host: its path without links, what is mounted inside it, and its file
    # system, if that lets more than modes and POSIX ACLs decide.
    place: str = ""
    inside: tuple[str, ...] = ()
    server: str = ""


def look(root: str) -> dict[str, Any]:
    """The fields of ``Root``. OSError."""
    with tree.opened_root(root) as descriptor:
        return _look(descriptor)


def _look(descriptor: int) -> dict[str, Any]:
    counts: dict[str, int | None] = {"files": None, "bytes": None}
    with tree.quiet(descriptor) as root, os.scandir(root) as entries:
        empty = next(entries, None) is None
    for key in counts:
        with contextlib.suppress(OSError, ValueError):  # not a CephFS
            counts[key] = int(os.getxattr(descriptor, f"ceph.dir.r{key}"))
    marks = {
        key: value
        for key, xattr in ((identity.CLUSTER, tree.FSID), (identity.MADE, tree.SNAPSHOT_MADE))
        if (value := tree.virtual(descriptor, xattr))
    }
    return {"stamp": tree.stamp(descriptor), "empty": empty, "marks": marks, **counts}


def look_in_place(root: str, state_dir: str, by_object: bool = False) -> dict[str, Any]:
    """As ``look``, of a directory of this host. OSError, SourceError when no dataset may show it.

    What is looked at is what was checked: the path is followed once. Whoever mounts it compares the
    stamp. ``by_object``: an object of the cluster names it. Links then lead nowhere: whoever may
    write above a source must not choose what of the host is shown. In the settings file they may
    lead to what the check of names there cannot see.
    """
    with kit.files.closing(_opened_in_place(root, by_object)) as descriptor:
        shut = {**closed.ALWAYS, **(closed.OF_USERS if by_object else {})}
        folders = {os.path.realpath(path): whose for path, whose in shut.items()}
        folders[os.path.realpath(state_dir)] = closed.AGENT
        place = os.readlink(f"/proc/self/fd/{descriptor}")
        if why := closed.why(place, folders):
            raise kit.errors.SourceError(f"directory {root}", why, "name another directory")
        table = mountinfo.read()
        mount = mountinfo.containing(place, table)
        return _look(descriptor) | {
            "place": place,
            "inside": mountinfo.inside(place, table)[:MOST_INSIDE],
            "server": mount.fstype if mount is not None and server_decides(mount) else "",
        }


def _opened_in_place(root: str, by_object: bool) -> int:
    if not by_object:
        return tree.open_root(root)
    try:
        return syscalls.open_without_links(root, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise kit.errors.SourceError(
            f"directory {root}",
            "a part of its path is a symbolic link, which an object of the cluster may not name",
            "name the directory itself, or name it in the settings file",
        ) from None


def show_part(mounted: str, part: str, target: str) -> None:
    """Have ``target`` show a directory of what is mounted at ``mounted``.

    ``part``: its path there. No symbolic link on it is followed: who may write to the source must
    not choose what of this host is shown. OSError; ENOTCONN while nothing is mounted.
    """
    try:
        made = _part(mounted, [name for name in part.split("/") if name not in ("", ".")])
    except FileNotFoundError:
        try:
            look(mounted)
        except OSError as error:
            raise OSError(errno.ENOTCONN, "its root cannot be read", mounted) from error
        raise
    with kit.files.closing(made):
        mounts.make_private(made)  # what is mounted here concerns no other dataset
        mounts.set_attributes(made, mounts.READ_ONLY_DATA)
        mounts.attach(made, target)


def _part(mounted: str, names: list[str]) -> int:
    """A detached mount of a directory. OSError."""
    if ".." in names:
        raise OSError(errno.EINVAL, "it is not below", mounted)
    with tree.opened_root(mounted) as root:
        top = mountinfo.top(mounted)
        if top is None or os.fstat(root).st_dev != os.makedev(*top.device):
            raise OSError(errno.ENOTCONN, "it is not mounted", mounted)
        with tree.opened(root, names) as directory:
            return mounts.clone_tree(f"/proc/self/fd/{directory}")


def lacks_snapshot(root: str) -> bool:
    """Whether ``root`` is in a snapshot that its directory has no more. OSError."""
    directory, _, rest = root.partition("/.snap/")
    if not rest:
        return False
    with tree.opened_root(f"{directory}/.snap") as descriptor:
        return not tree.has(descriptor, rest.split("/")[0])


def snapshots(directory: str) -> dict[str, float]:
    """The snapshots of a directory, and when each was made. OSError.

    Where ``ceph.snap.btime`` does not tell, the change of the snapshot's root does.
    """
    found = {}
    with tree.opened_root(f"{directory}/.snap") as descriptor:
        for name in os.listdir(descriptor)[:MOST_SNAPSHOTS]:
            try:
                with tree.opened(descriptor, [name]) as root:
                    made = tree.virtual(root, tree.SNAPSHOT_MADE)
                    found[name] = float(made) if made else os.fstat(root).st_ctime
            except (FileNotFoundError, NotADirectoryError, ValueError):
                continue  # just deleted
    return found
