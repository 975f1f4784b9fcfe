"""Symbolic links that lead out of a dataset: what a listing asks of the source to count them."""

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from cache.fill import control, protocol, share
from cache.fill.worker import Worker
from cache.store import manifest, tree
from cache.store.tree import Entry

LINKS = ("one", "two")


class Native:
    """A listing past the mount."""

    def __init__(self, source: Path) -> None:
        self._source = source

    def entries(self, _: Sequence[str]) -> Iterator[Entry]:
        for name in LINKS:
            yield tree.entry_of(name, (self._source / name).lstat())

    def location(self, *_: object) -> None:
        raise OSError(errno.EIO, "not asked for")


class Before:
    """A generation before that has these links."""

    def __init__(self, folder: Path, entries: list[Entry]) -> None:
        self._folder, self._entries = folder, entries

    def directory(self, _: Sequence[str], stack: contextlib.ExitStack) -> share.SharedDirectory:
        descriptor = stack.enter_context(tree.opened_root(self._folder))
        items = {each.name: manifest.Item(each, manifest.State.STORED) for each in self._entries}
        return share.SharedDirectory(descriptor, items, 0)


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Worker:
    for name in ("source", "generation/tree", "generation/staging", "generation/links", "before"):
        (tmp_path / name).mkdir(parents=True)
    for name in LINKS:
        (tmp_path / "source" / name).symlink_to("/elsewhere")
    monkeypatch.setattr(protocol, "send", lambda *_: None)
    setup = protocol.Setup(
        source=str(tmp_path / "source"), stamp="", generation=str(tmp_path / "generation"),
        immutable=True, native=None,
    )  # fmt: skip
    return Worker(0, control.Control.create().descriptor, setup)


@pytest.fixture
def opens(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """Directories of the source that were opened."""
    found: list[Sequence[str]] = []
    of_source = Worker._of_source

    def counted(worker: Worker, path: Sequence[str]) -> AbstractContextManager[int]:
        found.append(path)
        return of_source(worker, path)

    monkeypatch.setattr(Worker, "_of_source", counted)
    return found


def scanned(worker: Worker, *, again: bool = False) -> protocol.Scanned:
    job = protocol.Scan(directory=1, path=[], mounted=[], again=again, extras=False)
    return worker.scan(job)


@pytest.mark.parametrize("past_the_mount", [False, True])
def test_new_links_need_one_look_at_their_directory(
    past_the_mount: bool, tmp_path: Path, worker: Worker, opens: list[Sequence[str]]
) -> None:
    if past_the_mount:
        listing: Any = Native(tmp_path / "source")
        worker._listing = listing
    found = scanned(worker)
    assert (found.files, found.outside) == (2, 2)
    assert opens == [[]]


@pytest.mark.parametrize("where", ["tree", "before"])
def test_links_that_have_not_changed_are_not_asked_for(
    where: str, tmp_path: Path, worker: Worker, opens: list[Sequence[str]]
) -> None:
    source = tmp_path / "source"
    held = tmp_path / ("generation/tree" if where == "tree" else "before")
    listing: Any = Native(source)
    worker._listing = listing
    for name in LINKS:
        (held / name).symlink_to("/elsewhere")
        at = (source / name).lstat().st_mtime_ns
        os.utime(held / name, ns=(at, at), follow_symlinks=False)
    if where == "before":
        before: Any = Before(held, list(listing.entries([])))
        worker.shared = before
    found = scanned(worker, again=where == "tree")
    assert (found.stored.files, found.outside) == (2, 2)
    assert opens == []


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE])
def test_look_for_links_that_fails_ends_nothing(
    number: int, tmp_path: Path, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []

    def refused(*_: object) -> int:
        looks.append(number)
        error = OSError(number, os.strerror(number))
        raise tree.SourceRefusedError(number, "no") if number == errno.EACCES else error

    listing: Any = Native(tmp_path / "source")
    worker._listing = listing
    monkeypatch.setattr(Worker, "_of_source", refused)
    found = scanned(worker)
    assert (found.files, found.outside) == (2, 0)
    assert len(looks) == 1, "one for a directory"
