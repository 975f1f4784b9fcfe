"""A directory that something else has mounted."""

from typing import Any

import kit.child
import kit.errors
from cache.settings import DatasetSettings, DirSource
from cache.sources import reach


class Directory:
    """Read where it is. The agent mounts nothing for it, so it keeps nothing busy but its view."""

    def __init__(self, dataset: DatasetSettings, source: DirSource) -> None:
        self._path = str(source.path)
        self._thing = f"dataset {dataset.name}: source {source.path}"
        self.immutable = dataset.freshness == "snapshot"

    @property
    def identity(self) -> dict[str, Any]:
        return {"kind": "dir", "path": self._path}

    async def reach(self, deadline: float) -> reach.Reached:
        try:
            found = await kit.child.call(reach.look, self._path, deadline=deadline)
        except kit.child.DeadlineError as error:
            raise kit.errors.SourceError(
                self._thing, f"it did not answer within {deadline:g}s", "it is tried again"
            ) from error
        except OSError as error:
            raise reach.explain(self._thing, error) from error
        if found["empty"]:
            # Most likely what belongs there is not mounted yet; an empty dataset helps nobody.
            raise kit.errors.SourceError(
                self._thing, "it is empty", "mount or fill it; it is tried again"
            )
        return reach.Reached(
            self._path,
            found["stamp"],
            found["stamp"],
            "directory",
            found["files"],
            found["bytes"],
        )

    async def release(self) -> None:
        """Nothing of it is ours."""
