"""The kinds of sources: CephFS, RBD, a claim that names one of these, and a directory, which is
simple enough to be here.

A new kind is a module beside this one, its settings, and a line in ``source_of``.
"""

import errno
import hashlib
import os
import re
from pathlib import Path
from typing import Any

import kit.child
import kit.errors
import kit.formats
from cache.settings import (
    CephfsSource,
    DatasetSettings,
    DirSource,
    PvcSource,
    RbdSource,
    Source,
)
from cache.sources import base, cephfs, claims, rbd, roots

# Where sources are mounted when the path of the state directory is not plain. ceph-fuse gives the
# path of its mount to a shell, unquoted, each time it trims its cache (mount -o remount), and ends
# when that fails. libfuse follows links first. Ceph splits paths at commas and semicolons, too.
PLAIN = Path("/run/nodeagent/sources")
MEMORIES = "claims"  # in the state directory
_PLAIN_PATH = re.compile(r"[A-Za-z0-9@/._+-]+")


class Unknown:
    """Stands for a snapshot that is still to be found. It never answers."""

    block = False
    immutable = replaceable = True
    place = note = ""

    def __init__(self, dataset: DatasetSettings) -> None:
        self._thing = f"dataset {dataset.name}: source"
        self._pattern = dataset.snapshots

    @property
    def identity(self) -> dict[str, Any]:
        return {"kind": "unknown"}

    async def reach(self, deadline: float, *, serve: bool = True) -> base.Reached:
        why = f"it has no snapshot {self._pattern!r} yet, or they could not be listed"
        raise kit.errors.SourceError(self._thing, why, "make one; it is looked for by itself")

    async def snapshots(self, deadline: float) -> dict[str, float]:
        return {}

    async def release(self) -> None:
        """Nothing is mounted for it."""

    def take(self, source: Source) -> None:
        """Nothing is known of it."""


def home(state_dir: Path) -> Path:
    """The directory of all sources that an agent mounts: below its state directory, or, where no
    shell and not Ceph would take that path for a name, one of its own below ``PLAIN``."""
    if _PLAIN_PATH.fullmatch(str(state_dir)):
        return state_dir / "sources"
    return PLAIN / hashlib.sha256(os.fsencode(state_dir)).hexdigest()[:16]


def folder_of(state_dir: Path, name: str) -> Path:
    """Mount point and keys of a source that the agent mounts."""
    return home(state_dir) / name


def memory_of(state_dir: Path, name: str) -> Path:
    """What is remembered of a claim."""
    return state_dir / MEMORIES / f"{name}.json"


def source_of(
    settings: DatasetSettings, state_dir: Path, lookup: claims.ClaimLookup
) -> base.Source:
    """The source of a dataset, not reached yet. ``lookup``: what its claim names."""
    folder = folder_of(state_dir, settings.name)
    if isinstance(settings.source, PvcSource):
        memory = memory_of(state_dir, settings.name)
        return claims.ClaimSource(settings, settings.source, folder, memory, lookup)
    if isinstance(settings.source, CephfsSource):
        return cephfs.Cephfs(settings, settings.source, folder)
    if isinstance(settings.source, RbdSource):
        return rbd.Rbd(settings, settings.source, folder)
    return Directory(settings, settings.source, state_dir)


async def forget(state_dir: Path, name: str) -> None:
    """Release what a source of any kind left, and forget what is remembered of it."""
    await claims.release(folder_of(state_dir, name))
    kit.formats.forget(memory_of(state_dir, name))


class Directory:
    """A directory that something else has mounted, read in place."""

    block = False
    note = ""

    def __init__(self, dataset: DatasetSettings, source: DirSource, state_dir: Path) -> None:
        self._state_dir = str(state_dir)
        self._path = self.place = str(source.path)
        self._by_object = source.by_object
        self._thing = f"dataset {dataset.name}: source {source.path}"
        self.immutable = self.replaceable = dataset.freshness != "frozen"

    @property
    def identity(self) -> dict[str, Any]:
        return {"kind": "dir", "path": self._path}

    async def reach(self, deadline: float, *, serve: bool = True) -> base.Reached:
        try:
            found = await kit.child.call(
                roots.look_in_place, self._path, self._state_dir, self._by_object,
                deadline=deadline,
            )  # fmt: skip
            root = roots.Root(**found)
        except kit.child.DeadlineError as error:
            raise kit.errors.SourceError(
                self._thing, f"it did not answer within {deadline:g}s", "it is tried again"
            ) from error
        except OSError as error:
            if error.errno == errno.ENOENT and await self._has_lost_its_snapshot(deadline):
                why, remedy = "its snapshot does not exist", "make it, or set another one"
                raise base.GoneError(self._thing, why, f"{remedy}; it is tried again") from error
            raise base.explain(self._thing, error) from error
        if root.empty:
            # Most likely it is not mounted yet; an empty dataset is useless in any case.
            raise kit.errors.SourceError(
                self._thing, "it is empty", "mount or fill it; it is tried again"
            )
        return base.Reached(
            self._path, root.stamp, root.stamp, "directory", root.files, root.bytes,
            marks=root.marks, place=root.place, inside=tuple(root.inside), server=root.server,
        )  # fmt: skip

    async def _has_lost_its_snapshot(self, deadline: float) -> bool:
        try:
            return bool(await kit.child.call(roots.lacks_snapshot, self._path, deadline=deadline))
        except (kit.child.DeadlineError, OSError):
            return False  # not even its directory is there

    async def snapshots(self, deadline: float) -> dict[str, float]:
        async def nothing(_: OSError) -> None:
            """It is mounted by others."""

        directory, _, _ = self._path.partition("/.snap")
        return await base.snapshots_of(directory, self._thing, deadline, nothing)

    async def release(self) -> None:
        """Nothing of it is mounted by the agent."""

    def take(self, source: Source) -> None:
        """Its path cannot change, but who names it can."""
        assert isinstance(source, DirSource)
        self._by_object = source.by_object
