"""The kinds of sources. A new kind is one module and one line here."""

from pathlib import Path

import cache.settings
from cache.sources import cephfs, directory, reach


def make(dataset: cache.settings.DatasetSettings, state_dir: Path) -> reach.Source:
    """The source of a dataset; ``state_dir`` is where its mount point and keys may lie."""
    source = dataset.source
    if isinstance(source, cache.settings.CephfsSource):
        return cephfs.Cephfs(dataset, source, _folder(state_dir, dataset.name))
    return directory.Directory(dataset, source)


async def let_go(name: str, state_dir: Path) -> None:
    """What the source of a dataset that is in the settings no more has left: its mount, its key."""
    await cephfs.let_go(_folder(state_dir, name))


def _folder(state_dir: Path, name: str) -> Path:
    return state_dir / "sources" / name
