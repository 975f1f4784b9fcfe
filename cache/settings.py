"""Settings of the dataset cache."""

import re
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

import ceph.settings
import kit.settings
import kit.units

_NAME = re.compile(r"^[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?$")

LIVE_TREE = (
    "a live, changing tree cannot be cached: the kernel would answer ESTALE or ENOENT for names "
    "that change under a view. Choose 'freshness: snapshot' (read one immutable snapshot), "
    "'freshness: frozen' (you promise that the tree does not change), or make a snapshot for each "
    "version and point a dataset at each"
)


class DirSource(kit.settings.Section):
    """Any mounted directory."""

    kind: Literal["dir"]
    """A directory that something else has mounted."""
    path: kit.settings.AbsolutePath
    """The directory that is the dataset's root."""

    needs: ClassVar = "a .snap path"

    @property
    def in_snapshot(self) -> bool:
        return ".snap" in self.path.parts


class CephfsSource(kit.settings.Section):
    """A directory of a CephFS, mounted read-only by the agent itself."""

    kind: Literal["cephfs"]
    """A CephFS directory."""
    monitors: ceph.settings.Monitors = Field(min_length=1, description=ceph.settings.MONITORS)
    filesystem: kit.settings.Word = "cephfs"
    """Name of the file system in the cluster."""
    path: str = "/"
    """Directory in the file system; the dataset's root."""
    snapshot: str | None = None
    """Name under .snap of path; needed by 'freshness: snapshot'."""
    user: ceph.settings.User = "admin"
    """cephx user without 'client.'."""
    secret_file: kit.settings.AbsolutePath = Field(description=ceph.settings.SECRET_FILE)
    client: Literal["auto", "kernel", "fuse"] = "auto"
    """auto: the kernel client where the kernel has it, else ceph-fuse."""

    needs: ClassVar = "source.snapshot"

    @property
    def in_snapshot(self) -> bool:
        return self.snapshot is not None

    @field_validator("path")
    @classmethod
    def _plain_path(cls, value: str) -> str:
        parts = [part for part in value.split("/") if part]
        if not value.startswith("/") or ".." in parts or ".snap" in parts:
            raise ValueError(
                f"{value!r} is not an absolute path inside the file system; set a snapshot with "
                "'snapshot'"
            )
        return "/" + "/".join(parts)

    @field_validator("snapshot")
    @classmethod
    def _plain_name(cls, value: str | None) -> str | None:
        if value is not None and (not value or "/" in value or value in (".", "..")):
            raise ValueError(f"{value!r} is not a snapshot name")
        return value


Source = Annotated[DirSource | CephfsSource, Field(discriminator="kind")]


class DatasetSettings(kit.settings.Section):
    """One dataset: a named directory tree that jobs read at <views>/<name>/data."""

    name: str
    """Lower-case letters, digits, '-' and '.'; at most 63 characters."""
    source: Source
    """Where the files are."""
    freshness: Literal["snapshot", "frozen"]
    """snapshot: the source is an immutable snapshot. frozen: you promise that the tree does not
    change."""
    warm: bool = True
    """Fill the store without a request of an operator."""
    priority: int = Field(default=0, ge=-1000, le=1000)
    """Higher is filled first; equal ones by name."""

    @field_validator("name")
    @classmethod
    def _label(cls, value: str) -> str:
        if not _NAME.match(value) or ".." in value:
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
            if freshness is None:
                raise ValueError(f"freshness is missing; {LIVE_TREE}")
            if freshness not in ("snapshot", "frozen"):
                raise ValueError(f"freshness {freshness!r}: {LIVE_TREE}")
        return data

    @model_validator(mode="after")
    def _snapshot_where_promised(self) -> "DatasetSettings":
        if self.freshness == "snapshot" and not self.source.in_snapshot:
            raise ValueError(
                f"freshness 'snapshot' needs {self.source.needs}; without one the tree is live, "
                f"and {LIVE_TREE}"
            )
        if self.freshness == "frozen" and self.source.in_snapshot:
            raise ValueError("the source is a snapshot; say 'freshness: snapshot'")
        return self


class FillSettings(kit.settings.Section):
    """How hard a fill may work. These limits change while it runs."""

    workers: int = Field(default=8, ge=1, le=64)
    """Processes that copy. 8 hide the latency of ceph-fuse on 2 cores."""
    bytes_per_second: kit.units.Bytes = Field(default=0, ge=0)
    """Most bytes read from sources per second; 0: no limit."""
    files_per_second: int = Field(default=0, ge=0)
    """Most files read from sources per second; 0: no limit."""


class HintSettings(kit.settings.Section):
    """Copy sooner what jobs open while a dataset fills (fanotify, sampled)."""

    enabled: bool = True
    """Off: nothing is watched."""
    window: kit.units.Seconds = Field(default=0.2, gt=0, le=10)
    """How long opens are watched each time."""
    every: kit.units.Seconds = Field(default=2.0, gt=0, le=600)
    """From one window to the next. The default watches a tenth of the opens."""


class CacheSettings(kit.settings.Section):
    """The store on the SSD, the views, and what they hold."""

    store: kit.settings.AbsolutePath = Path("/var/lib/nodeagent/store")
    """Directory on the node's SSD."""
    disk: kit.settings.AbsolutePath | None = None
    """Mount point of the SSD. While nothing is mounted there the store is not used, and jobs read
    from the sources: the store must not fill the root disk. Default: the disk on which the store
    lay first. /: any disk."""
    views: kit.settings.AbsolutePath = Path("/var/lib/nodeagent/views")
    """Where jobs read: <views>/<name>/data. Give pods <views>/<name>."""
    budget: kit.units.Bytes = Field(default=500 * 1024**3, gt=0)
    """Most bytes the store may occupy."""
    reserve: kit.units.Share = 0.1
    """Share of the SSD's bytes and inodes that is never used, so that kubelet does not report
    DiskPressure (by default at 10 % of nodefs)."""
    refresh_interval: kit.units.Seconds = Field(default=5.0, gt=0, le=3600)
    """Least time between two refreshes of a view (1.5 us per cached name each)."""
    source_timeout: kit.units.Seconds = Field(default=15.0, gt=0, le=600)
    """How long reaching a source may take before it is tried again."""
    fill: FillSettings = FillSettings()
    """Limits of the fill."""
    hints: HintSettings = HintSettings()
    """Hints from readers."""
    datasets: tuple[DatasetSettings, ...] = ()
    """What is cached."""

    @model_validator(mode="after")
    def _consistent(self) -> "CacheSettings":
        names = [dataset.name for dataset in self.datasets]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"dataset {name!r} exists twice; names are unique")
        roots = {"store": self.store, "views": self.views}
        for dataset in self.datasets:
            if isinstance(dataset.source, DirSource):
                roots[f"the source of dataset {dataset.name!r}"] = dataset.source.path
        for key in ("store", "views"):
            for other, path in roots.items():
                if other != key and (path == roots[key] or roots[key] in path.parents):
                    raise ValueError(f"{other} ({path}) lies inside {key} ({roots[key]})")
                if other != key and path in roots[key].parents and other != "store":
                    raise ValueError(f"{key} ({roots[key]}) lies inside {other} ({path})")
        return self
