"""What kubelet and ceph-csi do to a block volume, with the same arguments and no terminal.

kubelet: kubernetes/mount-utils, mount_linux.go (GetDiskFormat, formatAndMountSensitive).
ceph-csi: internal/rbd/nodeserver.go (mountVolumeToStagePath): a mkfs of its own first, then the
same code as kubelet.
"""

import subprocess
from collections.abc import Callable
from dataclasses import dataclass

Run = Callable[..., subprocess.CompletedProcess[str]]

KUBELET_MKFS = {"ext4": ("-F", "-m0"), "xfs": ("-f",)}
CEPH_CSI_MKFS = {
    "ext4": ("-m0", "-Enodiscard,lazy_itable_init=1,lazy_journal_init=1"),
    "xfs": ("-K",),
}


@dataclass
class Outcome:
    """``found``: what the probe answered ('' is 'unformatted'); ``mkfs``: its exit code."""

    found: str = ""
    mkfs: int | None = None
    mkfs_error: str = ""
    mounted: bool = False
    error: str = ""


def disk_format(run: Run, device: str) -> str | None:
    """'' for 'unformatted', None for an error, as GetDiskFormat answers."""
    done = run("blkid", "-p", "-s", "TYPE", "-s", "PTTYPE", "-o", "export", device)
    if done.returncode == 2:
        return ""
    if done.returncode:
        return None
    values = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    return "unknown data, probably partitions" if "PTTYPE" in values else values.get("TYPE", "")


def kubelet(
    run: Run, device: str, fstype: str, target: str, between: Callable[[], None]
) -> Outcome:
    """FormatAndMount. ``between`` runs after the probe and before mkfs."""
    found = disk_format(run, device)
    between()
    if found is None:
        return Outcome(error="probe failed")
    outcome = Outcome(found=found)
    if not found:
        done = run(f"mkfs.{fstype}", *KUBELET_MKFS[fstype], device)
        outcome.mkfs, outcome.mkfs_error = done.returncode, done.stderr
        if done.returncode:
            outcome.error = "format failed"
            return outcome
    else:
        done = run("fsck", "-a", device)
        if done.returncode == 4:
            outcome.error = "fsck found errors"
            return outcome
    done = run("mount", "-t", fstype, "-o", "defaults", device, target)
    outcome.mounted = done.returncode == 0
    outcome.error = done.stderr
    return outcome


def ceph_csi(
    run: Run, device: str, fstype: str, target: str, between: Callable[[], None]
) -> Outcome:
    """NodeStageVolume: its own mkfs when its own probe finds nothing, then kubelet's way."""
    found = disk_format(run, device)
    between()
    if found is None:
        return Outcome(error="probe failed")
    if not found:
        done = run(f"mkfs.{fstype}", *CEPH_CSI_MKFS[fstype], device)
        if done.returncode:
            return Outcome(mkfs=done.returncode, mkfs_error=done.stderr, error="format failed")
    return kubelet(run, device, fstype, target, lambda: None)
