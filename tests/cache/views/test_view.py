"""Refreshing a view, with real mounts."""

import os
from pathlib import Path

import pytest

from cache.views import view
from linux import mountinfo
from tests.testbed import trees

pytestmark = pytest.mark.real


@pytest.fixture
def disk(memory: Path) -> Path:
    """A file system of its own, and the place of a view on it."""
    for name in ("store", "source", "view", "scratch"):
        (memory / name).mkdir()
    return memory


@pytest.mark.parametrize("stage", [view.Stage.STORE, view.Stage.SOURCE])
def test_refresh_leaves_other_mounts_writable(disk: Path, stage: view.Stage) -> None:
    shown = str(disk / "view")
    view.publish(shown, stage, str(disk / "source"), str(disk / "store"), str(disk / "scratch"))
    view.refresh(shown)
    (disk / "store" / "still").write_text("writable")
    assert "ro" not in mountinfo.at(str(disk), mountinfo.read())[-1].super_options.split(",")


def test_refresh_without_mount_does_nothing(disk: Path) -> None:
    view.refresh(str(disk / "view"))
    (disk / "still").write_text("writable")


def test_refresh_makes_an_overlay_forget(disk: Path) -> None:
    shown = disk / "view"
    view.publish(
        str(shown), view.Stage.OVERLAY, str(disk / "source"), str(disk / "store"),
        str(disk / "scratch"),
    )  # fmt: skip
    assert not (shown / "new").exists()
    (disk / "store" / "new").write_text("x")
    assert not (shown / "new").exists(), "the kernel remembers that it was not there"
    view.refresh(str(shown))
    assert (shown / "new").read_text() == "x"


def test_overlay_is_one_file_system_whose_directories_list_its_inodes(
    area: Path, disk: Path
) -> None:
    """Else ``du -x`` and ``find -xdev`` leave out what is stored, and tools that go by the inodes
    of a listing find others."""
    source = area / "source"
    trees.plain(source, 12)
    for folder in source.iterdir():
        (disk / "store" / folder.name).mkdir()
    stored = next(path for path in source.rglob("*") if path.is_file())
    (disk / "store" / stored.relative_to(source)).write_bytes(stored.read_bytes())
    shown = disk / "view"
    view.publish(
        str(shown), view.Stage.OVERLAY, str(source), str(disk / "store"), str(disk / "scratch")
    )
    found = [entry for folder, *_ in os.walk(shown) for entry in os.scandir(folder)]
    statuses = [os.stat(entry.path, follow_symlinks=False) for entry in found]
    assert {status.st_dev for status in statuses} == {shown.stat().st_dev}
    assert [entry.inode() for entry in found] == [status.st_ino for status in statuses]
