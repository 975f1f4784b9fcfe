import asyncio
import errno
import functools
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import asyncinotify
import pytest
import structlog

from nodeagent import configwatch

SOON = 15.0


class Watching(asyncinotify.Inotify):
    """Says when all watches are in place and an event is awaited."""

    in_place: asyncio.Event

    async def get(self) -> asyncinotify.Event:
        self.in_place.set()
        return await super().get()


@pytest.fixture(autouse=True)
async def no_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is noticed is noticed by inotify."""
    Watching.in_place = asyncio.Event()
    monkeypatch.setattr(configwatch, "Inotify", Watching)
    monkeypatch.setattr(configwatch, "POLL_SECONDS", 3600.0)
    monkeypatch.setattr(configwatch, "SETTLE_SECONDS", 0.05)


async def watched() -> None:
    await asyncio.wait_for(Watching.in_place.wait(), SOON)
    Watching.in_place.clear()


async def seen(watch: AsyncIterator[None], change: Callable[[], object]) -> None:
    """A change made while the file is watched is noticed."""
    task = asyncio.ensure_future(anext(watch))
    await watched()
    change()
    await asyncio.wait_for(task, SOON)


async def test_rewritten_file_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("one")
    watch = aiter(configwatch.changes(path))
    await seen(watch, lambda: path.write_text("two"))


async def test_renamed_file_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("one")
    watch = aiter(configwatch.changes(path))

    def replace(text: str) -> None:
        (tmp_path / "new").write_text(text)
        (tmp_path / "new").rename(path)

    await seen(watch, lambda: replace("two"))
    await seen(watch, lambda: replace("three"))


async def test_new_file_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    watch = aiter(configwatch.changes(path))
    await seen(watch, lambda: path.write_text("here"))


async def test_file_that_goes_and_comes_back_as_it_was_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("one")
    watch = aiter(configwatch.changes(path))
    await seen(watch, path.unlink)
    await seen(watch, lambda: path.write_text("one"))


async def test_configmap_swap_is_noticed(tmp_path: Path) -> None:
    # As kubelet lays it out: file -> ..data/file, ..data -> ..<time>, replaced by rename.
    def version(number: int) -> None:
        folder = tmp_path / f"..2026_{number}"
        folder.mkdir()
        (folder / "a.yaml").write_text(f"version {number}")
        (tmp_path / "..data_tmp").symlink_to(folder.name)
        (tmp_path / "..data_tmp").rename(tmp_path / "..data")
        if number > 1:
            old = tmp_path / f"..2026_{number - 1}"
            (old / "a.yaml").unlink()
            old.rmdir()

    version(1)
    (tmp_path / "a.yaml").symlink_to("..data/a.yaml")
    watch = aiter(configwatch.changes(tmp_path / "a.yaml"))
    for number in (2, 3, 4):
        await seen(watch, functools.partial(version, number))


async def test_same_bytes_are_not_a_change(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("one")
    watch = aiter(configwatch.changes(path))
    task = asyncio.ensure_future(anext(watch))
    await watched()
    path.write_text("one")
    (tmp_path / "other").write_text("x")
    await watched()  # again: the event was looked at
    assert not task.done()
    path.write_text("two")
    await asyncio.wait_for(task, SOON)


async def test_change_between_items_is_not_missed(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("one")
    watch = aiter(configwatch.changes(path))
    await seen(watch, lambda: path.write_text("two"))
    path.write_text("three")  # nobody waits just now
    await asyncio.wait_for(anext(watch), SOON)


async def test_without_watches_the_file_is_polled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_read = asyncio.Event()

    def none_left(*_: Any) -> None:
        has_read.set()
        raise OSError(errno.EMFILE, "Too many open files")

    path = tmp_path / "a.yaml"
    path.write_text("one")
    monkeypatch.setattr(configwatch, "POLL_SECONDS", 0.05)
    watch = aiter(configwatch.changes(path))
    with monkeypatch.context() as full, structlog.testing.capture_logs() as said:
        full.setattr(configwatch, "Inotify", none_left)
        for text in ("two", "three"):
            task = asyncio.ensure_future(anext(watch))
            await asyncio.wait_for(has_read.wait(), SOON)  # what is there now
            path.write_text(text)
            await asyncio.wait_for(task, SOON)
    assert len(said) == 1
    assert "Too many open files" in said[0]["why"]
    monkeypatch.setattr(configwatch, "POLL_SECONDS", 3600.0)
    await seen(watch, lambda: path.write_text("four"))  # by inotify again
