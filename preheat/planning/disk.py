"""The disk that images are on, seen through the kubelet's thresholds."""

import os

import kit.errors
from kube import kubelet
from kube.settings import KubeletSettings
from preheat import settings
from preheat.planning import plan


def node(
    images_path: str,
    section: settings.PreheatSettings,
    freeable: int = 0,
) -> plan.Node:
    """The disk that images are on. Blocking. Raises HostError, SettingsError."""
    limits = kubelet.thresholds(section.this_node.kubelet)
    path = _folder(images_path or "/")
    try:
        found = os.statvfs(path)
    except OSError as error:
        raise kit.errors.HostError(
            f"the container runtime's image directory {path}",
            f"cannot be read ({error.strerror})",
            "mount the host's directory at the same path in the agent's pod (read-only)",
        ) from error
    if _is_shared(path, section.this_node.kubelet):
        free, inodes = limits.free + limits.nodefs_free, limits.inodes + limits.nodefs_inodes
    else:
        free, inodes = limits.free, limits.inodes
    capacity = found.f_blocks * found.f_frsize
    eviction = max((each.of(capacity) for each in free), default=0.0)
    gc_low = min(limits.gc_low, limits.gc_high)
    return plan.Node(
        capacity=capacity,
        # Blocks reserved for root count as used, as the kubelet counts them.
        free=found.f_bavail * found.f_frsize,
        gc_high=limits.gc_high,
        gc_low=gc_low,
        eviction_free=eviction,
        # More could never be kept: the kubelet deletes down to gc_low, and evicts.
        pin_budget=min(section.pin_budget, int(min(gc_low, 1 - eviction) * capacity)),
        freeable=freeable,
        # A file system without a table of inodes (btrfs) never runs out of them.
        inodes_free=found.f_favail / found.f_files if found.f_files else 1.0,
        eviction_inodes=max((each.of(found.f_files) for each in inodes), default=0.0),
        assumed=limits.assumed,
        thresholds=limits.origin,
    )


def _is_shared(path: str, section: KubeletSettings) -> bool:
    """Whether the kubelet's own directory (its nodefs) is on the same file system."""
    try:
        return os.stat(path).st_dev == os.stat(section.root_dir).st_dev
    except OSError:
        return False  # it is not to be seen from here; imagefs signals count in any case


def _folder(images_path: str) -> str:
    """CRI names a directory for each snapshotter; remote ones keep theirs elsewhere."""
    parent, _, name = images_path.rpartition("/")
    remote = name.startswith("io.containerd.snapshotter.") and not os.path.isdir(images_path)
    return parent if remote and os.path.isdir(parent) else images_path
