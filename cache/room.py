"""The cache as the process registers it."""

from pathlib import Path
from typing import TYPE_CHECKING

import kit.errors
import kit.settings
import kit.units
from cache import settings
from cache.settings import CacheSettings, DatasetSettings, DirSource, PvcSource
from cache.views import closed
from kit.room import Asking, Intent, Presence, Report, Room, Rule, calls, named, whole

if TYPE_CHECKING:
    from cache.component import Cache
    from cache.dataset.dataset import Dataset


def given(dataset: DatasetSettings, section: CacheSettings, secrets: Path) -> DatasetSettings:
    """The dataset as an object of the cluster names it. SettingsError when it may not name this.

    Who writes objects is no root on the node: no path in one leads to a file of its choice.

    ``secrets``: the directory in which keys of Secrets (``secretRef``) are files.
    """
    source = dataset.source
    if isinstance(source, DirSource):
        if why := closed.why(closed.plain(str(source.path)), closed.OF_USERS):
            raise kit.errors.SettingsError(
                f"source.path {source.path}", why, "name it in the settings file of the node"
            )
        return dataset.model_copy(update={"source": source.named_by_object()})
    if isinstance(source, PvcSource):
        return dataset  # its annotation allows it, and its key is in a Secret
    file = closed.plain(str(source.secret_file))
    folders = [closed.plain(str(folder)) for folder in (secrets, section.object_keys)]
    if not any(closed.lies_in(file, folder) for folder in folders):
        raise kit.errors.SettingsError(
            f"source.secret_file {source.secret_file}",
            f"an object of the cluster names a file of the node outside of {section.object_keys}",
            "use secretRef, or put the key there (cache.object_keys)",
        )
    return dataset


# What the node's object in the cluster shows of datasets.


class DatasetStatus(kit.settings.Shown):
    """A dataset of this node."""

    name: str  # Name of the dataset.
    state: str  # complete, filling, partial, failed, paused, ...: as in 'nodeagent dataset list'.
    generation: str = ""  # Id of the version that jobs read.
    served_by: str = ""  # What jobs read: none, source, overlay or store.
    bytes: int = 0  # Bytes of the dataset, as far as counted.
    done_bytes: int = 0  # Bytes on the SSD. During a fill, in steps of 5 % of the whole.
    percent: int = 0  # Share on the SSD. During a fill, in steps of 5. 100: complete.
    # Why a fill is interrupted: the dataset that goes first, its priority, and what it does (fill,
    # verify). The interrupted fill then continues automatically.
    waits_for: str = ""
    message: str = ""  # Why the dataset is not complete. For a deleted dataset: who still uses it.
    scrubbed: str = ""  # End of the last complete scrub (RFC 3339). Empty before the first one.


def report(component: "Cache") -> list[DatasetStatus]:
    """One for each dataset of the settings, by name."""
    return [_reported(each) for _, each in sorted(component.datasets.items())]


def _reported(shown: "Dataset") -> DatasetStatus:
    figures, state = shown.figures, shown.state()
    total = figures.bytes
    if shown.generation.state == "complete":
        done, percent = total, 100
    else:
        # Coarse: each step is a write to the API server.
        percent = min(95, figures.done_bytes * 20 // total * 5) if total else 0
        done = total * percent // 100
    return DatasetStatus(
        name=shown.name,
        state=state,
        generation=Path(shown.folder).name,
        served_by=str(shown.stage),
        bytes=total,
        done_bytes=done,
        percent=percent,
        waits_for=shown.waits_for() if shown.gave_way else "",
        message="" if state == "complete" else shown.why(),
        scrubbed=kit.units.rfc3339(ended) if (ended := shown.generation.scrubbed) else "",
    )


# What makes a dataset another one: it needs a new name. Another snapshot is a new generation of it.
# As CEL calls them: namespace is a word of its own there.
_FIXED = ("kind", "path", "filesystem", "user", "pool", "__namespace__", "image", "name")
_DATASETS = Intent(
    kind="CachedDataset",
    plural="cacheddatasets",
    short=("cds",),
    summary="A dataset that nodes keep on their SSDs and that pods read by its name.",
    field="datasets",
    model=settings.DatasetSettings,
    key="name",
    without=("name",),
    rules=(
        Rule(
            "self.freshness != 'snapshot' || has(self.source.snapshot) || "
            "(has(self.source.path) && self.source.path.split('/').exists(p, p == '.snap'))",
            "freshness 'snapshot' needs source.snapshot (dir: a path in .snap); without a "
            "snapshot, write 'frozen' if the tree never changes",
        ),
        Rule(
            "self.freshness != 'frozen' || !(has(self.source.snapshot) || "
            "(has(self.source.path) && self.source.path.split('/').exists(p, p == '.snap')))",
            "the source is a snapshot; write freshness: snapshot",
        ),
        Rule(
            "!has(self.source.path) || self.source.path.startsWith('/')",
            "source.path is relative; begin it with /",
        ),
        Rule(
            "self.freshness == oldSelf.freshness",
            "freshness cannot change; make a dataset of another name",
        ),
        *(
            Rule(
                f"has(self.source.{name}) == has(oldSelf.source.{name}) && "
                f"(!has(self.source.{name}) || self.source.{name} == oldSelf.source.{name})",
                f"source.{name.strip('_')} cannot change: jobs would read two versions "
                "under one name; make a dataset of another name",
            )
            for name in _FIXED
        ),
    ),
    secret=("source", "secret_file"),
    given=given,
    release=calls("cache.component:Cache.release"),
    spread=True,
    requests=(
        Asking("pause", calls("cache.requests:pause"), calls("cache.requests:paused")),
        Asking("warm", calls("cache.requests:warm"), calls("cache.requests:warmed")),
        Asking("verify", calls("cache.requests:verify"), calls("cache.requests:verified")),
        Asking("rescan", calls("cache.requests:rescan"), calls("cache.requests:rescanned")),
    ),
)

_STATE_FILES = {
    "cache-trust.json": "all stored files are suspect: datasets are read from their sources until "
    "their files are verified",
    "cache-disk.json": "without cache.disk the store is used only where one is found",
    "dataset-uses.json": "datasets count as used when the agent started",
    "datasets/*.json": "a dataset of which nothing is stored may have been removed, so it is not "
    "filled: 'nodeagent dataset warm NAME' or 'nodeagent dataset remove NAME' decides; else what "
    "it shows stays what it is",
    "claims/*.json": "an RBD claim is not served until the API server has answered",
    "csi/*.json": "while something is mounted where its volume was, no dataset is removed",
}

ROOM = Room(
    name="cache",
    summary="The dataset cache. Without this section: off.",
    settings=settings.CacheSettings,
    build=calls("cache.component:Cache"),
    routes=named("cache.api:ROUTES"),
    heads=("datasets",),
    page=calls("cache.api:sections"),
    checks=calls("cache.doctor:checks"),
    traces=named("cache.uninstall"),
    intents=(_DATASETS,),
    condition=("CacheDegraded", "CacheWell"),
    data=lambda section: (section.store, section.views),
    state_files=_STATE_FILES,
    presence=Presence(
        "dataset",
        read=calls("cache.dataset.presence:read"),
        listen=calls("cache.dataset.presence:listen"),
    ),
    report=Report(
        "datasets",
        DatasetStatus,
        many=True,
        read=report,
        brief=whole,
        key="name",
        told=("state", "served_by", "generation", "waits_for"),
    ),
)
