"""What objects of the cluster may not name, though the settings file of a node may.

Who writes them is no root on the node: a path in one leads to no file or directory of its choice.
"""

from pathlib import Path

import kit.errors
from cache import settings
from cache.settings import CacheSettings, DatasetSettings, DirSource


def given(dataset: DatasetSettings, section: CacheSettings, secrets: Path) -> DatasetSettings:
    """The dataset as an object names it. SettingsError when it may not name this.

    ``secrets``: the directory in which keys of Secrets (``secretRef``) are files.
    """
    source = dataset.source
    if isinstance(source, DirSource):
        if why := settings.why_closed(settings.plain(str(source.path)), settings.CLOSED_OF_USERS):
            raise kit.errors.SettingsError(
                f"source.path {source.path}", why, "name it in the settings file of the node"
            )
        return dataset.model_copy(update={"source": source.named_by_object()})
    file = settings.plain(str(source.secret_file))
    folders = [settings.plain(str(folder)) for folder in (secrets, section.object_keys)]
    if not any(settings.lies_in(file, folder) for folder in folders):
        raise kit.errors.SettingsError(
            f"source.secret_file {source.secret_file}",
            f"an object of the cluster names a file of the node outside of {section.object_keys}",
            "use secretRef, or put the key there (cache.object_keys)",
        )
    return dataset
