"""The kinds of sources. A new kind is a module beside this one, its settings, and a line here."""

from pathlib import Path

from cache.settings import CephfsSource, DatasetSettings
from cache.sources import base, cephfs, directory


def folder_of(state_dir: Path, name: str) -> Path:
    """Mount point and keys of a source that the agent mounts."""
    return state_dir / "sources" / name


def source_of(settings: DatasetSettings, state_dir: Path) -> base.Source:
    """The source of a dataset, not reached yet."""
    if isinstance(settings.source, CephfsSource):
        return cephfs.Cephfs(settings, settings.source, folder_of(state_dir, settings.name))
    return directory.Directory(settings, settings.source)
