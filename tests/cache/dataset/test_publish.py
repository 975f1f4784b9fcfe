"""Publishing a manifest: where it may be written, one at a time, and what a killed one leaves."""

import asyncio
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kit.child
import kit.errors
import kit.files
from cache.dataset import choices, standing
from cache.store import index, published
from cache.store.tree import Entry

MARKS = {"cluster": "f51d", "filesystem": "1", "root": "1099511627776", "snapshot": "7"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A generation with nothing but its root."""
    made = tmp_path / "generation"
    made.mkdir()
    known = index.Index.open(made / index.NAME)
    known.add_root(Entry("", 0o40755, 0, 0, 0, 5, 1, 1, False))
    known.listed(1, entries=0, files=0, size=0, stored=(0, 0, 0), skipped=0)
    known.close()
    return made


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "shared").mkdir()
    return tmp_path / "shared" / "v7.manifest"


def names(target: Path) -> list[str]:
    return sorted(each.name for each in target.parent.iterdir())


def test_what_a_killed_publish_left_is_taken_away(folder: Path, target: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "rename", lambda *_, **__: os._exit(9))
        pid = os.fork()
        if pid == 0:
            published.write(str(target), str(folder), MARKS)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    (left,) = names(target)
    for content in target.with_name(left).read_bytes(), b"":
        target.with_name(left).write_bytes(content)
        published.write(str(target), str(folder), MARKS)
        assert names(target) == ["v7.manifest"]


def test_what_another_made_or_writes_beside_it_stays(folder: Path, target: Path) -> None:
    fresh = target.with_name(".v7.manifest.new")
    fresh.write_text("mine")
    with pytest.raises(kit.errors.RefusedError, match="no manifest"):
        published.write(str(target), str(folder), MARKS)
    fresh.write_bytes(published.MAGIC)
    os.chown(fresh, 1234, 0)
    with pytest.raises(kit.errors.RefusedError, match="not root's"):
        published.write(str(target), str(folder), MARKS)
    os.chown(fresh, 0, 0)
    with kit.files.closing(os.open(fresh, os.O_RDONLY)) as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(kit.errors.RefusedError, match="being published already"):
            published.write(str(target), str(folder), MARKS)
    assert names(target) == [fresh.name]


def test_nothing_is_written_to_the_directories_of_the_agent(folder: Path, target: Path) -> None:
    """Also not by a way that leads there."""
    way = target.parent.with_name("way")
    way.symlink_to(target.parent)
    for path, place in (target, target.parent), (way / "a.manifest", target.parent.parent):
        with pytest.raises(kit.errors.RefusedError, match="it would be in"):
            published.write(str(path), str(folder), MARKS, [str(place)])
    published.write(str(way / "a.manifest"), str(folder), MARKS, [str(folder)])
    assert names(target) == ["a.manifest"]


DAMAGES: dict[str, Callable[[Path], object]] = {
    "lost": Path.unlink,
    "damaged": lambda file: file.write_bytes(b"x" * 8192),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_index_that_is_lost_or_damaged_is_named(folder: Path, target: Path, what: str) -> None:
    DAMAGES[what](folder / index.NAME)
    with pytest.raises(kit.errors.RefusedError, match=f"its index is {what}"):
        published.write(str(target), str(folder), MARKS)
    assert names(target) == []


class Dataset(SimpleNamespace):
    __hash__ = object.__hash__  # type: ignore[assignment]
    refused = standing.Standing.refused


def dataset(area: Path) -> Any:
    return Dataset(
        name="a", no_store=None, state_dir=area / "state",
        cache=SimpleNamespace(store=area / "store", views=area / "views"),
        source=SimpleNamespace(block=False, immutable=True),
        generation=SimpleNamespace(state="complete"),
        current=SimpleNamespace(
            folder="g", record=SimpleNamespace(marks=MARKS, snapshot="v7")
        ),
    )  # fmt: skip


async def test_dataset_is_published_once_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []
    go = asyncio.Event()

    async def call(*args: Any, deadline: float) -> dict[str, int]:
        asked.append(args)
        if len(asked) == 1:
            await go.wait()
        return {}

    monkeypatch.setattr(kit.child, "call", call)
    made, to = dataset(tmp_path), "/mnt/v7.manifest"
    first = asyncio.create_task(choices.publish(made, to))
    await asyncio.sleep(0)
    with pytest.raises(kit.errors.RefusedError, match="dataset a: it is being published already"):
        await choices.publish(made, "/mnt/v8.manifest")
    go.set()
    assert (await first)["path"] == to
    await choices.publish(made, to)
    places = [str(tmp_path / each) for each in ("store", "views", "state")]
    assert asked == [(published.write, to, "g", MARKS, places)] * 2


@pytest.mark.parametrize(
    "to", ["", "/", "v7.manifest", "/mnt/.manifest", "/etc/profile.d/x.sh", "/mnt/../v7.manifest"]
)
async def test_other_names_are_refused(tmp_path: Path, to: str) -> None:
    with pytest.raises(kit.errors.SettingsError):
        await choices.publish(dataset(tmp_path), to)
