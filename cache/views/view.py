"""The view of a dataset: one read-only mount at <views>/<name>/data.

What is mounted there changes while jobs read: first the source, then an overlay of the store over
the source (of a block image: one device that shows both, ``cache.store.mixed``), at last the store
itself. Each is mounted beneath the old one, which is then detached
(kernel 6.5), so that a reader never misses the view: open files keep the old mount, the next open
gets the new one. An overlay remembers the names that it looked up; ``refresh`` makes it forget
them, so that readers get files that were stored since.

The functions run in a child process, because looking up a source may hang.
"""

import contextlib
import errno
import itertools
import os
import stat
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import kit.errors
import kit.files
from cache.store import disk, filesystem, image_copy, mixed, tree
from cache.views import places
from kit import child_main
from linux import in_use, mountinfo, mounts

MEMORY = "nodeagent"  # the source of the tmpfs with the places of views


class Stage(StrEnum):
    """What serves a view, from worst to best."""

    NONE = "none"
    UNKNOWN = "unknown"  # a mount that this agent cannot tell: it is to be replaced
    SOURCE = "source"  # the source itself
    OVERLAY = "overlay"  # store over source
    STORE = "store"  # native speed, and the source is not needed


def prepare(views: str) -> list[str]:
    """Make ``views`` a shared mount, from which mounts propagate to pods. HostError.

    It is a tmpfs unless something is mounted below: its places of views end with the
    views, so that after a reboot a job finds none, where it would take an empty one for the
    dataset. Nor is it one where others have something there: that is returned.
    """
    table = mountinfo.read()
    if disk.in_container(os.path.realpath(views), table, disk.apart(table)):
        raise kit.errors.HostError(
            f"cache.views {views}",
            "it is in the container's own layer: neither the host nor pods would see the views",
            "mount that directory of the host with mountPropagation: Bidirectional",
        )
    try:
        if not Path(views).is_dir():
            Path(views).mkdir(parents=True, mode=0o755)
            Path(views).chmod(0o755)  # whatever the umask is
        real = os.path.realpath(views)
        table = mountinfo.read()
        left: list[str] = []
        top = mountinfo.leads_to(real, table)
        used = any(mountinfo.is_above(real, mount.target) for mount in table)
        if not used and not (top is not None and top.target == real and is_memory(top)):
            left = places.clear(real)
            if not left and places.is_roots(real):  # else it would hide what others have done there
                _mount_memory(real)
        mount = mountinfo.leads_to(real, mountinfo.read())
        if mount is None or mount.shared is None:
            if mount is not None and mount.target == real:
                mounts.make_shared(views)
            else:
                mounts.bind_shared(views)
        return left
    except OSError as error:
        raise kit.errors.HostError(
            f"cache.views {views}",
            f"it cannot be made a shared mount ({error.strerror})",
            "run as root (CAP_SYS_ADMIN), in a pod with mountPropagation: Bidirectional",
        ) from error


def _mount_memory(views: str) -> None:
    """Mount a tmpfs with the SELinux label of the directory below it. OSError."""
    fields = {"source": MEMORY, "mode": "0755", "size": "1m", "nr_inodes": "65536"}
    with contextlib.suppress(OSError):
        label = os.getxattr(views, "security.selinux").rstrip(b"\0").decode()
        if Path("/sys/fs/selinux/enforce").exists():
            fields["context"] = label
    tree = mounts.new_filesystem("tmpfs", fields, attributes=mounts.PLACES)
    with kit.files.closing(tree):
        mounts.attach(tree, views)


def is_memory(mount: mountinfo.Mount) -> bool:
    """Whether it is the tmpfs that ``prepare`` mounts."""
    return mount.fstype == "tmpfs" and mount.source == MEMORY


def names(views: str) -> list[str]:
    """The datasets that have a view mounted."""
    below = (os.path.relpath(mount.target, views).split("/") for mount in mountinfo.read())
    return sorted({path[0] for path in below if len(path) == 2 and path[1] == "data"} - {".."})


def check_kernel() -> None:
    """HostError unless the kernel has overlayfs."""
    if not mounts.kernel_has("overlay"):
        raise kit.errors.HostError(
            "the kernel", "it lacks overlayfs", "load the module 'overlay' (modprobe overlay)"
        )


@dataclass(frozen=True)
class Shown:
    """What was published at a view, to be known again by the next agent."""

    device: str = ""  # of the mount, major:minor
    root: str = ""  # what of that device it shows
    layer: int = 0  # inode number of the store's tree; 0: it is not shown, or not known


@dataclass(frozen=True)
class Mounted:
    """The mount that was published, as the mount table shows it."""

    mount_id: int = 0
    device: tuple[int, int] = (0, 0)
    root: str = ""

    @classmethod
    def of(cls, mount: mountinfo.Mount | None) -> "Mounted":
        if mount is None:
            return cls()
        return cls(mount.mount_id, mount.device, mount.root)

    def shows(self, mount: mountinfo.Mount | None) -> bool:
        """Whether ``mount`` shows the same. Ids are given again, and directories renamed."""
        if mount is None or mount.device != self.device:
            return False
        return mount.mount_id == self.mount_id or mount.root == self.root


def lost(place: str, published: Mounted, table: Sequence[mountinfo.Mount]) -> str:
    """What has become of a mount at ``place``, in words; '' while jobs find what was published.

    ``table``: all mounts on the way to it.
    """
    now = mountinfo.leads_to(place, table)
    if now is None or now.target != place:
        return "it was unmounted"
    return "" if published.shows(now) else f"{_named(now)} is mounted over it"


def hiding(place: str, table: Sequence[mountinfo.Mount]) -> kit.errors.HostError | None:
    """Why nothing that is mounted at ``place`` could be found: a mount over its directory."""
    folder, now = os.path.dirname(place), mountinfo.leads_to(os.path.dirname(place), table)
    if now is None or now.target != folder:
        return None
    return kit.errors.HostError(
        f"view {place}", f"{_named(now)} is mounted over {folder} and hides it",
        f"umount {folder}; the view comes back by itself",
    )  # fmt: skip


def hides_all(
    views: str, base: Mounted, table: Sequence[mountinfo.Mount]
) -> kit.errors.HostError | None:
    """As ``hiding``, of all views, which lie on the mount ``base``."""
    now = mountinfo.leads_to(views, table)
    if now is None or Mounted.of(now) == base:
        return None
    return kit.errors.HostError(
        f"cache.views {views}", f"{_named(now)} is mounted over {now.target} and hides all views",
        f"umount {now.target}; the views come back by themselves",
    )  # fmt: skip


def _named(mount: mountinfo.Mount) -> str:
    return f"{mount.fstype} of {mount.source!r}"


def is_covered(view: str, shown: Shown, all_mounts: Sequence[mountinfo.Mount]) -> bool:
    """Whether what was published is there, below a mount of somebody else."""
    published = [
        (f"{mount.major}:{mount.minor}", mount.root) == (shown.device, shown.root)
        for mount in mountinfo.at(view, all_mounts)
    ]
    return any(published) and not published[-1]


def stage_of(
    view: str, layer: str, all_mounts: Sequence[mountinfo.Mount], shown: Shown, tree: int
) -> Stage:
    """What is mounted at ``view``. ``layer``: the tree of its generation.

    ``shown``: what was published last; ``tree``: the inode number of the tree now, 0 when there is
    none or another one. The path of a deleted tree may have another one since, and anything else
    may be mounted there: a mount that is not known for certain is UNKNOWN.
    """
    stacked = mountinfo.at(view, all_mounts)
    if not stacked:
        return Stage.NONE
    top = stacked[-1]
    same_tree = tree == shown.layer if shown.layer else tree > 0
    published = (shown.device, shown.root) == (f"{top.major}:{top.minor}", top.root)
    if (mixture := mixed.shows(top.device)) is not None:
        from_copy, from_source = mixture
        if not published or (from_copy and not same_tree):
            return Stage.UNKNOWN
        if not from_copy:
            return Stage.SOURCE
        return Stage.OVERLAY if from_source else Stage.STORE
    if _is_overlay(top):
        ours = same_tree and mounts.shows_layer(top.super_options, layer)
        return Stage.OVERLAY if ours else Stage.UNKNOWN
    if same_tree:
        disk = mountinfo.containing(layer, [m for m in all_mounts if m.target != view])
        if shown.layer and published and os.path.isfile(layer):
            return Stage.STORE  # a block image: the loop device over it
        if disk is not None and disk.device == top.device:
            below = os.path.relpath(layer, disk.target)
            if top.root == os.path.normpath(os.path.join(disk.root, below)):
                return Stage.STORE
    return Stage.SOURCE if published and not shown.layer else Stage.UNKNOWN


def _is_overlay(mount: mountinfo.Mount) -> bool:
    return mount.fstype == "overlay" and mount.source == "nodeagent"


def allow(view: str, owner: int, group: int, mode: str | None, source: str) -> str:
    """Set who may enter the view's parent; for which directory above ``source`` only the owner may,
    or ''. HostError, OSError. The umask of the agent has no say.

    ``mode`` None: all users, unless one of the directories above ``source`` keeps them out: the
    view must not show what its place has hidden. ``source`` is '' where those cannot be seen.
    """
    shut = _shut_above(source) if mode is None and source else ""
    bits = int(mode or "755", 8) if not shut else 0o700
    with places.parent(view) as parent:
        status = os.fstat(parent)
        if (status.st_uid, status.st_gid) != (owner, group):
            os.fchmod(parent, stat.S_IMODE(status.st_mode) & bits)  # never more open in between
            os.fchown(parent, owner, group)
        if stat.S_IMODE(os.fstat(parent).st_mode) != bits:
            os.fchmod(parent, bits)
    return shut


def is_allowed(view: str, owner: int, group: int, mode: str | None, source: str) -> bool:
    """Whether ``allow`` has nothing to do, as far as the view's own place tells."""
    if mode is None and source:
        return False  # the directories above a source may hang
    try:
        status = Path(view).parent.lstat()
    except OSError:
        return False
    if not stat.S_ISDIR(status.st_mode):
        return False
    found = status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)
    return found == (owner, group, int(mode or "755", 8))


def _shut_above(source: str) -> str:
    """A directory above ``source`` that does not let all users pass; '' when all do. OSError."""
    above = Path(os.path.realpath(source)).parents
    return next((str(each) for each in above if not each.stat().st_mode & stat.S_IXOTH), "")


def _all_pass_to(directory: int) -> bool:
    """The same for an open directory: whoever renames what is above it leads to no others."""
    with contextlib.ExitStack() as opened:
        for _ in Path(os.readlink(f"/proc/self/fd/{directory}")).parents:
            directory = os.open("..", os.O_PATH | os.O_DIRECTORY, dir_fd=directory)
            opened.callback(os.close, directory)
            if not os.fstat(directory).st_mode & stat.S_IXOTH:
                return False
    return True


def publish(
    view: str,
    stage: str,
    source: str,
    layer: str,
    scratch: str,
    before: str = "",
    stamp: str = "",
    hide: bool = False,
) -> dict[str, Any]:
    """Mount ``stage`` at ``view``, in place of ``before``, the stage that is there. HostError,
    OSError; ESHUTDOWN when ``source`` is another directory by now than the one with ``stamp``.

    ``hide``: the view is root's alone when a directory above the source keeps users out.
    The fields of ``Shown``, and ``clean``: False when the old mount stays below it (kernels before
    6.5), and ``mount``, its id. Where ``before`` is NONE, what is mounted there is somebody else's:
    it stays, hidden below.
    """
    with places.parent(view) as parent:
        at = places.mount_point(parent, Path(view).name, view)
        clean = _changed(view, stage, source, layer, before)
        if not clean:
            with contextlib.ExitStack() as opened:
                held = ""
                if stage in (Stage.SOURCE, Stage.OVERLAY):
                    # By this descriptor alone: the name may lead elsewhere at any moment.
                    root = tree.open_source(source, stamp)
                    opened.enter_context(kit.files.closing(root))
                    held = f"/proc/self/fd/{root}"
                    if hide and not _all_pass_to(root):
                        os.fchmod(parent, 0o700)
                clean = _mount(
                    view, at, stage, source, layer, scratch, held, above=before == Stage.NONE
                )
    top = mountinfo.leads_to(view, mountinfo.read())
    assert top is not None
    return {
        "clean": clean,
        "mount": top.mount_id,
        "device": f"{top.major}:{top.minor}",
        "root": top.root,
        "layer": 0 if stage == Stage.SOURCE else os.stat(layer).st_ino,
    }


def _changed(view: str, stage: str, source: str, layer: str, before: str) -> bool:
    """Have a device of the device mapper show ``stage``; whether the view needs no other mount.

    Where what it showed may have been wrong, readers get a new device, without old blocks in its
    caches: the source is mounted anew, whatever the view shows by now.
    """
    shown, mounted = mixed.at(view), mixed.at(source)
    if stage == Stage.STORE and shown and before in (Stage.SOURCE, Stage.OVERLAY):
        try:
            return mixed.make_whole(shown, layer)
        except OSError:
            return False  # the source hangs below who reads it now: others get the copy alone
    if not mounted:
        return False
    if before not in (Stage.NONE, Stage.SOURCE, stage):
        if stage == Stage.SOURCE:
            with contextlib.suppress(OSError):  # who reads it now keeps what it shows
                mixed.part(mounted)
        mixed.renewed(source)
    if stage == Stage.OVERLAY:
        mixed.blend(mixed.at(source), layer)
    return shown == mixed.at(source)


def _mount(
    view: str, at: str, stage: str, source: str, layer: str, scratch: str, held: str, *, above: bool
) -> bool:
    """Mount ``stage`` at ``view``; False when the old mount stays below it.

    ``held``: a path of the source that leads nowhere else. ``above``: whatever is there stays.
    """
    match Stage(stage):
        case Stage.OVERLAY if not mixed.at(source):
            made = _overlay([layer, held], Path(scratch))
        case Stage.STORE if os.path.isfile(layer):
            partition = image_copy.partition_of(Path(layer).parent)
            made = filesystem.view_of(layer, partition)
        case Stage.SOURCE | Stage.STORE | Stage.OVERLAY:
            made = mounts.clone_tree(layer if stage == Stage.STORE else held)
            mounts.set_attributes(made, mounts.READ_ONLY_DATA)
        case Stage.NONE | Stage.UNKNOWN:
            raise ValueError("nothing to publish")
    with kit.files.closing(made):
        if mountinfo.stacked(view) and not above:
            return mounts.swap(made, view)
        mounts.attach(made, at)
    return True


def trouble_of(layer: str) -> int:
    """The errno with which the tree of a store cannot be opened; 0 when it can."""
    try:
        os.close(os.open(layer, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        return error.errno or errno.EIO
    return 0


def _overlay(layers: list[str], scratch: Path) -> int:
    scratch.mkdir(parents=True, exist_ok=True, mode=0o700)
    own = tempfile.mkdtemp(dir=scratch)  # other datasets do the same at the same time
    try:
        return mounts.overlay(layers, Path(own))
    finally:
        os.rmdir(own)


def refresh(view: str, layer: str = "") -> None:
    """Have readers get what was stored since; does nothing for a mount that shows no mixture.

    An overlay forgets the names that it looked up. On a bind mount the same call would make the
    whole file system below read-only. A device of the device mapper gets another table; ``layer``
    is the copy that it shows.
    """
    stacked = mountinfo.stacked(view)
    if stacked and _is_overlay(stacked[-1]):
        mounts.refresh(view)
    elif layer and (device := mixed.at(view)):
        mixed.blend(device, layer)


def users(view: str) -> list[str]:
    """Who uses the view, a line each. In a child process of the agent."""
    holders = in_use.of_mount(view, ours=child_main.agent_pid())
    return [str(holder) for holder in holders]


def left_behind(view: str, layer: str) -> list[str]:
    """Who may still look into ``layer`` past the overlay of the view, a line each, at most 5."""
    stacked = mountinfo.stacked(view)
    now = stacked[-1].device if stacked and _is_overlay(stacked[-1]) else (0, 0)
    return list(itertools.islice(in_use.of_layer(layer, now, child_main.agent_pid()), 5))


def take_down(view: str) -> None:
    """Unmount the view and delete its place. InUseError names who uses it."""
    take_off(view)
    places.remove(view)
    with contextlib.suppress(OSError):
        Path(view).parent.rmdir()


def refuse_used(view: str, thing: str = "") -> None:
    """InUseError names who uses it. ``thing``: what it is, for operators."""
    if using := users(view):
        who = f"in use by {kit.errors.some(using)}"
        raise kit.errors.InUseError(thing or f"view {view}", who, "end them, then try again")


def take_off(view: str) -> None:
    """Unmount the view. InUseError names who uses it."""
    refuse_used(view)
    while mountinfo.stacked(view):
        try:
            mounts.unmount(view)
        except OSError as error:
            raise kit.errors.InUseError(
                f"view {view}", f"a process uses it ({error.strerror})", "end it, then try again"
            ) from error
