"""What an agent finds mounted at a view when it starts, and a publish that fails."""

import asyncio
import dataclasses
import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import kit.child
from cache.dataset.dataset import Dataset
from cache.settings import CacheSettings, DatasetSettings, DirSource
from cache.views import view
from cache.views.view import Shown, Stage
from linux import mountinfo, mounts
from tests.cache.views.test_view import disk as disk
from tests.testbed import held, trees
from tests.testbed.agent import Agent

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]


def published(disk: Path, stage: Stage) -> Shown:
    done = view.publish(
        str(disk / "view"), stage, str(disk / "source"), str(disk / "store"), str(disk / "scratch")
    )
    del done["clean"], done["mount"]
    return Shown(**done)


def seen(disk: Path, shown: Shown, layer: str = "store") -> Stage:
    tree = disk / layer
    inode = tree.stat().st_ino if tree.exists() else 0
    return view.stage_of(str(disk / "view"), str(tree), mountinfo.read(), shown, inode)


@pytest.mark.parametrize("stage", [Stage.SOURCE, Stage.OVERLAY, Stage.STORE])
def test_own_mount_is_known_again(disk: Path, stage: Stage) -> None:
    assert seen(disk, published(disk, stage)) is stage


@pytest.mark.parametrize("stage", [Stage.OVERLAY, Stage.STORE])
def test_mount_without_a_memory_is_known_by_its_layer(disk: Path, stage: Stage) -> None:
    published(disk, stage)
    assert seen(disk, Shown()) is stage


@pytest.mark.parametrize("stage", [Stage.OVERLAY, Stage.STORE])
def test_mount_of_a_deleted_tree_is_unknown(disk: Path, stage: Stage) -> None:
    shown = published(disk, stage)
    (disk / "store").rename(disk / "trash")  # keeps its inode number from being given again
    (disk / "store").mkdir()
    assert seen(disk, shown) is Stage.UNKNOWN
    shutil.rmtree(disk / "store")
    assert seen(disk, shown) is Stage.UNKNOWN


@pytest.mark.parametrize("stage", [Stage.OVERLAY, Stage.STORE])
def test_mount_of_another_generation_is_unknown(disk: Path, stage: Stage) -> None:
    shown = published(disk, stage)
    (disk / "other").mkdir()
    assert seen(disk, shown, layer="other") is Stage.UNKNOWN


def test_foreign_mount_is_unknown(disk: Path) -> None:
    shown = published(disk, Stage.SOURCE)
    mounts.detach(disk / "view")
    (disk / "foreign").mkdir()
    mounts.mount(str(disk / "foreign"), disk / "view", None, mounts.MS_BIND)
    assert seen(disk, shown) is Stage.UNKNOWN
    assert seen(disk, Shown()) is Stage.UNKNOWN


@pytest.mark.parametrize("state", ["complete", "filling"])
def test_view_of_a_deleted_store_shows_the_source_again(
    area: Path, node: Agent, state: str
) -> None:
    source = area / "source"
    trees.plain(source, 300)
    node.add_dir("a", source)
    if state == "filling":
        held.Fill(node, 30)
    node.start()
    node.wait_state("a", state)
    node.wait_served("a", "store" if state == "complete" else "overlay")
    node.kill()
    node.wait_for(lambda: not node.passes(), 20, "the pass to end")
    (folder,) = node.generations("a")
    shutil.rmtree(folder)
    assert state == "filling" or list(node.view("a").iterdir()) == []
    node.cache["datasets"][0]["warm"] = False
    node.start()
    node.wait_served("a", "source")
    trees.assert_equal(source, node.view("a"))


# --- a publish that fails


def complete(area: Path) -> Dataset:
    (area / "source").mkdir()
    settings = DatasetSettings(
        name="a", freshness="frozen", source=DirSource(kind="dir", path=area / "source")
    )
    cache = CacheSettings(store=area / "store", views=area / "views")
    made = Dataset(settings, cache, area / "state", lambda: None)
    os.makedirs(made.layer)
    made.generation = dataclasses.replace(made.generation, state="complete", skeleton=True)
    asyncio.run(made.change())
    return made


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.EINVAL, errno.EBUSY])
def test_failed_publish_leaves_a_complete_dataset_complete(
    area: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    shown = complete(area)
    real = kit.child.call

    async def call(function: Any, *arguments: Any, deadline: float) -> Any:
        if function is view.publish:
            raise OSError(number, os.strerror(number))
        return await real(function, *arguments, deadline=deadline)

    monkeypatch.setattr(kit.child, "call", call)
    with pytest.raises(OSError, match=os.strerror(number)):
        asyncio.run(shown.publish_store())
    assert shown.generation.state == "complete"


def test_complete_dataset_without_its_tree_is_filled_again(area: Path) -> None:
    shown = complete(area)
    shutil.rmtree(shown.layer)
    with pytest.raises(OSError, match="No such file"):
        asyncio.run(shown.publish_store())
    assert shown.generation.state == "filling"
    assert not shown.generation.skeleton
