"""What /proc shows of processes: names, families, mount namespaces, cgroups and their pods."""

import ctypes
import errno
import os
import re
import struct
from collections.abc import Container, Iterator
from pathlib import Path
from typing import NamedTuple

from linux import syscalls

_FILEID_KERNFS = 0xFE  # name_to_handle_at(2): the file handle of a cgroup is its id
# cgroupfs and systemd write a pod's UID with '-' or '_'.
_POD = re.compile(r"pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12})")
_CONTAINER = re.compile(r"[0-9a-f]{64}")
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_HOST_PIDS = 0xEFFFFFFC  # linux/proc_ns.h: inode of the namespace in which the kernel counts
# File systems whose files are asked for: no server and no cluster keeps the answer waiting.
LOCAL = frozenset({
    "devtmpfs", "tmpfs", "ramfs", "rootfs", "devpts", "proc", "sysfs", "cgroup", "cgroup2", "bpf",
    "hugetlbfs", "mqueue", "ext2", "ext3", "ext4", "xfs", "btrfs", "bcachefs", "f2fs", "zfs",
    "squashfs", "erofs", "vfat",
})  # fmt: skip

# Names of processes that are kubelet or contain it.
KUBELETS = frozenset({"kubelet", "kubelite", "k3s-server", "k3s-agent"})


def boot_id() -> str:
    """Names the time since the kernel started; another one after each boot."""
    return _BOOT.read_text().strip()


def name_of(pid: int | str) -> str:
    """A process's own name. It chooses it, and the kernel cuts it at 15 bytes, also within a
    character; what is no UTF-8 is replaced. OSError when it has ended."""
    return Path(f"/proc/{pid}/comm").read_bytes().strip().decode(errors="replace")


class StartedProcess(NamedTuple):
    """A process, by the nanoseconds from the boot to its start: its number may be used again."""

    started: int
    pid: int

    def has_ended(self) -> bool:
        """And closed its files. In doubt it has not."""
        if not sees_host():
            return False
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text(errors="replace")
        except OSError as error:
            return error.errno in (errno.ENOENT, errno.ESRCH)
        # Behind the name, which may contain anything: state, ..., threads, 0, start in clock ticks.
        fields = stat.rpartition(")")[2].split()
        same = int(fields[19]) == self.started * os.sysconf("SC_CLK_TCK") // 10**9
        return not same or (fields[0] in "ZX" and int(fields[17]) < 2)


def sees_host() -> bool:
    """Whether numbers of processes are here what they are in the kernel's BPF programs."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino == _HOST_PIDS
    except OSError:
        return False


def reads(pid: int) -> int | None:
    """How many reads of a process were answered, its threads' too, failed ones too. None when it
    has ended, or the kernel does not count them."""
    try:
        figures = Path(f"/proc/{pid}/io").read_text()
    except OSError:
        return None
    return int(figures.partition("syscr: ")[2].split()[0])


def pod_and_container(cgroup: str) -> tuple[str, str]:
    """The innermost pod UID and container id in paths of cgroups; '' for each that is missing."""
    pods, containers = _POD.findall(cgroup), _CONTAINER.findall(cgroup)
    return pods[-1].replace("_", "-") if pods else "", containers[-1] if containers else ""


def pod_of(pid: int | str, proc: str | Path = "/proc") -> tuple[str, str]:
    """The pod UID and container id of a process, by its cgroups, v1 hierarchies too. OSError when
    it has ended."""
    return pod_and_container(Path(proc, str(pid), "cgroup").read_text(errors="replace"))


def family(root: int) -> set[int]:
    """A process and its descendants."""
    children: dict[int, list[int]] = {}
    for pid in pids():
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
            parent = int(stat.rpartition(")")[2].split()[1])
        except OSError:
            continue  # just ended
        children.setdefault(parent, []).append(pid)
    found: set[int] = set()
    waiting = [root]
    while waiting:
        pid = waiting.pop()
        if pid not in found:
            found.add(pid)
            waiting += children.get(pid, [])
    return found


def mount_view(pid: int) -> tuple[int, str]:
    """Tells processes apart that see other mounts: mount namespace and root. OSError."""
    return os.stat(f"/proc/{pid}/ns/mnt").st_ino, os.readlink(f"/proc/{pid}/root")


def views(left_out: Container[int] = ()) -> Iterator[tuple[int, tuple[int, str]]]:
    """All processes but these, each with its ``mount_view``; not kernel threads."""
    for pid in pids():
        if pid not in left_out:
            try:
                yield pid, mount_view(pid)
            except OSError:
                continue  # just ended, or a kernel thread


def own(ours: int) -> set[int]:
    """Processes that do not count as users: this one, and ``ours`` (a pid, 0: none) and its
    descendants."""
    return (family(ours) if ours else set()) | {os.getpid()}


def pids() -> Iterator[int]:
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            yield int(entry)


def cgroup_path(mount: int, number: int) -> str:
    """The path of the cgroup with this id, below the hierarchy whose mount is open as ``mount``.

    BPF programs give the id. Empty when the cgroup is gone. Needs CAP_DAC_READ_SEARCH. OSError.
    """
    handle = ctypes.create_string_buffer(struct.pack("=IiQ", 8, _FILEID_KERNFS, number), 16)
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    opened = syscalls.libc.open_by_handle_at(mount, handle, flags)
    try:
        syscalls.checked(opened, f"cgroup {number}")
    except OSError as error:
        if error.errno in (errno.ESTALE, errno.ENOENT):
            return ""
        raise
    try:
        return str(Path(f"/proc/self/fd/{opened}").readlink())
    finally:
        os.close(opened)
