"""Which cgroup v2 directory the guard is attached to."""

from pathlib import Path

import kit.errors
from linux import mountinfo


def find() -> Path:
    """The mount point of the whole cgroup v2 hierarchy. HostError without one."""
    for mount in mountinfo.read():
        # Not mount.root: in a cgroup namespace of its own, a pod sees the host's root as /../..
        if mount.fstype == "cgroup2" and is_root(Path(mount.target)):
            return Path(mount.target)
    raise kit.errors.HostError(
        "cgroup v2",
        "its root is not mounted here",
        "in a pod, mount the host's /sys/fs/cgroup and use the host's cgroup namespace; on a node "
        "with cgroup v1 only: mount -t cgroup2 none /sys/fs/cgroup/unified; or set "
        "volumes.guard.cgroup",
    )


def is_root(cgroup: Path) -> bool:
    """Only the real root has no cgroup.events; a container's root has one."""
    return not (cgroup / "cgroup.events").exists()
