"""What a block device is: the disks that it shows, and whether they are there. Pure."""

from collections.abc import Mapping

from linux.stack import StackedDevice

Devices = Mapping[str, StackedDevice]  # by name


def disks(device: StackedDevice, devices: Devices) -> frozenset[str]:
    """Ways to the same bytes share one: multipath or dm-crypt on it, a loop device over all of it.
    A partition is another disk than its neighbours, and so are a logical volume and a part that
    plain dm-crypt or a loop device shows. No name counts that the disk gives itself: copies and
    cheap models share one."""
    lower = [disks(devices[name], devices) for name in device.below if name in devices]
    whole = device.driver == "loop" and not device.partial
    crypt = device.uuid.startswith("CRYPT-") and not device.uuid.startswith("CRYPT-PLAIN")
    if lower and (whole or crypt or device.uuid.startswith("mpath-")):
        return frozenset[str]().union(*lower)
    return frozenset({f"{device.number[0]}:{device.number[1]}"})


def gone(device: StackedDevice, devices: Devices) -> str:
    """Why nothing can be read from it any more; empty: nothing says so. A logical volume may do
    without one of several, multipath may wait for its paths, and DRBD reads from a peer."""
    if not device.size:
        return f"the kernel says that {device.name} has a size of 0"
    mapped = device.uuid.startswith(("LVM-", "CRYPT-"))
    if not (mapped or device.partition or device.driver == "loop"):
        return ""
    lost = [
        gone(devices[name], devices)
        if name in devices
        else f"{device.name} lies on {name}, which the kernel no longer has"
        for name in device.below
    ]
    if mapped and not lost:
        return f"the kernel no longer has what {device.name} lies on"
    return lost[0] if lost and all(lost) else ""
