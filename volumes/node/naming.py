"""What a block device is: its identity, the disk that it shows, and whether that is there. Pure.

Which volume lies on it says only what is mounted or published (``records.on_device``). Names say
nothing: no automatic lease depends on them, and a short one fits a foreign disk.
"""

import re
from collections.abc import Mapping

from linux.stack import StackedDevice

Devices = Mapping[str, StackedDevice]  # by name

_MAPPED_PART = re.compile(r"part(\d+)-")  # kpartx
# Of these a disk has one for itself. A serial, or what NVMe makes of one, may be a model's.
_UNIQUE = tuple(f"wwid:{kind}." for kind in ("naa", "eui", "uuid", "t10"))


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
    """The volume group of a logical volume: LVM doubles the dashes of names and joins by one."""
    if not device.uuid.startswith("LVM-"):
        return ""
    return device.mapping.replace("--", "\0").partition("-")[0].replace("\0", "-")


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
    if said.startswith(_UNIQUE):  # a copy of another size is another disk
        return f"{said} {device.model} {device.size}"
    return f"{device.number[0]}:{device.number[1]}"


def gone(device: StackedDevice, devices: Devices) -> str:
    """Why nothing can be read from it any more; empty: nothing says so. What is made of several may
    do without one, and multipath may wait for its paths."""
    if not device.size:
        return f"the kernel says that {device.name} has a size of 0"
    if device.uuid.startswith("mpath-"):
        return ""
    lost = [
        gone(devices[name], devices)
        if name in devices
        else f"{device.name} lies on {name}, which the kernel no longer has"
        for name in device.below
    ]
    if device.uuid.startswith(("LVM-", "CRYPT-")) and not lost:
        return f"the kernel no longer has what {device.name} lies on"
    return lost[0] if lost and all(lost) else ""
