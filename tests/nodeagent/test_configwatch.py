"""The settings file is read again while the agent runs."""

import asyncio
import os
import resource
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from nodeagent import app, configfile, logs, main
from nodeagent.settings import Settings

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
        self._items: AsyncIterator[bytes | None] = configfile.changes(path, configfile.look(path))
        self.next: asyncio.Future[bytes | None] = asyncio.ensure_future(anext(self._items))

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


# --- while a file is parsed, for it takes seconds when it is large


class Swapped:
    """Another file takes the place of ``path`` while its text is parsed, the ``at``-th time."""

    def __init__(self, path: Path, later: str, monkeypatch: pytest.MonkeyPatch, at: int = 1):
        self.left = at
        parse = configfile.parse

        def slow(text: str, origin: str) -> Settings:
            self.left -= 1
            if not self.left:
                (path.parent / "new").write_text(later)
                (path.parent / "new").rename(path)
            return parse(text, origin)

        monkeypatch.setattr(configfile, "parse", slow)


def settings_of(tmp_path: Path, name: str) -> str:
    return f"node: {name}\nstate_dir: {tmp_path}/state\n"


async def started(path: Path, copy: Path, monkeypatch: pytest.MonkeyPatch) -> app.Agent:
    """As ``nodeagent run`` starts it; its rooms do not begin."""
    made: list[app.Agent] = []

    async def run(agent: app.Agent) -> None:
        made.append(agent)

    monkeypatch.setattr(app.Agent, "run", run)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    monkeypatch.setattr(logs, "configure", lambda: None)
    command = ["--config", str(path), "run", "--last-good", str(copy)]
    await asyncio.to_thread(main.cli.main, command, standalone_mode=False)
    return made[0]


@pytest.mark.parametrize("later", ["other", "broken"])
async def test_what_is_swapped_during_the_first_parse_is_taken_at_the_next_look(
    path: Path, later: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = {"other": settings_of(path.parent, "other"), "broken": "a_slip: 1\n"}
    path.write_text(settings_of(path.parent, "first"))
    Swapped(path, texts[later], monkeypatch)
    agent = await started(path, path.parent / "copy.yaml", monkeypatch)
    assert agent.state.settings.node == "first"
    following = asyncio.create_task(agent._follow_settings())
    try:
        async with asyncio.timeout(SOON):
            while (agent._file.node, agent.state.config_error) == ("first", ""):
                await asyncio.sleep(0.01)
    finally:
        following.cancel()
    assert ("a_slip" in agent.state.config_error) is (later == "broken")


@pytest.mark.parametrize("when", ["start", "change", "command"])
async def test_the_copy_of_good_settings_is_of_what_was_parsed(
    path: Path, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not of what took its place meanwhile: after that, nothing would start."""
    good, copy = settings_of(path.parent, "good"), path.parent / "copy.yaml"
    path.write_text(settings_of(path.parent, "first") if when == "change" else good)
    Swapped(path, "a_slip: 1\n", monkeypatch, at=2 if when == "change" else 1)
    if when == "command":
        main.Context(path, None).section("volumes", copy)
    else:
        agent = await started(path, copy, monkeypatch)
        following = asyncio.create_task(agent._follow_settings())
        try:
            async with asyncio.timeout(SOON):
                if when == "change":
                    path.write_text(good)
                while not agent.state.config_error:
                    await asyncio.sleep(0.01)
        finally:
            following.cancel()
    assert copy.read_text() == good
