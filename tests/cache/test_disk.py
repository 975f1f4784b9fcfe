"""When a store may be used: its disk is mounted where it was before, or where the settings say."""

from pathlib import Path

import pytest

import kit.errors
from cache.store import disk


@pytest.mark.parametrize(
    ("found", "wanted", "good"),
    [
        ("/", "/", True),
        ("/mnt/ssd", "/", True),
        ("/mnt/ssd", "/mnt/ssd", True),
        ("/mnt/ssd/part", "/mnt/ssd", True),
        ("/", "/mnt/ssd", False),
        ("/mnt", "/mnt/ssd", False),
        ("/mnt/ssd2", "/mnt/ssd", False),
    ],
)
def test_store_lies_on_the_disk_that_is_wanted(found: str, wanted: str, good: bool) -> None:
    assert (disk.problem(found, wanted) == "") is good


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Where the store lies: the last entry."""
    places = ["/mnt/ssd"]
    monkeypatch.setattr(disk, "place", lambda _: places[-1])
    return places


def test_first_disk_is_remembered(tmp_path: Path, place: list[str]) -> None:
    disk.check("/mnt/ssd/store", None, tmp_path)
    disk.remember("/mnt/ssd/store", tmp_path)
    place.append("/")
    with pytest.raises(kit.errors.HostError, match="no disk is mounted at /mnt/ssd"):
        disk.check("/mnt/ssd/store", None, tmp_path)
    disk.check("/mnt/ssd/store", Path("/"), tmp_path)  # the operator's word counts
    disk.check("/elsewhere/store", None, tmp_path)  # another store was never anywhere
    place.append("/mnt/ssd")
    disk.check("/mnt/ssd/store", None, tmp_path)


def test_setting_counts_at_the_first_start(tmp_path: Path, place: list[str]) -> None:
    place.append("/")
    with pytest.raises(kit.errors.HostError, match="mount the SSD at /mnt/ssd"):
        disk.check("/mnt/ssd/store", Path("/mnt/ssd"), tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"disk": 1}', '{"store": "/s"}'])
def test_damaged_memory_is_none(tmp_path: Path, place: list[str], text: str) -> None:
    (tmp_path / "cache-disk.json").write_text(text)
    disk.check("/s", None, tmp_path)
    disk.remember("/s", tmp_path)
    place.append("/")
    with pytest.raises(kit.errors.HostError):
        disk.check("/s", None, tmp_path)


def test_place_is_the_mount_point_of_a_path() -> None:
    assert disk.place("/proc/self") == "/proc"
    assert disk.place("/") == "/"
