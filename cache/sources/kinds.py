"""The kinds of sources: CephFS, and a directory, which is simple enough to be here.

A new kind is a module beside this one, its settings, and a line in ``source_of``.
"""

from pathlib import Path
from typing import Any

import kit.child
import kit.errors
from cache.settings import CephfsSource, DatasetSettings, DirSource
from cache.sources import base, cephfs


def folder_of(state_dir: Path, name: str) -> Path:
    """Mount point and keys of a source that the agent mounts."""
    return state_dir / "sources" / name


def source_of(settings: DatasetSettings, state_dir: Path) -> base.Source:
    """The source of a dataset, not reached yet."""
    if isinstance(settings.source, CephfsSource):
        return cephfs.Cephfs(settings, settings.source, folder_of(state_dir, settings.name))
    return Directory(settings, settings.source)


class Directory:
    """A directory that something else has mounted, read in place."""

    def __init__(self, dataset: DatasetSettings, source: DirSource) -> None:
        self._path = str(source.path)
        self._thing = f"dataset {dataset.name}: source {source.path}"
        self.immutable = dataset.freshness == "snapshot"

    @property
    def identity(self) -> dict[str, Any]:
        return {"kind": "dir", "path": self._path}

    async def reach(self, deadline: float) -> base.Reached:
        try:
            root = base.Root(**await kit.child.call(base.look, self._path, deadline=deadline))
        except kit.child.DeadlineError as error:
            raise kit.errors.SourceError(
                self._thing, f"it did not answer within {deadline:g}s", "it is tried again"
            ) from error
        except OSError as error:
            raise base.explain(self._thing, error) from error
        if root.empty:
            # Most likely it is not mounted yet; an empty dataset is useless in any case.
            raise kit.errors.SourceError(
                self._thing, "it is empty", "mount or fill it; it is tried again"
            )
        return base.Reached(self._path, root.stamp, root.stamp, "directory", root.files, root.bytes)

    async def release(self) -> None:
        """Nothing of it is mounted by the agent."""
