"""What the guard does when nothing happens: what the clock makes due, and no more."""

import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from linux import blockdev
from tests.volumes.guard.world import witness
from volumes import settings
from volumes.guard import controller, pace, steps


class World:
    """A controller whose devices are a list; nothing is in the kernel."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
        self.there = [self.device(number) for number in range(count)]
        self.in_use: frozenset[str] = frozenset()
        self.scans = 0
        self.checked: list[str] = []
        self.guard = controller.Controller(
            settings.GuardSettings(), (), witness(), state_dir=folder
        )
        self.guard.node._uevents = object()  # type: ignore[assignment]  # they are heard
        now = time.monotonic()
        for device in self.there:
            self.guard.manager.known[device.name] = steps.Known(device, checked=now)

        def all_devices() -> list[blockdev.BlockDevice]:
            self.scans += 1
            return self.there

        def schedule(name: str, device: blockdev.BlockDevice | None = None) -> None:
            self.checked.append(name)

        monkeypatch.setattr(self.guard._devices, "all", all_devices)
        monkeypatch.setattr(self.guard.manager, "schedule", schedule)
        monkeypatch.setattr(blockdev, "names", lambda: [each.name for each in self.there])
        monkeypatch.setattr(blockdev, "with_superblock", lambda: self.in_use)
        monkeypatch.setattr(blockdev, "identify", lambda name: self._identify(name))

    @staticmethod
    def device(number: int) -> blockdev.BlockDevice:
        return blockdev.BlockDevice(f"rbd{number}", (252, number), "rbd", 4096, False, number)

    def _identify(self, name: str) -> blockdev.BlockDevice | None:
        return next((each for each in self.there if each.name == name), None)

    def age(self, seconds: float, names: Iterable[str]) -> None:
        for name in names:
            self.guard.manager.known[name].checked = time.monotonic() - seconds

    async def look(self) -> list[str]:
        self.checked.clear()
        await self.guard._look()
        return self.checked


async def test_all_devices_are_read_only_where_an_event_may_be_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, monkeypatch, 3)
    for _ in range(3):
        assert await world.look() == []
    assert world.scans == 1
    world.there.append(world.device(7))  # no uevent told of it, its name does
    assert await world.look() == ["rbd7"] and world.scans == 2
    del world.there[0]
    await world.look()
    assert world.scans == 3 and "rbd0" not in world.guard.manager.known
    world.guard._scanned -= controller.SCAN_SECONDS
    await world.look()
    assert world.scans == 4
    world.guard.node._uevents = None
    await world.look()
    assert world.scans == 5


async def test_devices_that_are_due_together_are_checked_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, monkeypatch, 100)
    names = list(world.guard.manager.known)
    world.in_use = frozenset(names[50:])
    await world.look()
    world.age(pace.CHECK_AGAIN_SECONDS, names)
    world.age(pace.CHECK_IN_USE_SECONDS, names[90:])
    seen: list[str] = []
    rounds = 0
    while checked := await world.look():
        assert len(checked) <= 100 * controller.ROUND_SECONDS / pace.CHECK_AGAIN_SECONDS
        seen += checked
        rounds += 1
        world.age(0, checked)
    assert sorted(seen) == sorted(names[:50] + names[90:])  # those in use wait longer
    assert set(seen[:10]) == set(names[90:])  # the oldest first
    assert rounds * controller.ROUND_SECONDS <= pace.CHECK_AGAIN_SECONDS
