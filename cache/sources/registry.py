"""The kinds of sources. A new kind is one module and one line here."""

from pathlib import Path

import cache.settings
from cache.sources import cephfs, directory, reach


def make(dataset: cache.settings.DatasetSettings, state_dir: Path) -> reach.Source:
    """The source of a dataset; ``state_dir`` is where its mount point and keys may lie."""
    source = dataset.source
    if isinstance(source, cache.settings.CephfsSource):
        return cephfs.Cephfs(dataset, source, state_dir / "sources" / dataset.name)
    return directory.Directory(dataset, source)
