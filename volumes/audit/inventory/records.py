"""Records of kubelet and ceph-csi about staged volumes. Runs in the scan child only.

kubelet: plugins/kubernetes.io/csi/<driver>/<hash>/vol_data.json (before 1.24: csi/pv/<name>) and
pods/<uid>/volumes/kubernetes.io~csi/<name>/vol_data.json. ceph-csi: image-meta.json in the staging
directory. Files inside a mounted volume are never read.
"""

import bisect
import json
import os
from collections.abc import Iterator
from typing import Any

from linux import blockdev, mountinfo
from linux.rbd_sysfs import RbdImage
from volumes.audit.inventory.model import Publish, Volume

_MOST_VOLUMES = 2048
_LARGEST_RECORD = 1 << 16


def _json(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as stream:  # noqa: PTH123
            value = json.loads(stream.read(_LARGEST_RECORD))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _names(path: str) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []


def _staged(kubelet: str, root: str) -> Iterator[tuple[str, str]]:
    """(directory with vol_data.json, staging directory)."""
    base = f"{kubelet}/plugins/kubernetes.io/csi"
    for driver in _names(root + base):
        if driver == "volumeDevices":
            continue  # raw block volumes: the bind mount of their device node shows them
        for volume in _names(f"{root}{base}/{driver}"):
            home = f"{base}/{driver}/{volume}"
            yield home, f"{home}/globalmount"


def _published(kubelet: str, root: str) -> Iterator[tuple[str, str, str]]:
    """(pod uid, volume name, directory)."""
    for uid in _names(f"{root}{kubelet}/pods"):
        base = f"{kubelet}/pods/{uid}/volumes/kubernetes.io~csi"
        for name in _names(root + base):
            yield uid, name, f"{base}/{name}"


class _Devices:
    """Devices by number (those of their layers too), name and image; the first of each counts."""

    def __init__(self, devices: list[blockdev.BlockDevice]) -> None:
        self.by_number: dict[blockdev.Number, blockdev.BlockDevice] = {}
        self.by_name: dict[str, blockdev.BlockDevice] = {}
        self.by_image: dict[tuple[str, str, str], blockdev.BlockDevice] = {}
        for device in devices:
            self.by_name.setdefault(device.name, device)
            for number in device.numbers:
                self.by_number.setdefault(number, device)
            if (image := device.image) is not None:
                self.by_image.setdefault((image.pool, image.name, image.namespace), device)


def volumes(
    kubelet: str,
    host: list[mountinfo.Mount],
    devices: list[blockdev.BlockDevice],
    *,
    root: str = "",
) -> tuple[list[Volume], list[str]]:
    """Every staged volume with its publishes and its device; and what could not be read.

    ``kubelet`` is its directory without symbolic links, ``root`` the directory to read it from.
    """
    by_target = {mount.target: mount for mount in host if _below(mount.target, kubelet)}
    targets = sorted(by_target)
    publishes = _publishes(kubelet, root, by_target)
    known = _Devices(devices)
    found: list[Volume] = []
    gaps: list[str] = []
    for home, staging in _staged(kubelet, root):
        if len(found) >= _MOST_VOLUMES:
            gaps.append(
                f"{kubelet}: more than {_MOST_VOLUMES} staged volumes, the others are left out"
            )
            break
        record = _json(f"{root}{home}/vol_data.json")
        handle = str(record.get("volumeHandle", ""))
        mounts = _at_or_below(targets, staging)
        meta = {} if staging in mounts else _json(f"{root}{staging}/image-meta.json")
        image = _image(meta)
        device = _device(meta, image, [by_target[target] for target in mounts], known)
        published = publishes.get(handle, []) if handle else []
        found.append(
            Volume(
                driver=str(record.get("driverName", "")),
                handle=handle,
                staging=staging,
                mounts=tuple(sorted(mounts)),
                device=device.name if device else "",
                image=(device.image if device else None) or image,
                publishes=tuple(published),
                name=published[0].volume if published else str(record.get("specVolID", "")),
            )
        )
    return found, gaps


def _publishes(
    kubelet: str, root: str, by_target: dict[str, mountinfo.Mount]
) -> dict[str, list[Publish]]:
    """The volumes that kubelet gave to pods, by their handle."""
    found: dict[str, list[Publish]] = {}
    for uid, name, home in _published(kubelet, root):
        record = _json(f"{root}{home}/vol_data.json")
        mount = by_target.get(f"{home}/mount")
        handle = str(record.get("volumeHandle", ""))
        found.setdefault(handle, []).append(
            Publish(
                pod_uid=uid,
                path=f"{home}/mount",
                volume=str(record.get("specVolID", name)),
                mounted=mount is not None,
                read_only=mount is not None and mount.read_only,
                handle=handle,
            )
        )
    return found


def _at_or_below(targets: list[str], upper: str) -> list[str]:
    """Of the sorted ``targets``, ``upper`` and what is below it."""
    at = bisect.bisect_left(targets, upper)
    exact = targets[at : at + 1] if targets[at : at + 1] == [upper] else []
    first, last = (bisect.bisect_left(targets, f"{upper}{end}") for end in "/0")  # 0 follows /
    return exact + targets[first:last]


def _below(path: str, upper: str) -> bool:
    return path == upper or path.startswith(upper + "/")


def _image(meta: dict[str, Any]) -> RbdImage | None:
    pool, name = meta.get("pool"), meta.get("image")
    if not isinstance(pool, str) or not isinstance(name, str) or not name:
        return None
    return RbdImage(pool=pool, name=name, namespace=str(meta.get("radosNamespace") or ""))


def _device(
    meta: dict[str, Any],
    image: RbdImage | None,
    mounts: list[mountinfo.Mount],
    devices: _Devices,
) -> blockdev.BlockDevice | None:
    """The volume's device: by its mounts, else by ceph-csi's record, else by the image."""
    for mount in mounts:
        if (found := devices.by_number.get(mount.device)) is not None:
            return found
    noted = devices.by_name.get(os.path.basename(str(meta.get("device") or "")))
    if noted is not None or image is None:
        return noted
    return devices.by_image.get((image.pool, image.name, image.namespace))
