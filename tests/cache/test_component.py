"""Bytes of the store that no dataset of the settings has: orphans, and what is being deleted."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

import kit.child
import kit.findings
from cache import component
from cache.settings import CacheSettings
from cache.space import reserve
from cache.store import disk, generations, health, probe, watch
from cache.views import view
from tests.testbed import waiting


class Nobody(kit.findings.Reporter):
    def report(self, *_: Any, **__: Any) -> None:
        pass


def generation(root: Path, name: str, *, state: str, used: int) -> Path:
    folder = root / name / "g"
    fields = {"dataset": name, "identity": "{}", "state": state, "used": used}
    generations.save(str(folder), fields)
    (folder / "tree" / "d").mkdir(parents=True)
    (folder / "tree" / "d" / "f").write_text("x")
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "store" / generations.TRASH).mkdir(parents=True)
    return tmp_path / "store"


@pytest.fixture
def cache(tmp_path: Path, root: Path) -> component.Cache:
    settings = CacheSettings(store=root, views=tmp_path / "views", budget=2**40)
    return component.Cache(settings, state_dir=tmp_path / "state", reporter=Nobody())


class Broken:
    """A dataset that nothing serves."""

    name, stage, removed = "a", view.Stage.NONE, False

    def why(self) -> str:
        return "no monitor answers"


def test_one_dataset_that_nothing_serves_is_told_and_leaves_the_agent_ready(
    cache: component.Cache,
) -> None:
    cache.datasets["a"] = Broken()  # type: ignore[assignment]
    health = cache.health()
    assert health.ready
    assert list(health.reasons) == ["a: not published (no monitor answers)"]


@pytest.mark.parametrize("strange", [False, True])
async def test_store_that_is_missing_is_made_anew_while_the_agent_runs(
    strange: bool, root: Path, cache: component.Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "check", lambda *_: None)
    monkeypatch.setattr(generations, "_check_abilities", lambda _: None)
    (root / generations.TRASH).rmdir()
    if strange:
        (root / "others").mkdir()
    cache.watch = watch.StoreWatch(
        str(root), cache._state_dir, None, cache._store_changed, cache.soundness, lambda: None
    )
    cache.watch.take(health.Sign("its disk fails (Input/output error)"))
    await cache._look_at_store()
    assert not disk.uuid_of(str(root)), "a store is made where one may come back"
    cache.watch.take(health.Sign("no store is there", gone=True, missing=True))
    await cache._look_at_store()
    assert bool(disk.uuid_of(str(root))) is not strange
    assert cache.health().alive is strange, "all begins anew with a new store, and only then"
    if strange:
        assert "not empty" in str(cache.no_store)
    disk.unlock(str(root))


async def test_what_lacks_room_is_filled_again_when_others_leave_some(
    cache: component.Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    came: list[Any] = []
    monkeypatch.setattr(cache.jobs, "room_came", came.extend)
    monkeypatch.setattr(reserve, "LASTS_SECONDS", 0.0)
    cache.watch = watch.StoreWatch(
        "/s", cache._state_dir, None, cache._store_changed, cache.soundness, lambda: None
    )
    broken: Any = Broken()
    cache.datasets["a"] = broken
    monkeypatch.setattr(cache, "used", lambda: 2**30)
    for free, deleting in ((1, 0), (1, 0), (50, 2**30), (50, 0), (50, 0)):
        cache.trashed = deleting
        cache.watch.seen = probe.Seen(size=100 * 2**30, free=free * 2**30)
        component._disk_looked_at(cache)
    assert [each.name for each in came] == ["a"]


async def test_trash_counts_until_deleted_and_is_retried(
    root: Path, cache: component.Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(component, "TRASH_RETRY_SECONDS", 0.05)
    real, tries = kit.child.call, [0]

    async def call(function: Any, *arguments: Any, deadline: float) -> Any:
        if function is generations.empty_trash:
            tries[0] += 1
            if tries[0] < 3:
                assert cache.used() >= 10**9
                raise RuntimeError("killed") if tries[0] == 1 else OSError(5, "I/O error")
        return await real(function, *arguments, deadline=deadline)

    monkeypatch.setattr(kit.child, "call", call)
    folder = generation(root, "old", state="complete", used=10**9)
    cache.orphans = {str(folder): 10**9}
    monkeypatch.setattr(os.path, "ismount", lambda _: True)
    monkeypatch.setattr(view, "take_down", generations.load)  # nothing is mounted
    await cache.remove("old")
    assert cache.orphans == {}
    assert cache.trashed == 10**9
    assert cache._trash is not None
    async with asyncio.timeout(waiting.limit(90)):
        await cache._trash
    assert tries[0] == 3
    assert cache.used() == 0
    assert list((root / generations.TRASH).iterdir()) == []


async def test_trash_discarded_meanwhile_is_deleted(root: Path, cache: component.Cache) -> None:
    first, second = (generation(root, name, state="complete", used=7) for name in ("a", "b"))
    generations.discard(str(root), str(first))
    cache._empty_trash()
    task = cache._trash
    assert task is not None
    await asyncio.sleep(0)
    while cache._trash_waits:
        await asyncio.sleep(0)
    generations.discard(str(root), str(second))
    cache._empty_trash()
    async with asyncio.timeout(waiting.limit(90)):
        await task
    assert list((root / generations.TRASH).iterdir()) == []
