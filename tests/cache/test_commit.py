"""The committing worker, over what a kill at the worst moment leaves."""

import os
from pathlib import Path
from typing import Any

import pytest

from cache.fill import control, messages, tree
from cache.fill.worker import Worker

pytestmark = pytest.mark.real  # trusted xattrs need root


@pytest.fixture
def worker(area: Path) -> Worker:
    for name in ("source", "generation/tree/d", "generation/staging", "generation/links"):
        (area / name).mkdir(parents=True)
    page = control.Control.create()
    setup = {
        "source": str(area / "source"),
        "stamp": "",
        "generation": str(area / "generation"),
        "immutable": False,
        "native": None,
    }
    return Worker(0, page.descriptor, setup)


@pytest.fixture(autouse=True)
def answers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    said: list[Any] = []
    monkeypatch.setattr(messages, "send", lambda _, message: said.append(message))
    return said


def stage(area: Path, chunk: str, *names: str) -> None:
    folder = area / "generation" / "staging" / chunk
    folder.mkdir()
    for name in names:
        (folder / name).write_bytes(b"same bytes")


def commit(chunk: str, links: list[list[str]], seal: list[Any] | None = None) -> dict[str, Any]:
    chunks = [{"chunk": chunk, "path": ["d"], "links": links, "mtime_ns": 5 * 10**17}]
    return {"do": "commit", "chunks": chunks, "seal": seal or []}


def test_links_of_one_file_are_links_in_the_tree(area: Path, worker: Worker) -> None:
    stage(area, "1", "one", "two")
    worker.commit(commit("1", [["one", "key"], ["two", "key"]]))
    one, two = (area / "generation" / "tree" / "d" / n for n in ("one", "two"))
    assert one.stat().st_ino == two.stat().st_ino


def test_a_batch_that_was_renamed_and_not_noted_can_be_committed_again(
    area: Path, worker: Worker
) -> None:
    # rename(2) of one link of a file over another does nothing, and leaves the old name behind.
    links = [["one", "key"], ["two", "key"]]
    stage(area, "1", "one", "two", "plain")
    worker.commit(commit("1", links))
    stage(area, "1", "one", "two", "plain")
    worker.commit(commit("1", links))
    folder = area / "generation" / "tree" / "d"
    assert sorted(os.listdir(folder)) == ["one", "plain", "two"]
    assert (folder / "one").stat().st_ino == (folder / "two").stat().st_ino
    assert os.listdir(area / "generation" / "staging") == []


def test_a_directory_is_sealed_only_with_all_its_entries(
    area: Path, worker: Worker, answers: list[Any]
) -> None:
    stage(area, "1", "one")
    folder = {"directory": 7, "path": ["d"], "as": ["d", 0o40755, 0, 0, 0, 10**18, 1, 1, False]}
    worker.commit(commit("1", [], [{**folder, "entries": 2}]))
    assert (answers[-1]["sealed"], answers[-1]["missing"]) == ([], [7])
    assert tree.OPAQUE not in os.listxattr(area / "generation" / "tree" / "d")
    worker.commit({"do": "commit", "chunks": [], "seal": [{**folder, "entries": 1}]})
    assert (answers[-1]["sealed"], answers[-1]["missing"]) == ([7], [])
    assert os.getxattr(area / "generation" / "tree" / "d", tree.OPAQUE) == b"y"
    assert (area / "generation" / "tree" / "d").stat().st_mtime_ns == 10**18


def test_what_a_sealed_directory_lacks_shows_again_through_every_directory_above(
    area: Path, worker: Worker, answers: list[Any]
) -> None:
    folders = [area / "generation" / "tree" / path for path in ("d", "d/e", "d/e/f", "d/other")]
    for folder in folders:
        folder.mkdir(exist_ok=True)
        os.setxattr(folder, tree.OPAQUE, b"y")
    (folders[2] / "one").write_bytes(b"1")
    worker.checks.recheck({"directories": [[3, ["d", "e", "f"], 2], [4, ["d", "other"], 0]]})
    assert answers[-1]["missing"] == [3]
    marked = [tree.OPAQUE in os.listxattr(folder) for folder in folders]
    assert marked == [False, False, False, True]


@pytest.mark.parametrize(
    ("ordered", "chunks", "syncs"), [(True, 0, 0), (False, 0, 1), (True, 1, 1)]
)
def test_a_seal_waits_for_a_sync_unless_a_journal_keeps_the_order(
    area: Path,
    worker: Worker,
    monkeypatch: pytest.MonkeyPatch,
    ordered: bool,
    chunks: int,
    syncs: int,
) -> None:
    seen: list[int] = []

    def syncfs(descriptor: int) -> int:
        seen.append(descriptor)
        return 0

    monkeypatch.setattr("linux.syscalls.libc.syncfs", syncfs)
    worker.ordered = ordered
    stage(area, "1", "one")
    job = commit("1", [])
    worker.commit({**job, "chunks": job["chunks"][:chunks]})
    assert len(seen) == syncs
