"""The cache's part of the admin API (paths and bodies: openapi.yaml) and of the status page."""

from collections.abc import Awaitable, Callable, Sequence

import kit.errors
import kit.units
from cache import status
from cache.component import Cache
from cache.dataset import Dataset
from cache.jobs import Jobs
from kit.room import Answer, Cell, Handler, Json, PageSection, Request, Role, Route, Stream, watch

MOST_FAILURES = 1000  # on one page

_TONES = {"complete": "good", "failed": "bad", "waiting": "bad", "partial": "mid"}


def _named(cache: Cache, request: Request) -> Dataset:
    return cache.get(request.path["name"])


def _accepted(dataset: Dataset) -> Answer:
    return Answer(status.of_dataset(dataset), 202)


async def _list(cache: Cache, _: Request) -> Json:
    return {
        "datasets": [status.of_dataset(cache.datasets[name]) for name in sorted(cache.datasets)],
        "orphans": sorted({folder.split("/")[-2] for folder in cache.orphans}),
        "store_bytes": cache.used(),
        "budget_bytes": cache.settings.budget,
    }


async def _show(cache: Cache, request: Request) -> Json:
    return status.of_dataset(_named(cache, request))


def _request(act: Callable[[Jobs, Dataset], Awaitable[None]]) -> Handler:
    """A request without fields."""

    async def handle(cache: Cache, request: Request) -> Answer:
        request.fields()
        dataset = _named(cache, request)
        await act(cache.jobs, dataset)
        return _accepted(dataset)

    return handle


async def _verify(cache: Cache, request: Request) -> Answer:
    body = request.fields(source=bool)
    dataset = _named(cache, request)
    await cache.jobs.verify(dataset, source=body.get("source", False))
    return _accepted(dataset)


async def _remove(cache: Cache, request: Request) -> Json:
    name = request.path["name"]
    await cache.remove(name)
    return {"removed": name, "in_settings": name in cache.datasets}


async def _failures(cache: Cache, request: Request) -> Json:
    limit = request.query.get("limit", "100")
    if not limit.isdigit() or not 1 <= int(limit) <= MOST_FAILURES:
        raise kit.errors.SettingsError(
            "limit", f"{limit!r} is not a number from 1 to {MOST_FAILURES}", "correct it"
        )
    after = request.query.get("after", "")
    return await status.failures(_named(cache, request), int(limit), after)


async def _progress(cache: Cache, request: Request) -> Stream:
    dataset = _named(cache, request)

    def read() -> Json | None:
        return status.of_dataset(dataset) if dataset in cache.datasets.values() else None

    return Stream(watch(read))


_BASE = "/v1/datasets"
ROUTES = (
    Route("GET", _BASE, _list),
    Route("GET", f"{_BASE}/{{name}}", _show),
    Route("DELETE", f"{_BASE}/{{name}}", _remove, Role.DANGEROUS),
    Route("POST", f"{_BASE}/{{name}}/warm", _request(Jobs.warm), Role.OPERATE),
    Route("POST", f"{_BASE}/{{name}}/pause", _request(Jobs.pause), Role.OPERATE),
    Route("POST", f"{_BASE}/{{name}}/resume", _request(Jobs.resume), Role.OPERATE),
    Route("POST", f"{_BASE}/{{name}}/cancel", _request(Jobs.cancel), Role.OPERATE),
    Route("POST", f"{_BASE}/{{name}}/verify", _verify, Role.OPERATE),
    Route("GET", f"{_BASE}/{{name}}/failures", _failures),
    Route("GET", f"{_BASE}/{{name}}/progress", _progress),
)


def page(cache: Cache) -> Sequence[PageSection]:
    """Each dataset with its state, its progress and its place on the SSD."""
    size = kit.units.format_size
    rows = [_row(status.of_dataset(cache.datasets[name])) for name in sorted(cache.datasets)]
    return [
        PageSection(
            title="Datasets",
            summary=f"{size(cache.used())} of {size(cache.settings.budget)} used.",
            head=("Dataset", "State", "Stored", "On SSD", "Why"),
            rows=rows,
        )
    ]


def _row(shown: Json) -> Sequence[Cell]:
    size = kit.units.format_size
    files, data, rate, left = shown["files"], shown["bytes"], shown["rate"], shown["eta_seconds"]
    about = "about " if shown["estimated"] else ""
    stored = [
        Cell(
            f"{files['done']} of {about}{files['total']} files, "
            f"{size(data['done'])} of {size(data['total'])}"
        )
    ]
    if shown["phase"]:
        eta = "" if left is None else f", {kit.units.format_duration(left)} left"
        stored.append(Cell(f"{rate['files']:.0f} files/s, {size(rate['bytes'])}/s{eta}"))
    if files["failed"]:
        stored.append(Cell(f"{files['failed']} failed", tone="bad"))
    return (
        Cell(shown["name"], style="strong", below=[Cell(shown["view"], style="code")]),
        Cell(
            shown["state"],
            tone=_TONES.get(shown["state"], "mid"),
            below=[Cell(f"served by {shown['served_by']}")],
        ),
        Cell(progress=(files["done"], max(files["total"], 1)), below=stored),
        Cell(size(shown["store_bytes"])),
        Cell(below=[Cell(shown["why"])]),
    )
