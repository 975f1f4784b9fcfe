"""Who uses views, which files are opened through them, and when each dataset was used last.

Looks of ``cache.space.uses``, each in a child process.
"""

import os
import stat
import time
from collections.abc import Iterable
from pathlib import Path

import kit.formats
from cache.views import by_id
from linux import fanotify, in_use, mountinfo, procfs

FILE = "dataset-uses.json"
FORMAT = 1
WINDOW_SECONDS = 0.2  # in which opens are seen
MOST_OPENS = 512  # in one window


def holders(ours: int, views: list[str]) -> dict[str, str]:
    """One user of each view that has any, in a line. ``ours``: the pid of the agent, 0: none."""
    table = mountinfo.read()
    targets = _with_ids(views, table)
    found = in_use.held(list(targets), ours=ours)
    return {targets[target]: str(holder) for target, holder in reversed(found.items())}


def _with_ids(views: Iterable[str], table: list[mountinfo.Mount]) -> dict[str, str]:
    """The view of each place where one of its dataset's trees is mounted."""
    folders = {by_id.folder_of(view): view for view in views}
    above = ((mount.target, os.path.dirname(mount.target)) for mount in table)
    return {view: view for view in folders.values()} | {
        target: folders[folder] for target, folder in above if folder in folders
    }


def opened(ours: int, layers: dict[str, str]) -> dict[str, tuple[int, int]]:
    """Views through which something is opened within WINDOW_SECONDS.

    Of each the number of opened files that its layer has, and of others. ``layers``: of the current
    generation of each, by its view. ``ours``: as there. OSError.
    """
    table = mountinfo.read()
    targets = _with_ids(layers, table)
    seen, left_out = in_use.Targets(list(targets)), procfs.own(ours) if ours else set()
    found: dict[str, tuple[int, int]] = {}
    with fanotify.OpenWatch() as opens:
        devices = {mount.device: mount.target for mount in table if mount.target in targets}
        for target in devices.values():
            opens.watch_filesystem(target)
        count, deadline = 0, time.monotonic() + WINDOW_SECONDS
        while time.monotonic() < deadline and count < MOST_OPENS:
            for descriptor, pid in opens.events():
                try:
                    is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
                    path = os.readlink(f"/proc/self/fd/{descriptor}")
                finally:
                    os.close(descriptor)
                target, below = ("", "") if pid in left_out else seen.of(pid, path)
                if target:
                    view = targets[target]
                    known, others = found.get(view, (0, 0))
                    stored = os.path.lexists(f"{_tree(view, target, layers[view])}/{below}")
                    found[view] = known + (is_file and stored), others + (is_file and not stored)
                count += 1
                if count >= MOST_OPENS:
                    break
            time.sleep(0.01)
    return found


def _tree(view: str, target: str, layer: str) -> str:
    """The layer that ``target`` shows: ``layer``, or that of a generation by its id."""
    if target == view:
        return layer
    name, generation = os.path.basename(layer), os.path.basename(target)
    return f"{os.path.dirname(os.path.dirname(layer))}/{generation}/{name}"


def load(path: Path) -> dict[str, float] | kit.formats.Damage | None:
    """The times by dataset, as ``kit.formats.read``."""
    return kit.formats.read(
        path, FORMAT, lambda kept: {name: float(at) for name, at in dict(kept["used"]).items()}
    )
