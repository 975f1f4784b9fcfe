"""Refreshing a view, with real mounts."""

from pathlib import Path

import pytest

from cache.views import view
from linux import mountinfo

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
