"""What the guard itself tells, with a stand-in for the kernel."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kit.errors
from kit.findings import Severity
from linux import bpf
from tests.volumes.guard.world import witness
from volumes import doctor, settings
from volumes.guard import controller, kernel, override, status

PROGRAM = bpf.ProgramInfo(1, kernel.PROGRAM, "", 0, ())


@pytest.mark.parametrize(
    ("attached", "pinned", "no_watch", "rule"),
    [
        (True, True, "", None),
        (True, True, "not traced", "leases-outlive-disks"),
        (True, False, "the host does not have it mounted", "guard-not-pinned"),
        (False, False, "not traced", None),  # switched off: there are no leases
    ],
)
async def test_a_guard_that_lacks_something_says_what(
    tmp_path: Path, attached: bool, pinned: bool, no_watch: str, rule: str | None
) -> None:
    control: Any = controller.Controller(
        settings.GuardSettings(), (), witness(), state_dir=tmp_path
    )
    control.in_force.guard = SimpleNamespace(no_watch=no_watch)
    control.in_force.present = kernel.Present(
        kernel.Mode.ENFORCE, frozenset({252}), programs=(PROGRAM,) * attached, pinned=pinned
    )
    lacks = {"leases-outlive-disks", "guard-not-pinned"}
    found = [each for each in status.findings(control, 0.0) if each.rule in lacks]
    assert [each.rule for each in found] == ([] if rule is None else [rule])
    assert all(no_watch in each.message for each in found)


async def test_a_kernel_that_takes_no_program_is_critical_and_doctor_says_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Any:
        raise kit.errors.HostError("guard program", "this kernel does not take it", "another one")

    handle = SimpleNamespace(
        read=kernel.Present,
        apply=refuse,
        try_load=refuse,
        close=lambda: None,
        no_watch="",
        ends_with_disk=False,
    )
    monkeypatch.setattr(override, "handle", lambda *_: handle)
    wanted = settings.GuardSettings(mode="enforce")
    control: Any = controller.Controller(wanted, (), witness(), state_dir=tmp_path)
    control._use(await control.in_force.attach())
    assert control.executor.leases is None, "where nothing refuses, nothing is granted"
    (found,) = status.findings(control, 0.0)
    assert (found.rule, found.severity) == ("guard-not-in-force", Severity.CRITICAL)
    assert "does not take it" in found.message
    assert "does not take it" in status.describe(control)["unsupported"]

    (check,) = (
        each
        for each in doctor.checks(settings.VolumesSettings(guard=wanted), tmp_path)
        if each.name == "bpf"
    )
    assert check.wanted
    with pytest.raises(kit.errors.HostError, match="does not take it"):
        check.look(*check.arguments)
