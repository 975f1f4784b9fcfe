"""Places of views: what others have put there is neither followed nor served."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kit.errors
from cache.views import by_id, places, view
from linux import mountinfo, mounts

pytestmark = pytest.mark.real


@pytest.fixture
def disk(memory: Path) -> Path:
    """A file system of its own, with a source, a directory of somebody, and the views."""
    for name in ("source", "scratch", "views", "victim/data"):
        (memory / name).mkdir(parents=True)
    (memory / "source" / "file").write_text("of the dataset")
    return memory


def publish(disk: Path) -> None:
    shown = str(disk / "views" / "demo" / "data")
    view.publish(shown, view.Stage.SOURCE, str(disk / "source"), "", str(disk / "scratch"))


class Patched:
    """``os`` with other functions."""

    def __init__(self, **functions: Any) -> None:
        vars(self).update(functions)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


def link_name(views: Path) -> None:
    (views / "demo").symlink_to(views.parent / "victim")


def link_data(views: Path) -> None:
    (views / "demo").mkdir()
    (views / "demo" / "data").symlink_to(views.parent / "victim")


def others_data(views: Path) -> None:
    (views / "demo" / "data").mkdir(parents=True)
    os.chown(views / "demo" / "data", 1000, 1000)


def open_data(views: Path) -> None:
    (views / "demo" / "data").mkdir(parents=True)
    (views / "demo" / "data").chmod(0o777)


def full_data(views: Path) -> None:
    (views / "demo" / "data").mkdir(parents=True, exist_ok=True)
    (views / "demo" / "data" / "ready").write_text("jobs wait for this file")


def others_views(views: Path) -> None:
    os.chown(views, 1000, 1000)


def open_views(views: Path) -> None:
    views.chmod(0o777)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (link_name, "a link or a file"),
        (link_data, "a link or a file"),
        (others_data, "belongs to uid 1000"),
        (open_data, "others than root may write"),
        (full_data, "somebody has put 'ready'"),
        (others_views, "belongs to uid 1000"),
        (open_views, "others than root may write"),
    ],
)
def test_nothing_is_mounted_where_others_decide(
    disk: Path, spoil: Callable[[Path], None], why: str
) -> None:
    spoil(disk / "views")
    before = len(mountinfo.read())
    with pytest.raises(kit.errors.HostError, match=why):
        publish(disk)
    assert len(mountinfo.read()) == before
    assert list((disk / "victim" / "data").iterdir()) == []


def test_nothing_is_put_there_after_it_was_seen_empty(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = disk / "views" / "demo" / "data"

    def then_somebody_writes(place: int) -> list[str]:
        seen = os.listdir(place)
        with pytest.raises(PermissionError):
            (data / "ready").touch()
        with pytest.raises(PermissionError):
            data.rename(data.with_name("away"))
        return seen

    monkeypatch.setattr(places, "os", Patched(listdir=then_somebody_writes))
    publish(disk)
    mounts.unmount(data)
    assert os.listdir(data) == []


def test_nothing_is_mounted_on_a_directory_that_was_put_in_the_place(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = disk / "views" / "demo" / "data"
    flags = mounts.set_immutable

    def swapped(descriptor: int, on: bool) -> bool:
        if on:
            data.rename(data.with_name("away"))
            full_data(disk / "views")
        return flags(descriptor, on)

    monkeypatch.setattr(mounts, "set_immutable", swapped)
    with pytest.raises(kit.errors.HostError, match="another directory in its place"):
        publish(disk)
    assert os.listdir(data) == ["ready"]
    data.with_name("away").rmdir()  # it is not immutable


def test_no_link_is_followed_by_who_sets_owners_and_modes(disk: Path) -> None:
    link_name(disk / "views")
    shown = str(disk / "views" / "demo" / "data")
    assert not view.is_allowed(shown, 0, 0, "0755", "")
    with pytest.raises(kit.errors.HostError, match="a link or a file"):
        view.allow(shown, 4711, 4711, "0777", "")
    assert (disk / "victim").stat().st_uid == 0
    view.take_down(shown)
    assert (disk / "victim" / "data").is_dir()


def test_no_generation_is_mounted_through_a_link(disk: Path) -> None:
    (disk / "views" / "demo").mkdir()
    (disk / "views" / "demo" / by_id.FOLDER).symlink_to(disk / "victim")
    with pytest.raises(kit.errors.HostError, match="a link or a file"):
        by_id.show(str(disk / "views" / "demo" / "data"), "1", str(disk / "source"))
    assert os.listdir(disk / "victim") == ["data"]


def test_no_place_of_a_generation_is_removed_through_a_link(disk: Path) -> None:
    link_name(disk / "views")
    theirs = disk / "victim" / by_id.FOLDER / "1"
    theirs.mkdir(parents=True)
    by_id.take_down_all(str(disk / "views" / "demo" / "data"))
    assert theirs.exists()


def test_empty_places_take_no_files_and_go_with_the_view(disk: Path) -> None:
    """The file system of the views must have the flag; else there is nothing to try."""
    data = disk / "views" / "demo" / "data"
    publish(disk)
    by_id.show(str(data), "1", str(disk / "source"))
    for place in (data, data.parent / by_id.FOLDER / "1"):
        assert (place / "file").read_text() == "of the dataset"
        mounts.unmount(place)
        with pytest.raises(PermissionError):
            (place / "ready").touch()
        with pytest.raises(PermissionError):
            place.rename(place.with_name("away"))
    publish(disk)  # as after a reboot
    assert (data / "file").exists()
    by_id.take_down_all(str(data))  # also of those that a reboot has left
    view.take_down(str(data))
    assert os.listdir(disk / "views") == []


def test_place_that_is_gone_or_full_is_left(disk: Path) -> None:
    full_data(disk / "views")
    data = disk / "views" / "demo" / "data"
    places.remove(data)
    places.remove(data / "no" / "such")
    assert (data / "ready").exists()
