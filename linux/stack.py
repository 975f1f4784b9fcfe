"""All block devices of a node at one moment as one graph: what each is, what lies on what, and who
uses it.

``read`` reads sysfs, /proc and links in /dev. Any of them can hang, so it is for a child process.
"""

import contextlib
import dataclasses
import fcntl
import os
import re
import stat
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import kit.errors
import kit.messages
from linux import blockdev, mountinfo, procfs, rbd_sysfs
from linux.blockdev import Number

MOST_DEVICES = 4096
_LOOP_GET_STATUS64 = 0x4C05
_LOOP_INFO = struct.Struct("=8x8xQ208x")  # struct loop_info64: lo_rdevice, and what else it has
LINKS = ("by-id", "by-path")
# Where the kernel says which medium it is, of all drivers, the surest first.
_WWIDS = ("wwid", "device/wwid", "md/uuid")
_SERIALS = ("serial", "device/serial", "device/cid")
_WRITES = os.O_WRONLY | os.O_RDWR


@dataclass(frozen=True)
class StackedDevice:
    """A disk, a partition, or what is made of others. ``below``: the names of what it lies on (of a
    loop device over a disk that has gone, its number); of a partition, its disk."""

    name: str  # sda
    number: Number
    driver: str = ""  # as in /proc/devices
    size: int = 0  # bytes; 0: nothing is attached
    partition: bool = False
    below: tuple[str, ...] = ()
    mapping: str = ""  # device mapper: its name
    uuid: str = ""  # device mapper: LVM-..., CRYPT-..., mpath-...
    backing: str = ""  # loop: the path of its file
    partial: bool = False  # loop: it shows a part of what it lies on
    partuuid: str = ""  # of a partition; older kernels do not say it
    wwid: str = ""
    serial: str = ""
    model: str = ""  # vendor and model
    links: tuple[str, ...] = ()  # in /dev/disk: by-id/wwn-0x5000...


@dataclass(frozen=True)
class Stack:
    """``swaps``: names of devices. ``pools``: names of the devices of each btrfs. ``opened``: names
    of devices that programs have open for writing, with the names of these; None: not asked.
    ``nodes``: targets of mounts that are nodes of block devices, with the device's name."""

    devices: tuple[StackedDevice, ...]
    mounts: tuple[mountinfo.Mount, ...] = ()
    swaps: tuple[str, ...] = ()
    pools: tuple[tuple[str, ...], ...] = ()
    opened: dict[str, tuple[str, ...]] | None = None
    nodes: dict[str, str] = dataclasses.field(default_factory=dict)


def disk_below(name: str) -> Number | None:
    """The number of the block device that a loop device lies on. OSError."""
    descriptor = os.open(f"/dev/{name}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        said = fcntl.ioctl(descriptor, _LOOP_GET_STATUS64, bytes(_LOOP_INFO.size))
    finally:
        os.close(descriptor)
    (number,) = _LOOP_INFO.unpack(said)
    return (os.major(number), os.minor(number)) if number else None


def encoded(root: str, programs: bool) -> str:
    """For ``kit.child``."""
    return kit.messages.encode(read(root, programs))


def decoded(text: str) -> Stack:
    return kit.messages.decode(text, Stack)


def read(
    root: str = "/",
    programs: bool = False,
    disk_below: Callable[[str], Number | None] = disk_below,
) -> Stack:
    """``programs``: ask also which devices programs have open for writing; reads all of /proc.
    OSError; HostError when there are too many devices."""
    sysfs, proc = Path(root, "sys"), Path(root, "proc")
    drivers, links = blockdev.majors(proc), _links(Path(root, "dev/disk"))
    there = numbers(sysfs)
    names = {number: name for name, number in there}
    found = [
        _over(_device(sysfs, name, number, drivers, links.get(name, ())), sysfs, disk_below)
        for name, number in there
    ]
    mapped = {each.mapping: each.name for each in found if each.mapping}
    mounts = tuple(mountinfo.parse(_table(proc)))
    return Stack(
        devices=tuple(found),
        mounts=mounts,
        swaps=tuple(_swaps(proc, mapped)),
        pools=tuple(_pools(sysfs)),
        opened=_opened(proc, names) if programs else None,
        nodes=dict(_nodes(root, mounts, names)),
    )


def reached(
    names: Iterable[str],
    known: dict[str, StackedDevice],
    sysfs: str | Path = blockdev.SYSFS,
    proc: str | Path = blockdev.PROC,
) -> None:
    """Add to ``known`` these devices and what they lie on, as far as they are there, without links
    and serials: virtio asks the device for its own, which can hang. OSError."""
    drivers: dict[int, str] = {}
    ahead = list(names)
    while ahead:
        name = ahead.pop()
        number = None if name in known else blockdev.number_of(f"{sysfs}/class/block/{name}")
        if number is not None:
            drivers = drivers or blockdev.majors(proc)
            made = _device(Path(sysfs), name, number, drivers, None)
            known[name] = _over(made, sysfs, disk_below)
        if name in known:
            ahead += known[name].below


def _nodes(
    root: str, mounts: Iterable[mountinfo.Mount], names: dict[Number, str]
) -> Iterator[tuple[str, str]]:
    """A file that is mounted shows another path than the file system's root; of those kubelet's are
    asked, by number: whoever made the node may have given it any name, in any file system."""
    for mount in mounts:
        if mount.root != "/" and "/volumeDevices/" in mount.target:
            with contextlib.suppress(OSError):  # it was unmounted, or is out of sight
                status = os.stat(f"{root.rstrip('/')}{mount.target}")
                number = os.major(status.st_rdev), os.minor(status.st_rdev)
                if stat.S_ISBLK(status.st_mode) and number in names:
                    yield mount.target, names[number]


def numbers(sysfs: str | Path = blockdev.SYSFS) -> list[tuple[str, Number]]:
    """Names and numbers of all devices, in the order of names. Never waits for a device. OSError;
    HostError when there are too many."""
    there = [
        (name, number)
        for name in sorted(os.listdir(f"{sysfs}/class/block"))
        if (number := blockdev.number_of(f"{sysfs}/class/block/{name}"))
    ]
    if len(there) > MOST_DEVICES:
        raise kit.errors.HostError(
            "block devices of this node",
            f"there are {len(there)}, and at most {MOST_DEVICES} are told apart",
            "set volumes.guard.scope: ceph",
        )
    return there


def _over(
    made: StackedDevice, sysfs: str | Path, disk_below: Callable[[str], Number | None]
) -> StackedDevice:
    """A loop device with the block device that it lies on."""
    if made.backing.startswith("/dev/") or "/volumeDevices/" in made.backing:
        with contextlib.suppress(OSError):  # without an answer it lies on a file
            if number := disk_below(made.name):
                lower = blockdev.name_of(number, sysfs) or "{}:{}".format(*number)
                return dataclasses.replace(made, below=(lower,))
    return made


def _device(
    sysfs: Path, name: str, number: Number, drivers: dict[int, str], links: tuple[str, ...] | None
) -> StackedDevice:
    """``links``: None leaves the serial out as well."""
    home = f"{sysfs}/class/block/{name}"

    def text(*files: str) -> str:
        return next(filter(None, (rbd_sysfs.text(f"{home}/{file}") for file in files)), "")

    partition = os.path.exists(f"{home}/partition")
    disk = (os.path.basename(os.path.dirname(os.path.realpath(home))),) if partition else ()
    backing = text("loop/backing_file")
    limits = [text(f"loop/{file}") for file in ("offset", "sizelimit")] if backing else []
    return StackedDevice(
        name=name,
        number=number,
        driver=drivers.get(number[0], ""),
        size=rbd_sysfs.integer(text("size")) * blockdev.SECTOR,
        partition=partition,
        below=disk or tuple(sorted(rbd_sysfs.listed(f"{home}/slaves"))),
        mapping=text("dm/name"),
        uuid=text("dm/uuid"),
        backing=backing,
        partial=any(limit not in ("", "0") for limit in limits),
        # No link in /dev/disk says this: a copy of a disk would take the link of the first one.
        partuuid=text("uevent").partition("PARTUUID=")[2].partition("\n")[0],
        wwid=text(*_WWIDS),
        serial=text(*(() if links is None else _SERIALS)),
        model=" ".join(f"{text('device/vendor')} {text('device/model')}".split()),
        links=links or (),
    )


def _links(folder: Path) -> dict[str, tuple[str, ...]]:
    """By the name of the device."""
    found: dict[str, tuple[str, ...]] = {}
    for kind in LINKS:
        for link in sorted(rbd_sysfs.listed(f"{folder}/{kind}")):
            with contextlib.suppress(OSError):  # it went meanwhile
                name = os.path.basename(os.readlink(folder / kind / link))
                found[name] = (*found.get(name, ()), f"{kind}/{link}")
    return found


def _table(proc: Path) -> bytes:
    """The host's mount table, as far as this process may see it."""
    try:
        return (proc / "1/mountinfo").read_bytes()
    except OSError:
        return (proc / "self/mountinfo").read_bytes()


def _swaps(proc: Path, mapped: dict[str, str]) -> Iterator[str]:
    with contextlib.suppress(FileNotFoundError):  # a kernel without swap
        for line in (proc / "swaps").read_text().splitlines()[1:]:
            path, kind, *_ = line.split()
            if kind == "partition":  # any device
                yield named(path, mapped)


def named(path: str, mapped: dict[str, str]) -> str:
    """The name of the device that a path in /dev stands for. ``mapped``: names by those of the
    device mapper."""
    return mapped.get(path.removeprefix("/dev/mapper/"), path.removeprefix("/dev/"))


def _pools(sysfs: Path) -> Iterator[tuple[str, ...]]:
    for pool in sorted(rbd_sysfs.listed(f"{sysfs}/fs/btrfs")):
        if members := rbd_sysfs.listed(f"{sysfs}/fs/btrfs/{pool}/devices"):
            yield tuple(sorted(members))


def _opened(proc: Path, names: dict[Number, str]) -> dict[str, tuple[str, ...]]:
    """No look at an open file that is no device node: that can hang."""
    found: dict[str, set[str]] = {}
    for pid in filter(str.isdigit, rbd_sysfs.listed(str(proc))):
        for descriptor in rbd_sysfs.listed(f"{proc}/{pid}/fd") if int(pid) != os.getpid() else ():
            with contextlib.suppress(OSError, ValueError):  # it ended, or closed it
                link = f"{proc}/{pid}/fd/{descriptor}"
                if not os.readlink(link).startswith("/dev/"):
                    continue
                status = os.stat(link)
                name = names.get((os.major(status.st_rdev), os.minor(status.st_rdev)))
                if name is None or not stat.S_ISBLK(status.st_mode):
                    continue
                said = Path(f"{proc}/{pid}/fdinfo/{descriptor}").read_text()
                flags = re.search(r"^flags:\s+([0-7]+)", said, re.MULTILINE)
                if flags and int(flags[1], 8) & _WRITES:
                    found.setdefault(name, set()).add(procfs.name_of(pid))
    return {name: tuple(sorted(programs)) for name, programs in found.items()}
