"""What a block device is: its numbers, its driver, and the volume behind it. From sysfs."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import kit.errors

SYSFS = Path("/sys")
PROC = Path("/proc")

Number = tuple[int, int]  # major, minor


@dataclass(frozen=True)
class RbdImage:
    """An image of a Ceph cluster, as krbd says it (Documentation/ABI/testing/sysfs-bus-rbd)."""

    fsid: str
    pool: str
    pool_id: int
    namespace: str
    image: str
    image_id: str
    snapshot: str  # empty: the image's head

    @property
    def spec(self) -> str:
        parts = [self.pool, *([self.namespace] if self.namespace else []), self.image]
        return "/".join(parts) + (f"@{self.snapshot}" if self.snapshot else "")


@dataclass(frozen=True)
class BlockDevice:
    """One whole device or partition at one moment. ``diskseq`` tells one attachment from the next
    on the same number; None before Linux 5.15."""

    name: str  # rbd0
    number: Number
    driver: str  # as in /proc/devices, without the digits of per-device majors
    size: int  # bytes
    read_only: bool
    diskseq: int | None
    parent: str = ""  # the whole device's name, for a partition
    rbd: RbdImage | None = None
    backing: str = ""  # loop: the file; nbd: the backend's identifier
    holders: tuple[str, ...] = ()  # devices on top of it
    client: str = ""  # the Ceph client's id, as in kernel messages

    @property
    def path(self) -> str:
        return f"/dev/{self.name}"

    @property
    def volume(self) -> str:
        """The volume's identity, the same on every node; empty when nothing names it."""
        if self.rbd is not None:
            rbd = self.rbd
            if not (rbd.fsid and rbd.image_id):
                return ""
            at = f"@{rbd.snapshot}" if rbd.snapshot else ""
            return f"rbd:{rbd.fsid}/{rbd.pool_id}/{rbd.namespace}/{rbd.image_id}{at}"
        if self.backing and not self.parent:
            return f"{self.driver}:{self.backing}"
        return ""

    @property
    def title(self) -> str:
        """For people."""
        if self.rbd is not None:
            return self.rbd.spec
        return self.backing or self.name

    @property
    def attachment(self) -> tuple[Number, int | None, int, str]:
        """Equal for two looks exactly when nothing was attached anew between them."""
        return self.number, self.diskseq, self.size, self.volume


def majors(proc: Path = PROC) -> dict[int, str]:
    """Block majors and their drivers. krbd without single_major has 'rbd0': its driver is rbd."""
    text = (proc / "devices").read_text()
    found = {}
    for line in text.partition("Block devices:\n")[2].splitlines():
        number, _, name = line.strip().partition(" ")
        if number.isdigit():
            found[int(number)] = re.sub(r"^(rbd)\d+$", r"\1", name)
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _integer(text: str) -> int | None:
    return int(text) if text.lstrip("-").isdigit() else None


def identify(name: str, sysfs: Path = SYSFS, proc: Path = PROC) -> BlockDevice | None:
    """The device called ``name`` (sda, rbd0p1); None when there is no such device now."""
    folder = sysfs / "class/block" / name
    match = re.fullmatch(r"(\d+):(\d+)", _read(folder / "dev"))
    if match is None:
        return None
    number = int(match[1]), int(match[2])
    whole = folder
    parent = ""
    if (folder / "partition").exists():
        parent = folder.resolve().parent.name
        whole = sysfs / "class/block" / parent
    driver = majors(proc).get(number[0], "")
    if parent and driver == "blkext":  # partitions beyond the driver's own minors
        above = _read(whole / "dev").partition(":")[0]
        driver = majors(proc).get(int(above or 0), "")
    holders = folder / "holders"
    index = re.sub(r"\D", "", parent or name)
    return BlockDevice(
        name=name,
        number=number,
        driver=driver,
        size=(_integer(_read(folder / "size")) or 0) * 512,
        read_only=_read(folder / "ro") == "1",
        diskseq=_integer(_read(whole / "diskseq")),
        parent=parent,
        rbd=_rbd(sysfs, index) if driver == "rbd" else None,
        backing=_backing(driver, whole),
        holders=tuple(sorted(e.name for e in holders.iterdir())) if holders.is_dir() else (),
        client=_read(sysfs / "bus/rbd/devices" / index / "client_id") if driver == "rbd" else "",
    )


def _rbd(sysfs: Path, index: str) -> RbdImage | None:
    folder = sysfs / "bus/rbd/devices" / index
    if not folder.is_dir():
        return None
    snapshot = _read(folder / "current_snap")
    return RbdImage(
        fsid=_read(folder / "cluster_fsid"),
        pool=_read(folder / "pool"),
        pool_id=_integer(_read(folder / "pool_id")) or 0,
        namespace=_read(folder / "pool_ns"),
        image=_read(folder / "name"),
        image_id=_read(folder / "image_id"),
        snapshot="" if snapshot in ("-", "") else snapshot,
    )


def _backing(driver: str, whole: Path) -> str:
    if driver == "loop":
        return _read(whole / "loop/backing_file")
    if driver == "nbd":
        return _read(whole / "backend")  # rbd-nbd --cookie; ceph-csi gives the volume's id
    return ""


def every(sysfs: Path = SYSFS) -> Iterator[str]:
    """Names of all block devices and partitions."""
    yield from sorted(os.listdir(sysfs / "class/block"))


def name_of(number: Number, sysfs: Path = SYSFS) -> str:
    """The name of the device with that number; empty when there is none."""
    link = sysfs / "dev/block" / f"{number[0]}:{number[1]}"
    try:
        return os.path.basename(os.readlink(link))
    except OSError:
        return ""


def by_path(path: str, sysfs: Path = SYSFS) -> BlockDevice:
    """The device that the node ``path`` stands for. NotFoundError, or RefusedError for a node that
    is no block device."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise kit.errors.NotFoundError(path, str(error.strerror), "name a device node") from error
    if (status.st_mode & 0o170000) != 0o060000:
        raise kit.errors.RefusedError(path, "is no block device", "name one, like /dev/rbd0")
    name = name_of((os.major(status.st_rdev), os.minor(status.st_rdev)), sysfs)
    device = identify(name, sysfs) if name else None
    if device is None:
        raise kit.errors.NotFoundError(path, "nothing is attached to its number", "map it first")
    return device
