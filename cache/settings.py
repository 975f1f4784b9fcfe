"""Settings of the dataset cache."""

import re
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, PrivateAttr, field_validator, model_validator

import ceph.settings
import kit.settings
import kit.slips
import kube.settings
from cache.views import closed

_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?")

LIVE_TREE = (
    "a live, changing tree cannot be cached: the kernel would answer ESTALE or ENOENT for names "
    "that change under a view. Choose 'freshness: snapshot' (read one immutable snapshot), "
    "'freshness: follow' (read the newest snapshot), or 'freshness: frozen' (you promise that the "
    "tree does not change)"
)


class DirSource(kit.settings.Section):
    """Any mounted directory."""

    kind: Literal["dir"]
    """A directory that something else has mounted."""
    path: kit.settings.AbsolutePath
    """Root of the dataset. You must mount it yourself."""

    needs: ClassVar = "a .snap path"
    _by_object: bool = PrivateAttr(default=False)

    @property
    def by_object(self) -> bool:
        """An object of the cluster names it: no link on the way to it is followed."""
        return self._by_object

    def named_by_object(self) -> "DirSource":
        named = self.model_copy()
        named._by_object = True
        return named

    @property
    def in_snapshot(self) -> bool:
        return ".snap" in self.path.parts


class CephfsSource(kit.settings.Section):
    """A directory of a CephFS, mounted read-only by the agent itself."""

    kind: Literal["cephfs"]
    """A CephFS directory."""
    monitors: ceph.settings.Monitors = Field(min_length=1, description=ceph.settings.MONITORS)
    filesystem: kit.settings.Word = "cephfs"
    """Name of the file system."""
    path: str = "/"
    """Root of the dataset."""
    snapshot: str | None = None
    """Name of the snapshot in `path`/.snap, for 'freshness: snapshot'."""
    manifest: str | None = Field(default=None, max_length=4096)
    """File of a published manifest, relative to 'path'. A path that begins with '/' is a path
    on this node."""
    user: ceph.settings.User = ceph.settings.USER
    """cephx user without 'client.'."""
    secret_file: kit.settings.AbsolutePath = Field(description=ceph.settings.SECRET_FILE)
    client: Literal["auto", "kernel", "fuse"] = "auto"
    """auto: the kernel client if the kernel has it, else ceph-fuse. kernel, fuse: only this
    client."""

    needs: ClassVar = "source.snapshot"

    @property
    def in_snapshot(self) -> bool:
        return self.snapshot is not None

    @field_validator("path")
    @classmethod
    def _plain_path(cls, value: str) -> str:
        parts = [part for part in value.split("/") if part not in ("", ".")]
        if not value.startswith("/") or ".." in parts or ".snap" in parts:
            raise ValueError(
                f"{value!r} is not an absolute path inside the file system; set a snapshot with "
                "'snapshot'"
            )
        return kit.settings.one_line("/" + "/".join(parts))

    @field_validator("manifest")
    @classmethod
    def _plain_manifest(cls, value: str | None) -> str | None:
        parts = [] if value is None else value.removeprefix("/").split("/")
        if "\0" in (value or "") or {"", ".", "..", ".snap"} & set(parts):
            raise ValueError(
                f"{value!r} is not the path of a file: leave out '.', '..' and '.snap', which "
                "cannot be written"
            )
        return value

    @field_validator("snapshot")
    @classmethod
    def _plain_name(cls, value: str | None) -> str | None:
        if value is not None and (not value or "/" in value or value in (".", "..")):
            raise ValueError(f"{value!r} is not a snapshot name")
        return None if value is None else kit.settings.one_line(value)


class RbdSource(kit.settings.Section):
    """A snapshot of an RBD image that holds an ext4 or XFS file system."""

    kind: Literal["rbd"]
    """A block image."""
    monitors: ceph.settings.Monitors = Field(min_length=1, description=ceph.settings.MONITORS)
    pool: kit.settings.Word
    """Pool of the image."""
    namespace: str = ""
    """Namespace in the pool."""
    image: kit.settings.Word
    """Name of the image. Encrypted images do not work."""
    snapshot: kit.settings.Word
    """Name of the snapshot."""
    partition: int = Field(0, ge=0, le=128)
    """Number of the partition that holds the file system. 0: the image has no partitions."""
    user: ceph.settings.User = ceph.settings.USER
    """cephx user without 'client.'. Caps: mon 'profile rbd', osd 'profile rbd-read-only'."""
    secret_file: kit.settings.AbsolutePath = Field(description=ceph.settings.SECRET_FILE)
    client: Literal["auto", "krbd", "none"] = "auto"
    """auto: if the kernel has an RBD client, jobs read during the fill. krbd: requires this client.
    none: jobs wait for the copy."""

    needs: ClassVar = "source.snapshot"
    in_snapshot: ClassVar = True

    @field_validator("namespace")
    @classmethod
    def _plain_namespace(cls, value: str) -> str:
        return value and kit.settings.word(value)

    @field_validator("snapshot")
    @classmethod
    def _is_snapshot(cls, value: str) -> str:
        if value == "-":  # as the kernel writes the image itself, which changes
            raise ValueError("'-' is not a snapshot name")
        return value


class PvcSource(kit.settings.Section):
    """The volume of a PersistentVolumeClaim of ceph-csi. Its annotation nodeagent.io/cache has to
    be 'allowed'."""

    kind: Literal["pvc"]
    """A claim."""
    namespace: kit.settings.Word
    """Namespace of the claim."""
    name: kit.settings.Word
    """Name of the claim. The claim needs the annotation nodeagent.io/cache: allowed."""
    snapshot: kit.settings.Word | None = None
    """Name of a VolumeSnapshot, for 'freshness: snapshot'."""

    needs: ClassVar = "source.snapshot (a VolumeSnapshot)"

    @property
    def in_snapshot(self) -> bool:
        return self.snapshot is not None


# How a source is reached; what it is does not depend on them.
WAYS = ("monitors", "secret_file", "client", "manifest")

Source = Annotated[DirSource | CephfsSource | RbdSource | PvcSource, Field(discriminator="kind")]


def snapshot_of(source: Source) -> str:
    """The name of its snapshot, '' when it names none."""
    if not isinstance(source, DirSource):
        return source.snapshot or ""
    parts = source.path.parts
    after = parts.index(".snap") + 1 if ".snap" in parts else len(parts)
    return parts[after] if after < len(parts) else ""


def at_snapshot(source: Source, name: str) -> Source:
    """The same directory or image in another snapshot."""
    if not isinstance(source, DirSource):
        return source.model_copy(update={"snapshot": name})
    parts = list(source.path.parts)
    if ".snap" not in parts:
        return source.model_copy(update={"path": source.path / ".snap" / name})
    at = parts.index(".snap") + 1
    return source.model_copy(update={"path": Path(*parts[:at], name, *parts[at + 1 :])})


def same_place(old: Source, new: Source) -> bool:
    """Whether they are the same source, perhaps in another snapshot or reached in another way."""
    if snapshot_of(old) and snapshot_of(new):
        new = at_snapshot(new, snapshot_of(old))
    ways = {name: getattr(old, name) for name in WAYS if hasattr(old, name)}
    same = type(old) is type(new)
    return same and new.model_copy(update=ways).model_dump() == old.model_dump()


class ViewAccessSettings(kit.settings.Section):
    """Who may enter <views>/<name>, and so read the dataset, as far as its own modes allow."""

    owner: int = Field(default=0, ge=0, lt=2**32 - 1)
    """User id of <views>/<name>."""
    group: int = Field(default=0, ge=0, lt=2**32 - 1)
    """Group id of <views>/<name>."""
    mode: str | None = Field(default=None, pattern="^0?[0-7]{3}$")
    """Octal mode of <views>/<name>, in quotes."""

    @property
    def fault(self) -> str:
        """Why only root may enter, '' when others may. Told, not refused: an update of the agent
        must not take the settings of a node."""
        shut = self.mode is not None and not int(self.mode, 8) & 0o111
        return f"access.mode {self.mode!r} has no x bit" if shut else ""


class DatasetSettings(kit.settings.Section):
    """One dataset: a named directory tree that jobs read at <views>/<name>/data."""

    name: str
    """Lower-case letters, digits, '-' and '.'; at most 63 characters."""
    source: Source
    """Where the original data is. `kind` is dir, cephfs, rbd or pvc."""
    freshness: Literal["snapshot", "follow", "frozen"]
    """snapshot, follow (always the newest snapshot) or frozen (you promise not to change the
    files)."""
    snapshots: str = Field(default="*", min_length=1, max_length=255)
    """Shell pattern of the snapshots that 'freshness: follow' uses. '*' excludes names that begin
    with '_'."""
    earlier: int = Field(default=1, ge=0, le=8)
    """How many earlier generations the agent keeps, if they fit."""
    warm: bool = True
    """Fill automatically. false: while nothing is stored, fill only on command. Updates of a stored
    dataset still start automatically."""
    priority: int = Field(default=0, ge=-1000, le=1000)
    """Datasets with a higher priority are filled first, and interrupt other fills. Among unused
    datasets, they are evicted last."""
    budget: kit.settings.Bytes = Field(default=0, ge=0)
    """Maximum bytes in the store. 0: no limit."""
    budget_inodes: int = Field(default=0, ge=0)
    """Maximum files and directories in the store. 0: no limit."""
    keep: bool = False
    """true: the agent evicts this dataset automatically only in two cases: the dataset is above its
    own budget, or its own update needs space."""
    access: ViewAccessSettings = ViewAccessSettings()
    """Who may enter the view."""

    @field_validator("name")
    @classmethod
    def _label(cls, value: str) -> str:
        if not _NAME.fullmatch(value) or ".." in value:
            raise ValueError(
                f"{value!r} is not a dataset name: use lower-case letters, digits, '-' and '.', "
                "at most 63, and begin and end with a letter or digit"
            )
        return value

    @model_validator(mode="before")
    @classmethod
    def _no_live_tree(cls, data: object) -> object:
        if isinstance(data, dict):
            freshness = data.get("freshness")
            if "freshness" not in data and kit.slips.close("freshness", [*map(str, data)]):
                return data  # a misspelt one is told as such
            if freshness is None:
                raise ValueError(f"freshness is missing; {LIVE_TREE}")
            if freshness not in ("snapshot", "follow", "frozen"):
                raise ValueError(f"freshness {freshness!r}: {LIVE_TREE}")
        return data

    @model_validator(mode="after")
    def _snapshot_where_promised(self) -> "DatasetSettings":
        if self.freshness == "snapshot" and not self.source.in_snapshot:
            raise ValueError(
                f"freshness 'snapshot' needs {self.source.needs}; without one the tree is live, "
                f"and {LIVE_TREE}"
            )
        if self.freshness == "follow" and isinstance(self.source, RbdSource):
            raise ValueError("freshness 'follow' is for directories; an image has one snapshot")
        if self.freshness == "follow" and self.source.in_snapshot:
            raise ValueError(
                "the source is one snapshot; leave it out to follow the newest, or say 'freshness: "
                "snapshot'"
            )
        if self.freshness == "frozen" and self.source.in_snapshot:
            raise ValueError("the source is a snapshot; say 'freshness: snapshot'")
        if self.freshness == "frozen" and getattr(self.source, "manifest", None) is not None:
            raise ValueError("source.manifest is of a snapshot; 'freshness: frozen' reads none")
        return self


class FillSettings(kit.settings.Section):
    """How hard a fill may work. These limits change while it runs."""

    workers: int = Field(default=8, ge=1, le=64)
    """Processes that copy files."""
    bytes_per_second: kit.settings.Bytes = Field(default=0, ge=0)
    """Maximum bytes per second from sources. 0: no limit."""
    files_per_second: int = Field(default=0, ge=0)
    """Maximum files per second from sources. 0: no limit."""
    jitter: kit.settings.Seconds = Field(default=0.0, ge=0, le=86400)
    """Longest random delay before the fill of a new dataset or snapshot."""


class ScrubSettings(kit.settings.Section):
    """Stored files are read against their checksums in the background, past the page cache."""

    every: kit.settings.Seconds = Field(default=28 * 86400.0, ge=0, le=366 * 86400)
    """Time between scrubs. 0: only after SSD errors."""
    bytes_per_second: kit.settings.Bytes = Field(default=20 * 1024**2, gt=0)
    """Maximum bytes per second that a scheduled scrub reads from the SSD."""
    crash_bytes_per_second: ClassVar[kit.settings.Bytes] = 200 * 1024**2
    """The same in the round that follows an unclean shutdown of the node, while nothing fills.
    After trouble of the SSD there is no limit: jobs read from the sources until it is over."""


class CompareSettings(kit.settings.Section):
    """Datasets with 'freshness: frozen' are compared with their sources: a sample of the files, by
    their status alone. A difference is a finding; 'nodeagent dataset rescan NAME' takes it over."""

    every: kit.settings.Seconds = Field(default=3600.0, ge=0, le=366 * 86400)
    """Time between comparisons of a frozen dataset. 0: never."""
    entries: ClassVar[int] = 512
    """About how many files are looked at in a round, and an eighth as many directories. The next
    round looks at others."""


class CsiSettings(kit.settings.Section):
    """Volumes that pods ask for by the name of a dataset: the CSI driver nodeagent.io."""

    enabled: bool = False
    """Serve CSI volumes to pods."""
    wait: ClassVar[kit.settings.Seconds] = 20.0
    """How long one request of the kubelet may wait for a dataset before it is answered with the
    reason. The kubelet shows it as an event of the pod, pauses and asks again; it gives up a
    request after 2 minutes."""


class CacheSettings(kube.settings.RoomSettings):
    """The store on the SSD, the views, and what they hold."""

    store: kit.settings.AbsolutePath = Path("/var/lib/nodeagent/store")
    """Directory of the store."""
    disk: kit.settings.AbsolutePath | None = None
    """Mount point of the SSD. The agent uses the store only on this disk. Default: the disk where
    the store was created. '/': any disk, also the root disk."""
    views: kit.settings.AbsolutePath = Path("/var/lib/nodeagent/views")
    """Directory of the views. Mount <views>/<name> into pods."""
    budget: kit.settings.Bytes = Field(default=500 * 1024**3, gt=0)
    """Maximum bytes of the store."""
    budget_inodes: int = Field(default=0, ge=0)
    """Maximum files and directories in the store. 0: no limit."""
    reserve: kit.settings.Share = 0.1
    """Share of bytes and inodes that stays free. With `kubelet.config`, it is at least 9/8 of the
    kubelet's eviction thresholds for this file system."""
    refresh_interval: ClassVar[kit.settings.Seconds] = 5.0
    """Least time between two refreshes of a view (1.5 us per cached name each)."""
    source_timeout: ClassVar[kit.settings.Seconds] = 15.0
    """How long reaching a source may take before it is tried again."""
    source_check: ClassVar[kit.settings.Seconds] = 600.0
    """How often it is checked that the source of a complete dataset is still the one that it was
    filled from. A CephFS is mounted for it, for less than a second."""
    follow_interval: ClassVar[kit.settings.Seconds] = 30.0
    """How often the snapshots of a dataset with 'freshness: follow' are listed."""
    fill: FillSettings = FillSettings()
    """Limits of the fill."""
    scrub: ScrubSettings = ScrubSettings()
    """Verification of what is stored."""
    compare: CompareSettings = CompareSettings()
    """The compare of frozen datasets with their sources."""
    csi: CsiSettings = CsiSettings()
    """Volumes for pods."""
    object_keys: kit.settings.AbsolutePath = Path("/etc/nodeagent/object-keys")
    """Directory in which `source.secret_file` of a CachedDataset must lie."""
    datasets: tuple[DatasetSettings, ...] = ()
    """Datasets."""

    @model_validator(mode="after")
    def _consistent(self) -> "CacheSettings":
        for number, name in kit.settings.again(dataset.name for dataset in self.datasets):
            said = f"dataset {name!r} is there twice; names are unique"
            raise kit.settings.misplaced(said, "datasets", number, "name")
        roots = {"store": str(self.store), "views": str(self.views)}
        places: dict[str, tuple[str | int, ...]] = {}
        for number, dataset in enumerate(self.datasets):
            if isinstance(dataset.source, DirSource):
                name = f"the source of dataset {dataset.name!r}"
                roots[name] = str(dataset.source.path)
                places[name] = ("datasets", number, "source", "path")
        self.fit()
        plain = {other: closed.plain(path) for other, path in roots.items()}
        for key in ("store", "views"):
            for other, path in roots.items():
                place = places.get(other, (other,))
                if other != key and closed.lies_in(plain[other], plain[key]):
                    said = f"{other} ({path}) lies inside {key} ({roots[key]})"
                    raise kit.settings.misplaced(f"{said}: choose another directory", *place)
                if other not in (key, "store") and closed.lies_in(plain[key], plain[other]):
                    said = f"{key} ({roots[key]}) lies inside {other} ({path})"
                    raise kit.settings.misplaced(f"{said}: choose another directory", *place)
        return self

    def fit(self) -> Self:
        kubelet = self.this_node.kubelet
        folders = {
            **closed.ALWAYS,
            str(kubelet.root_dir): closed.KUBELET,
            str(kubelet.image_dir): closed.RUNTIME,
        }
        for number, dataset in enumerate(self.datasets):
            if isinstance(dataset.source, DirSource):
                path = str(dataset.source.path)
                if why := closed.why(closed.plain(path), folders):
                    said = f"the source of dataset {dataset.name!r} ({path}): {why}"
                    raise kit.settings.misplaced(said, "datasets", number, "source", "path")
        return self
