"""Mounts of complete generations by their id: <views>/<name>/by-id/<generation>.

``data`` goes from one generation to the next; these stay the same tree for as long as the
generation is there. When the current one loses files of its store, the mount of its id falls back
to what ``data`` shows. While stored files are not to be believed, each shows the source of its own
generation. The functions run in a child process.
"""

import contextlib
import errno
import os
from collections.abc import Mapping, Sequence

import kit.errors
import kit.files
from cache.store.tree import open_source
from cache.views import places, view
from kit import child_main
from linux import in_use, mountinfo, mounts

FOLDER = "by-id"


def folder_of(data: str) -> str:
    """``data``: the view of the dataset."""
    return f"{os.path.dirname(data)}/{FOLDER}"


def shown(data: str, table: Sequence[mountinfo.Mount] | None = None) -> list[str]:
    """The ids that are mounted. ``table``: of this process's namespace; None: read it."""
    below = f"{folder_of(data)}/"
    mounted = mountinfo.read() if table is None else table
    return sorted({m.target[len(below) :] for m in mounted if m.target.startswith(below)})


def whole(data: str, layers: Mapping[str, str], table: Sequence[mountinfo.Mount]) -> list[str]:
    """The ids that show the tree of the store itself. ``layers``: by id."""
    below = f"{folder_of(data)}/"
    tops = {m.target[len(below) :]: m for m in table if m.target.startswith(below)}
    return sorted(
        name for name, layer in layers.items() if name in tops and _shows(tops[name], layer, table)
    )


def _shows(mount: mountinfo.Mount, layer: str, table: Sequence[mountinfo.Mount]) -> bool:
    """Whether a mount shows a directory of the store. Only the mount table is asked."""
    return mountinfo.place(layer, table) == (mount.device, mount.root)


def show(data: str, name: str, layer: str, over: bool = False) -> None:
    """Mount the tree of a complete generation. HostError, OSError.

    ``over``: what is mounted there is somebody else's, and stays below ours.
    """
    path, target = folder_of(data), f"{folder_of(data)}/{name}"
    with places.parent(data) as above, places.folder(above, FOLDER, path) as folder:
        os.fchmod(folder, 0o755)  # whatever the umask is; who may pass is decided above
        at = places.mount_point(folder, name, target)
        now = mountinfo.top(target)
        if now is not None and _shows(now, layer, mountinfo.read()):
            return
        with kit.files.closing(mounts.clone_tree(layer)) as tree:
            mounts.set_attributes(tree, mounts.READ_ONLY_DATA)
            if now is None or over:
                mounts.attach(tree, at)
            else:
                mounts.swap(tree, target)


def fall_back(data: str, name: str) -> bool:
    """Have what is mounted by an id show what the view shows, because its tree loses files.

    Open files stay what they are. False when it is not mounted, or was done. OSError.
    """
    target = f"{folder_of(data)}/{name}"
    table = mountinfo.read()
    shows, now = mountinfo.at(data, table), mountinfo.at(target, table)
    if not now or (shows and now[-1].device == shows[-1].device and now[-1].fstype == "overlay"):
        return False
    if not shows:
        raise OSError(errno.EAGAIN, "the view is not mounted", data)
    with kit.files.closing(mounts.clone_tree(data)) as tree:
        mounts.make_private(tree)  # what is mounted over the view later is not mounted here
        mounts.set_attributes(tree, mounts.READ_ONLY_DATA)
        mounts.swap(tree, target)
    return True


def show_source(data: str, name: str, root: str, stamp: str = "") -> None:
    """Have what is mounted by an id show the source of that generation, at ``root``. OSError.
    ``stamp`` as for ``tree.open_source``.

    Open files stay what they are.
    """
    target = f"{folder_of(data)}/{name}"
    if mountinfo.top(target) is None:
        return
    with kit.files.closing(open_source(root, stamp)) as held:
        made = mounts.clone_tree(f"/proc/self/fd/{held}")
    with kit.files.closing(made):
        mounts.make_private(made)
        mounts.set_attributes(made, mounts.READ_ONLY_DATA)
        mounts.swap(made, target)


def users(data: str, name: str, layer: str) -> list[str]:
    """Who uses a generation, by its id, by a view that was replaced, or by a volume.

    Nobody uses a block image that was evicted: its copy went when the last device over it ended.
    """
    besides = [data, f"{folder_of(data)}/{name}"]
    if not os.path.lexists(layer):
        return []
    found = in_use.of_tree(layer, besides, child_main.agent_pid())
    return [str(each) for each in found]


def hide(data: str, name: str) -> bool:
    """Unmount a generation; False while a process uses it. OSError."""
    target = f"{folder_of(data)}/{name}"
    while mountinfo.top(target) is not None:
        try:
            mounts.unmount(target)
        except OSError:
            return False
    places.remove(target, levels=2)
    with contextlib.suppress(OSError):
        os.rmdir(folder_of(data))
    return True


def drop_others(data: str, names: list[str]) -> None:
    """Detach what is mounted by ids other than ``names``: their trees have gone."""
    for each in set(shown(data)) - set(names):
        mounts.detach(f"{folder_of(data)}/{each}")
    _remove_places(data, names)


def _remove_places(data: str, names: Sequence[str] = ()) -> None:
    """Mount points of generations other than ``names``, also those that a reboot has left."""
    with contextlib.suppress(OSError):
        for each in set(os.listdir(folder_of(data))) - {*names, *shown(data)}:
            places.remove(f"{folder_of(data)}/{each}", levels=2)


def all_users(data: str) -> list[str]:
    """Who uses the view of a dataset, or one of its generations by its id: each is named once."""
    ids = [f"{folder_of(data)}/{each}" for each in shown(data)]
    return list(dict.fromkeys(using for each in (data, *ids) for using in view.users(each)))


def refuse_used(data: str) -> None:
    """InUseError names who uses the view of a dataset, or one of its generations by its id."""
    _refuse_used_ids(data)
    view.refuse_used(data)


def _refuse_used_ids(data: str) -> None:
    folder = folder_of(data)
    for each in shown(data):
        view.refuse_used(f"{folder}/{each}", f"generation {each} at {folder}")


def take_down_all(data: str) -> None:
    """Unmount all of a dataset. InUseError names who uses one; then all of them stay."""
    folder = folder_of(data)
    _refuse_used_ids(data)
    for each in shown(data):
        if not hide(data, each):
            raise kit.errors.InUseError(
                f"generation {each} at {folder}", "a process uses it", "end it, then try again"
            )
    _remove_places(data)
    with contextlib.suppress(OSError):
        os.rmdir(folder)
