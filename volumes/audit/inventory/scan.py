"""One scan of the node, from a request to an inventory. Runs in the scan child only."""

import dataclasses
import os
import time
from dataclasses import dataclass

from linux import mountinfo
from volumes.audit.inventory import blocks, holders, records
from volumes.audit.inventory.model import Device, Inventory, Number, Place, User, Volume
from volumes.audit.inventory.processes import Processes, host_space

_MOST_GAPS = 50
# Names of processes that are kubelet or contain it.
_KUBELETS = ("kubelet", "k3s-server", "k3s-agent")
_MOST_LINKS = 40  # as the kernel


@dataclass(frozen=True)
class Request:
    drivers: tuple[str, ...]
    kubelet: str
    proc: str
    sys: str
    containers: str  # containerd's bundles, for pods' names
    deep: bool  # visit every mount namespace
    users_of: tuple[str, ...] = ()  # devices whose open files are searched
    kubelet_set: bool = False  # the settings say where kubelet's directory is


def scan(request: Request) -> Inventory:
    """The node now. OSError only when /proc or /sys themselves cannot be read."""
    cpu = time.process_time()
    devices = blocks.devices(list(request.drivers), request.sys, request.proc)
    watched = {number for device in devices for number in device.numbers}
    processes: Processes | None = None
    gaps: list[str] = []
    hidden: list[str] = []
    host_spaces: dict[int, int] = {}
    if not (request.deep or request.users_of):
        host_spaces[host_space(request.proc, [])] = 1
    else:
        processes = Processes(request.proc, request.containers)
        host_spaces[processes.host_space()] = 1
        if processes.hidden > 1:
            hidden.append(
                f"{processes.hidden} processes may not be read; does the agent have CAP_SYS_PTRACE?"
            )
        # kubelet may run in a mount namespace of its own, where it then mounts volumes
        for pid in processes.named("kubelet"):
            host_spaces.setdefault(Processes.space(f"{request.proc}/{pid}/ns/mnt"), pid)
    tables: dict[int, list[mountinfo.Mount]] = {}
    for inode, pid in host_spaces.items():
        try:
            with open(f"{request.proc}/{pid}/mountinfo", "rb") as stream:  # noqa: PTH123
                tables[inode] = mountinfo.parse(stream.read())
        except OSError as error:
            gaps.append(f"mount table of pid {pid}: {error.strerror}")
    everything = [mount for table in tables.values() for mount in table]
    host = _on_host(tables, watched)
    devices = _with_raw(devices, everything)
    root = _root(request.proc)
    directory = _host_path(request.kubelet, root)
    kubelet = _kubelet(directory, root, tables)
    volumes, missing = records.volumes(directory, everything, devices, root=root)
    gaps += missing
    no_records = ""
    if kubelet is None and _has_kubelet(request, processes):
        no_records = f"no kubelet directory at {request.kubelet}"
        gaps.append(f"{no_records}: mount it, or set volumes.audit.kubelet to where it is")
    visited = holders.Visited()
    using: list[User] = []
    numbers: list[Number] = []
    if processes is not None:
        if request.deep:
            unexplained = {n for d in devices for n in d.live} - {p.device for p in host}
            namespaces = holders.Namespaces(
                processes, request.proc, set(host_spaces), watched, kubelet
            )
            visited = namespaces.visit(unexplained)
        numbers = [n for d in devices if d.name in request.users_of for n in sorted(d.numbers)]
        using = holders.users(processes, request.proc, set(numbers), set(host_spaces))
    return Inventory(
        taken=time.time(),
        cpu=time.process_time() - cpu,
        deep=request.deep,
        devices=tuple(_named(devices, volumes)),
        host=tuple(host),
        host_spaces=tuple(host_spaces),
        kubelet=kubelet[0] if kubelet else None,
        no_records=no_records,
        spaces=tuple(visited.spaces),
        spaces_at=time.time() if request.deep else 0.0,
        users=tuple(using),
        users_of=tuple(numbers),
        volumes=tuple(volumes),
        supported_features=blocks.supported_features(request.sys),
        kernel=os.uname().release,
        namespaces=visited.count,
        processes=processes.count if processes else 0,
        gaps=tuple((gaps + ([] if request.deep else hidden))[:_MOST_GAPS]),
        deep_gaps=tuple((hidden + visited.gaps)[:_MOST_GAPS]) if request.deep else (),
        space_gaps=tuple((visited.gaps + (hidden if visited.by_processes else []))[:_MOST_GAPS]),
    )


def _on_host(tables: dict[int, list[mountinfo.Mount]], watched: set[Number]) -> list[Place]:
    return [
        holders.place(inode, mount)
        for inode, table in tables.items()
        for mount in table
        if mount.device in watched
    ]


def _with_raw(devices: list[Device], host: list[mountinfo.Mount]) -> list[Device]:
    bound: dict[str, list[str]] = {}
    for mount in host:
        if mount.fstype == "devtmpfs" and mount.root != "/":
            bound.setdefault(mount.root.removeprefix("/"), []).append(mount.target)
    named = []
    for device in devices:
        names = (device.name, *(layer.name for layer in device.layers))
        raw = tuple(target for name in names for target in bound.get(name, ()))
        named.append(dataclasses.replace(device, raw=raw) if raw else device)
    return named


def _root(proc: str) -> str:
    """The directory of the host's files; empty (the agent's own view) if pid 1's is forbidden."""
    try:
        os.stat(f"{proc}/1/root/.")
    except OSError:
        return ""
    return f"{proc}/1/root"


def _host_path(path: str, root: str) -> str:
    """``path`` without symbolic links, as the host's mount tables have it.

    realpath would follow the host's absolute links into the agent's own file system.
    """
    todo, done, links = path.split("/")[::-1], "", 0
    while todo:
        part = todo.pop()
        if part in ("", "."):
            continue
        if part == "..":
            done = done.rpartition("/")[0]
            continue
        try:
            target = os.readlink(f"{root}{done}/{part}")
        except OSError:  # no link, or nothing there
            done = f"{done}/{part}"
            continue
        links += 1
        if links > _MOST_LINKS:
            return path
        if target.startswith("/"):
            done = ""
        todo += target.split("/")[::-1]
    return done or "/"


def _has_kubelet(request: Request, processes: Processes | None) -> bool:
    """Whether kubelet's directory must exist: not on a node without kubelet."""
    if request.kubelet_set:
        return True
    return processes is not None and any(processes.named(name) for name in _KUBELETS)


def _kubelet(
    real: str, root: str, tables: dict[int, list[mountinfo.Mount]]
) -> tuple[Place, str] | None:
    """The host mount that kubelet's directory is on, and its path in that file system."""
    if not os.path.isdir(root + real):
        return None
    for inode, table in tables.items():
        mount = mountinfo.containing(real, table)
        if mount is not None:
            below = real[len(mount.target.rstrip("/")) :]
            return holders.place(inode, mount), (mount.root.rstrip("/") + below).rstrip("/") or "/"
    return None


def _named(devices: list[Device], volumes: list[Volume]) -> list[Device]:
    """Devices whose driver does not show the image get it from ceph-csi's record."""
    images = {v.device: v.image for v in volumes if v.device and v.image}
    return [
        dataclasses.replace(device, image=images[device.name])
        if device.image is None and device.name in images
        else device
        for device in devices
    ]
