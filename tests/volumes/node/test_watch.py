"""What the guard and the audit hear of the node through one watch."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest

from linux import netlink
from tests.volumes.guard.world import DEVICE, witness
from volumes import settings
from volumes.guard import controller
from volumes.node import watch


async def test_what_one_listener_cannot_heed_the_other_hears() -> None:
    event = netlink.Uevent("add", "rbd0", "disk")
    waiting: list[list[netlink.Uevent] | Exception] = [[event], netlink.Overflow(), []]

    class Uevents:
        def read(self) -> list[netlink.Uevent]:
            found = waiting.pop(0)
            if isinstance(found, Exception):
                raise found
            return found

    def fail(_: Sequence[netlink.Uevent] | None) -> None:
        raise ValueError("whatever it is")

    heard: list[Sequence[netlink.Uevent] | None] = []
    node = watch.NodeWatch()
    node.devices += [fail, heard.append]
    node._uevents = Uevents()  # type: ignore[assignment]
    node.hear()
    assert heard == [[event], None], "and that some may be lost"
    node.hear()
    assert heard == [[event], None] and waiting == []


async def test_what_one_listener_of_mounts_cannot_heed_the_others_hear() -> None:
    def fail(*_: object) -> None:
        raise ValueError("whatever it is")

    heard: list[object] = []
    node = watch.NodeWatch()
    node.mounts += [fail, lambda: heard.append("mounts")]
    node.published += [fail, lambda *told: heard.append(told)]
    node._mounted()
    node._published({}, whole=True)
    assert heard == ["mounts", ({}, True)]


@pytest.mark.parametrize("told", ["by uevents", "by a scan"])
async def test_a_device_that_cannot_be_heeded_hides_no_other_and_is_tried_again(
    told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else those after it in the batch are guarded at the next scan alone, minutes later."""
    guard = controller.Controller(
        settings.GuardSettings(), (), witness(), state_dir=tmp_path / "state"
    )
    guard._scanned = 0.0
    seen: list[str] = []

    def look(name: str) -> None:
        seen.append(name)
        if name == "rbd1":
            raise ValueError("whatever it is")

    monkeypatch.setattr(guard, "_seen", look)
    names = ("rbd0", "rbd1", "rbd2")
    if told == "by uevents":
        guard._on_devices([netlink.Uevent("add", name, "disk") for name in names])
    else:
        there = [dataclasses.replace(DEVICE, name=name) for name in names]
        monkeypatch.setattr(guard._devices, "all", lambda: there)
        await guard._scan()
    assert seen == list(names)
    assert guard._scanned < 0, "no scan is due"


async def test_who_stops_takes_nothing_from_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[str] = []

    class Tables:
        def __init__(self, *_: object) -> None:
            looks.append("made")

        async def start(self) -> None:
            looks.append("started")

        async def close(self) -> None:
            looks.append("closed")

    monkeypatch.setattr(watch, "RawBlockWatch", Tables)
    node = watch.NodeWatch()
    guard, audit = object(), object()
    await node.stop(guard)  # one whose start failed
    await node.start(guard)
    await node.start(audit)
    await node.stop(audit)
    assert node.hears_devices and looks == ["made", "started"]
    await node.stop(guard)
    assert not node.hears_devices and looks == ["made", "started", "closed"]
