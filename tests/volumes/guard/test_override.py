"""The operator's override and log."""

from pathlib import Path

import pytest

import kit.errors
from volumes.guard import kernel, override


def test_override_survives_and_damaged_file_is_error(tmp_path: Path) -> None:
    assert override.load(tmp_path) is None
    override.store(tmp_path, kernel.Mode.DRY_RUN, "me", "why")
    found = override.load(tmp_path)
    assert found is not None and (found.mode, found.reason) == (kernel.Mode.DRY_RUN, "why")
    override.path(tmp_path).write_text("{")
    with pytest.raises(kit.errors.HostError, match="set the mode again"):
        override.load(tmp_path)
    override.clear(tmp_path)
    assert override.load(tmp_path) is None


def test_override_of_a_newer_agent_is_left_alone(tmp_path: Path) -> None:
    override.store(tmp_path, kernel.Mode.OFF, "me", "why")
    file = override.path(tmp_path)
    newer = file.read_text().replace('"format": 1', '"format": 2')
    assert newer != file.read_text()
    file.write_text(newer)
    with pytest.raises(kit.errors.HostError, match="newer agent wrote it"):
        override.load(tmp_path)
    assert file.read_text() == newer


def test_note_is_shown_by_noted(tmp_path: Path) -> None:
    assert override.noted(tmp_path) == []
    override.note(tmp_path, "detach", "me", "why", mode="off")
    (line,) = override.noted(tmp_path)
    assert (line["action"], line["by"], line["reason"], line["mode"]) == (
        *("detach", "me", "why", "off"),
    )
