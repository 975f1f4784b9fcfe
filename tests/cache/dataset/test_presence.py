"""Schedulers are told of whole datasets only, and of the end of one before its files go."""

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

import kit.errors
from cache import component
from cache.dataset import dataset, presence, standing
from cache.settings import CacheSettings, DatasetSettings
from cache.store import generations
from cache.views import view
from tests.cache.test_component import Nobody


class Complete(standing.Standing):
    """A complete one, as far as it is asked here."""

    stage = view.Stage.STORE
    newer = no_store = trouble = job = None
    removed = suspect = False
    folder = "/store/coco/frozen-1"
    record = generations.Generation(dataset="coco", identity="{}", state="complete")

    def __init__(self, refuses: bool = False) -> None:
        self.refuses = refuses
        self.did: list[str] = []
        self.current = cast(Any, self)  # as far as it is asked: its record

    async def remove(self) -> None:
        self.did.append("removed")
        if self.refuses:
            raise kit.errors.InUseError("dataset coco", "a pod uses it", "wait")


def made(tmp_path: Path, one: Complete) -> component.Cache:
    (tmp_path / "store" / generations.TRASH).mkdir(parents=True)
    (tmp_path / "views").mkdir()
    settings = CacheSettings(store=tmp_path / "store", views=tmp_path / "views", budget=2**40)
    cache = component.Cache(settings, state_dir=tmp_path / "state", reporter=Nobody())
    cache.datasets["coco"] = cast(Any, one)
    return cache


@pytest.mark.parametrize(
    "change",
    [
        {"stage": view.Stage.OVERLAY},
        {"removed": True},
        {"suspect": True},
        {"no_store": kit.errors.HostError("disk", "gone", "look")},
        {"newer": kit.errors.HostError("files", "newer", "update")},
        {"record": generations.Generation(dataset="coco", identity="{}", state="partial")},
    ],
    ids=lambda change: next(iter(change)),
)
def test_only_what_is_read_from_the_ssd_alone_is_told(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    one = Complete()
    cache = made(tmp_path, one)
    assert presence.read(cache) == {"coco": "frozen-1"}
    for name, value in change.items():
        setattr(one, name, value)
    assert presence.read(cache) == {}


async def test_loss_of_files_is_told_once_it_is_durable_that_they_go(tmp_path: Path) -> None:
    """As an eviction begins: the state first, then the files."""
    source = {"kind": "dir", "path": str(tmp_path)}
    settings = DatasetSettings.model_validate(
        {"name": "coco", "source": source, "freshness": "frozen"}
    )
    store = CacheSettings(store=tmp_path / "store", views=tmp_path / "views")
    real = dataset.Dataset(settings, store, tmp_path, lambda: None)
    Path(real.folder).mkdir(parents=True)
    told = []

    async def tell() -> None:
        told.append((real.whole(), (generations.load(real.folder) or {})["state"]))

    real.tell, real.stage = tell, view.Stage.STORE
    await real.change(state="complete")
    await real.change(scrubbed=1.0)
    assert real.whole() and told == []
    await real.change(state="partial", left_files=1)
    assert told == [(False, "partial")]
    await real.change(left_files=2)
    assert len(told) == 1


async def test_dataset_that_is_added_later_tells_too(tmp_path: Path) -> None:
    cache = made(tmp_path, Complete())
    told = []

    async def tell() -> None:
        told.append("told")

    source = {"kind": "dir", "path": str(tmp_path)}
    late = {"name": "late", "source": source, "freshness": "frozen"}
    await cache._add([DatasetSettings.model_validate(late)])
    loops = list(cache._tasks.values())
    for each in loops:  # before they begin
        each.cancel()
    await asyncio.gather(*loops, return_exceptions=True)
    await cache.datasets["late"].tell_loss()
    assert told == [], "nobody listens yet"
    presence.listen(cache, tell)
    await cache.datasets["late"].tell_loss()
    assert told == ["told"]


@pytest.mark.parametrize("refuses", [False, True])
async def test_end_is_told_before_the_files_go(
    tmp_path: Path, refuses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Complete(refuses)
    cache = made(tmp_path, one)

    async def tell() -> None:
        assert presence.read(cache) == {}
        one.did.append("told")

    presence.listen(cache, tell)
    monkeypatch.setattr(cache, "_remove", lambda _: one.remove())
    if refuses:
        with pytest.raises(kit.errors.InUseError):
            await cache.remove("coco")
        assert presence.read(cache) == {"coco": "frozen-1"}  # it stays, after all
    else:
        await cache.remove("coco")
    assert one.did == ["told", "removed"]
