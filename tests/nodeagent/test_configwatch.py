"""The settings file is read again while the agent runs."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from nodeagent import configfile

SOON = 15.0


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configfile, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(configfile, "SETTLE_SECONDS", 0.02)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.yaml"


class Watching:
    """Takes each item of ``changes`` from the moment on at which it is made."""

    def __init__(self, path: Path) -> None:
        self._items: AsyncIterator[None] = configfile.changes(path, configfile.look(path))
        self.next: asyncio.Future[None] = asyncio.ensure_future(anext(self._items))

    async def notices(self) -> None:
        await asyncio.wait_for(self.next, SOON)
        self.next = asyncio.ensure_future(anext(self._items))


async def looks() -> None:
    """Time for several looks."""
    await asyncio.sleep(0.3)


async def test_rewritten_and_renamed_file_is_noticed(path: Path) -> None:
    path.write_text("one")
    watch = Watching(path)
    await looks()
    path.write_text("two")
    await watch.notices()
    (path.parent / "new").write_text("three")
    (path.parent / "new").rename(path)
    await watch.notices()


@pytest.mark.parametrize("later", ["another", None])
async def test_what_happens_to_the_file_while_the_agent_starts_is_noticed(
    path: Path, later: str | None
) -> None:
    path.write_text("one")
    loaded = configfile.look(path)
    path.unlink()
    if later is not None:
        path.write_text(later)
    items = configfile.changes(path, loaded)
    await asyncio.wait_for(anext(items), SOON)


async def test_file_that_comes_goes_and_comes_back_as_it_was_is_noticed(path: Path) -> None:
    watch = Watching(path)
    await looks()
    path.write_text("one")
    await watch.notices()
    path.unlink()
    await watch.notices()
    path.write_text("one")
    await watch.notices()


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
    watch = Watching(tmp_path / "a.yaml")
    await looks()
    for number in (2, 3, 4):
        version(number)
        await watch.notices()


async def test_same_bytes_are_not_a_change(path: Path) -> None:
    path.write_text("one")
    watch = Watching(path)
    await looks()
    path.write_text("one")
    await looks()
    assert not watch.next.done()
    path.write_text("two")
    await watch.notices()


async def test_half_a_file_is_not_taken(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing would be all defaults. What is taken has been there for a moment."""
    monkeypatch.setattr(configfile, "SETTLE_SECONDS", 1.0)
    path.write_text("one")
    watch = Watching(path)
    await looks()
    path.write_text("")  # as an editor that writes the file anew
    await looks()
    path.write_text("two")
    written = asyncio.get_running_loop().time()
    await watch.notices()
    assert asyncio.get_running_loop().time() - written >= 1.0
