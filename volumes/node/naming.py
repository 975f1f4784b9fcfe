"""What a block device is: the disk that it shows, and whether that is there. Pure."""

from collections.abc import Mapping

from linux.stack import StackedDevice

Devices = Mapping[str, StackedDevice]  # by name


def disk(device: StackedDevice, devices: Devices) -> str:
    """Equal for all ways to the same bytes: multipath or LUKS on it, a loop device over it. A
    partition is another disk than its neighbours, and so is a logical volume. No name counts that
    the disk gives itself: copies and cheap models share one."""
    lower = devices.get(device.below[0]) if device.below else None
    if lower and (device.driver == "loop" or device.uuid.startswith(("CRYPT-", "mpath-"))):
        return disk(lower, devices)
    return f"{device.number[0]}:{device.number[1]}"


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
