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


def test_operator_log_is_bounded_and_skips_torn_line(tmp_path: Path) -> None:
    override.note(tmp_path, "detach", "me", "why")
    log = override.log(tmp_path)
    with log.path.open("ab") as stream:
        stream.write(b'{"torn')
    assert [e["action"] for e in log.last()] == ["detach"]
    log.path.write_bytes(b"x" * (log.largest + 1))
    override.note(tmp_path, "accept", "me", "")
    assert [e["action"] for e in log.last()] == ["accept"]
    assert sorted(p.name for p in log.path.parent.iterdir()) == ["operator.log", "operator.log.1"]
