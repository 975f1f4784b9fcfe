"""The node's volumes as one frozen model, made by the scan child; everything else only reads it.

Block devices, their images and Ceph clients are those of ``linux.blockdev``.
"""

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from linux import blockdev
from linux.rbd_sysfs import RbdImage

ThingT = TypeVar("ThingT")


@dataclass(frozen=True)
class Place:
    """One mount of a watched device, or one that shows kubelet's directories."""

    namespace: int  # inode of the mount namespace
    target: str
    root: str
    device: blockdev.Number
    fstype: str
    read_only: bool  # this mount
    super_read_only: bool
    options: tuple[str, ...]
    super_options: tuple[str, ...]
    propagation: str  # private, slave, shared

    @property
    def is_private(self) -> bool:
        return self.propagation == "private"


@dataclass(frozen=True)
class Owner:
    """A process and its pod. ``started`` distinguishes it from a later one with the same pid. One
    without a pid is the loop device ``comm``."""

    pid: int
    started: int  # clock ticks since boot
    comm: str
    cgroup: str
    container: str = ""  # id
    pod_uid: str = ""
    pod: str = ""  # namespace/name where the runtime's records say it
    thread: int = 0  # a thread with a namespace of its own; 0: the process
    host: bool = False  # it is in the host's mount namespace

    @property
    def label(self) -> str:
        if not self.pid:
            return f"loop device {self.comm}"
        who = f"pid {self.pid} ({self.comm})"
        if self.thread:
            who = f"thread {self.thread} of {who}"
        if self.pod or self.pod_uid:
            who += f" of pod {self.pod or self.pod_uid}"
        return who


@dataclass(frozen=True)
class Space:
    """A mount namespace other than the host's, with the processes in it."""

    inode: int
    id: int  # 0 when the kernel does not give ids
    owners: tuple[Owner, ...] = ()  # a few of them; empty: no process
    processes: int = 0  # how many there are
    kept_by: tuple[str, ...] = ()  # bind mounts and descriptors that keep it without processes
    places: tuple[Place, ...] = ()  # watched devices and kubelet's directories only

    @property
    def owner(self) -> Owner | None:
        return self.owners[0] if self.owners else None

    @property
    def label(self) -> str:
        if self.owner is not None:
            more = f" and {self.processes - 1} more" if self.processes > 1 else ""
            return self.owner.label + more
        kept = f", kept by {self.kept_by[0]}" if self.kept_by else ""
        return f"mount namespace {self.inode} without processes{kept}"


@dataclass(frozen=True)
class User:
    """Who keeps a file system or the device itself in use without a mount."""

    owner: Owner
    device: blockdev.Number
    ways: tuple[str, ...]  # fd 5, cwd, root, exe, map, device fd 7; /var/lib/disk.img
    namespace: int


@dataclass(frozen=True)
class FsErrors:
    """The errors that a live ext4 has counted; fsck sets the count back. ``last``: Unix time.
    ``stops``: at the first one it stops writing (errors=remount-ro)."""

    count: int
    last: float
    stops: bool


@dataclass(frozen=True)
class Publish:
    """A staged volume given to a pod."""

    pod_uid: str
    path: str
    volume: str  # the PV's name
    mounted: bool
    read_only: bool
    handle: str = ""
    driver: str = ""


@dataclass(frozen=True)
class Volume:
    """The records of kubelet and the CSI driver about one staged volume, or one published as raw
    block."""

    driver: str
    handle: str
    staging: str  # the directory kubelet gave to the driver; of a raw one, kubelet's own
    mounts: tuple[str, ...]  # host mount points at or below it
    device: str  # kernel name of the watched device; empty when not known
    image: RbdImage | None
    publishes: tuple[Publish, ...]
    name: str = ""  # the PV's name where a publish says it
    # Of all drivers, the block device that is mounted or published as a whole:
    number: blockdev.Number | None = None
    on: str = ""  # its kernel name, or what the mount table calls it
    disks: frozenset[str] = frozenset()  # volumes.node.naming.disks
    gone: str = ""  # why nothing can be read from it any more
    read_only: bool = False  # every mount of it, or every pod's

    @property
    def is_raw(self) -> bool:
        return "/volumeDevices/" in self.staging

    @property
    def places(self) -> tuple[str, ...]:
        """Where it is mounted or published."""
        return self.mounts + tuple(each.path for each in self.publishes if each.mounted)


@dataclass(frozen=True)
class Inventory:
    """Everything one scan saw. ``deep``: the mount namespaces were visited too."""

    taken: float  # Unix time of its begin
    cpu: float  # seconds of CPU
    deep: bool
    devices: tuple[blockdev.BlockDevice, ...] = ()  # watched devices that have a medium
    # Devices that volumes.audit.names leaves out, but that show a watched one's content or use its
    # Ceph client: what is true of the watched one depends on them.
    related: tuple[blockdev.BlockDevice, ...] = ()
    # Device name -> where its node is bind-mounted, as kubelet does for raw block volumes, and
    # where kubelet has a record of it as one.
    raw: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    fs_errors: Mapping[str, FsErrors] = field(default_factory=dict)  # by device or layer
    host: tuple[Place, ...] = ()  # watched devices in the host's namespaces
    host_spaces: tuple[int, ...] = ()
    kubelet: Place | None = None  # the host mount that kubelet's directory lies on
    no_records: str = ""  # why kubelet's records could not be read; 'volumes' is then unknown
    spaces: tuple[Space, ...] = ()
    spaces_at: float = 0.0  # Unix time of the deep scan that ``spaces`` come from
    users: tuple[User, ...] = ()
    users_of: tuple[blockdev.Number, ...] = ()  # devices whose users were searched
    volumes: tuple[Volume, ...] = ()
    supported_features: int = 0  # of the kernel's RBD client; 0: not loaded
    kernel: str = ""
    namespaces: int = 0  # how many there are
    processes: int = 0
    gaps: tuple[str, ...] = ()  # what this scan could not read, and why
    # The same for the last deep scan, kept until the next one; and those that may hide mounts.
    deep_gaps: tuple[str, ...] = ()
    space_gaps: tuple[str, ...] = ()

    @functools.cached_property
    def by_number(self) -> dict[blockdev.Number, blockdev.BlockDevice]:
        """Every watched device by its number and those of its layers."""
        layers = {number: device for device in self.devices for number in device.numbers}
        return layers | {device.number: device for device in self.devices}

    @functools.cached_property
    def file_systems(self) -> dict[str, tuple[object, ...]]:
        """By name of the watched device or layer on which one is live: what the device is attached
        as, whatever its size."""
        found: dict[str, tuple[object, ...]] = {}
        for device in self.devices:
            names = [layer.name for layer in device.layers if layer.active]
            for name in names + ([device.name] if device.active else []):
                found[name] = device.number, device.diskseq, device.volume
        return found

    @functools.cached_property
    def _by_name(self) -> dict[str, blockdev.BlockDevice]:
        return {device.name: device for device in self.devices}

    @functools.cached_property
    def _on_host(self) -> dict[blockdev.Number, list[Place]]:
        return _grouped((place.device, place) for place in self.host)

    @functools.cached_property
    def _elsewhere(self) -> dict[blockdev.Number, list[tuple[Space, Place]]]:
        pairs = ((space, place) for space in self.spaces for place in space.places)
        return _grouped((place.device, (space, place)) for space, place in pairs)

    @functools.cached_property
    def _users(self) -> dict[blockdev.Number, list[User]]:
        return _grouped((user.device, user) for user in self.users)

    @functools.cached_property
    def _volumes(self) -> dict[str, Volume]:
        """The first volume of each device."""
        return {volume.device: volume for volume in reversed(self.volumes)}

    def device(self, name: str) -> blockdev.BlockDevice | None:
        return self._by_name.get(name)

    def on_host(self, device: blockdev.BlockDevice) -> tuple[Place, ...]:
        return tuple(_of(self._on_host, device))

    def elsewhere(self, device: blockdev.BlockDevice) -> list[tuple[Space, Place]]:
        """Mounts of the device outside the host's namespaces."""
        return _of(self._elsewhere, device)

    def users_on(self, device: blockdev.BlockDevice) -> tuple[User, ...]:
        return tuple(_of(self._users, device))

    def volume_of(self, device: blockdev.BlockDevice) -> Volume | None:
        return self._volumes.get(device.name)


def contents(device: blockdev.BlockDevice) -> list[str]:
    """What must not be written through two devices. A snapshot never changes."""
    if device.image is not None and device.image.snapshot:
        return []
    image = [f"image {device.image.head}"] if device.image is not None else []
    return image + ([f"file {device.backing_file}"] if device.backing_file else [])


def related(
    watched: Iterable[blockdev.BlockDevice], others: Iterable[blockdev.BlockDevice]
) -> list[blockdev.BlockDevice]:
    """Those of the others that share content or a Ceph client with a watched device."""
    known = {each for device in watched for each in _shared(device)}
    return [device for device in others if known.intersection(_shared(device))]


def _shared(device: blockdev.BlockDevice) -> list[str]:
    client = device.client.client if device.client else ""
    return contents(device) + ([f"client {client}"] if client else [])


def _grouped(
    pairs: Iterable[tuple[blockdev.Number, ThingT]],
) -> dict[blockdev.Number, list[ThingT]]:
    found: dict[blockdev.Number, list[ThingT]] = {}
    for number, thing in pairs:
        found.setdefault(number, []).append(thing)
    return found


def _of(
    grouped: Mapping[blockdev.Number, list[ThingT]], device: blockdev.BlockDevice
) -> list[ThingT]:
    """Of the device and its layers."""
    return [thing for number in sorted(device.numbers) for thing in grouped.get(number, ())]
