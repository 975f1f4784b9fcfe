"""What a report of a denial starts: a look at the device that is there now."""

import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest

from linux import blockdev
from tests.volumes.guard.world import DEVICE
from volumes.guard import denials, kernel, reports, steps
from volumes.ledger import store

EVENT = kernel.Event(1.0, 9, 1, 0, DEVICE.number, True, "mkfs.ext4", "", ())


class Manager:
    """Notes what it is asked to check. It heard of ``DEVICE`` from the kernel's events."""

    def __init__(self) -> None:
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
    manager: Any = Manager()
    ledger = store.LedgerStore(tmp_path)
    told = reports.Reports(manager, ledger, is_watched=lambda _: True, changed=lambda: None)
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
    ("unproven: not in use", "scope-would-deny", "): unproven: not in use"),
    ("", "format-unchecked", ""),
])  # fmt: skip
async def test_a_write_to_a_device_of_no_driver_waits_for_no_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whose: str, rule: str, why: str
) -> None:
    monkeypatch.setattr(blockdev, "name_of", lambda number: DEVICE.name)
    monkeypatch.setattr(blockdev, "identify", lambda name: DEVICE)
    manager: Any = Manager()
    ledger = store.LedgerStore(tmp_path)
    told = reports.Reports(
        manager, ledger, is_watched=lambda _: False, whose=lambda *_: whose, changed=lambda: None
    )
    told.denied(dataclasses.replace(EVENT, denied=False, time=time.monotonic()), None)
    (found,) = manager.denials.findings(time.time())
    assert (found.rule, why in found.message) == (rule, True)
    told.close()
