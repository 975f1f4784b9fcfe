"""Which volume of Kubernetes lies on a device, by kubelet's and ceph-csi's records of this moment.

kubelet writes its record, and ceph-csi its own, before the image is mapped, so whoever formats the
device for a pod has left both. A scan may be older than a new device; this reads only what
concerns one.
"""

import os
from pathlib import Path

import kit.errors
from linux import blockdev, mountinfo
from volumes.audit.inventory import records, scan

_TABLE = Path("/proc/1/mountinfo")


def on_device(name: str, kubelet: str) -> list[str]:
    """CSI driver, volumeHandle and the PersistentVolume's name where a pod's record has it (else
    empty); nothing when no record names the device. For child processes.

    HostError when kubelet's directory cannot be seen: then nobody knows.
    """
    root = scan.host_root("/proc")
    directory = scan.host_path(kubelet, root)
    if not os.path.isdir(root + directory):
        raise kit.errors.HostError(
            f"kubelet's directory {kubelet}",
            "is not there",
            "set kubelet.root_dir to its path",
        )
    device = blockdev.identify(name)
    if device is None:
        return []
    host = mountinfo.parse(_TABLE.read_bytes())
    found, _ = records.volumes(directory, host, [device], root=root)
    for volume in found:
        if volume.device == name and volume.driver and volume.handle:
            return [volume.driver, volume.handle, volume.name]
    return []
