"""The cache as the process registers it."""

import kit.traces
from cache import node_status, objects, settings
from kit.room import Asking, Command, Intent, Presence, Report, Room, Rule, calls, named


def _traces() -> kit.traces.Traces:
    from cache import uninstall

    return kit.traces.Traces(uninstall.find, uninstall.remove)


# What makes a dataset another one: it needs a new name. Another snapshot is a new generation of it.
# As CEL calls them: namespace is a word of its own there.
_FIXED = ("kind", "path", "filesystem", "user", "pool", "__namespace__", "image")
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
            "freshness 'snapshot' needs source.snapshot (dir: a .snap path); a tree without one is "
            "live and cannot be cached",
        ),
        Rule(
            "self.freshness != 'frozen' || !(has(self.source.snapshot) || "
            "(has(self.source.path) && self.source.path.split('/').exists(p, p == '.snap')))",
            "the source is a snapshot; say freshness: snapshot",
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
    given=objects.given,
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
    "cache-trust.json": "all stored files are doubted: datasets are read from their sources until "
    "their files are verified",
    "cache-disk.json": "without cache.disk the store is used only where one is found",
    "dataset-uses.json": "datasets count as used when the agent started",
    "datasets/*.json": "a dataset of which nothing is stored may have been removed, so it is not "
    "filled: 'nodeagent dataset warm' or 'nodeagent dataset remove' decides; else what it shows "
    "stays what it is",
    "csi/*.json": "while something is mounted where its volume was, no dataset is removed",
}

ROOM = Room(
    name="cache",
    summary="The dataset cache; absent: no cache on this node.",
    settings=settings.CacheSettings,
    build=calls("cache.component:Cache"),
    routes=named("cache.api:ROUTES"),
    openapi="cache:openapi.yaml",
    commands=(
        Command(
            "dataset",
            "Datasets: warmed onto the SSD, served by the kernel.",
            named("cache.commands:dataset"),
        ),
    ),
    page=calls("cache.page:sections"),
    checks=calls("cache.doctor:checks"),
    traces=_traces,
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
        node_status.DatasetStatus,
        many=True,
        read=node_status.of,
        brief=node_status.brief,
        key="name",
        told=("state", "served_by", "generation", "waits_for"),
    ),
)
