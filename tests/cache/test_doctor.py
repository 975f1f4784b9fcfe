"""What 'nodeagent doctor' says of settings that no node can keep."""

from pathlib import Path

import pytest

import kit.errors
from cache import doctor
from cache.settings import CacheSettings


def test_a_budget_above_the_disk_is_told(tmp_path: Path) -> None:
    assert " of a disk of " in doctor.budget(str(tmp_path / "store"), 2**20)
    with pytest.raises(kit.errors.HostError) as raised:
        doctor.budget(str(tmp_path / "store"), 900 * 2**50)
    assert raised.value.thing.startswith("cache.budget ")
    assert "the disk of the store has " in raised.value.cause


def test_a_budget_that_nobody_set_is_no_matter(tmp_path: Path) -> None:
    def names(section: CacheSettings) -> set[str]:
        return {each.name for each in doctor.checks(section, tmp_path)}

    assert "budget" not in names(CacheSettings())
    assert "budget" in names(CacheSettings(budget=2**40))


@pytest.mark.parametrize(
    ("folders", "told"),
    [
        ({"a": "/d", "b": "/d/e"}, "the source of dataset b (/d/e): lies inside that of dataset a"),
        ({"a": "/d/e", "b": "/d"}, "the source of dataset a (/d/e): lies inside that of dataset b"),
        ({"a": "/d", "b": "/d"}, "lies inside"),
        ({"a": "/d", "b": "/de"}, ""),
    ],
)
def test_sources_that_overlap_are_told(folders: dict[str, str], told: str) -> None:
    if not told:
        assert doctor.apart(folders) == "no source lies inside another"
        return
    with pytest.raises(kit.errors.HostError) as raised:
        doctor.apart(folders)
    assert told in str(raised.value)


@pytest.mark.parametrize(("mode", "told"), [("0640", True), ("600", True), ("0750", False)])
def test_a_mode_that_lets_only_root_in_is_told(mode: str, told: bool, tmp_path: Path) -> None:
    """An agent that is updated starts with it."""
    source = {"kind": "dir", "path": "/s"}
    given = {"name": "a", "freshness": "frozen", "source": source, "access": {"mode": mode}}
    section = CacheSettings.model_validate({"datasets": [given]})
    found = [each for each in doctor.checks(section, tmp_path) if each.name == "access a"]
    assert bool(found) is told
    for each in found:
        with pytest.raises(kit.errors.HostError) as raised:
            each.look(*each.arguments)
        assert f"access.mode '{mode}' has no x bit" in str(raised.value)
        assert "'0755'" in raised.value.remedy


@pytest.mark.parametrize(
    ("make", "told"),
    [("touch", "it is not a directory"), ("", "the directory does not exist")],
)
def test_a_source_that_is_no_directory_is_told(make: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "source"
    if make:
        path.touch()
    with pytest.raises(kit.errors.SourceError) as raised:
        doctor.directory(str(path), str(tmp_path), by_object=False)
    assert raised.value.cause == told
    assert "tried again" not in raised.value.remedy, "a doctor looks once"
