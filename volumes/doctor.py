"""What the guard and the audit need of a node. The functions run in child processes."""

import contextlib
import importlib.util
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kit.errors
from ceph import monitors, secrets
from ceph.settings import ClusterSettings
from kit.room import Check
from linux import blockdev, kmsg, mountinfo
from volumes import settings
from volumes.guard import kernel, override
from volumes.node import raw_block


def checks(section: settings.VolumesSettings, state_dir: Path) -> Sequence[Check]:
    guard = section.guard
    guarding, auditing = guard.mode != "off", section.audit.enabled
    found = [
        Check(
            "bpf", bpf, (guard.model_dump(mode="json"), str(kernel.OBJECT)),
            "nothing refuses a format", guarding,
        ),
        Check(
            "guarded drivers", drivers, (list(guard.drivers),),
            "a device that appears is guarded a moment after its driver", wanted=False,
        ),
        Check("kernel log", kernel_log, (), "no automatic leases, no kernel lines", guarding),
        Check(
            "host processes", processes, (), "leaked mounts and their pods are not found", auditing
        ),
        Check(
            "raw block volumes", raw_volumes, (),
            "in mode enforce their pods may not write to them", guarding and guard.raw_block,
        ),
        Check("journal", journal, (), "log lines of services are not read", wanted=False),
    ]  # fmt: skip
    for cluster in section.clusters:
        found += _of_cluster(cluster)
    if section.clusters:
        cost = "clusters are not asked what an image holds"
        found.append(Check("ceph bindings", bindings, (), cost))
    return found


def _of_cluster(cluster: ClusterSettings) -> list[Check]:
    cost = f"cluster {cluster.name} is not asked: no lease for its images, no findings about it"
    found = []
    if cluster.secret_file is not None:
        key = (str(cluster.secret_file), cluster.user)
        found.append(Check(f"key {cluster.name}", secrets.has_key, key, cost))
    if cluster.monitors:
        found.append(Check(f"ceph {cluster.name}", monitors.reach, (list(cluster.monitors),), cost))
    else:
        found.append(Check(f"ceph {cluster.name}", configuration, (str(cluster.conf),), cost))
    return found


def bpf(section: dict[str, Any], program: str) -> str:
    """Loads the guard program and drops it: nothing is attached."""
    wanted = settings.GuardSettings.model_validate(section)
    with contextlib.closing(override.handle(wanted, Path(program))) as guard:
        try:
            present = guard.read()
            guard.try_load()
        except OSError as error:
            remedy = "install libbpf1" if "libbpf" in str(error) else "run as root (CAP_SYS_ADMIN)"
            raise kit.errors.HostError("BPF", error.strerror or str(error), remedy) from error
    state = f"attached in mode {present.mode}" if present.attached else "not attached now"
    return f"the kernel takes the program {kernel.PROGRAM}; {state}"


def drivers(names: list[str]) -> str:
    loaded = set(blockdev.majors().values())
    if missing := [name for name in names if name not in loaded]:
        raise kit.errors.HostError(
            f"block drivers {', '.join(missing)}", "are not loaded",
            f"load them at boot: modprobe {' '.join(missing)} (deploy/guard/modules-load.conf)",
        )  # fmt: skip
    return f"{', '.join(names)} are loaded"


def kernel_log() -> str:
    try:
        kmsg.Kmsg(from_now=True).close()
    except OSError as error:
        raise kit.errors.HostError(
            "/dev/kmsg", str(error.strerror), "mount the host's /dev, and run as root"
        ) from error
    return "/dev/kmsg can be read"


def processes() -> str:
    try:
        count = len(mountinfo.read(Path("/proc/1/mountinfo")))
        # On a host pid 2 is the kernel's. Where the node itself is a container it is not, but pid 1
        # is then the node's and not our container's.
        kthreads = Path("/proc/2/comm")
        seen = kthreads.exists() and kthreads.read_bytes().strip() == b"kthreadd"
        seen = seen or not os.path.samefile("/proc/1/ns/mnt", "/proc/self/ns/mnt")
    except OSError:
        count, seen = 0, False
    if not seen:
        raise kit.errors.HostError(
            "/proc", "it does not show the host's processes", "in a pod: hostPID: true"
        )
    return f"the host's processes are seen, {count} mounts"


def raw_volumes() -> str:
    """Whether the mount tables in which kubelet may publish them can be read."""
    try:
        _, found = raw_block.spaces()
        for pid in found.values():
            mountinfo.of(pid)
            if pid != 1:
                os.stat(f"/proc/{pid}/root/dev")
    except OSError as error:
        raise kit.errors.HostError(
            "kubelet's mount namespace",
            f"cannot be read ({error.strerror or error})",
            "run as root (CAP_SYS_PTRACE); in a pod: privileged and hostPID",
        ) from error
    own = ", and in a mount namespace of kubelet's own" if len(found) > 1 else ""
    return f"they are seen where pid 1 has its mounts{own}"


def journal() -> str:
    if shutil.which("journalctl") is None:
        raise kit.errors.HostError("journalctl", "is not installed", "install systemd's journalctl")
    folders = [each for each in ("/var/log/journal", "/run/log/journal") if os.path.isdir(each)]
    if not folders:
        raise kit.errors.HostError(
            "the journal", "neither /var/log/journal nor /run/log/journal is there",
            "in a pod mount both; without systemd there is none",
        )  # fmt: skip
    return f"{', '.join(folders)}"


def bindings() -> str:
    if missing := [each for each in ("rados", "rbd") if importlib.util.find_spec(each) is None]:
        raise kit.errors.HostError(
            f"Python bindings {', '.join(missing)}", "are not installed",
            f"install {' '.join(f'python3-{each}' for each in missing)}",
        )  # fmt: skip
    return "rados and rbd are installed"


def configuration(path: str) -> str:
    if not os.access(path, os.R_OK):
        raise kit.errors.HostError(path, "cannot be read", "put ceph.conf there")
    return f"{path} can be read"
