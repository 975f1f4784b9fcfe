"""What an uninstall takes of the guard's, and the memory that it leaves."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.testbed import cell, constants
from volumes import uninstall
from volumes.guard import override
from volumes.ledger import store
from volumes.settings import VolumesSettings

pytestmark = pytest.mark.real


@pytest.fixture
def section(tmp_path: Path) -> Iterator[dict[str, object]]:
    with cell.cell(tmp_path) as where:
        yield constants.made(VolumesSettings, guard=cell.settings(where)).as_json()


def kinds(section: dict[str, object], state: Path) -> dict[str, dict[str, object]]:
    return {each["kind"]: each for each in uninstall.find(section, str(state))}


def test_memory_of_volumes_stays_and_the_rest_goes(
    section: dict[str, object], tmp_path: Path
) -> None:
    (tmp_path / "volumes" / "ledger").mkdir(parents=True)
    ledger = store.LedgerStore(tmp_path / "volumes" / "ledger")
    entry = store.Entry("volume").saw("ext4", "uuid", "", 1.0, "node")
    ledger.put(entry)
    (tmp_path / "volumes" / "operator.log").write_text("a line\n")
    found = kinds(section, tmp_path)
    assert "what 1 volumes hold" in str(found["ledger"]["stays"])

    uninstall.remove(section, str(tmp_path), "state", str(tmp_path / "volumes"))

    assert [each.name for each in (tmp_path / "volumes").iterdir()] == ["ledger"]
    again = store.LedgerStore(tmp_path / "volumes" / "ledger")
    again.load()
    assert again.get("volume") == entry
    assert set(kinds(section, tmp_path)) == {"ledger"}

    uninstall.remove(section, str(tmp_path), "ledger", str(tmp_path / "volumes" / "ledger"))
    assert not tmp_path.exists(), "of an agent whose other traces went before"
    assert not kinds(section, tmp_path)


def test_what_is_beside_the_ledger_outlives_it(section: dict[str, object], tmp_path: Path) -> None:
    for folder in ("volumes/ledger", "cache"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "volumes" / "operator.log").touch()
    uninstall.remove(section, str(tmp_path), "ledger", str(tmp_path / "volumes" / "ledger"))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["cache", "volumes"]
    uninstall.remove(section, str(tmp_path), "state", str(tmp_path / "volumes"))
    assert [each.name for each in tmp_path.iterdir()] == ["cache"]


def test_word_that_is_held_in_memory_goes(section: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "volumes").write_text("no folder, so the disk takes nothing")
    wanted = VolumesSettings.of_json(section).guard
    new = override.Override.of({"mode": "off", "by": "me", "reason": "test", "at": 1.0})
    kept, warning = asyncio.run(override.save(wanted, tmp_path, new))
    assert kept and warning
    trace = kinds(section, tmp_path)["mode given by an operator"]

    uninstall.remove(section, str(tmp_path), str(trace["kind"]), str(trace["name"]))

    assert override.held_at(wanted) is None
