import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cache.fill import control, worker
from kit import child_main
from tests.testbed import held, holding, trees, waiting
from tests.testbed.agent import Agent


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """What the hook changes is as before after the test."""
    monkeypatch.setattr(control.Throttle, "step", control.Throttle.step)
    monkeypatch.setattr(worker.Worker, "copy", worker.Worker.copy)
    monkeypatch.setattr(child_main, "command", child_main.command)
    yield monkeypatch


def counting(page: control.Control, files: int) -> threading.Thread:
    """A worker that counts so many files, unless it is cancelled."""

    def count() -> None:
        throttle = control.Throttle(page, 0)
        try:
            for _ in range(files):
                throttle.step(1, 10)
        except control.Cancelled:
            pass

    made = threading.Thread(target=count, daemon=True)
    made.start()
    return made


@pytest.mark.parametrize("end", ["go on", "cancel", "folder is gone"])
def test_worker_waits_with_signs_of_life_until(
    tmp_path: Path, patched: pytest.MonkeyPatch, end: str
) -> None:
    fill = held.Fill(Agent(tmp_path / "node"), 3)
    folder = tmp_path / "node" / "holds"
    holding.hold_files(folder)
    page = control.Control.create()
    thread = counting(page, 5)
    waiting.until(fill.workers, 10, "the worker to wait")
    assert page.counted() == (3, 30)
    beats = page.beats()
    waiting.until(lambda: page.beats() > beats + 2, 10, "signs of life")
    assert page.counted() == (3, 30)
    if end == "go on":
        fill.go_on()
    elif end == "cancel":
        page.cancel()
    else:
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
    thread.join(waiting.limit(10))
    assert not thread.is_alive()
    assert page.counted() == ((4, 40) if end == "cancel" else (5, 50))
    assert not folder.exists() or fill.workers() == []


def test_only_fills_of_an_agent_with_a_folder_are_started_by_the_hook(
    tmp_path: Path, patched: pytest.MonkeyPatch
) -> None:
    fill, verify = "cache.fill.fill:main", "cache.fill.verify:main"
    patched.setenv(holding.FOLDER, str(tmp_path / "none"))
    holding.install()
    assert child_main.command("run", fill)[-1:] == [fill]
    patched.setenv(holding.FOLDER, str(tmp_path))
    holding.install()
    assert child_main.command("run", fill)[-3:] == ["run", "tests.testbed.holding:main", fill]
    assert child_main.command("run", verify)[-2:] == ["run", verify]


@pytest.mark.real
def test_held_fill_is_an_ordinary_one_at_work(area: Path, node: Agent) -> None:
    source = area / "source"
    trees.plain(source, 200)
    fill = held.Fill(node, 20)
    node.add_dir("a", source)
    node.start()
    old = fill.wait()
    node.wait_for(lambda: node.dataset("a")["files"]["done"] >= 20, 30, "20 files")
    node.wait_served("a", "overlay")
    assert node.dataset("a")["files"]["done"] < 40
    node.kill()
    node.wait_for(lambda: not set(old) & set(node.passes()), 20, "its workers to end with it")
    node.start()
    fill.wait()
    node.tell("a", "pause")
    node.wait_for(lambda: not node.passes(), 20, "the pass to end")
    node.tell("a", "resume")
    fill.wait()
    fill.go_on()
    node.wait_state("a", "complete")
    trees.assert_equal(source, node.view("a"))
