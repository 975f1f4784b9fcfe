"""The view of a dataset: one read-only mount at <views>/<name>/data.

What is mounted there changes while jobs read: first the source, then an overlay of the store over
the source, at last the store itself. Each is mounted beneath the old one, which is then detached
(kernel 6.5), so that a reader never misses the view: open files keep the old mount, the next open
gets the new one. An overlay remembers the names that it looked up; ``refresh`` makes it forget
them, so that readers get files that were stored since.

The functions run in a child process, because looking up a source may hang.
"""

import contextlib
import os
import tempfile
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

import kit.errors
import kit.files
from linux import mountinfo, mounts, procfs


class Stage(StrEnum):
    """What serves a view, from worst to best."""

    NONE = "none"
    SOURCE = "source"  # the source itself
    OVERLAY = "overlay"  # store over source
    STORE = "store"  # native speed, and the source is not needed


def prepare(views: str) -> None:
    """Make ``views`` a shared mount, from which mounts propagate to pods. HostError."""
    try:
        Path(views).mkdir(parents=True, exist_ok=True, mode=0o755)
        mount = mountinfo.containing(os.path.realpath(views), mountinfo.read())
        if mount is None or mount.shared is None:
            if mount is not None and mount.target == os.path.realpath(views):
                mounts.make_shared(views)
            else:
                mounts.bind_shared(views)
    except OSError as error:
        raise kit.errors.HostError(
            f"cache.views {views}",
            f"it cannot be made a shared mount ({error.strerror})",
            "run as root (CAP_SYS_ADMIN), in a pod with mountPropagation: Bidirectional",
        ) from error


def check_kernel() -> None:
    """HostError unless the kernel has overlayfs."""
    if not mounts.kernel_has("overlay"):
        raise kit.errors.HostError(
            "the kernel", "it lacks overlayfs", "load the module 'overlay' (modprobe overlay)"
        )


def stage_of(view: str, layer: str | None, all_mounts: Sequence[mountinfo.Mount]) -> Stage:
    """What is mounted at ``view``. ``layer``: the tree of its generation, if it has one."""
    stacked = mountinfo.at(view, all_mounts)
    if not stacked:
        return Stage.NONE
    top = stacked[-1]
    if _is_overlay(top):
        # An overlay of another generation (the settings had another source) counts as a source.
        ours = layer is not None and mounts.shows_layer(top.super_options, layer)
        return Stage.OVERLAY if ours else Stage.SOURCE
    if layer is not None:
        disk = mountinfo.containing(layer, [m for m in all_mounts if m.target != view])
        if disk is not None and disk.device == top.device:
            below = os.path.relpath(layer, disk.target)
            if top.root == os.path.normpath(os.path.join(disk.root, below)):
                return Stage.STORE
    return Stage.SOURCE


def _is_overlay(mount: mountinfo.Mount) -> bool:
    return mount.fstype == "overlay" and mount.source == "nodeagent"


def publish(view: str, stage: str, source: str, layer: str, scratch: str) -> bool:
    """Mount ``stage`` at ``view``, in place of what is there. OSError.

    False when the old mount stays below it (kernels before 6.5).
    """
    target = Path(view)
    # 0755: jobs of any user read here.
    target.mkdir(parents=True, exist_ok=True, mode=0o755)
    match Stage(stage):
        case Stage.OVERLAY:
            tree = _overlay([layer, source], Path(scratch))
        case Stage.SOURCE | Stage.STORE:
            tree = mounts.clone_tree(source if stage == Stage.SOURCE else layer)
            mounts.set_attributes(tree, mounts.READ_ONLY_DATA)
        case Stage.NONE:
            raise ValueError("nothing to publish")
    with kit.files.closing(tree):
        if mountinfo.at(view, mountinfo.read()):
            return mounts.swap(tree, view)
        mounts.attach(tree, view)
        return True


def _overlay(layers: list[str], scratch: Path) -> int:
    scratch.mkdir(parents=True, exist_ok=True, mode=0o700)
    own = tempfile.mkdtemp(dir=scratch)  # other datasets do the same at the same time
    try:
        return mounts.overlay(layers, Path(own))
    finally:
        os.rmdir(own)


def refresh(view: str) -> None:
    """Make an overlay forget the names that it looked up; does nothing for another mount.

    On a bind mount the same call would make the whole file system below read-only.
    """
    stacked = mountinfo.at(view, mountinfo.read())
    if stacked and _is_overlay(stacked[-1]):
        mounts.refresh(view)


def users(view: str) -> list[str]:
    """Who uses the view, a line each. In a child process of the agent."""
    agent = os.getppid()
    # 1: the agent has just died, and every process is a descendant of 1.
    ours = agent if agent > 1 else 0
    return [str(holder) for holder in procfs.holders_of_mount(view, ours=ours)]


def take_down(view: str) -> None:
    """Unmount the view. InUseError names who uses it."""
    if using := users(view):
        more = f" and {len(using) - 5} more" if len(using) > 5 else ""
        raise kit.errors.InUseError(
            f"view {view}", "in use by " + "; ".join(using[:5]) + more, "end them, then try again"
        )
    while mountinfo.at(view, mountinfo.read()):
        try:
            mounts.unmount(view)
        except OSError as error:
            raise kit.errors.InUseError(
                f"view {view}", f"a process uses it ({error.strerror})", "end it, then try again"
            ) from error
    with contextlib.suppress(OSError):
        Path(view).rmdir()
        Path(view).parent.rmdir()
