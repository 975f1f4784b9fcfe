"""Volumes that kubelet publishes as raw block devices (volumeMode: Block)."""

from collections.abc import Iterable
from pathlib import Path

from linux import mountinfo
from volumes import devices

# Renewed while the device stays published; ends by itself when nobody is there to renew it.
HELD_SECONDS = 3600.0
_FOLDER = "/volumeDevices/"


def host_mounts() -> list[mountinfo.Mount]:
    """The host's mounts, as far as this process may see them."""
    try:
        return mountinfo.read(Path("/proc/1/mountinfo"))
    except OSError:
        return mountinfo.read()


def published(device: devices.BlockDevice, mounts: Iterable[mountinfo.Mount]) -> bool:
    """kubelet binds the node itself, a file of devtmpfs, below a volumeDevices directory."""
    return any(
        mount.fstype == "devtmpfs" and mount.root == f"/{device.name}" and _FOLDER in mount.target
        for mount in mounts
    )
