"""Reaching and letting go of a source: one at a time, and nothing of it stays mounted."""

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest

import kit.errors
from cache.dataset import Dataset
from cache.settings import CacheSettings, CephfsSource, DatasetSettings, DirSource
from cache.sources import cephfs, reach
from linux import mountinfo, mounts


class SlowSource:
    """A source that takes a moment, and knows how many reach it at once."""

    immutable = False
    identity: dict[str, Any] = {"kind": "slow"}  # noqa: RUF012

    def __init__(self, *, answers: bool = True) -> None:
        self.answers = answers
        self.reaching = self.most = self.times = 0

    async def reach(self, deadline: float) -> reach.Reached:
        self.reaching += 1
        self.times += 1
        self.most = max(self.most, self.reaching)
        await asyncio.sleep(0.05)
        self.reaching -= 1
        if not self.answers:
            raise kit.errors.SourceError("the source", "it does not answer", "wait")
        return reach.Reached("/nowhere", "1:1", "1:1", "slow")

    async def release(self) -> None:
        assert self.reaching == 0, "let go while somebody reaches it"


def complete(folder: Path, source: SlowSource, woken: list[int]) -> Dataset:
    settings = DatasetSettings(
        name="a", freshness="frozen", source=DirSource(kind="dir", path=folder / "source")
    )
    cache = CacheSettings(store=folder / "store", views=folder / "views")
    made = Dataset(settings, cache, folder / "state", lambda: woken.append(1))
    made.source = source
    made.generation = dataclasses.replace(made.generation, state="complete")
    return made


def test_verify_reaches_the_source_once_and_keeps_it_meanwhile(tmp_path: Path) -> None:
    source, woken = SlowSource(), list[int]()

    async def ask() -> None:
        dataset = complete(tmp_path, source, woken)
        asked = [asyncio.create_task(dataset.verify(source=True)) for _ in range(2)]
        await asyncio.sleep(0.02)
        assert dataset.facts().source_needed
        assert dataset.lock.locked()
        assert woken == []
        await asyncio.gather(*asked)
        assert dataset.facts().source_needed
        assert dataset.work.verify_queued

    asyncio.run(ask())
    assert (source.most, source.times) == (1, 1)
    assert woken == [1, 1]


def test_a_verify_whose_source_does_not_answer_is_refused_and_not_queued(tmp_path: Path) -> None:
    async def ask() -> None:
        dataset = complete(tmp_path, SlowSource(answers=False), [])
        with pytest.raises(kit.errors.SourceError):
            await dataset.verify(source=True)
        assert dataset.work.verified == {}
        assert not dataset.facts().source_needed

    asyncio.run(ask())


def test_a_source_that_went_before_its_turn_fails_the_comparison(tmp_path: Path) -> None:
    async def ask() -> None:
        dataset = complete(tmp_path, SlowSource(answers=False), [])
        dataset.work.verified = {"state": "queued", "source": True}
        await dataset.work.run_verify(0)
        assert dataset.work.verified["state"] == "failed"
        assert "does not answer" in dataset.work.verified["why"]

    asyncio.run(ask())


@pytest.mark.real
def test_every_mount_on_the_mount_point_of_a_source_goes(area: Path) -> None:
    folder = area / "sources" / "a"
    source = CephfsSource(
        kind="cephfs", monitors=("127.0.0.1:1",), path="/a", secret_file=area / "secret"
    )
    settings = DatasetSettings(name="a", freshness="frozen", source=source)
    made = cephfs.Cephfs(settings, source, folder)
    target = folder / "mount"
    target.mkdir(parents=True)
    for _ in range(2):
        mounts.mount(str(area), target, None, mounts.MS_BIND)
    assert len(mountinfo.at(str(target), mountinfo.read())) == 2
    asyncio.run(made.release())
    assert mountinfo.at(str(target), mountinfo.read()) == []
    assert not folder.exists()
