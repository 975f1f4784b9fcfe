"""Which volume of Kubernetes lies on which block device, for any CSI driver. Pure.

A volume is its CSI driver and volumeHandle. Which disk is its own is said, the surest first, by the
number of what is mounted or published for it, by kubelet's loop device over a raw block volume, and
by what the disk or udev calls the disk. Where nothing says it, or two disks are called so, the
volume has no disk and the disk no name.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from linux.blockdev import Number
from linux.stack import StackedDevice

Devices = Mapping[str, StackedDevice]  # by name

_SHORTEST = 5  # of what is compared as a whole: Hetzner's ids are numbers
_VIRTIO_SERIAL = 20  # bytes; of a longer one this much is left
# Nobody makes such an id twice. So it may stand anywhere: iscsi-iqn.2019-10.io.longhorn:pvc-...
_GENERATED = re.compile(r"[0-9a-f]{16}")
# by-id/scsi-0HC_Volume_1, scsi-0DO_Volume_pvc-1, scsi-0Google_PersistentDisk_1, google-1
_LINK = re.compile(r"by-id/(?:google-|scsi-0[^_]+_(?:Volume|PersistentDisk)_)(.+)")
_MAPPED_PART = re.compile(r"part(\d+)-")  # kpartx


@dataclass(frozen=True)
class Recorded:
    """``name``: the PersistentVolume's, where a record has it. ``number``: of the block device that
    is mounted or published."""

    driver: str
    handle: str
    name: str = ""
    number: Number | None = None


def identity(device: StackedDevice) -> str:
    """What stays the same over reboots, the surest that there is; empty: nothing does."""
    links = [link for link in device.links if link.startswith("by-path/")]
    ids = [link for link in device.links if link.startswith("by-id/")]
    raid = [link for link in ids if link.startswith("by-id/md-uuid-")]
    slot = device.model.startswith("IET ")  # tgt: these name its target, and the next volume there
    said = (
        ("dm", device.uuid or device.mapping),
        ("md", raid[0] if raid else ""),
        ("part", device.partuuid if _tells(device.partuuid[:-3]) else ""),
        ("wwid", device.wwid if _tells(device.wwid) and not slot else ""),
        ("serial", device.serial if _tells(device.serial) and not slot else ""),
        ("file", device.backing),
        ("path", links[0].partition("/")[2] if links else ""),
        ("id", ids[0].partition("/")[2] if ids and not slot else ""),
    )
    return next((f"{kind}:{text}" for kind, text in said if text), "")


def _tells(text: str) -> bool:
    """Some disks say nothing but zeros."""
    return bool(set(text.rpartition(".")[2]) - set("0-: "))


def group(device: StackedDevice) -> str:
    """The volume group of a logical volume."""
    return _lvm(device)[0]


def _lvm(device: StackedDevice) -> tuple[str, str]:
    """Group and volume: LVM doubles the dashes of names and joins by one."""
    if not device.uuid.startswith("LVM-"):
        return "", ""
    above, _, name = device.mapping.replace("--", "\0").partition("-")
    return above.replace("\0", "-"), name.replace("\0", "-")


def disk(device: StackedDevice, devices: Devices) -> str:
    """Equal for all ways to the same bytes: its paths, multipath or LUKS on it, a loop device over
    it. A partition is another disk than its neighbours, and so is a logical volume."""
    lower = devices.get(device.below[0]) if device.below else None
    if lower is not None and device.partition:
        return f"{disk(lower, devices)} {device.name.removeprefix(lower.name).lstrip('p')}"
    if lower is not None and (part := _MAPPED_PART.match(device.uuid)):
        return f"{disk(lower, devices)} {part[1]}"
    if lower is not None and (
        device.driver == "loop" or device.uuid.startswith(("CRYPT-", "mpath-"))
    ):
        return disk(lower, devices)
    said = identity(device)
    if said.startswith(("wwid:", "serial:")):  # a copy of another size is another disk
        return f"{said} {device.model} {device.size}"
    return f"{device.number[0]}:{device.number[1]}"


def gone(device: StackedDevice, devices: Devices) -> str:
    """Why nothing can be read from it any more; empty: nothing says so. What is made of several may
    do without one."""
    if not device.size:
        return f"the kernel says that {device.name} has a size of 0"
    made = device.uuid.startswith(("LVM-", "CRYPT-", "mpath-"))
    lost = [
        gone(devices[name], devices)
        if name in devices
        else f"{device.name} lies on {name}, which the kernel no longer has"
        for name in device.below
    ]
    if made and not lost:
        return f"the kernel no longer has what {device.name} lies on"
    return lost[0] if lost and all(lost) else ""


def disk_of(claim: Recorded, devices: Devices) -> str:
    """The disk of a volume; empty: nothing says which, or more than one may be it."""
    found = {disk(device, devices) for device in _by_number(claim, devices)} or {
        disk(device, devices) for device in devices.values() if _is_called(device, claim)
    }
    return found.pop() if len(found) == 1 else ""


def _by_number(claim: Recorded, devices: Devices) -> list[StackedDevice]:
    over = f"/volumeDevices/{claim.name}/"  # kubelet's loop device outlives what was published
    return [each for each in devices.values() if claim.number == each.number] or [
        each for each in devices.values() if claim.name and over in each.backing
    ]


def _is_called(device: StackedDevice, claim: Recorded) -> bool:
    if device.partition:
        return False
    names = {claim.handle, claim.handle.rpartition("/")[2], claim.name}
    names |= {name.replace("-", "") for name in names}  # vol-0a1b, and EBS calls it vol0a1b
    whole = {
        device.serial,
        _lvm(device)[1],
        *(m[1] for m in map(_LINK.fullmatch, device.links) if m),
    }
    if whole & {name for name in names if len(name) >= _SHORTEST}:
        return True
    unique = [name for name in names if _GENERATED.search(name.replace("-", ""))]
    said = " ".join((*whole, device.mapping.replace("--", "-"), device.wwid, *device.links))
    return any(
        device.serial == name[:_VIRTIO_SERIAL]
        or re.search(rf"(?<![0-9A-Za-z]){re.escape(name)}(?![0-9A-Za-z])", said)
        for name in unique
    )


def on_device(name: str, claims: Collection[Recorded], devices: Devices) -> Recorded | None:
    """Which volume lies on a device; None: nothing says it, or there are two."""
    if name not in devices:
        return None
    wanted = disk(devices[name], devices)
    found = {(c.driver, c.handle): c for c in claims if disk_of(c, devices) == wanted}
    return next(iter(found.values())) if len(found) == 1 else None
