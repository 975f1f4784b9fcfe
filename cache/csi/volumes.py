"""What a pod asks for, whether it can be had now, and what is said about it. Pure.

Source: the CSI specification 1.9, and what kubelet adds to a request (podInfoOnMount).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import kit.errors
import kit.units
from cache.views.view import Stage

DRIVER = "nodeagent.io"
# What kubelet and provisioners add to the attributes that a person writes.
_ADDED = ("csi.storage.k8s.io/", "storage.kubernetes.io/")
_KNOWN = ("dataset", "layout", "wait")
_FILLS = ("queued", "scanning", "filling")
MOST_TEXT = 100  # characters of a wrong value that a message repeats


def sockets(kubelet: Path) -> tuple[Path, Path]:
    """The driver's CSI socket and its registration socket, below the kubelet's root directory."""
    return (
        kubelet / "plugins" / DRIVER / "csi.sock",
        kubelet / "plugins_registry" / f"{DRIVER}-reg.sock",
    )


class VolumeLayout(StrEnum):
    """Where in the volume the data is, and whether it follows what serves the view."""

    DIRECT = "direct"  # at the mount path; stays what served when the pod started
    PARENT = "parent"  # below data/; follows


class Wait(StrEnum):
    AVAILABLE = "available"  # until the dataset can be read, from wherever
    COMPLETE = "complete"  # until all of it is stored


class TakenError(kit.errors.RefusedError):
    """Another volume is mounted at the target."""


@dataclass(frozen=True)
class WantedVolume:
    """``pod``: namespace/name, as far as kubelet says it."""

    dataset: str
    layout: VolumeLayout
    wait: Wait
    pod: str = ""


@dataclass(frozen=True)
class Shown:
    """What is known of a dataset."""

    stage: Stage
    state: str
    why: str
    reached: bool  # its source answers
    files: int
    bytes: int
    done_files: int
    done_bytes: int
    block: bool = False  # an image: what is counted as files are its chunks
    late: str = ""  # why nothing can be read before all of it is stored, though the source answers

    @property
    def percent(self) -> int:
        """Rounded down: 100 only when all is stored."""
        done, total = (self.done_bytes, self.bytes) if self.bytes else (self.done_files, self.files)
        return min(100, 100 * done // total) if total else 0


def _short(text: str) -> str:
    return repr(text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]}…")


def wanted(
    attributes: Mapping[str, str], *, read_only: bool, block: bool, options: bool
) -> WantedVolume:
    """What the volume's attributes ask for. SettingsError names what is wrong and what to write.

    ``read_only``: by the pod, or by the volume's access mode. ``block``: a raw device is asked for.
    ``options``: mount options or a file system type are given.
    """
    thing = f"volume of driver {DRIVER}"

    def refuse(cause: str, remedy: str) -> kit.errors.SettingsError:
        return kit.errors.SettingsError(thing, cause, remedy)

    given = {key: value for key, value in attributes.items() if not key.startswith(_ADDED)}
    if unknown := sorted(set(given) - set(_KNOWN)):
        raise refuse(
            f"volumeAttributes has {_short(unknown[0])}, which does not exist",
            f"the attributes are {', '.join(_KNOWN)}",
        )
    name = given.get("dataset", "")
    if not name:
        raise refuse("volumeAttributes has no 'dataset'", "name one of the node's datasets")
    found = {}
    for key, kind in (("layout", VolumeLayout), ("wait", Wait)):
        value = given.get(key, str(next(iter(kind))))
        if value not in set(kind):
            raise refuse(
                f"volumeAttributes has {key} {_short(value)}", f"it is {' or '.join(kind)}"
            )
        found[key] = value
    if block:
        raise refuse("a block device is asked for", "use volumeMode: Filesystem")
    if options:
        raise refuse("mountOptions or an fsType is given", "leave them out: nothing is formatted")
    if not read_only:
        raise refuse(
            "readOnly is false, and datasets are only read",
            "write 'readOnly: true' into the pod's csi volume; a PersistentVolume has accessModes: "
            "[ReadOnlyMany]",
        )
    space = attributes.get("csi.storage.k8s.io/pod.namespace", "")
    pod = attributes.get("csi.storage.k8s.io/pod.name", "")
    return WantedVolume(
        name, VolumeLayout(found["layout"]), Wait(found["wait"]), f"{space}/{pod}" if pod else ""
    )


def obstacle(shown: Shown, volume: WantedVolume, *, last: bool) -> kit.errors.AgentError | None:
    """Why the volume cannot be mounted now, in words for the pod's events; None when it can.

    ``last``: nobody waits any longer. A direct volume keeps what it gets first, so it waits a
    moment for the overlay of a dataset that is being filled; it gets the source if it must.
    """
    thing = f"dataset {volume.dataset}"
    again = "it is tried again by itself"
    why = f" ({shown.why})" if shown.why else ""
    if shown.state == "removed":
        return kit.errors.RefusedError(
            thing, "it was removed from this node", f"'nodeagent dataset warm {volume.dataset}'"
        )
    whole = shown.stage is Stage.STORE
    nothing = shown.stage in (Stage.NONE, Stage.UNKNOWN)
    if not whole and not shown.reached:
        return kit.errors.SourceError(thing, f"its source does not answer{why}", again)
    if not whole and (volume.wait is Wait.COMPLETE or (nothing and shown.late)):
        remedy = again
        if shown.state not in _FILLS:
            remedy = f"see 'nodeagent dataset show {volume.dataset}' on the node"
        size = kit.units.format_size
        parts = "chunks" if shown.block else "files"
        late = f"; {shown.late}" if shown.late else ""
        return kit.errors.RefusedError(
            thing,
            f"not complete yet: {shown.percent} % ({shown.done_files} of {shown.files} {parts}, "
            f"{size(shown.done_bytes)} of {size(shown.bytes)}; {shown.state}{why}){late}",
            remedy,
        )
    if nothing and not whole:
        return kit.errors.SourceError(thing, f"its view is not mounted yet{why}", again)
    # An image has no overlay: where one device shows copy and source, its mount stays the same.
    early = shown.stage is Stage.SOURCE and shown.state in _FILLS and not shown.block
    if early and volume.layout is VolumeLayout.DIRECT and not last:
        return kit.errors.RefusedError(thing, "its directories are being listed", again)
    return None


@dataclass(frozen=True)
class Stats:
    """``trouble``: why the volume is abnormal; '' when it is well."""

    bytes: int
    inodes: int
    trouble: str = ""
    said: str = ""


def stats(
    dataset: str, shown: Shown | None, *, mounted: bool, held: tuple[int, int] | None = None
) -> Stats:
    """Of a volume: the dataset's own size. Nothing is available, for nothing can be written.

    ``held``: bytes and files that the file system in an image has; None: nobody could ask it.
    """
    if shown is None:
        text = f"dataset {dataset} is no longer in the settings; what was mounted stays readable"
        return Stats(0, 0, text if mounted else "nothing is mounted")
    size, files = held or (shown.bytes, 0 if shown.block else shown.files)  # chunks are no files
    trouble = ""
    if not mounted:
        trouble = "nothing is mounted"
    elif shown.stage is not Stage.STORE and not shown.reached:
        trouble = f"the source does not answer: {shown.why or 'it is looked at'}"
    served = f"dataset {dataset} is {shown.state}, {shown.percent} % stored"
    return Stats(size, files, trouble, served)


# Kubelet's file in the folder of a pod that has users of its own (hostUsers: false), and file
# systems whose mounts a runtime can map to them.
USERS = "userns"
_MAPPED = ("btrfs", "ceph", "erofs", "ext4", "f2fs", "tmpfs", "xfs")


def pod_folder(target: str) -> Path:
    """Kubelet's folder of the pod: <pods>/<uid>/volumes/kubernetes.io~csi/<volume>/mount."""
    return Path(target).parents[3]


def maps(fstype: str) -> bool:
    """Whether the users of a mount of this file system can be mapped."""
    return fstype in _MAPPED


_TARGET = re.compile(r"(/[^/\0]+)+")


def target_below(path: str, pods: str) -> str:
    """``path`` when it is a plain path below the kubelet's pods. SettingsError otherwise."""
    if (
        not _TARGET.fullmatch(path)
        or {".", ".."} & set(path.split("/"))
        or not path.startswith(f"{pods}/")
    ):
        raise kit.errors.SettingsError(
            f"target path {_short(path)}",
            f"it does not lie below {pods}",
            "set kubelet.root_dir to the kubelet's root directory",
        )
    return path


def linked(path: str) -> kit.errors.RefusedError:
    return kit.errors.RefusedError(
        f"target path {path}",
        "a part of it is a symbolic link, and would lead the mount elsewhere",
        "remove the link; only the kubelet's root directory and its 'pods' may be links",
    )
