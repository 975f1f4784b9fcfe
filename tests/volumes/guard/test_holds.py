"""A device whose format was refused stays attached until its check, and with a lease until it is
formatted. The whole of it with krbd: test_guest.py."""

import asyncio
import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from linux import blockdev
from tests.testbed import blockdev as disks
from tests.testbed import waiting
from tests.volumes.guard.world import BLANK, DEVICE, EXT4, World
from volumes.guard import holds, lease, pace
from volumes.probe.examine import Kind, Verdict

NO_ANSWER = Verdict(Kind.TIMEOUT, "/dev/rbd99", where="no answer")


async def settled(world: World) -> None:
    """No check runs or follows; one that watches a lease sleeps."""
    await waiting.until_async(lambda: "rbd99" not in world.manager._checking, 30, "the check")
    for _ in range(3):
        await asyncio.sleep(pace.FIRST_SECONDS)
        await waiting.until_async(lambda: "rbd99" not in world.manager._checking, 30, "the check")


async def test_a_stage_that_is_undone_finds_the_device_again(world: World) -> None:
    world.manager.denied("rbd99", DEVICE)
    assert world.did == ["hold"]
    await waiting.until_async(lambda: world.map, 30, "the lease")
    await settled(world)
    assert world.holds.names == ["rbd99"]  # leased, and not yet formatted
    world.verdict = EXT4
    await waiting.until_async(lambda: not world.holds.names, 30, "the end of the hold")
    assert world.map  # the lease lingers, for a mkfs that opens again


async def test_a_refusal_during_a_check_holds_too(world: World) -> None:
    world.manager.schedule("rbd99", DEVICE)
    await waiting.until_async(lambda: "probe" in world.did, 30, "the first probe")
    world.manager.denied("rbd99", DEVICE)
    await waiting.until_async(lambda: world.map, 30, "the lease")
    await settled(world)
    assert world.holds.names == ["rbd99"]


@pytest.mark.parametrize("verdict", [EXT4, NO_ANSWER])
async def test_what_may_not_be_formatted_is_let_go_by_its_check(
    world: World, verdict: Verdict
) -> None:
    world.verdict = verdict
    for _ in range(2):
        world.manager.denied("rbd99", DEVICE)
        assert world.holds.names == ["rbd99"]
        await waiting.until_async(lambda: not world.holds.names, 30, "the end of the hold")
        assert world.manager.known["rbd99"].reasons
        await settled(world)
    if verdict is EXT4:  # It is looked at again only later: until then everybody may detach it.
        world.manager.denied("rbd99", DEVICE)
        assert "rbd99" in world.manager._timers
        assert not world.holds.names


async def test_a_stop_waits_for_no_check_that_was_just_asked_for(world: World) -> None:
    """asyncio.wait_for of Python 3.11 loses a cancel that comes as its wait ends."""
    world.verdict = NO_ANSWER
    world.manager.denied("rbd99", DEVICE)
    await settled(world)
    world.manager.schedule("rbd99", DEVICE)
    async with asyncio.timeout(30):
        await world.manager.close()


async def test_an_unused_lease_ends_the_hold(world: World) -> None:
    world.manager.settings = world.manager.settings.model_copy(update={"lease": 1.0})
    world.manager.denied("rbd99", DEVICE)
    await waiting.until_async(lambda: world.map, 30, "the lease")
    await waiting.until_async(lambda: not world.holds.names, 30, "the end of the hold")


async def test_a_device_that_is_gone_or_another_is_not_held(world: World) -> None:
    world.manager.denied("rbd99", DEVICE)
    await waiting.until_async(lambda: world.map, 30, "the lease")
    world.device = dataclasses.replace(DEVICE, diskseq=8)
    world.verdict = dataclasses.replace(BLANK, diskseq=8)
    world.manager.replaced(world.manager.known["rbd99"])
    assert not world.holds.names
    await settled(world)
    world.manager.denied("rbd99", world.device)
    world.manager.forget("rbd99")
    assert not world.holds.names


async def test_who_was_only_warned_holds_nothing(world: World) -> None:
    world.manager.denied("rbd99")  # dry-run
    await settled(world)
    assert "hold" not in world.did


# --- the child


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[blockdev.BlockDevice]:
    """A loop device, which counts here as one that an open keeps attached."""
    monkeypatch.setattr(lease, "NEW_DISKS", frozenset({"loop"}))
    with disks.loop(disks.blank(tmp_path / "disk", 2**20)) as path:
        found = blockdev.identify(Path(path).name)
        assert found is not None
        yield found


def openers(device: blockdev.BlockDevice) -> list[int]:
    """Processes that have it open."""
    found = []
    for each in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.stat(each).st_rdev == os.makedev(*device.number):
                found.append(int(each.parts[2]))
    return found


@pytest.mark.real
async def test_child_has_the_device_open_until_the_end(disk: blockdev.BlockDevice) -> None:
    held = holds.Holds()
    held.begin(disk, 60)
    held.begin(disk, 60)
    await waiting.until_async(lambda: held.begun, 60, "the hold")
    (pid,) = openers(disk)
    assert pid != os.getpid()
    held.end(disk.name)
    await waiting.until_async(lambda: not openers(disk), 60, "the end of the hold")
    assert held.names == []
    held.begin(disk, 1)
    await waiting.until_async(lambda: held.begun == 2, 60, "the hold")
    await waiting.until_async(lambda: not openers(disk), 60, "the end of its time")
    held.begin(disk, 60)
    await held.close()
    assert openers(disk) == []


@pytest.mark.real
async def test_child_does_not_hold_another_attachment(disk: blockdev.BlockDevice) -> None:
    held = holds.Holds()
    assert disk.diskseq is not None
    held.begin(dataclasses.replace(disk, diskseq=disk.diskseq + 1), 60)
    await waiting.until_async(lambda: not held.names, 60, "the refusal")
    assert (held.begun, openers(disk)) == (0, [])
    for other in (dataclasses.replace(disk, parent="x"), dataclasses.replace(disk, driver="nbd")):
        held.begin(other, 60)
        assert held.names == []
    await held.close()
