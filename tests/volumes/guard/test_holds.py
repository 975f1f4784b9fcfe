"""A device whose format was refused stays attached until its check, and with a lease until it is
formatted. The whole of it with krbd: test_guest.py."""

import asyncio
import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from linux import blockdev
from tests.testbed import blockdev as disks
from tests.testbed import waiting
from tests.volumes.guard.world import BLANK, DEVICE, EXT4, NO_ANSWER, World
from volumes.guard import hold, holds, lease, pace
from volumes.ledger import store
from volumes.probe.examine import Kind, Verdict


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
    await settled(world)
    assert not world.map  # no process is at work on it


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
    for _ in range(1 if verdict is EXT4 else 2):
        world.manager.denied("rbd99", DEVICE)
        assert world.holds.names == ["rbd99"]
        await waiting.until_async(lambda: not world.holds.names, 30, "the end of the hold")
        await settled(world)
        assert world.manager.known["rbd99"].reasons


async def test_a_stop_waits_for_no_check_that_was_just_asked_for(world: World) -> None:
    """asyncio.wait_for of Python 3.11 loses a cancel that comes as its wait ends."""
    world.verdict = NO_ANSWER
    world.manager.denied("rbd99", DEVICE)
    await settled(world)
    world.manager.schedule("rbd99", DEVICE)
    async with asyncio.timeout(waiting.limit(30)):
        await world.manager.close()


async def test_data_is_let_go_before_its_cluster_answers(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unmap tries for half a second, and what is left mapped is in use for other nodes."""
    world.verdict = EXT4
    asked, answers, ask = asyncio.Event(), asyncio.Event(), world.ask

    async def slow(*args: Any, **words: Any) -> Any:
        asked.set()
        await answers.wait()
        return await ask(*args, **words)

    monkeypatch.setattr(world, "ask", slow)
    world.manager.denied("rbd99", DEVICE)
    assert world.holds.names == ["rbd99"]
    async with asyncio.timeout(waiting.limit(30)):
        await asked.wait()
    assert not world.holds.names
    answers.set()
    await settled(world)
    world.did.clear()
    world.manager.denied("rbd99", DEVICE)  # now it is known
    assert "hold" not in world.did


async def test_what_an_operator_permits_is_kept_for_the_next_stage(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blockdev, "by_path", lambda _: DEVICE)
    monkeypatch.setattr(blockdev, "in_use", lambda _: False)
    world.verdict = EXT4
    await world.manager.allow("/dev/rbd99", DEVICE.volume, "why", "me")
    await settled(world)
    assert world.holds.names == ["rbd99"]
    world.verdict = dataclasses.replace(EXT4, uuid="new")
    await waiting.until_async(lambda: not world.holds.names, 30, "the end of the hold")


async def test_an_unused_lease_ends_the_hold(world: World) -> None:
    world.manager.checks.settings = world.manager.checks.settings.model_copy(update={"lease": 1.0})
    world.manager.denied("rbd99", DEVICE)
    await waiting.until_async(lambda: world.map, 30, "the lease")
    await waiting.until_async(lambda: not world.holds.names, 30, "the end of the hold")


async def test_a_device_that_is_gone_or_another_is_not_held(world: World) -> None:
    world.manager.denied("rbd99", DEVICE)
    await waiting.until_async(lambda: world.map, 30, "the lease")
    world.device = dataclasses.replace(DEVICE, diskseq=8)
    world.verdict = dataclasses.replace(BLANK, diskseq=8)
    world.manager.checks.replaced(world.manager.known["rbd99"])
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
async def test_a_child_that_is_killed_holds_nothing(disk: blockdev.BlockDevice) -> None:
    held = holds.Holds()
    for _ in range(2):
        held.begin(disk, 60)
        await waiting.until_async(lambda: openers(disk), 60, "the hold")
        (pid,) = openers(disk)
        os.kill(pid, signal.SIGKILL)
        await waiting.until_async(lambda: not held.names, 60, "the end to be seen")
    await held.close()


async def test_no_child_is_left_whatever_is_asked_while_one_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started, go, left = asyncio.Event(), asyncio.Event(), set["Child"]()

    class Child:
        about = ""

        async def start(self) -> None:
            started.set()
            await go.wait()
            left.add(self)

        async def ask(self, *_: Any) -> bool:
            left.add(self)
            return True

        async def ended(self) -> None:
            await asyncio.Event().wait()

        async def close(self) -> None:
            left.discard(self)

    monkeypatch.setattr(holds, "_worker", Child)
    for closed_first in (False, True):
        started.clear()
        go.clear()
        held = holds.Holds()
        held.begin(DEVICE, 60)
        await started.wait()  # the next child
        held.begin(dataclasses.replace(DEVICE, name="rbd98"), 60)
        held.end("rbd98")
        if not closed_first:
            go.set()
        await asyncio.sleep(0)
        await held.close()
        go.set()
        await asyncio.sleep(0)
        assert not left


@pytest.mark.real
async def test_child_does_not_hold_another_attachment(disk: blockdev.BlockDevice) -> None:
    held = holds.Holds()
    assert disk.diskseq is not None
    held.begin(dataclasses.replace(disk, diskseq=disk.diskseq + 1), 60)
    await waiting.until_async(lambda: not held.names, 60, "the refusal")
    assert (held.begun, openers(disk)) == (0, [])
    with pytest.raises(OSError, match="another device"):
        hold.have_open(hold.Request(disk.name, disk.number, disk.diskseq + 1, 60))
    assert openers(disk) == []
    for other in (dataclasses.replace(disk, parent="x"), dataclasses.replace(disk, driver="nbd")):
        held.begin(other, 60)
        assert held.names == []
    await held.close()


async def test_what_the_ledger_knows_to_hold_data_is_not_held(world: World) -> None:
    """No check can permit its format, so a hold only keeps a failover waiting: each refused mkfs of
    a volume that cannot be read would hold it for a probe's deadline."""
    world.verdict = NO_ANSWER
    world.ledger.put(store.Entry(DEVICE.volume, type="ext4", uuid="u1"))
    for _ in range(2):
        world.manager.denied("rbd99", DEVICE)
        assert not world.holds.names
        await settled(world)
    await world.manager.close()


@pytest.mark.parametrize("kind", [Kind.UNKNOWN_CONTENT, Kind.AMBIVALENT])
async def test_what_an_operator_permits_is_kept_whatever_it_holds(
    world: World, monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    monkeypatch.setattr(blockdev, "by_path", lambda _: DEVICE)
    monkeypatch.setattr(blockdev, "in_use", lambda _: False)
    world.verdict = Verdict(kind, "/dev/rbd99", size=DEVICE.size, diskseq=7)
    await world.manager.allow("/dev/rbd99", DEVICE.volume, "why", "me")
    await settled(world)
    assert world.map[DEVICE.number].until > time.monotonic()
    assert world.holds.names == ["rbd99"]
    if kind is Kind.AMBIVALENT:
        world.map.clear()  # the permit ends, and with it what the operator said
        world.manager.schedule("rbd99", DEVICE)
    else:
        world.verdict = EXT4
    await waiting.until_async(lambda: not world.holds.names, 30, "the end of the hold")
    await settled(world)  # a save that is cancelled keeps the next test's from the disk's thread
    await world.manager.close()
