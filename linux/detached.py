"""Who still looks into a tree through anything but the mount that shows it now.

A process keeps a mount that another one has replaced with its working directory, its root, or an
open directory: what it opens from there goes through the old mount. Other mounts show the tree,
too: a copy in a mount namespace that mounts do not reach, a volume that was made earlier. Open
files alone do not matter: they stay what they are.
"""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from linux import mountinfo, mounts, procfs, statx


def users(layer: str, now: tuple[int, int], ours: int = 0) -> Iterator[str]:
    """Who may still look into ``layer``, a directory, through anything but the overlay ``now``.

    A line for each mount that shows it or a part of it in any mount namespace, and for each process
    that stands in one of its directories in a mount that was replaced, of its disk or of a device
    without a disk (an overlay). ``now``: device of the overlay, (0, 0) when there is none.
    Processes of ``ours`` (a pid) and its descendants stand in no view: those that fill keep a
    mount of their source that is nowhere attached, and whose device looks like that of an overlay.
    """
    left_out = procfs.family(ours) | {os.getpid()} if ours else {os.getpid()}
    shown = mountinfo.place(layer, mountinfo.read())
    assert shown is not None
    device, _ = shown
    known: dict[tuple[int, str], set[int]] = {}  # mounts of a namespace and root
    place = statx.Statx(statx.PLACE)
    for pid in procfs.pids():
        try:
            key = procfs.mount_view(pid)
            if key not in known:
                theirs = mountinfo.read(Path(f"/proc/{pid}/mountinfo"))
                top = {mount.target: mount for mount in theirs}.values()  # the last one covers
                known[key] = {mount.mount_id for mount in top}
                for mount in top:
                    if _shows(mount, layer, shown, now):
                        yield f"it is mounted at {mount.target} (seen by pid {pid})"
        except OSError:
            continue  # just ended, or a kernel thread
        if pid not in left_out and (how := _stands_in(place, pid, layer, device, known[key])):
            yield f"pid {pid}: {how}"


def _shows(
    mount: mountinfo.Mount, layer: str, place: tuple[tuple[int, int], str], now: tuple[int, int]
) -> bool:
    if mount.fstype == "overlay":
        return mount.device != now and mounts.shows_layer(mount.super_options, layer)
    device, root = place
    inside = mount.root == root or mount.root.startswith(f"{root}/")
    return mount.device == device and inside


def _stands_in(
    place: statx.Statx, pid: int, layer: str, device: tuple[int, int], attached: set[int]
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
