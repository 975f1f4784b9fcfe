"""What a report of a denial starts: a look at the device that is there now."""

import dataclasses
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from linux import blockdev
from tests.volumes.guard.world import DEVICE
from volumes.guard import denials, kernel, rehearsal, reports, steps
from volumes.ledger import store
from volumes.probe.examine import Verdict

EVENT = kernel.Event(1.0, 9, 1, 0, DEVICE.number, True, "mkfs.ext4", "", ())


class _NeverAsked:
    async def probe(self, *_: str) -> Verdict:
        raise AssertionError("no device is there")


def _rehearsal(folder: Path) -> rehearsal.Rehearsal:
    return rehearsal.Rehearsal(folder, _NeverAsked())  # type: ignore[arg-type]


class Manager:
    """Notes what it is asked to check. It heard of ``DEVICE`` from the kernel's events."""

    def __init__(self, folder: Path) -> None:
        self.executor = SimpleNamespace(ledger=store.LedgerStore(folder))
        self.known = {DEVICE.name: steps.Known(DEVICE)}
        self.denials = denials.Denials()
        self.scheduled: list[blockdev.BlockDevice] = []
        self.refused: list[blockdev.BlockDevice | None] = []

    def schedule(self, name: str, device: blockdev.BlockDevice) -> None:
        self.scheduled.append(device)

    def denied(self, name: str, refused: blockdev.BlockDevice | None) -> None:
        self.refused.append(refused)


async def test_a_denial_right_after_another_disk_came_is_about_that_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stands behind a number is kept for a moment. A check of the disk that went would give
    the new one's content to it, and take the new pod's permission."""
    before = dataclasses.replace(DEVICE, diskseq=6, image=None)
    there = [before]
    monkeypatch.setattr(blockdev, "name_of", lambda number: DEVICE.name)
    monkeypatch.setattr(blockdev, "identify", lambda name: there[-1])
    manager: Any = Manager(tmp_path)
    told = reports.Reports(
        manager, is_watched=lambda _: True, rehearsal=_rehearsal(tmp_path),
        changed=lambda: None,
    )  # fmt: skip
    manager.known = {DEVICE.name: steps.Known(before)}
    told.denied(EVENT, None)
    there.append(DEVICE)
    manager.known = {DEVICE.name: steps.Known(DEVICE)}
    told.denied(EVENT, None)
    assert manager.scheduled == []
    assert manager.refused == [before, DEVICE]
    there.append(dataclasses.replace(DEVICE, diskseq=8))  # of which only the denial tells
    told.denied(EVENT, None)
    assert manager.scheduled == []  # known and kept agree; the check that follows finds it
    there.append(DEVICE)
    manager.known = {DEVICE.name: steps.Known(before)}
    told.denied(EVENT, None)
    assert manager.scheduled == [DEVICE]
    told.close()


@pytest.mark.parametrize(("whose", "rule", "why"), [
    ("unproven: not in use", "scope-would-deny", "only reports that: unproven: not in use"),
    ("", "format-unchecked", ""),
])  # fmt: skip
async def test_a_write_to_a_device_of_no_driver_waits_for_no_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whose: str, rule: str, why: str
) -> None:
    monkeypatch.setattr(blockdev, "name_of", lambda number: DEVICE.name)
    monkeypatch.setattr(blockdev, "identify", lambda name: DEVICE)
    manager: Any = Manager(tmp_path)
    rehearsed = _rehearsal(tmp_path)
    told = reports.Reports(
        manager, is_watched=lambda _: False, whose=lambda *_: whose, rehearsal=rehearsed,
        changed=lambda: None,
    )  # fmt: skip
    told.denied(dataclasses.replace(EVENT, denied=False, time=time.monotonic()), None)
    (found,) = manager.denials.findings(time.time()) + rehearsed.denials.findings(time.time())
    assert (found.rule, why in found.message) == (rule, True)
    told.close()
    await rehearsed.stop()


async def test_many_writes_that_the_scope_reports_end_no_other_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does one on a device whose name a guarded volume had before."""
    names = {number: f"sd{number}" for number in range(2 * denials.MOST_GROUPS)}
    monkeypatch.setattr(blockdev, "name_of", lambda number: names.get(number[1], DEVICE.name))
    monkeypatch.setattr(blockdev, "identify", lambda name: None)
    manager: Any = Manager(tmp_path)
    rehearsed = _rehearsal(tmp_path)
    of_scope = [(8, number) for number in names] + [DEVICE.number]
    told = reports.Reports(
        manager, is_watched=lambda _: False,
        whose=lambda number, *_: "unproven" if number in of_scope else "", rehearsal=rehearsed,
        changed=lambda: None,
    )  # fmt: skip
    now = dataclasses.replace(EVENT, time=time.monotonic())
    manager.denials.add(denials.resolve(now, None, DEVICE.name, "", ""))
    manager.denials.decided(DEVICE.name, "has_fs ext4", ("it holds data",))
    for number in of_scope:
        event = dataclasses.replace(EVENT, number=number, denied=False, time=time.monotonic())
        told.denied(event, None)
    (kept,) = manager.denials.findings(time.time())
    assert kept.rule == "format-denied"
    found = rehearsed.denials.findings(time.time())
    assert {each.rule for each in found} == {"scope-would-deny"}
    assert len(found) == denials.MOST_GROUPS
    told.close()
    await rehearsed.stop()
