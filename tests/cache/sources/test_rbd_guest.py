"""Datasets on real krbd and a real device mapper, in a guest with Debian's kernel."""

from pathlib import Path

import pytest

from tests.testbed import guest

pytestmark = [pytest.mark.real, pytest.mark.guest, pytest.mark.timeout(1200)]

_SCRIPT = Path(__file__).with_name("guest_rbd.py")


def test_reads_move_from_the_mapped_snapshot_to_the_copy_range_by_range(tmp_path: Path) -> None:
    passed = ("RELOADS", "KILLS")
    result, _ = guest.replay(_SCRIPT, tmp_path, ("train", "other"), "320M", passed)
    said = result.marked("check")
    print("\n".join(result.marked("time")))
    assert result.exit == 0, result.text[-4000:]
    assert "served by a device of the source True" in said
    assert "mapped 2 watchers 0 locks 0" in said
    assert "audit: ours 2 idle [] leaked []" in said
    assert "bad chunk changed the table True is still read from the copy False" in said
    assert "the same device True" in said
    assert "a new device True" in said
    assert "lines [1, 1] of [1, 1]" in said
    assert "reader errors 0" in said
    assert "a file held open keeps its snapshot True True" in said
    assert "snapshot made anew is shown True" in said
    assert "writable False" in said
    assert "left mapped 0 devices {} loops [] folders []" in said
