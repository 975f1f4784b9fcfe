"""What the agent and its child processes say to each other about Ceph, as frozen dataclasses.

``Access``, ``ImageAccess`` and ``Entry`` are for children that read CephFS or RBD themselves
(``ceph.native``, ``ceph.image``), the rest is for the worker process that ``ceph.client`` asks.
Nothing here loads the bindings.
"""

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple


@dataclass(frozen=True)
class Access:
    """How to reach a directory of a CephFS past the mount."""

    conf: str  # ceph.conf with monitors and keyring
    user: str  # without 'client.'
    filesystem: str
    root: str  # the directory in the file system, .snap/<name> included
    top: str = "/"  # a directory at or above it that the user may mount
    snapshot: int = 0  # its id; a listing of another one is an error. 0: not known


@dataclass(frozen=True)
class ImageAccess:
    """How to reach a snapshot of an RBD image."""

    conf: str  # ceph.conf with monitors and keyring
    user: str  # without 'client.'
    pool: str
    namespace: str
    image: str
    snapshot: str
    partition: int = 0  # that holds the file system; 0: it is on all of the image

    @property
    def spec(self) -> str:
        middle = f"{self.namespace}/" if self.namespace else ""
        return f"{self.pool}/{middle}{self.image}@{self.snapshot}"


@dataclass(frozen=True)
class SnapshotFacts:
    """What a snapshot of an image is, whatever it is called. ``size`` in bytes."""

    fsid: str
    pool_id: int
    image_id: str
    snap_id: int
    size: int


class Entry(NamedTuple):
    """One directory entry as a scan saw it. Messages keep it as a JSON list."""

    name: str  # os.fsdecode of the name's bytes
    mode: int  # st_mode, type included
    uid: int
    gid: int
    size: int
    mtime_ns: int
    ino: int
    nlink: int
    xattrs: bool  # False only when it certainly has none and an object read may stand for the file
    ctime_ns: int = 0  # 0 when it is not known
    change: int = 0  # Ceph's change version; 0 when it is not known
    holes: int = 0  # bytes of holes that a copy has, too, as far as it is known


@dataclass(frozen=True)
class CephCredentials:
    """How the worker connects. The key itself stays in its file until the worker reads it."""

    cluster: str  # its name in settings, for errors
    monitors: tuple[str, ...]
    conf: str  # empty: librados reads no ceph.conf, /etc/ceph/ceph.conf neither
    user: str
    secret_file: str  # empty: the keyring that conf names
    patience: float  # seconds for each answer of the cluster


@dataclass(frozen=True)
class ImageId:
    """An RBD image by its ids, which renaming does not change."""

    pool_id: int
    namespace: str
    image_id: str


@dataclass(frozen=True, order=True)
class ImageName:
    pool: str
    namespace: str
    name: str


@dataclass(frozen=True)
class Extents:
    """Where to look for allocated extents: from byte ``start`` to the end. Without an object map
    that would visit every object of a large image: then only at ``places``, (offset, length),
    where data leaves marks."""

    start: int = 0
    places: tuple[tuple[int, int], ...] = ((0, 1),)


@dataclass(frozen=True)
class ContentQuestion:
    """Does the image hold data, and what does its metadata say?"""

    image: ImageId
    metadata_key: str
    extents: Extents | None = None  # also look for an allocated extent


@dataclass(frozen=True)
class MetadataChange:
    image: ImageId
    metadata_key: str
    value: str


@dataclass(frozen=True)
class ViewQuestion:
    """How is the cluster, and who uses these images? ``wide`` False: without what is the same for
    every node and changes slowly (``ClusterView.with_wide_of``)."""

    images: tuple[ImageName, ...]
    wide: bool = True


@dataclass(frozen=True)
class Request:
    """At most one question is set; without one, the answer is the cluster's fsid.

    ``fsid``: the cluster that was connected to before; another one is an error.
    """

    credentials: CephCredentials
    fsid: str = ""
    content: ContentQuestion | None = None
    change: MetadataChange | None = None
    view: ViewQuestion | None = None


@dataclass(frozen=True)
class ImageContent:
    """``size`` and ``extent`` are set only when extents were asked for."""

    metadata: str | None  # None: the image has no such entry
    size: int | None = None
    extent: tuple[int, int] | None = None  # offset and length of an allocated extent; None: none


@dataclass(frozen=True)
class Watcher:
    client: str  # "client4144"
    address: str  # "10.0.0.5:0/123456"


@dataclass(frozen=True)
class ImageView(ImageName):
    """One image as the cluster sees it.

    Readers leave no watcher: an image without watchers may still be in use.
    """

    features: int = 0
    watchers: tuple[Watcher, ...] = ()
    locks: tuple[Watcher, ...] = ()  # those who hold one
    mirrored: bool = False  # rbd-mirror copies it, or copies to it
    error: str = ""  # why it could not be asked

    @property
    def migrating(self) -> bool:
        """A live migration between pools or images is going on (RBD_FEATURE_MIGRATING)."""
        return bool(self.features & 1 << 9)

    @property
    def key(self) -> tuple[str, str, str]:
        return self.pool, self.namespace, self.name


@dataclass(frozen=True)
class VersionCount:
    kind: str  # mon, mgr, osd, mds
    version: str  # "ceph version 16.2.15 (...) pacific (stable)"
    count: int


@dataclass(frozen=True)
class FeatureGroup:
    kind: str  # mon, osd, client, ...
    release: str
    features: int
    count: int


# What monitors must collect from all daemons: asked rarely.
WIDE = ("versions", "features", "osd get-require-min-compat-client")


def refusal(command: str) -> str:
    return f"'ceph {command}' is not allowed to this key"


@dataclass(frozen=True)
class ClusterView:
    name: str
    taken: float  # Unix time
    fsid: str
    versions: tuple[VersionCount, ...] = ()
    features: tuple[FeatureGroup, ...] = ()
    min_client: str = ""  # require_min_compat_client
    blocklist: tuple[str, ...] = ()  # addresses, and ranges as "cidr:10.1.0.0:0/24"
    monitors_v1: tuple[str, ...] = ()
    monitors_v2: tuple[str, ...] = ()
    images: tuple[ImageView, ...] = ()
    node_client: str = ""  # version of this node's Ceph client: "16.2.15"
    denied: tuple[str, ...] = ()  # commands that this key may not run; what they give is missing

    def with_wide_of(self, before: "ClusterView") -> "ClusterView":
        """With what an earlier answer said of the whole cluster."""
        kept = tuple(command for command in before.denied if command in WIDE)
        return replace(
            self,
            versions=before.versions,
            features=before.features,
            min_client=before.min_client,
            denied=(*self.denied, *kept),
        )

    @property
    def gaps(self) -> tuple[str, ...]:
        """The denied commands, for people."""
        return tuple(refusal(command) for command in self.denied)

    def refused(self, commands: tuple[str, ...]) -> list[str]:
        """Why the answers of these commands are unknown."""
        return [f"cluster {self.name}: {refusal(c)}" for c in commands if c in self.denied]

    def image(self, pool: str, namespace: str, name: str) -> ImageView | None:
        return self._images.get((pool, namespace, name))

    @functools.cached_property
    def _images(self) -> dict[tuple[str, str, str], ImageView]:
        """The first of each key."""
        return {image.key: image for image in reversed(self.images)}


@dataclass(frozen=True)
class Answer:
    fsid: str
    content: ImageContent | None = None
    view: ClusterView | None = None
