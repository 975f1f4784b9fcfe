"""The cache's part of the admin API (paths and bodies: openapi.yaml) and of the status page."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence

import kit.errors
import kit.room
import kit.units
from cache import status
from cache.component import Cache
from cache.dataset import choices
from cache.dataset.dataset import Dataset
from cache.dataset.succession import Succession
from cache.fill import space
from cache.work.jobs import Jobs
from kit.room import Answer, Cell, Handler, Json, PageSection, Request, Role, Route, Stream, watch

# The cache's part of the status page: each dataset, what serves it, and the store.

MOST_ROWS = 200
MOST_SPACES = 4  # namespaces of the pods that read a dataset
_TONES = {"complete": "good", "failed": "bad", "partial": "mid"}
_SERVES = {
    "none": "nothing serves it",
    "source": "jobs read the source",
    "overlay": "jobs read SSD and source",
    "store": "jobs read the SSD",
}
_UNKNOWN = {"overlay": "no job was seen to open a file in the last 15 min"}
BLOCKS = "of an image, parts of a file may lie on either side"
_EMPTY = (
    "No dataset yet. Name one in the settings (cache.datasets) or make a CachedDataset in the "
    "cluster; it then shows here while it is warmed."
)


def sections(cache: Cache) -> Sequence[PageSection]:
    """Datasets by name, those that need a person first."""
    size = kit.units.format_size
    shown = [status.of_dataset(cache.datasets[name]) for name in sorted(cache.datasets)]
    shown.sort(key=lambda each: _TONES.get(each.state) != "bad" and each.served_by != "none")
    summary = f"The store takes {size(cache.used())} of {size(cache.settings.budget)}; "
    summary += f"its disk is {cache.store_state()}."
    if lacks := cache.lacking().bytes:
        summary += f" Other files take {size(lacks)} of what is to stay free (cache.reserve)."
    if len(shown) > MOST_ROWS:
        summary += f" {len(shown) - MOST_ROWS} more are not shown: nodeagent dataset list."
    head = ("Dataset", "State", "Read by", "SSD hits", "Stored", "On SSD", "Version", "Why")
    rows = [_row(each, cache.csi.pods(each.name)) for each in shown[:MOST_ROWS]]
    return [PageSection("Datasets", summary, head, rows, _EMPTY, _disk(cache))]


def _disk(cache: Cache) -> Sequence[kit.room.Slice]:
    """The store's disk as it was last seen; empty before that."""
    seen = cache.watch.seen if cache.watch is not None else None
    if seen is None or not seen.size:
        return ()
    kept = space.floors(seen.size, seen.inodes, cache.settings.reserve, cache.reserve.least).bytes
    return disk(seen.size, seen.free, cache.used(), cache.settings.budget, kept)


def disk(size: int, free: int, used: int, budget: int, kept: int) -> Sequence[kit.room.Slice]:
    """``kept``: what is to stay free. Where less of the budget is left than it says, the disk is
    too small for it."""
    reserve = min(kept, free)
    left = max(0, min(budget - used, free - reserve))
    return (
        kit.room.Slice("datasets", used, "used"),
        kit.room.Slice("other files", max(0, size - free - used), "other"),
        kit.room.Slice(f"left of the budget of {kit.units.format_size(budget)}", left, "left"),
        kit.room.Slice("free beside it", free - reserve - left, "free"),
        kit.room.Slice("reserve", reserve, "reserve"),
    )


def _row(shown: status.ShownDataset, pods: Sequence[str]) -> Sequence[Cell]:
    size = kit.units.format_size
    files, data, update = shown.files, shown.bytes, shown.update
    served = shown.served_by
    version = [Cell(shown.snapshot or shown.freshness)]
    unlisted = not files.total and shown.state != "complete"
    about = "about " if shown.estimated else ""
    counted = "" if unlisted else f"{files.done:,} of {about}{files.total:,} files"
    if update is not None:
        version.append(Cell(f"{update.snapshot or 'the next'} comes: {update.state}", "mid"))
    return (
        Cell(shown.name, style="strong", below=[Cell(shown.view, style="code")]),
        Cell(
            shown.state,
            tone=_TONES.get(shown.state, "mid"),
            below=[Cell(_SERVES.get(served, served), "bad" if served == "none" else "")],
        ),
        readers(pods, shown.used_by),
        hits_cell(shown),
        Cell(
            "not listed yet" if unlisted else f"{size(data.done)} of {size(data.total)}",
            progress=None if unlisted else (data.done, max(data.total, 1)),
            spark=shown.rate.history,
            below=_below(shown, counted),
        ),
        Cell(size(shown.store_bytes), number=True),
        Cell(shown.generation, style="code", below=version),
        Cell(below=[Cell(shown.why)] if shown.why else [], wide=True),
    )


def readers(pods: Sequence[str], used_by: str) -> Cell:
    """Pods that have it as a volume, by namespace; else who, and smaller what of the view."""
    if pods:
        spaces: dict[str, list[str]] = {}
        for pod in pods:
            space_of, _, name = pod.rpartition("/")
            spaces.setdefault(space_of, []).append(name)
        told = [
            f"{each}{': ' if each else ''}{kit.errors.some(names, between=', ')}"
            for each, names in spaces.items()
        ]
        more = [Cell(f"{len(told) - MOST_SPACES} more namespaces")] if told[MOST_SPACES:] else []
        number = f"{len(pods)} pod{'s' if len(pods) > 1 else ''}"
        return Cell(number, below=[*map(Cell, told[:MOST_SPACES]), *more])
    who, _, what = used_by.partition(": ")
    return Cell(who or "nobody", below=[Cell(what, style="code")] if what else [])


def hits_cell(shown: status.ShownDataset) -> Cell:
    """Which share of what jobs open is on the SSD. A sample says between what it may be."""
    share, hits, history = kit.units.format_share, shown.hits, shown.hits_history
    if hits is None:
        why = _UNKNOWN.get(shown.served_by, "")
        why = BLOCKS if why and shown.source["kind"] == "rbd" else why
        told, below = ("not known" if why else ""), ([Cell(why)] if why else [])
    else:
        told, below = share(hits.ratio), []
        if hits.opens:
            below = [
                Cell(f"{share(hits.low)} to {share(hits.high)}"),
                Cell(f"{hits.opens:,} opens seen"),
            ]
    # A line that never moved says no more than the number.
    moved = len(set(history)) > 1
    return Cell(told, below=below, spark=history if moved else (), spark_top=1.0)


def _below(shown: status.ShownDataset, counted: str) -> list[Cell]:
    """What is stored in files, how fast more comes, and what could not be."""
    rate, left = shown.rate, shown.eta_seconds
    found = [Cell(counted)] if counted else []
    if shown.phase:
        eta = "" if left is None else f", {kit.units.format_duration(left)} left"
        found.append(Cell(f"{rate.files:,.0f} files/s, {kit.units.format_size(rate.bytes)}/s{eta}"))
    if failed := shown.files.failed:
        found.append(Cell(f"{failed:,} could not be copied", tone="bad"))
    return found


MOST_FAILURES = 1000  # on one page
LONGEST_NAME = 255
LOOK_SECONDS = 2.0


def _named(cache: Cache, request: Request) -> Dataset:
    return cache.get(request.path["name"])


def _accepted(dataset: Dataset) -> Answer:
    return Answer(status.of_dataset(dataset), 202)


async def _look(cache: Cache) -> None:
    """So that what is said to be served is. Not for long: the watch looks by itself."""
    with contextlib.suppress(kit.errors.AgentError, OSError, RuntimeError):
        async with asyncio.timeout(LOOK_SECONDS):
            await cache.view_watch.look()


async def _list(cache: Cache, _: Request) -> Json:
    await _look(cache)
    return {
        "datasets": [status.of_dataset(cache.datasets[name]) for name in sorted(cache.datasets)],
        "orphans": sorted(
            {folder.split("/")[-2] for folder in cache.orphans} | set(cache.lost_views)
        ),
        "store": cache.store_state(),
        "store_bytes": cache.used(),
        "budget_bytes": cache.settings.budget,
    }


async def _show(cache: Cache, request: Request) -> status.ShownDataset:
    dataset = _named(cache, request)
    await _look(cache)
    return status.of_dataset(dataset)


def _request(act: Callable[[Cache, Dataset], Awaitable[None]]) -> Handler:
    """A request without fields."""

    async def handle(cache: Cache, request: Request) -> Answer:
        request.fields()
        dataset = _named(cache, request)
        await act(cache, dataset)
        return _accepted(dataset)

    return handle


def _job(act: Callable[[Jobs, Dataset], Awaitable[None]]) -> Handler:
    return _request(lambda cache, dataset: act(cache.jobs, dataset))


def _choice(act: Callable[[Succession], Awaitable[None]]) -> Handler:
    return _request(lambda cache, dataset: act(cache.successions[dataset.name]))


async def _warm(cache: Cache, request: Request) -> Answer:
    body = request.fields(now=bool)
    dataset = _named(cache, request)
    await _look(cache)
    await cache.jobs.ask(dataset, now=body.get("now", False))
    return _accepted(dataset)


async def _verify(cache: Cache, request: Request) -> Answer:
    body = request.fields(source=bool)
    dataset = _named(cache, request)
    await cache.jobs.verify(dataset, source=body.get("source", False))
    return _accepted(dataset)


async def _evict(cache: Cache, request: Request) -> Answer:
    body = request.fields(to=int, force=bool)
    to = body.get("to", 0)
    if not 0 <= to < 2**63:
        raise kit.errors.SettingsError("to", f"{to} is not a number of bytes", "correct it")
    dataset = _named(cache, request)
    await cache.evict(dataset.name, to=to, force=body.get("force", False))
    return _accepted(dataset)


async def _remove(cache: Cache, request: Request) -> Json:
    request.fields()
    name = request.path["name"]
    await cache.remove(name)
    return {"removed": name, "in_settings": name in cache.datasets}


async def _failures(cache: Cache, request: Request) -> Json:
    limit = request.query.get("limit", "100")
    if not (number := kit.units.parse_count(limit, MOST_FAILURES)):
        raise kit.errors.SettingsError(
            "limit", f"{limit!r} is not a number from 1 to {MOST_FAILURES}", "correct it"
        )
    after = request.query.get("after", "")
    return await status.failures(_named(cache, request), number, after)


async def _progress(cache: Cache, request: Request) -> Stream:
    dataset = _named(cache, request)

    def read() -> status.ShownDataset | None:
        return status.of_dataset(dataset) if dataset in cache.datasets.values() else None

    return Stream(watch(read))


async def _update(cache: Cache, request: Request) -> Answer:
    snapshot = request.fields(snapshot=str).get("snapshot", "")
    bad = snapshot in (".", "..") or "/" in snapshot or not snapshot.isprintable()
    if bad or len(snapshot) > LONGEST_NAME:
        cause = f"{snapshot[:100]!r} is not a name"
        raise kit.errors.SettingsError("snapshot", cause, "correct it")
    dataset = _named(cache, request)
    await choices.update(cache.successions[dataset.name], snapshot)
    return _accepted(dataset)


async def _publish_manifest(cache: Cache, request: Request) -> Json:
    to = request.fields(to=str).get("to", "")
    return await choices.publish(_named(cache, request), to)


async def _cancel(cache: Cache, dataset: Dataset) -> None:
    if not await choices.cancel(cache.successions[dataset.name]):
        await cache.jobs.cancel(dataset)


async def _generations(cache: Cache, request: Request) -> Json:
    dataset = _named(cache, request)
    users = cache.successions[dataset.name].users
    return {"generations": status.generations_of(dataset, users)}


_BASE = "/v1/datasets"
ROUTES = (
    Route("GET", _BASE, _list),
    Route("GET", f"{_BASE}/{{name}}", _show),
    Route("DELETE", f"{_BASE}/{{name}}", _remove, Role.DANGEROUS),
    Route("POST", f"{_BASE}/{{name}}/warm", _warm, Role.OPERATE),
    Route("POST", f"{_BASE}/{{name}}/pause", _job(Jobs.pause), Role.OPERATE),
    Route("POST", f"{_BASE}/{{name}}/resume", _job(Jobs.resume), Role.OPERATE),
    Route("POST", f"{_BASE}/{{name}}/cancel", _request(_cancel), Role.OPERATE),
    Route("POST", f"{_BASE}/{{name}}/verify", _verify, Role.OPERATE),
    Route("POST", f"{_BASE}/{{name}}/evict", _evict, Role.DANGEROUS),
    Route("POST", f"{_BASE}/{{name}}/update", _update, Role.OPERATE),
    Route("POST", f"{_BASE}/{{name}}/rollback", _choice(choices.rollback), Role.OPERATE),
    Route("POST", f"{_BASE}/{{name}}/rescan", _choice(choices.rescan), Role.OPERATE),
    Route("POST", f"{_BASE}/{{name}}/manifest", _publish_manifest, Role.DANGEROUS),
    Route("GET", f"{_BASE}/{{name}}/generations", _generations),
    Route("GET", f"{_BASE}/{{name}}/failures", _failures),
    Route("GET", f"{_BASE}/{{name}}/progress", _progress),
)
