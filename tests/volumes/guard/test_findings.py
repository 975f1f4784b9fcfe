"""What the guard itself tells, with a stand-in for the kernel."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from linux import bpf
from volumes import settings, status
from volumes.guard import controller, kernel

PROGRAM = bpf.ProgramInfo(1, kernel.FULL, "", 0, ())


@pytest.mark.parametrize(
    ("attached", "pinned", "no_watch", "rule"),
    [
        (True, True, "", None),
        (True, True, "no BTF", "leases-outlive-disks"),
        (True, False, "the host does not have it mounted", "guard-not-pinned"),
        (False, False, "no BTF", None),  # switched off: there are no leases
    ],
)
async def test_a_guard_that_lacks_something_says_what(
    tmp_path: Path, attached: bool, pinned: bool, no_watch: str, rule: str | None
) -> None:
    control: Any = controller.Controller(settings.GuardSettings(), (), state_dir=tmp_path)
    control.guard = SimpleNamespace(no_watch=no_watch)
    control.present = kernel.Present(
        kernel.Mode.ENFORCE, frozenset({252}), programs=(PROGRAM,) * attached, pinned=pinned
    )
    lacks = {"leases-outlive-disks", "guard-not-pinned"}
    found = [each for each in status.findings(control, 0.0) if each.rule in lacks]
    assert [each.rule for each in found] == ([] if rule is None else [rule])
    assert all(no_watch in each.message for each in found)
