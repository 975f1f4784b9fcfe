"""The node's volumes as one frozen model, made by the scan child; everything else only reads it.

The model crosses a pipe as JSON (``to_json``, ``from_json``).
"""

import dataclasses
import functools
import types
import typing
from dataclasses import dataclass
from typing import Any

Number = tuple[int, int]  # major and minor of a device


@dataclass(frozen=True)
class Image:
    """An RBD image as the cluster names it. ``snapshot`` is empty for the image itself."""

    pool: str
    name: str
    namespace: str = ""
    snapshot: str = ""
    image_id: str = ""
    fsid: str = ""

    @property
    def spec(self) -> str:
        middle = f"{self.namespace}/" if self.namespace else ""
        end = f"@{self.snapshot}" if self.snapshot else ""
        return f"{self.pool}/{middle}{self.name}{end}"

    @property
    def head(self) -> str:
        """The image that a snapshot belongs to: what must not be mapped twice."""
        return f"{self.fsid}:{self.pool}/{self.namespace}/{self.name}"


@dataclass(frozen=True)
class Client:
    """The Ceph client behind a kernel mapping (sysfs-bus-rbd)."""

    mapping_id: str  # what to write to remove it
    client: str  # "client4144"; empty when the driver does not say
    address: str  # "10.0.0.5:0/123456"
    features: int = 0
    config: str = ""  # map options, config_info


@dataclass(frozen=True)
class Layer:
    """A partition of a device or what is stacked on it (dm-crypt, LVM, md), at whatever height."""

    name: str  # kernel name, "rbd0p1", "dm-0"
    number: Number
    active: tuple[str, ...] = ()  # file system drivers with a live superblock right on it


@dataclass(frozen=True)
class Device:
    """A guarded block device that has a medium."""

    name: str  # kernel name, "rbd0"
    number: Number
    driver: str
    size: int  # bytes
    read_only: bool
    diskseq: int  # different for each attach; 0 when the kernel does not count them
    active: tuple[str, ...]  # file system drivers with a live superblock on it or a layer
    holders: tuple[str, ...]  # dm, md or partitions right on top of it
    backing: str = ""  # loop: the file
    backing_id: str = ""  # loop: what distinguishes the file from others
    raw: tuple[str, ...] = ()  # where its node is bound for a pod's raw block volume
    image: Image | None = None
    client: Client | None = None
    layers: tuple[Layer, ...] = ()  # everything on top of it

    @functools.cached_property
    def numbers(self) -> frozenset[Number]:
        """Its own number and those of its layers: a mount of any of them is a use of it."""
        return frozenset((self.number, *(layer.number for layer in self.layers)))

    @functools.cached_property
    def live(self) -> frozenset[Number]:
        """The numbers that have a live superblock, as mount tables show them.

        A file system claims what it is on: where a layer has one, the device below it has none of
        its own. btrfs is left out, because the number of its mounts belongs to no device.
        """
        above = frozenset(layer.number for layer in self.layers if {*layer.active} - {"btrfs"})
        of_layers = {fs for layer in self.layers for fs in layer.active}
        return above | {self.number} if set(self.active) - of_layers - {"btrfs"} else above

    def name_of(self, number: Number) -> str:
        """Kernel name of the device or layer with that number."""
        return next((each.name for each in self.layers if each.number == number), self.name)

    @property
    def label(self) -> str:
        return f"{self.name} ({self.image.spec})" if self.image else self.name


@dataclass(frozen=True)
class Place:
    """One mount of a watched device, or one that shows kubelet's directories."""

    namespace: int  # inode of the mount namespace
    target: str
    root: str
    device: Number
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
    """A process and its pod. ``started`` distinguishes it from a later one with the same pid."""

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
    owners: tuple[Owner, ...]  # a few of them; empty: no process
    processes: int  # how many there are
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
    """A process that keeps a file system or the device itself in use without a mount."""

    owner: Owner
    device: Number
    ways: tuple[str, ...]  # fd 5, cwd, root, exe, map, device fd 7
    namespace: int


@dataclass(frozen=True)
class Publish:
    """A staged volume given to a pod."""

    pod_uid: str
    path: str
    volume: str  # the PV's name
    mounted: bool
    read_only: bool
    handle: str = ""


@dataclass(frozen=True)
class Volume:
    """The records of kubelet and the CSI driver about one staged volume."""

    driver: str
    handle: str
    staging: str  # the directory kubelet gave to the driver
    mounts: tuple[str, ...]  # host mount points at or below it
    device: str  # kernel name; empty when not known
    image: Image | None
    publishes: tuple[Publish, ...]
    name: str = ""  # the PV's name where a publish says it


@dataclass(frozen=True)
class Inventory:
    """Everything one scan saw. ``deep``: the mount namespaces were visited too."""

    taken: float  # Unix time
    cpu: float  # seconds of CPU
    deep: bool
    devices: tuple[Device, ...] = ()
    host: tuple[Place, ...] = ()  # watched devices in the host's namespaces
    host_spaces: tuple[int, ...] = ()
    kubelet: Place | None = None  # the host mount that kubelet's directory lies on
    no_records: str = ""  # why kubelet's records could not be read; 'volumes' is then unknown
    spaces: tuple[Space, ...] = ()
    spaces_at: float = 0.0  # Unix time of the deep scan that ``spaces`` come from
    users: tuple[User, ...] = ()
    users_of: tuple[Number, ...] = ()  # devices whose users were searched
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
    def by_number(self) -> dict[Number, Device]:
        """Every watched device by its number and those of its layers."""
        layers = {number: device for device in self.devices for number in device.numbers}
        return layers | {device.number: device for device in self.devices}

    def device(self, name: str) -> Device | None:
        return next((device for device in self.devices if device.name == name), None)

    def on_host(self, device: Device) -> tuple[Place, ...]:
        return tuple(place for place in self.host if place.device in device.numbers)

    def elsewhere(self, device: Device) -> list[tuple[Space, Place]]:
        """Mounts of the device outside the host's namespaces."""
        return [
            (space, place)
            for space in self.spaces
            for place in space.places
            if place.device in device.numbers
        ]

    def users_on(self, device: Device) -> tuple[User, ...]:
        return tuple(user for user in self.users if user.device in device.numbers)

    def volume_of(self, device: Device) -> Volume | None:
        return next((volume for volume in self.volumes if volume.device == device.name), None)


def to_json(value: Any) -> Any:
    """Plain JSON of the model's classes."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple | list):
        return [to_json(item) for item in value]
    return value


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def from_json(kind: Any, data: Any) -> Any:
    """The instance of ``kind`` that ``to_json`` wrote. TypeError when it is something else."""
    origin = typing.get_origin(kind)
    if origin is types.UnionType:
        if data is None:
            return None
        inner = next(arg for arg in typing.get_args(kind) if arg is not type(None))
        return from_json(inner, data)
    if origin is tuple:
        inner = typing.get_args(kind)
        return tuple(from_json(inner[0], item) for item in data)
    if dataclasses.is_dataclass(kind):
        hints = _hints(typing.cast(type, kind))
        return kind(**{name: from_json(hints[name], item) for name, item in data.items()})  # type: ignore[operator]
    return data
