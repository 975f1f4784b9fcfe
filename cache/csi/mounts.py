"""Mount and unmount volumes. The functions run in child processes: what they look at may hang.

A volume is a copy of the view's mount, or of the directory above it with the view below. It is made
apart and attached in one step, so a killed child leaves either nothing or all of it.

``parent`` follows the view: it receives what is mounted and unmounted there, and sends nothing
back. ``direct`` is private: a mount of its own that keeps the source, the overlay or the store that
served when it was made. The kernel keeps these alive, whatever happens at the view.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import kit.errors
import kit.files
from cache.csi import volumes
from cache.csi.volumes import VolumeLayout
from cache.store import disk
from linux import in_use, mountinfo, mounts, procfs, syscalls

VIEW = "data"
MOST_TRIES = 5  # the view is swapped a few times in the life of a dataset
MOST_STACKED = 16
_ALL_MAY_PASS = stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH


def publish(target: str, view: str, layout: str, record: str) -> bool:
    """Mount at ``target`` what serves ``view``; False when something is mounted there already.

    ``record``: nothing is mounted once this file has gone, for then the volume was unpublished
    while this process hung. OSError, HostError, RefusedError.
    """
    place = mountinfo.containing(os.path.dirname(target), own := mountinfo.read())
    if (place is None or place.shared is None) and disk.apart(own):
        raise kit.errors.HostError(
            os.path.dirname(target), "what is mounted here does not reach the kubelet",
            "mount the kubelet's pods directory with mountPropagation: Bidirectional",
        )  # fmt: skip
    if mountinfo.at(target, own):
        return False
    with _in_place(target) as name:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o750)
        if os.path.islink(name):
            raise volumes.linked(target)
    for _ in range(MOST_TRIES):
        _attach(target, view, VolumeLayout(layout), record)
        if layout == VolumeLayout.DIRECT or _same(view, f"{target}/{VIEW}"):
            return True
        with _in_place(target) as name:
            _detach(name)  # the view was swapped between the copy and its attachment
    raise kit.errors.RefusedError(f"view {view}", "it changes all the time", "it is tried again")


def renew(target: str, view: str, record: str) -> None:
    """Have a ``direct`` volume show what serves the view now. Containers that have it keep what
    they have. OSError, HostError, RefusedError."""
    _attach(target, view, VolumeLayout.DIRECT, record, put=mounts.swap)


def _attach(
    target: str, view: str, layout: VolumeLayout, record: str,
    put: Callable[[int, str], object] = mounts.attach,
) -> None:  # fmt: skip
    if not mountinfo.stacked(view):
        raise kit.errors.RefusedError(f"view {view}", "nothing is mounted", "it is tried again")
    follows = layout is VolumeLayout.PARENT
    if not follows:
        _refuse_closed(os.path.dirname(view))
    tree = mounts.clone_tree(os.path.dirname(view) if follows else view, recursive=follows)
    with kit.files.closing(tree):
        if follows:
            mounts.make_follower(tree)
        else:
            mounts.make_private(tree)
        mounts.set_attributes(tree, mounts.READ_ONLY_DATA)
        if not os.path.exists(record):
            raise kit.errors.RefusedError(f"volume {target}", "it was unpublished meanwhile", "")
        with _in_place(target) as name:
            put(tree, name)


@contextlib.contextmanager
def _in_place(target: str) -> Iterator[str]:
    """A path of ``target`` that no link leads elsewhere while the block runs, whoever else may
    write to a pod's folder. OSError, ELOOP for a link that was put there meanwhile."""
    folder = syscalls.open_without_links(os.path.dirname(target), os.O_PATH | os.O_DIRECTORY)
    with kit.files.closing(folder):
        try:
            yield f"/proc/self/fd/{folder}/{os.path.basename(target)}"
        except OSError as error:  # an Event of the pod has its text
            raise OSError(error.errno, error.strerror, target) from error


def _refuse_closed(folder: str) -> None:
    """RefusedError unless all users may enter the view's parent: a volume without it has no such
    door, and would show what the view does not."""
    mode = stat.S_IMODE(os.lstat(folder).st_mode)
    if mode & _ALL_MAY_PASS != _ALL_MAY_PASS:
        raise kit.errors.RefusedError(
            f"view {folder}",
            f"not all users may enter it (mode {mode:04o}), and layout 'direct' would let them in",
            "write layout: parent into volumeAttributes; or, where all may read the dataset, set "
            "its access.mode to '0755'",
        )


def _same(view: str, below: str) -> bool:
    table = mountinfo.read()
    shown = [mountinfo.at(path, table)[-1:] for path in (view, below)]
    first, second = ([(each.device, each.root) for each in tops] for tops in shown)
    return first == second


def _detach(target: str) -> None:
    for _ in range(MOST_STACKED):
        try:
            # Lazily: a mount whose source hangs, or that somebody uses, goes as well.
            mounts.detach(target)
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.ENOENT):  # no mount point
                return
            raise
    raise OSError(errno.EBUSY, "it is mounted again and again", target)


def unpublish(target: str) -> None:
    """Unmount what is at ``target`` and delete the directory, if they are there. OSError."""
    # A link is no mount point, and the kubelet's to remove.
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), _in_place(target) as name:
        _detach(name)
        os.rmdir(name)


def size(path: str) -> tuple[int, int]:
    """Bytes and inodes that are used in the file system at ``path``. OSError."""
    found = os.statvfs(path)
    return (found.f_blocks - found.f_bfree) * found.f_frsize, found.f_files - found.f_ffree


def users(target: str) -> list[str]:
    """Processes of the pod that has the volume, a line each."""
    parts, found = set(Path(target).parts), []
    for pid in procfs.pids():
        with contextlib.suppress(OSError):  # just ended, which in_use.holder would count
            pod, container = procfs.pod_of(pid)
            if pod in parts:
                how = f"has the volume {target}"
                found.append(str(in_use.Holder(pid, procfs.name_of(pid), how, pod, container)))
    return found
