"""How sources are looked at and let go: how many at once, again after a failure, by another way."""

import asyncio
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import kit.errors
from cache import component
from cache.dataset.action import Action
from cache.fill import control, copy
from cache.settings import CacheSettings, CephfsSource, DatasetSettings, same_place
from cache.sources import cephfs, cephfs_mount, roots
from cache.store import generations, tree
from cache.views import view
from tests.cache.test_component import Nobody
from tests.cache.work.test_jobs import Source, dataset
from tests.testbed import trees
from tests.testbed.agent import Agent


async def test_only_so_many_sources_are_looked_at_at_once(tmp_path: Path) -> None:
    source = Source()
    looks = asyncio.Semaphore(component.MOST_LOOKS)
    shown = [dataset(tmp_path / str(number), source) for number in range(60)]
    for each in shown:
        each.looks = looks
    looking = [asyncio.create_task(each.reach()) for each in shown]
    while source.reaching < component.MOST_LOOKS:
        await asyncio.sleep(0)
    source.go.set()
    await asyncio.gather(*looking)
    assert (source.times, source.most) == (60, component.MOST_LOOKS)


async def test_release_that_failed_is_tried_again(tmp_path: Path) -> None:
    class Stubborn(Source):
        fails = 2

        async def release(self) -> None:
            if self.fails:
                self.fails -= 1
                raise kit.errors.InUseError("the mount", "it is busy", "wait")

    shown = dataset(tmp_path, Stubborn())
    shown.stage = view.Stage.STORE
    shown.due.first_check(float("inf"))
    for _ in range(2):
        with pytest.raises(kit.errors.InUseError):
            await shown._act(Action.RELEASE)
        assert shown.facts().source_mounted
    assert await shown._act(Action.RELEASE)
    assert not shown.facts().source_mounted


def settings(folder: Path, **more: Any) -> CephfsSource:
    fields: dict[str, Any] = {
        "kind": "cephfs", "monitors": ["10.0.0.1:1"], "path": "/a", "snapshot": "v1",
        "secret_file": folder / "secret",
    }  # fmt: skip
    return CephfsSource.model_validate(fields | more)


def test_the_way_to_a_source_may_change_and_the_source_not(tmp_path: Path) -> None:
    old = settings(tmp_path)
    for way in ({"monitors": ["10.0.0.2:1"]}, {"secret_file": "/k"}, {"client": "fuse"}):
        assert same_place(old, settings(tmp_path, **way)), way
    for place in ({"path": "/b"}, {"filesystem": "other"}, {"path": "/b", "snapshot": "v2"}):
        assert not same_place(old, settings(tmp_path, **place)), place
    assert same_place(old, settings(tmp_path, snapshot="v2")), "another snapshot is an update"


def test_other_monitors_are_another_mount(tmp_path: Path) -> None:
    given = settings(tmp_path)
    named = DatasetSettings(name="a", freshness="snapshot", source=given)
    source = cephfs.Cephfs(named, given, tmp_path)
    (tmp_path / cephfs_mount.SHOWN).write_text(source._shows)
    assert source._is_ours()
    source.take(settings(tmp_path, secret_file="/elsewhere"))
    assert source._is_ours()
    source.take(settings(tmp_path, monitors=["10.0.0.9:1"]))
    assert not source._is_ours()


@pytest.mark.real
@pytest.mark.parametrize(("ahead", "waits"), [(0.0, True), (10.0, False), (-10.0, False)])
def test_change_time_in_the_future_costs_no_wait(
    area: Path, monkeypatch: pytest.MonkeyPatch, ahead: float, waits: bool
) -> None:
    (area / "source").mkdir()
    (area / "staging").mkdir()
    (area / "source" / "f").write_bytes(b"x")
    status = (area / "source" / "f").stat()
    naps: list[float] = []
    monkeypatch.setattr(time, "time_ns", lambda: status.st_ctime_ns - int(ahead * 1e9))
    monkeypatch.setattr(time, "sleep", naps.append)
    copier = copy.Copier(control.Throttle(control.Control.create(), 0), immutable=False)
    with tree.opened_root(area / "source") as origin, tree.opened_root(area / "staging") as staging:
        copier.copy(origin, tree.entry_of("f", status), staging)
    assert bool(naps) is waits


@pytest.mark.real
async def test_nothing_is_synced_in_the_loop(area: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync

    def fsync(descriptor: int) -> None:
        assert threading.current_thread() is not threading.main_thread(), (
            "the loop waits for a disk"
        )
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    cache = component.Cache(
        CacheSettings(store=area / "store", views=area / "views"), area / "state", Nobody()
    )
    await cache._prepare_store()
    shown = dataset(area, Source())
    await shown.save_state()
    await shown.change(state="new")
    given = settings(area)
    named = DatasetSettings(name="a", freshness="snapshot", source=given)
    (area / "secret").write_text("AQBrKRhnAAAAABAAd2Vyc2lvbiAxIGtleSBmb3IgdGVzdHM=")
    with pytest.raises(kit.errors.SourceError):  # nobody is at that address
        await cephfs.Cephfs(named, given, area / "sources").reach(1.0)
    assert isinstance(roots.Root, type)


def test_store_of_a_newer_format_is_left_alone(tmp_path: Path) -> None:
    marker = tmp_path / "nodeagent.json"
    marker.write_text('{"format": 2, "more": 1}')
    (tmp_path / "what we do not know").mkdir()
    with pytest.raises(kit.errors.HostError, match="its format is 2"):
        generations._check_format(tmp_path, "")
    assert marker.read_text() == '{"format": 2, "more": 1}'
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["nodeagent.json", "what we do not know"]


@pytest.mark.real
@pytest.mark.timeout(120)
def test_view_without_a_store_is_reported(area: Path, node: Agent) -> None:
    trees.plain(area / "source", 20)
    node.add_dir("a", area / "source")
    node.start()
    node.wait_state("a", "complete")
    (folder,) = node.generations("a")
    node.stop()
    shutil.rmtree(folder.parent)
    node.cache["datasets"] = []
    node.start()
    assert node.get("/v1/datasets")["orphans"] == ["a"]
    assert [each["rule"] for each in node.findings()] == ["view-orphan"]
    assert node.cli("dataset", "remove", "a").returncode == 0
    assert not node.view("a").exists()
    node.wait_for(lambda: node.findings() == [], 30, "the finding to go")
