"""Block devices: one model of a device, its readers from sysfs, and small ioctls.

``identify`` reads one device or partition. It reads sysfs only, which never waits for a device, so
the agent's own loop may call it. ``Scans`` read all attached devices of some drivers and also what
lies on top of them and which image an rbd-nbd shows; that can hang, so it is for child processes.
No function here asks for the backing file of a loop device beyond its path: a stat of it hangs when
the file system below hangs.

A device number and a name are used again and again. What stays the same while one medium is
attached is ``BlockDevice.attachment``.
"""

import contextlib
import dataclasses
import fcntl
import fnmatch
import functools
import os
import re
import stat
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import kit.errors
import kit.files
from linux import mountinfo, rbd_sysfs
from linux.rbd_sysfs import RbdClient, RbdImage

SYSFS = Path("/sys")
PROC = Path("/proc")
MOST_DEVICES = 4096  # of one scan
MOST_LAYERS = 256  # on one device
SECTOR = 512
_LOOP_CLR_FD = 0x4C01
# What changes with another medium: a disk of nbd stays, and may come back with the same size.
_STATE = ("dev", "size", "diskseq", "backend", "loop/backing_file")
# File systems that list in /sys/fs/<name> the devices with a superblock in use.
_FILE_SYSTEMS = ("ext4", "xfs", "f2fs")

# The uuid of a LUKS mapping ends with its name.
_LUKS_UUID = re.compile(r"(CRYPT-LUKS\d+-[0-9a-f]+)-.*", re.DOTALL)

# A whole device whose name ends with a digit has a "p" before the number of a partition.
_PARTITION = re.compile(r"(.*\d)p\d+|((?:sd|vd|hd|xvd)[a-z]+)\d+")

Number = tuple[int, int]  # major, minor
_Root = str | Path


@dataclass(frozen=True)
class DeviceLayer:
    """A partition of a device or what is stacked on it (dm-crypt, LVM, md), at whatever height."""

    name: str  # rbd0p1, dm-0
    number: Number
    active: tuple[str, ...] = ()  # file system types with a live superblock directly on it


@dataclass(frozen=True)
class BlockDevice:
    """A whole device or partition at one moment. Only ``Scans`` fill ``active`` and ``layers``."""

    name: str  # rbd0
    number: Number
    driver: str  # as in /proc/devices; rbd also where each device has a major of its own
    size: int  # bytes
    read_only: bool
    diskseq: int | None = None  # changes with each attach; None before Linux 5.15
    parent: str = ""  # the whole device's name, for a partition
    image: RbdImage | None = None
    client: RbdClient | None = None
    backing: str = ""  # loop: the file; nbd: the backend's identifier
    holders: tuple[str, ...] = ()  # devices directly on top of it (dm, md)
    partitions: tuple[str, ...] = ()
    active: tuple[str, ...] = ()  # file system types with a live superblock on it or on a layer
    layers: tuple[DeviceLayer, ...] = ()  # everything on top of it
    mapping: str = ""  # device mapper: the uuid of what it does, CRYPT-LUKS2-...
    below: tuple["BlockDevice", ...] = ()  # device mapper: what it lies on; empty until it does

    @property
    def lowest(self) -> "BlockDevice":
        """What it lies on at the bottom, where that is one device."""
        return self.below[0].lowest if len(self.below) == 1 else self

    @property
    def encrypts(self) -> str:
        """The path of the device that a LUKS mapping encrypts; empty for anything else."""
        luks = self.mapping.startswith("CRYPT-LUKS") and len(self.below) == 1
        return self.below[0].path if luks else ""

    @property
    def path(self) -> str:
        return f"/dev/{self.name}"

    @property
    def part(self) -> str:
        """Device mapper: what it is of the device below, whatever name the mapping was given."""
        return _LUKS_UUID.sub(r"\1", self.mapping)

    @property
    def volume(self) -> str:
        """The volume's identity, the same on every node; empty when nothing names it."""
        if self.below:
            lower = self.below[0].volume if len(self.below) == 1 else ""
            return f"{lower}+{self.part}" if lower and self.part else ""
        image = self.image
        if image is not None and image.fsid and image.image_id:
            at = f"@{image.snapshot}" if image.snapshot else ""
            return f"rbd:{image.fsid}/{image.pool_id}/{image.namespace}/{image.image_id}{at}"
        if self.backing and not self.parent:
            return f"{self.driver}:{self.backing}"
        return ""

    @property
    def attachment(self) -> tuple[Number, int | None, int, str]:
        """Equal at two moments exactly when nothing was attached anew between them."""
        return self.number, self.diskseq, self.size, self.volume

    @property
    def title(self) -> str:
        """What it holds, for people."""
        if self.below:
            return f"{self.name} on {self.below[0].title}"
        if self.image is not None:
            return self.image.spec
        return self.backing or self.name

    @property
    def label(self) -> str:
        """The device and what it holds, for people."""
        return f"{self.name} ({self.image.spec})" if self.image else self.name

    @property
    def backing_file(self) -> str:
        """loop: the path of the file as long as it exists. Its inode would say more, but asking for
        it hangs with the file system below."""
        deleted = self.backing.endswith(" (deleted)")
        return self.backing if self.driver == "loop" and not deleted else ""

    @property
    def stacked(self) -> tuple[str, ...]:
        """What lies directly on top of it, partitions included."""
        return self.holders + self.partitions

    @functools.cached_property
    def numbers(self) -> frozenset[Number]:
        """Its own number and those of its layers: a mount of any of them is a use of it."""
        return frozenset((self.number, *(layer.number for layer in self.layers)))

    @functools.cached_property
    def live(self) -> frozenset[Number]:
        """The numbers with a live superblock, as mount tables show them.

        A file system claims the device below it: where a layer has one, the device itself has none.
        btrfs is left out, because its mounts show a number of their own.
        """
        above = frozenset(layer.number for layer in self.layers if {*layer.active} - {"btrfs"})
        on_layers = {fs for layer in self.layers for fs in layer.active}
        return above | {self.number} if set(self.active) - on_layers - {"btrfs"} else above

    def name_of(self, number: Number) -> str:
        return next((each.name for each in self.layers if each.number == number), self.name)


def is_named(name: str, patterns: Iterable[str]) -> bool:
    """Whether one of the shell patterns matches the name of a device."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def whole_name(name: str) -> str:
    """The name of the whole device of a partition (rbd0p1, sda1); of anything else its own."""
    part = _PARTITION.fullmatch(name)
    return part[1] or part[2] if part else name


def majors(proc: _Root = PROC) -> dict[int, str]:
    """Block majors and their drivers. krbd without single_major has 'rbd0': its driver is rbd.

    OSError when the list cannot be read: an empty answer would mean that nothing is attached.
    """
    found = {}
    text = Path(proc, "devices").read_text()
    for line in text.partition("Block devices:\n")[2].splitlines():
        number, _, name = line.strip().partition(" ")
        if number.isdigit():
            found[int(number)] = re.sub(r"^(rbd)\d+$", r"\1", name)
    return found


def names() -> list[str]:
    return sorted(os.listdir(f"{SYSFS}/class/block"))


def name_of(number: Number, sysfs: _Root = SYSFS) -> str:
    """The name of the device with that number; empty when there is none."""
    try:
        return os.path.basename(os.readlink(f"{sysfs}/dev/block/{number[0]}:{number[1]}"))
    except OSError:
        return ""


def identify(name: str, sysfs: _Root = SYSFS, proc: _Root = PROC) -> BlockDevice | None:
    """The device or partition called ``name`` (sda, rbd0p1); None when there is none now."""
    home = f"{sysfs}/class/block/{name}"
    number = number_of(home)
    if number is None:
        return None
    parent, whole = "", home
    if os.path.exists(f"{home}/partition"):
        parent = os.path.basename(os.path.dirname(os.path.realpath(home)))
        whole = f"{sysfs}/class/block/{parent}"
    drivers = majors(proc)
    driver = drivers.get(number[0], "")
    if parent and driver == "blkext":  # partitions beyond the driver's own minors
        above = number_of(whole)
        driver = drivers.get(above[0], "") if above else ""
    return _device(name, number, driver, home, sysfs, parent, whole)


class Known:
    """Devices as they were identified, read again only when they may have changed: hundreds of them
    are looked at every half minute. One thread at a time."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[tuple[str, ...], BlockDevice]] = {}

    def all(self, sysfs: _Root = SYSFS, proc: _Root = PROC) -> list[BlockDevice]:
        """All block devices and partitions. What lies on a device may be an earlier state."""
        before, self._kept = self._kept, {}
        found = []
        for name in names():
            home = f"{sysfs}/class/block/{name}"
            state = tuple(rbd_sysfs.text(f"{home}/{file}") for file in _STATE)
            if name in before and before[name][0] == state:
                device: BlockDevice | None = before[name][1]
            else:
                device = identify(name, sysfs, proc)
            if device is None:
                continue
            found.append(device)
            # A mapping shows what it lies on a moment after it appeared; without DISKSEQ (and for a
            # partition, which has none) another device with the same number looks the same.
            stays = device.driver != "device-mapper" and not device.parent
            if stays and device.diskseq is not None:
                self._kept[name] = state, device
        return found


def with_superblock(sysfs: _Root = SYSFS) -> frozenset[str]:
    """Names of the devices on which a file system is live, in any mount namespace."""
    return frozenset(_superblocks(sysfs))


def _device(
    name: str, number: Number, driver: str, home: str, sysfs: _Root, parent: str, whole: str
) -> BlockDevice:
    image: RbdImage | None = None
    client: RbdClient | None = None
    if driver == "rbd":
        image, client = rbd_sysfs.mapping(re.sub(r"\D", "", parent or name), sysfs)
    below: tuple[BlockDevice, ...] = ()
    if driver == "device-mapper" and not parent:
        lower = (identify(each, sysfs) for each in sorted(rbd_sysfs.listed(f"{home}/slaves")))
        below = tuple(each for each in lower if each is not None)
    diskseq = rbd_sysfs.text(f"{whole}/diskseq")
    return BlockDevice(
        name=name,
        number=number,
        driver=driver,
        size=rbd_sysfs.integer(rbd_sysfs.text(f"{home}/size")) * SECTOR,
        read_only=rbd_sysfs.text(f"{home}/ro") == "1",
        diskseq=int(diskseq) if diskseq.isdigit() else None,
        parent=parent,
        image=image,
        client=client,
        backing=_backing(driver, whole),
        holders=tuple(sorted(rbd_sysfs.listed(f"{home}/holders"))),
        partitions=() if parent else tuple(_partitions(name, home)),
        mapping=rbd_sysfs.text(f"{home}/dm/uuid"),
        below=below,
    )


def number_of(home: str) -> Number | None:
    """By its directory in sysfs."""
    match = re.fullmatch(r"(\d+):(\d+)", rbd_sysfs.text(f"{home}/dev"))
    return (int(match[1]), int(match[2])) if match else None


def _backing(driver: str, whole: str) -> str:
    if driver == "loop":
        return rbd_sysfs.text(f"{whole}/loop/backing_file")
    if driver == "nbd":
        # rbd-nbd --cookie; ceph-csi gives the volume's id
        return rbd_sysfs.text(f"{whole}/backend")
    return ""


def _partitions(name: str, home: str) -> list[str]:
    def is_part(entry: str) -> bool:
        return entry.startswith(name) and entry.removeprefix(name).removeprefix("p").isdecimal()

    return sorted(entry for entry in rbd_sysfs.listed(home) if is_part(entry))


class Scans:
    """Every whole device of some drivers that has a medium, again and again: what no uevent names
    is not read anew."""

    def __init__(self) -> None:
        self._wanted: dict[int, str] = {}
        self._found: dict[str, BlockDevice] = {}

    def scan(
        self,
        drivers: Collection[str],
        changed: Collection[str] | None = None,
        sysfs: _Root = SYSFS,
        proc: _Root = PROC,
    ) -> list[BlockDevice]:
        """In the order of names. Can hang. OSError when /proc or sysfs cannot be read.

        ``changed``: the names in all uevents since the scan before; None: read every device. Live
        file systems are read in any case. A flag that somebody set without an uevent (BLKROSET)
        shows when its device is read the next time.
        """
        wanted = {major: driver for major, driver in majors(proc).items() if driver in drivers}
        if not wanted:
            self._wanted, self._found = {}, {}
            return []
        superblocks = _superblocks(sysfs)
        if changed is None or wanted != self._wanted or not self._renew(changed, sysfs, proc):
            self._wanted, self._found = wanted, {}
            for name in sorted(os.listdir(f"{sysfs}/block")):
                self._read(name, sysfs, proc)
        found = [_with_superblocks(self._found[name], superblocks) for name in sorted(self._found)]
        self._found.update((device.name, device) for device in found)
        return found

    def _renew(self, changed: Collection[str], sysfs: _Root, proc: _Root) -> bool:
        """Read the ``changed`` devices. False: one of them may lie on devices that do not say so (a
        mapping), or within one (a partition)."""
        for name in changed:
            known = self._found.pop(name, None)
            number = number_of(f"{sysfs}/block/{name}")
            if number is None and known is None:
                return False
            if number is not None and number[0] not in self._wanted:
                return False
            self._read(name, sysfs, proc)
        return True

    def _read(self, name: str, sysfs: _Root, proc: _Root) -> None:
        home = f"{sysfs}/block/{name}"
        number = number_of(home)
        if number is None or number[0] not in self._wanted or len(self._found) >= MOST_DEVICES:
            return
        if rbd_sysfs.text(f"{home}/size") == "0":
            return  # a free loop or nbd minor: many, and a scan comes after every mount
        device = _device(name, number, self._wanted[number[0]], home, sysfs, "", home)
        image = device.image
        if device.size and device.driver == "nbd":
            image = rbd_sysfs.nbd_image(home, device.diskseq, proc)
        if device.size:
            layers = _layers(device, sysfs)
            self._found[name] = dataclasses.replace(device, image=image, layers=layers)


def _with_superblocks(device: BlockDevice, superblocks: dict[str, list[str]]) -> BlockDevice:
    """The same object where nothing changed."""
    layers = tuple(
        dataclasses.replace(layer, active=tuple(superblocks.get(layer.name, ())))
        for layer in device.layers
    )
    every = (*superblocks.get(device.name, ()), *(fs for layer in layers for fs in layer.active))
    active = tuple(dict.fromkeys(every))
    if active == device.active and layers == device.layers:
        return device
    return dataclasses.replace(device, active=active, layers=layers)


def _layers(device: BlockDevice, sysfs: _Root) -> tuple[DeviceLayer, ...]:
    """Every layer above a device, each once, the lowest first."""
    found: dict[str, DeviceLayer] = {}
    # names with their directories: that of a partition lies in its disk's
    ahead = _above(device.name, f"{sysfs}/block/{device.name}", sysfs)
    for name, home in ahead:
        number = number_of(home)
        if name in (device.name, *found) or number is None or len(found) >= MOST_LAYERS:
            continue
        found[name] = DeviceLayer(name, number)
        ahead += _above(name, home, sysfs)
    return tuple(found.values())


def _above(name: str, home: str, sysfs: _Root) -> list[tuple[str, str]]:
    """(name, directory) of the holders and partitions of a disk, of the holders of a partition."""
    holders = [
        (holder, f"{sysfs}/block/{holder}")
        for holder in sorted(rbd_sysfs.listed(f"{home}/holders"))
    ]
    if home != f"{sysfs}/block/{name}":
        return holders
    return holders + [(part, f"{home}/{part}") for part in _partitions(name, home)]


def _superblocks(sysfs: _Root) -> dict[str, list[str]]:
    """Device name -> types of the file systems with a live superblock on it.

    A superblock is live while any mount namespace or open descriptor keeps it.
    """
    found: dict[str, list[str]] = {}
    for fstype in _FILE_SYSTEMS:
        for name in rbd_sysfs.listed(f"{sysfs}/fs/{fstype}"):
            if name not in ("features", "stats"):
                found.setdefault(name, []).append(fstype)
    for uuid in rbd_sysfs.listed(f"{sysfs}/fs/btrfs"):
        for name in rbd_sysfs.listed(f"{sysfs}/fs/btrfs/{uuid}/devices"):
            found.setdefault(name, []).append("btrfs")
    return found


def by_path(path: str) -> BlockDevice:
    """The device that the node ``path`` stands for.

    NotFoundError, or RefusedError when ``path`` is not a block device.
    """
    try:
        status = os.stat(path)
    except OSError as error:
        raise kit.errors.NotFoundError(path, str(error.strerror), "name a device node") from error
    if not stat.S_ISBLK(status.st_mode):
        raise kit.errors.RefusedError(path, "it is not a block device", "name one, like /dev/rbd0")
    name = name_of((os.major(status.st_rdev), os.minor(status.st_rdev)))
    device = identify(name) if name else None
    if device is None:
        raise kit.errors.NotFoundError(path, "nothing is attached to its number", "map it first")
    return device


def in_use(device: BlockDevice, sysfs: _Root = SYSFS) -> bool:
    """Whether another device lies on it, or a file system on it is live in any namespace."""
    if device.holders or device.name in _superblocks(sysfs):
        return True
    return any(mount.device == device.number for mount in mountinfo.read())


# --- ioctls (linux/fs.h, linux/loop.h). All raise OSError; all can hang.


def detach_loop(path: str, number: Number) -> None:
    """Detach the file from a loop device; the kernel delays that while somebody has it open."""
    with opened(path, number) as descriptor:
        fcntl.ioctl(descriptor, _LOOP_CLR_FD)


@contextlib.contextmanager
def claimed(path: str, number: Number) -> Iterator[None]:
    """While the block runs nobody can mount the device or stack another on it.

    EBUSY when somebody already has. Others may still have it open.
    """
    with opened(path, number, os.O_EXCL):
        yield


@contextlib.contextmanager
def opened(path: str, number: Number, flags: int = 0) -> Iterator[int]:
    """Open for reading while the block runs. OSError when the path leads to another number."""
    flags |= os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    with kit.files.closing(os.open(path, flags)) as descriptor:
        if os.fstat(descriptor).st_rdev != os.makedev(*number):
            raise OSError(0, f"{path} is no longer device {number[0]}:{number[1]}")
        yield descriptor
