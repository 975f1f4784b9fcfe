"""Records of kubelet and ceph-csi about staged volumes. Runs in child processes only.

kubelet: plugins/kubernetes.io/csi/<driver>/<hash>/vol_data.json (before 1.24: csi/pv/<name>) and
pods/<uid>/volumes/kubernetes.io~csi/<name>/vol_data.json. ceph-csi: image-meta.json in the staging
directory. Files inside a mounted volume are never read.
"""

import bisect
import contextlib
import dataclasses
import json
import operator
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kit.errors
from linux import blockdev, mountinfo, rbd_sysfs, stack
from linux.rbd_sysfs import RbdImage
from volumes.audit.inventory.model import Publish, Volume
from volumes.node import naming, raw_block

_MOST_VOLUMES = 2048
_LARGEST_RECORD = 1 << 16
_NODE = re.compile(r"/[^/]+//deleted")  # the kernel's own, and none of LVM in /dev/mapper
_MOST_LINKS = 40  # as the kernel
# A file system's clock advances in steps: what changed less long ago is read again.
_SETTLED_SECONDS = 2.0

_Stamp = tuple[int, int, int, int, int]  # device, inode, size, times of change


@dataclass(frozen=True)
class _Pod:
    """What kubelet gave to a pod, and what is mounted in its directory."""

    mounts: tuple[mountinfo.Mount, ...]
    publishes: Mapping[str, tuple[mountinfo.Mount | None, Publish]]  # by where they are mounted

    def is_as(self, mounts: list[mountinfo.Mount]) -> bool:
        """Nothing was mounted or unmounted, and everything that it was given is mounted. What
        kubelet gives to it next shows as a mount, or at the next scan that is not quick."""
        same = len(mounts) == len(self.mounts) > 0 and all(map(operator.is_, mounts, self.mounts))
        return same and all(mount is not None for mount, _ in self.publishes.values())


class Files:
    """Files and directories, read again only when they may have changed. What is not asked for
    between two ``begin`` is forgotten: a scan that asks for everything begins with it."""

    def __init__(self) -> None:
        self._now: dict[str, tuple[_Stamp, Any]] = {}
        self._before: dict[str, tuple[_Stamp, Any]] = {}

        self.pods: dict[str, _Pod] = {}  # by uid

    def begin(self) -> None:
        self._before, self._now = self._now, {}

    def json(self, path: str) -> dict[str, Any]:
        """Empty when it is not there or no JSON object."""
        value: dict[str, Any] = self._read(path, _json, {})
        return value

    def names(self, path: str) -> list[str]:
        """Of a directory, sorted; empty when it is not there."""
        value: list[str] = self._read(path, lambda path: sorted(rbd_sysfs.listed(path)), [])
        return value

    def _read(self, path: str, read: Callable[[str], Any], missing: Any) -> Any:
        try:
            status = os.stat(path)
        except OSError:
            return missing
        stamp = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        kept = self._now.get(path) or self._before.get(path)
        if kept is None or kept[0] != stamp:
            began = time.time()
            kept = stamp, read(path)
            if not 0 <= status.st_ctime < began - _SETTLED_SECONDS:
                return kept[1]  # a change of the same instant would not show
        self._now[path] = kept
        return kept[1]


def _json(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as stream:  # noqa: PTH123
            value = json.loads(stream.read(_LARGEST_RECORD))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _staged(kubelet: str, root: str, files: Files) -> Iterator[tuple[str, str]]:
    """(directory with vol_data.json, staging directory)."""
    base = f"{kubelet}/plugins/kubernetes.io/csi"
    for driver in files.names(root + base):
        if driver == "volumeDevices":
            continue  # raw block volumes: see _raw
        for volume in files.names(f"{root}{base}/{driver}"):
            home = f"{base}/{driver}/{volume}"
            yield home, f"{home}/globalmount"


class _Devices:
    """Devices by number (those of their layers too), name and image; the first of each counts.
    ``without``: types of file systems that lie on none."""

    def __init__(
        self, devices: list[blockdev.BlockDevice], sys: str | Path, proc: str | Path
    ) -> None:
        self.sys = sys
        lines = rbd_sysfs.text(f"{proc}/filesystems").splitlines()
        self.without = {line.split()[1] for line in lines if line.startswith("nodev")}
        self.by_number: dict[blockdev.Number, blockdev.BlockDevice] = {}
        self.by_name: dict[str, blockdev.BlockDevice] = {}
        self.by_image: dict[tuple[str, str, str], blockdev.BlockDevice] = {}
        for device in devices:
            self.by_name.setdefault(device.name, device)
            for number in device.numbers:
                self.by_number.setdefault(number, device)
            if device.image is not None:
                self.by_image.setdefault(device.image.key, device)


def volumes(
    kubelet: str,
    host: list[mountinfo.Mount],
    devices: list[blockdev.BlockDevice],
    *,
    roots: Sequence[str] = ("",),
    files: Files | None = None,
    quick: bool = False,
    sys: str | Path = blockdev.SYSFS,
    proc: str | Path = blockdev.PROC,
) -> tuple[list[Volume], list[str]]:
    """Every volume that is staged or published as raw block, with its publishes and its device; and
    what could not be read.

    ``kubelet`` is its directory without symbolic links, ``roots`` the directories to read it from:
    records are in all of them, and a device node may be bound in one only. ``files`` is what was
    read of it before. ``quick``: pods in whose directories nothing was mounted or unmounted since
    then are not looked at.
    """
    files, root = files or Files(), roots[0]
    if not quick:
        files.begin()
    by_target = {mount.target: mount for mount in host if mountinfo.within(mount.target, kubelet)}
    targets = sorted(by_target)
    publishes = _publishes(kubelet, root, by_target, files, quick)
    known = _Devices(devices, sys, proc)
    found: list[Volume] = []
    gaps: list[str] = []
    for home, staging in _staged(kubelet, root, files):
        if len(found) >= _MOST_VOLUMES:
            gaps.append(
                f"{kubelet}: more than {_MOST_VOLUMES} staged volumes, the others are left out"
            )
            break
        record = files.json(f"{root}{home}/vol_data.json")
        driver, handle = str(record.get("driverName", "")), str(record.get("volumeHandle", ""))
        mounts = _at_or_below(targets, staging)
        meta = {} if staging in mounts else files.json(f"{root}{staging}/image-meta.json")
        image = _image(meta)
        # What is mounted within the volume is another's.
        own = [staging] if staging in mounts else mounts
        below = (by_target[target] for target in mounts)
        on_disk = [mount.device for mount in below if not _lies_on_none(mount, known)]
        device = _device(meta, image, on_disk, known)
        published = publishes.get(handle, []) if handle else []
        published = [each for each in published if each.driver in ("", driver)]
        given = [by_target[each.path] for each in published if each.mounted]
        at = [by_target[target] for target in own] or given  # some drivers stage nothing
        numbers = [(mount, _number(mount, roots, known)) for mount in at]
        found.append(
            Volume(
                driver=driver,
                handle=handle,
                staging=staging,
                mounts=tuple(sorted(mounts)),
                device=device.name if device else "",
                image=(device.image if device else None) or image,
                publishes=tuple(published),
                name=published[0].volume if published else str(record.get("specVolID", "")),
                number=next((number for _, number in numbers if number), None),
                on=next((os.path.basename(m.source) for m, number in numbers if number), ""),
                read_only=any(each and all(m.read_only for m in each) for each in (at, given)),
            )
        )
    return [*found, *_raw(kubelet, roots, files, known, by_target)], gaps


def on_device(name: str, kubelet: str) -> list[str]:
    """Which volume of Kubernetes lies on a device, by the records of this moment: CSI driver,
    volumeHandle and the PersistentVolume's name where a pod's record has it (else empty); nothing
    when no record names the device. A volume is on it, too, that is on the same disk or published
    from it as raw block, where only one is. For child processes.

    kubelet writes its record, and ceph-csi its own, before the image is mapped, so whoever formats
    the device for a pod has left both. A scan may be older than a new device.
    HostError when kubelet's directory cannot be seen: then nobody knows.
    """
    root = host_root("/proc")
    directory = host_path(kubelet, root)
    if not os.path.isdir(root + directory):
        raise kit.errors.HostError(
            f"kubelet's directory {kubelet}",
            "is not there",
            "set kubelet.root_dir to its path",
        )
    device = blockdev.identify(name)
    if device is None:
        return []
    host = mountinfo.parse(Path("/proc/1/mountinfo").read_bytes())
    found, _ = volumes(directory, host, [device], roots=(root,))
    claims = [each for each in found if each.driver and each.handle]
    direct = [each for each in claims if each.device == name and not each.is_raw]
    if not direct:
        known: dict[str, stack.StackedDevice] = {}
        with contextlib.suppress(OSError):  # then the records alone say it
            stack.reached([name], known)
            claims, _ = on_disks(claims, known)
        disks = naming.disks(known[name], known) if name in known else frozenset()
        there = [e for e in claims if e.number and (e.number == device.number or e.disks & disks)]
        direct = there if len({(each.driver, each.handle) for each in there}) == 1 else []
    return [direct[0].driver, direct[0].handle, direct[0].name] if direct else []


def on_disks(
    volumes: list[Volume],
    known: dict[str, stack.StackedDevice],
    sys: str | Path = blockdev.SYSFS,
    proc: str | Path = blockdev.PROC,
) -> tuple[list[Volume], list[str]]:
    """With the devices of all drivers that they lie on; and what could not be read. ``known``: what
    was read before. OSError."""
    names = {v.number: blockdev.name_of(v.number, sys) for v in volumes if v.number is not None}
    if not names:
        return volumes, []
    there = rbd_sysfs.listed(f"{sys}/dev/block")
    stack.reached(filter(None, names.values()), known, sys, proc)
    found = []
    for volume in volumes:
        if volume.number is not None:
            number = "{}:{}".format(*volume.number)
            name = names[volume.number]
            home = f"{sys}/dev/block/{number}"
            gone = "the kernel no longer has it" if there and number not in there else ""
            disk = known.get(name)
            volume = dataclasses.replace(
                volume,
                on=name or volume.on or number,
                disks=naming.disks(disk, known) if disk else frozenset(),
                gone=naming.gone(disk, known) if disk else gone,
                read_only=volume.read_only or rbd_sysfs.text(f"{home}/ro") == "1",
            )
        found.append(volume)
    return found, [] if there else [f"{sys}/dev/block: shows no device, so none counts as gone"]


def host_root(proc: str) -> str:
    """The directory of the host's files; empty (the agent's own view) if pid 1's is forbidden."""
    try:
        os.stat(f"{proc}/1/root/.")
    except OSError:
        return ""
    return f"{proc}/1/root"


def host_path(path: str, root: str) -> str:
    """``path`` without symbolic links, as the host's mount tables have it.

    realpath would follow the host's absolute links into the agent's own file system.
    """
    todo, done, links = path.split("/")[::-1], "", 0
    while todo:
        part = todo.pop()
        if part in ("", "."):
            continue
        if part == "..":
            done = done.rpartition("/")[0]
            continue
        try:
            target = os.readlink(f"{root}{done}/{part}")
        except OSError:  # not a link, or nothing there
            done = f"{done}/{part}"
            continue
        links += 1
        if links > _MOST_LINKS:
            return path
        if target.startswith("/"):
            done = ""
        todo += target.split("/")[::-1]
    return done or "/"


def _raw(
    kubelet: str,
    roots: Sequence[str],
    files: Files,
    known: _Devices,
    by_target: Mapping[str, mountinfo.Mount],
) -> Iterator[Volume]:
    """Raw block volumes, which kubelet keeps in volumeDevices: the record in <name>/data, and the
    device nodes mounted at publish/<name>/<uid> and <name>/dev/<uid>. A node that is only a file
    outlives a reboot, and a mount may outlive its pod: they say nothing. Where the kernel deleted
    the node (in devtmpfs), its device is gone, and the number may be the next one's. ceph-csi notes
    image and device where kubelet had the volume staged: then only a node of a device that shows
    this image counts, and the record of one that shows another is an earlier attachment's."""
    base = f"{kubelet}/plugins/kubernetes.io/csi/volumeDevices"
    for name in files.names(roots[0] + base)[:_MOST_VOLUMES]:
        record = files.json(f"{roots[0]}{base}/{name}/data/vol_data.json")
        if not record:
            continue
        homes = f"{base}/publish/{name}", f"{base}/{name}/dev"
        paths = [f"{home}/{uid}" for home in homes for uid in files.names(roots[0] + home)]
        paths = [path for path in paths if os.path.basename(path) in files.pods]
        bound = [by_target[path] for path in paths if path in by_target]
        bound = [mount for mount in bound if mount.fstype in ("devtmpfs", "tmpfs")]
        lost = [m for m in bound if m.fstype == "devtmpfs" and m.root.endswith("//deleted")]
        nodes = _nodes(roots, [mount.target for mount in bound if mount not in lost])
        meta = files.json(f"{roots[0]}{base}/staging/{name}/image-meta.json")
        image = _image(meta)
        device = _device(meta, image, () if image else nodes.values(), known)
        if image:
            if device and device.image and device.image.key != image.key:
                device = known.by_image.get(image.key)
            shown = device.name if device and device.image else ""
            nodes = {p: n for p, n in nodes.items() if shown and _reaches(n, shown, known.sys)}
        # With a device it is attached anew, and its pod gets that in a moment.
        lost = [mount for mount in lost if _NODE.match(mount.root) and not (nodes or device)]
        handle = str(record.get("volumeHandle", ""))
        pods = {os.path.basename(path): path for path in [*nodes, *(m.target for m in lost)][::-1]}
        yield Volume(
            driver=str(record.get("driverName", "")),
            handle=handle,
            staging=f"{base}/{name}",
            mounts=(),
            device=device.name if device else "",
            image=(device.image if device else None) or image,
            publishes=tuple(
                Publish(uid, path, name, mounted=True, read_only=False, handle=handle)
                for uid, path in pods.items()
            ),
            name=str(record.get("specVolID", name)),
            number=next(iter(nodes.values()), None),
            on=lost[0].root.split("/")[1] if lost else "",
            gone="the kernel deleted its node in /dev" if lost else "",
        )


def _reaches(number: blockdev.Number, device: str, sys: str | Path) -> bool:
    """Whether that device lies on ``device``, or is it: LUKS on an image."""
    names = [blockdev.name_of(number, sys)]
    for name in names:
        names += rbd_sysfs.listed(f"{sys}/class/block/{name}/slaves") if name else ()
    return device in names


def _nodes(roots: Sequence[str], paths: list[str]) -> dict[str, blockdev.Number]:
    """Device numbers of the paths that are nodes of block devices, in the first root where they
    are."""
    found: dict[str, blockdev.Number] = {}
    for root in roots:
        with contextlib.suppress(OSError):
            asked = raw_block.block_nodes(root, [path for path in paths if path not in found])
            found |= {path: number for path, number in asked.items() if number}
    return found


def _number(
    mount: mountinfo.Mount, roots: Sequence[str], known: _Devices
) -> blockdev.Number | None:
    """Of the block device whose file system is mounted there, all of it: drivers that make folders
    of one file system their volumes share a device. btrfs shows a number of its own, and Lustre one
    that may be a disk's."""
    if mount.root != "/" or _lies_on_none(mount, known):
        return None
    if mount.fstype == "btrfs":
        return _nodes(roots[:1], [mount.source]).get(mount.source)
    return mount.device if mount.major else None


def _lies_on_none(mount: mountinfo.Mount, known: _Devices) -> bool:
    """Its number may be a disk's all the same."""
    return mount.fstype.partition(".")[0] in known.without or not mount.source.startswith("/")


def _publishes(
    kubelet: str, root: str, by_target: dict[str, mountinfo.Mount], files: Files, quick: bool
) -> dict[str, list[Publish]]:
    """The volumes that kubelet gave to pods, by their handle."""
    base = f"{kubelet}/pods/"
    mounted: dict[str, list[mountinfo.Mount]] = {}
    for target, mount in by_target.items():
        if target.startswith(base):
            mounted.setdefault(target[len(base) :].partition("/")[0], []).append(mount)
    before, files.pods = files.pods, {}
    found: dict[str, list[Publish]] = {}
    for uid in files.names(root + base.rstrip("/")):
        mounts = mounted.get(uid, [])
        pod = before.get(uid)
        if pod is None or not (quick and pod.is_as(mounts)):
            pod = _Pod(
                tuple(mounts), dict(_of_pod(f"{base}{uid}", uid, root, by_target, files, pod))
            )
        files.pods[uid] = pod
        for _, publish in pod.publishes.values():
            found.setdefault(publish.handle, []).append(publish)
    return found


def _of_pod(
    pod: str,
    uid: str,
    root: str,
    by_target: dict[str, mountinfo.Mount],
    files: Files,
    before: _Pod | None,
) -> Iterator[tuple[str, tuple[mountinfo.Mount | None, Publish]]]:
    """kubelet writes the record of a volume before it has it mounted, and never again: where the
    same mount is there, so is the same record."""
    base = f"{pod}/volumes/kubernetes.io~csi"
    for name in files.names(root + base):
        path = f"{base}/{name}/mount"
        mount = by_target.get(path)
        known = before.publishes.get(path) if before is not None else None
        if known is not None and mount is not None and known[0] is mount:
            yield path, known
            continue
        record = files.json(f"{root}{base}/{name}/vol_data.json")
        publish = Publish(
            pod_uid=uid,
            path=path,
            volume=str(record.get("specVolID", name)),
            mounted=mount is not None,
            read_only=mount is not None and mount.read_only,
            handle=str(record.get("volumeHandle", "")),
            driver=str(record.get("driverName", "")),
        )
        yield path, (mount, publish)


def _at_or_below(targets: list[str], upper: str) -> list[str]:
    """Of the sorted ``targets``, ``upper`` and what is below it."""
    at = bisect.bisect_left(targets, upper)
    exact = targets[at : at + 1] if targets[at : at + 1] == [upper] else []
    first, last = (bisect.bisect_left(targets, f"{upper}{end}") for end in "/0")  # 0 follows /
    return exact + targets[first:last]


def _image(meta: dict[str, Any]) -> RbdImage | None:
    pool, name = meta.get("pool"), meta.get("image")
    if not isinstance(pool, str) or not isinstance(name, str) or not name:
        return None
    return RbdImage(pool=pool, name=name, namespace=str(meta.get("radosNamespace") or ""))


def _device(
    meta: dict[str, Any],
    image: RbdImage | None,
    numbers: Iterable[blockdev.Number],
    devices: _Devices,
) -> blockdev.BlockDevice | None:
    """The volume's device: by what is mounted or published, else by ceph-csi's record, else by the
    image."""
    for number in numbers:
        if (found := devices.by_number.get(number)) is not None:
            return found
    noted = devices.by_name.get(os.path.basename(str(meta.get("device") or "")))
    if noted is not None or image is None:
        return noted
    return devices.by_image.get(image.key)
