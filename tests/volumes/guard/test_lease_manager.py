"""LeaseManager with stand-ins for device, probe, cluster and kernel: what it does, in which order.

The decisions themselves are tested in test_lease.py, real devices in test_lease_manager_devices.py.
"""

import asyncio
import contextlib
import dataclasses
import errno
import json
import math
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import kit.child
import kit.errors
import kit.tasks
from ceph.protocol import Extents
from kit import processes
from linux import blockdev, procfs
from linux.rbd_sysfs import RbdClient, RbdImage
from tests.testbed import waiting
from tests.volumes.guard.world import (
    BLANK,
    DEVICE,
    EXT4,
    IMAGE,
    NO_ANSWER,
    PUBLISHED,
    SIZE,
    World,
    witness,
)
from volumes import settings
from volumes.guard import (
    checks,
    controller,
    denials,
    explain,
    kernel,
    lease,
    lease_manager,
    pace,
    status,
    steps,
)
from volumes.guard.lease import Step
from volumes.ledger import mirror, store
from volumes.node import raw_block
from volumes.node.watch import RawBlockWatch
from volumes.probe.examine import Kind, Verdict


async def test_first_lease_follows_the_granting_order(world: World) -> None:
    known = await world.checked()
    assert known.reasons == ()
    assert world.did == ["probe", "probe", "identify", "record permission", "mirror", "reserve",
                         "identify", "grant"]  # fmt: skip
    held = world.map[254, 99]
    assert held.diskseq == 7
    assert 140 < held.until - time.monotonic() <= 150


async def test_grant_executes_the_step_list(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list that test_lease_lives.py drives, and no order of the manager's own."""
    monkeypatch.setattr(lease, "GRANTING", (Step.MIRROR, Step.RECORD_PERMISSION))
    await world.checked()
    assert world.did[3:] == ["record permission"]  # nothing to mirror before, and no lease
    assert world.map == {}


async def test_grant_stops_when_the_attachment_changes(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, written = world.write, list[store.Entry]()

    async def replaced(image: RbdImage, entry: store.Entry, part: str = "") -> bool:
        written.append(entry)
        world.device = dataclasses.replace(DEVICE, diskseq=8)
        return await write(image, entry)

    monkeypatch.setattr(world, "write", replaced)
    known = await world.checked()
    assert "another device was attached" in known.reasons[0]
    assert world.map == {}
    entry = world.ledger.get(DEVICE.volume)
    assert entry is not None
    # This process knows that nothing was granted. An open permission would refuse the volume for
    # ever where no cluster can be asked.
    assert not entry.permitted
    assert [bool(each.permitted) for each in written] == [True, False]  # the copy, too


async def test_a_grant_that_may_have_reached_the_kernel_stays_open(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def grant(*_: Any) -> None:
        raise OSError(5, "unknown outcome")

    monkeypatch.setattr(world, "grant", grant)
    await world.checked()
    entry = world.ledger.get(DEVICE.volume)
    assert entry is not None and entry.permitted


async def test_a_broken_grant_closes_no_permission_but_its_own(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The volume was mapped again under another name, and permitted there meanwhile."""
    write = world.write

    async def again(image: RbdImage, entry: store.Entry, part: str = "") -> bool:
        world.ledger.put(entry.permit("the other mapping", time.time()))
        world.device = dataclasses.replace(DEVICE, diskseq=8)
        return await write(image, entry)

    monkeypatch.setattr(world, "write", again)
    await world.checked()
    entry = world.ledger.get(DEVICE.volume)
    assert entry is not None and entry.permitted and entry.permitted_by == "the other mapping"


async def test_a_broken_grant_leaves_no_count_that_closes_an_earlier_permission(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody wrote under the earlier one, and what he wrote cannot be seen. No open is counted
    under the reservation of the second: its end must not look like that of an unused lease."""
    world.ledger.put(store.Entry(DEVICE.volume).permit("automatic", 1.0))
    monkeypatch.setattr(blockdev, "by_path", lambda _: world.device)
    monkeypatch.setattr(blockdev, "in_use", lambda _: False)
    identify, failing = blockdev.identify, True

    async def no_cluster(*_: Any, **__: Any) -> mirror.Answer:
        return mirror.NOT_ASKED

    def identified(name: str) -> blockdev.BlockDevice | None:
        if failing and "reserve" in world.did:  # the last look before the grant
            raise OSError(5, "I/O error")
        return identify(name)

    monkeypatch.setattr(blockdev, "identify", identified)
    with pytest.raises(OSError):
        await world.manager.allow("/dev/rbd99", DEVICE.volume, "scratch", "me")
    assert world.map == {}
    failing = False
    monkeypatch.setattr(world, "ask", no_cluster)
    known = await world.checked()
    assert any("may have happened" in reason for reason in known.reasons), known.reasons
    entry = world.ledger.get(DEVICE.volume)
    assert entry is not None and entry.permitted_by == "automatic"


async def test_growth_keeps_the_permission_of_a_raw_volume(world: World) -> None:
    """Its pod may open the device at any moment, and a full state disk gives no new one."""
    await world.checked()
    await published(world, True)
    await waiting.until_async(lambda: world.map[254, 99].until == math.inf, 5.0)
    world.did.clear()
    world.device = dataclasses.replace(DEVICE, size=2 * SIZE)
    world.manager.schedule("rbd99", world.device)
    await waiting.until_async(lambda: world.did.count("grant") > 0, 5.0)
    assert "revoke" not in world.did and "record permission" not in world.did


async def test_lease_of_a_partition_needs_a_living_agent(world: World) -> None:
    part = dataclasses.replace(DEVICE, name="rbd99p1", number=(259, 1), parent="rbd99")
    assert world.manager.executor.grace(DEVICE) == 0
    assert world.manager.executor.grace(part) == lease.GRACE_SECONDS


@pytest.mark.parametrize("verdict", [EXT4, Verdict(Kind.UNREADABLE, errno=5), BLANK])
async def test_check_revokes_a_lease_of_another_attachment(world: World, verdict: Verdict) -> None:
    """An earlier agent's lease; the number passed to another volume while none was running."""
    world.map[254, 99] = kernel.KernelLease(time.monotonic() + 3600, 0, diskseq=6)
    world.verdict = verdict
    await world.checked()
    assert world.did[0] == "revoke"
    assert (254, 99) not in world.map or world.map[254, 99].diskseq == 7


async def test_check_keeps_a_lease_of_the_same_attachment(world: World) -> None:
    await world.checked()
    held = dict(world.map)
    restarted = world.new_manager()
    known = await world.checked(restarted)
    assert known.reasons == ()
    assert world.map == held
    await restarted.close()


async def test_revoke_unproven_keeps_only_leases_of_what_is_attached(world: World) -> None:
    end = time.monotonic() + 3600
    world.map = {(254, 99): kernel.KernelLease(end, 0, 7), (254, 98): kernel.KernelLease(end, 0, 5)}
    world.manager.revoke_unproven()
    assert list(world.map) == [(254, 99)]  # 98 has no device
    world.device = dataclasses.replace(DEVICE, diskseq=8)
    world.manager.revoke_unproven()
    assert world.map == {}


async def test_content_ends_the_lease_and_closes_the_permission(world: World) -> None:
    await world.checked()
    world.verdict = EXT4
    world.did.clear()
    world.manager.schedule("rbd99")
    async with asyncio.timeout(waiting.limit(30)):
        while "revoke" not in world.did:
            await asyncio.sleep(0.01)
    assert world.did == ["identify", "probe", "record ext4", "mirror", "revoke"]
    entry = world.ledger.get(DEVICE.volume)
    assert entry is not None
    assert (entry.type, entry.permitted) == ("ext4", 0.0)


def denial() -> denials.Denial:
    return denials.Denial(
        at=0.0, device="rbd99", volume=DEVICE.volume, title="t", denied=True, pid=5,
        program="mkfs.ext4", parent="", command="", cgroup="", pod="", container="",
    )  # fmt: skip


def uses(world: World, process: "subprocess.Popen[bytes]") -> procfs.StartedProcess:
    """It opens the device under the lease, first of all."""
    stat = Path(f"/proc/{process.pid}/stat").read_text()
    started = int(stat.rpartition(")")[2].split()[19]) * 10**9 // os.sysconf("SC_CLK_TCK")
    writer = procfs.StartedProcess(started, process.pid)
    world.map[254, 99] = dataclasses.replace(world.map[254, 99], opens=2, writer=writer)
    return writer


@pytest.fixture
def formatter(world: World) -> Iterator["subprocess.Popen[bytes]"]:
    """It has the device open."""
    world.writes = True
    with subprocess.Popen(["sleep", "infinity"]) as process:
        yield process
        process.kill()


async def test_the_lease_lasts_while_its_formatter_is_at_work(
    world: World, formatter: "subprocess.Popen[bytes]"
) -> None:
    """It may open the device again when its mark is there."""
    await world.checked()
    uses(world, formatter)
    known = await looked_again(world)
    assert known.reasons == (f"process {formatter.pid} formats it now: wait for its end",)
    assert status.describe_device(known, 0.0)["formatted_by"] == formatter.pid
    world.verdict = EXT4
    await looked_again(world)
    assert world.map[254, 99].until - time.monotonic() > 60
    formatter.kill()
    os.waitid(os.P_PID, formatter.pid, os.WEXITED | os.WNOWAIT)  # a zombie has closed its files
    assert (await looked_again(world)).writer == 0
    assert (254, 99) not in world.map


async def test_the_next_lease_waits_for_a_formatter_that_outlives_its_own(
    world: World, formatter: "subprocess.Popen[bytes]"
) -> None:
    """Two would format at once."""
    await world.checked()
    uses(world, formatter)
    world.map[254, 99] = dataclasses.replace(world.map[254, 99], until=time.monotonic() - 5)
    for _ in range(2):
        known = await looked_again(world)
        assert known.reasons == (f"process {formatter.pid} formats it now: wait for its end",)
        assert world.map[254, 99].writer, "who it is stays known"
    assert "rbd99" in world.manager._tasks, "nobody else asks for the next look"
    formatter.kill()
    formatter.wait()
    await looked_again(world)
    assert (254, 99) not in world.map or world.map[254, 99].writer is None


async def test_one_who_is_refused_before_the_lease_is_freed_is_no_finding(
    world: World, monkeypatch: pytest.MonkeyPatch, formatter: "subprocess.Popen[bytes]"
) -> None:
    """The writer ends while a look runs, and the next comes. A second later he may format it."""
    await world.checked()
    uses(world, formatter)
    probe = world.probe

    async def slow(*words: str) -> Verdict:
        monkeypatch.setattr(world, "probe", probe)
        formatter.kill()
        formatter.wait()
        world.manager.denials.add(denial())
        return await probe(*words)

    monkeypatch.setattr(world, "probe", slow)
    known = await looked_again(world)
    assert known.freed_next and status.describe_device(known, 0.0)["freed_next"]
    assert world.manager.denials.findings(0.0) == []
    delayed = world.manager.denials.delayed
    await waiting.until_async(lambda: not known.reasons, 30, "the next look")
    assert world.manager.denials.findings(0.0) == []
    assert world.manager.denials.delayed == delayed + 1 and not known.freed_next


async def test_one_who_is_refused_at_the_end_of_a_lease_that_was_to_be_freed_is_no_finding(
    world: World, monkeypatch: pytest.MonkeyPatch, formatter: "subprocess.Popen[bytes]"
) -> None:
    """The lease ends before the look that would free it: that look gives the next one."""
    await world.checked()
    uses(world, formatter)
    probe = world.probe

    async def slow(*words: str) -> Verdict:
        monkeypatch.setattr(world, "probe", probe)
        formatter.kill()
        formatter.wait()
        until = time.monotonic() + 0.15
        world.map[254, 99] = dataclasses.replace(world.map[254, 99], until=until)
        return await probe(*words)

    monkeypatch.setattr(world, "probe", slow)
    world.manager.denials.add(denial())
    world.manager.denied("rbd99")
    known = await looked_again(world)
    assert known.freed_next
    await waiting.until_async(lambda: not world.manager.denials.waiting, 30, "the next looks")
    assert (known.reasons, world.manager.denials.findings(0.0)) == ((), [])


async def test_who_was_refused_before_a_lease_of_an_agent_that_knew_no_writers_is_no_finding(
    world: World,
) -> None:
    """That lease is everybody's: the next try passes, and no look frees it."""
    await world.checked()
    everybody = procfs.StartedProcess(0, 0)
    world.map[254, 99] = dataclasses.replace(world.map[254, 99], writer=everybody)
    world.manager.denials.add(denial())
    known = await looked_again(world)
    assert (known.reasons, known.freed_next) == ((), False)
    world.verdict = EXT4
    await looked_again(world)
    assert world.manager.denials.findings(0.0) == []


async def test_who_was_refused_after_one_that_left_no_blank_volume_is_a_finding(
    world: World, monkeypatch: pytest.MonkeyPatch, formatter: "subprocess.Popen[bytes]"
) -> None:
    """No look frees that lease."""
    await world.checked()
    uses(world, formatter)
    formatter.kill()
    formatter.wait()
    world.verdict = Verdict(Kind.UNKNOWN_CONTENT, "/dev/rbd99", size=SIZE, diskseq=7)
    world.manager.denials.add(denial())
    known = await looked_again(world)
    assert not known.freed_next and len(world.manager.denials.findings(0.0)) == 1


@pytest.mark.parametrize("tries", [False, True])
async def test_the_end_of_an_overdue_formatter_is_seen_between_looks(
    world: World, monkeypatch: pytest.MonkeyPatch, formatter: "subprocess.Popen[bytes]", tries: bool
) -> None:
    """Also where one that ``tries`` again waits for a look that its pace has put off."""
    for name in ("OVERDUE_CHECK_SECONDS", "LONGEST_OVERDUE_SECONDS"):
        monkeypatch.setattr(checks, name, 3600.0)
    await world.checked()
    uses(world, formatter)
    world.map[254, 99] = dataclasses.replace(world.map[254, 99], until=time.monotonic() - 5)
    known = await looked_again(world)
    assert known.writer == formatter.pid
    if tries:
        known.pace = pace.Pace((Kind.BLANK_VERIFIED, True, known.writer), 8, time.monotonic())
        world.manager.denied("rbd99")
    formatter.kill()
    formatter.wait()
    ends = ("its lease ended unused; the next attempt to write gets a new one",)
    await waiting.until_async(lambda: known.reasons == (() if tries else ends), 30, "its end")
    assert known.writer == 0


@pytest.mark.parametrize("meanwhile", ["", "opened", "opened and ended"])
async def test_who_closed_the_device_leaves_the_lease_to_the_next(
    world: World, monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    """access(2) takes the lease, too: 'test -w DEVICE' in a shell that lives on. What the probe saw
    counts only for one that did not open the device ``meanwhile``."""
    await world.checked()
    probe = world.probe

    async def slow(*words: str) -> Verdict:
        if meanwhile:
            world.map[254, 99] = dataclasses.replace(world.map[254, 99], opens=3)
        if meanwhile == "opened and ended":
            process.kill()
            process.wait()
        return await probe(*words)

    with subprocess.Popen(["sleep", "infinity"]) as process:
        try:
            uses(world, process)
            monkeypatch.setattr(world, "probe", slow)
            known = await looked_again(world)
            assert (world.map[254, 99].writer is None) is not bool(meanwhile)
            assert bool(known.reasons) is bool(meanwhile), "others are refused until the next look"
            assert (known.writer == process.pid) is (meanwhile == "opened")
        finally:
            process.kill()


@pytest.fixture
def shell() -> Iterator["subprocess.Popen[bytes]"]:
    """It lives on, without the device open."""
    with subprocess.Popen(["sleep", "infinity"]) as process:
        yield process
        process.kill()


async def test_a_shell_that_lives_on_keeps_no_blank_volume_from_its_next_lease(
    world: World, shell: "subprocess.Popen[bytes]"
) -> None:
    await world.checked()
    uses(world, shell)
    world.map[254, 99] = dataclasses.replace(world.map[254, 99], until=time.monotonic() - 5)
    world.did.clear()
    await looked_again(world)
    assert "revoke" in world.did


async def test_in_doubt_a_writer_that_lives_keeps_the_lease(
    world: World, shell: "subprocess.Popen[bytes]"
) -> None:
    """The kernel does not say who has the device open."""

    async def refuses(number: blockdev.Number) -> frozenset[procfs.StartedProcess]:
        raise OSError(errno.EINVAL, "Invalid argument")

    await world.checked()
    uses(world, shell)
    world.manager.checks.writing = refuses
    for until in (time.monotonic() + 60, time.monotonic() - 5):
        world.map[254, 99] = dataclasses.replace(world.map[254, 99], until=until)
        await looked_again(world)
        assert world.map[254, 99].writer


async def test_a_writer_that_the_first_look_does_not_show_keeps_the_lease(
    world: World, shell: "subprocess.Popen[bytes]"
) -> None:
    """Its open was still under way, or its descriptor moved."""
    await world.checked()
    writer, asked = uses(world, shell), []

    async def writing(number: blockdev.Number) -> frozenset[procfs.StartedProcess]:
        asked.append(1)
        return frozenset({writer} if len(asked) == 2 else ())

    world.manager.checks.writing = writing
    await looked_again(world)
    assert len(asked) == 2 and world.map[254, 99].writer


async def test_content_of_one_that_closed_the_device_leaves_it_five_seconds(
    world: World, shell: "subprocess.Popen[bytes]"
) -> None:
    """It may open the device again, and has no reason to for as long as a lease."""
    await world.checked()
    uses(world, shell)
    world.verdict = EXT4
    await looked_again(world)
    assert 0 < world.map[254, 99].until - time.monotonic() <= lease.LINGER_SECONDS


async def test_where_the_end_of_a_formatter_is_not_seen_the_end_of_its_lease_counts(
    world: World, monkeypatch: pytest.MonkeyPatch, shell: "subprocess.Popen[bytes]"
) -> None:
    """An agent in a pid namespace of its own: numbers of processes are others there."""
    monkeypatch.setattr(procfs, "_HOST_PIDS", 1)
    await world.checked()
    uses(world, shell)
    (reason,) = (await looked_again(world)).reasons or ()
    assert "pid namespace does not show whether it has ended" in reason
    world.map[254, 99] = dataclasses.replace(world.map[254, 99], until=time.monotonic() - 5)
    world.did.clear()
    assert (await looked_again(world)).writer == 0
    assert "revoke" in world.did


async def test_an_operator_waits_for_a_formatter_at_work(
    world: World, monkeypatch: pytest.MonkeyPatch, formatter: "subprocess.Popen[bytes]"
) -> None:
    monkeypatch.setattr(blockdev, "by_path", lambda path: world.device)
    monkeypatch.setattr(blockdev, "in_use", lambda device: False)
    await world.checked()
    uses(world, formatter)
    world.did.clear()
    with pytest.raises(kit.errors.RefusedError, match=f"process {formatter.pid} formats it now"):
        await world.manager.allow("/dev/rbd99", DEVICE.volume, "scratch", "me")
    expired = dataclasses.replace(world.map[254, 99], until=time.monotonic() - 5)
    held, world.map[254, 99] = world.map[254, 99], expired
    with pytest.raises(kit.errors.RefusedError) as refused:
        await world.manager.allow("/dev/rbd99", DEVICE.volume, "scratch", "me")
    assert f"kill {formatter.pid}; if it does not end, its I/O hangs" in refused.value.remedy
    assert "never unmap with force" in refused.value.remedy, "krbd refuses another unmap"
    world.map[254, 99] = held
    monkeypatch.setattr(procfs, "_HOST_PIDS", 1)  # here another process has its number
    with pytest.raises(kit.errors.RefusedError, match="pid namespace does not show") as refused:
        await world.manager.allow("/dev/rbd99", DEVICE.volume, "scratch", "me")
    assert "kill" not in refused.value.remedy
    assert "grant" not in world.did


@pytest.mark.parametrize("lives", [False, True])
async def test_an_operator_permits_the_next_try_after_one_that_left_no_blank_volume(
    world: World, monkeypatch: pytest.MonkeyPatch, formatter: "subprocess.Popen[bytes]", lives: bool
) -> None:
    """No check freed its lease, which still holds. It was killed, or ``lives`` on as a shell."""
    monkeypatch.setattr(blockdev, "by_path", lambda path: world.device)
    monkeypatch.setattr(blockdev, "in_use", lambda device: False)
    await world.checked()
    uses(world, formatter)
    if lives:
        world.writes = False
    else:
        formatter.kill()
        formatter.wait()
    world.verdict = Verdict(Kind.UNKNOWN_CONTENT, "/dev/rbd99", size=SIZE, diskseq=7)
    await looked_again(world)
    assert world.map[254, 99].writer is not None
    await world.manager.allow("/dev/rbd99", DEVICE.volume, "scratch", "me")
    assert world.map[254, 99].writer is None


@pytest.mark.parametrize("full", [False, True])
async def test_an_opener_keeps_no_lease_that_an_operator_permits_for_a_dead_writer(
    world: World, monkeypatch: pytest.MonkeyPatch, formatter: "subprocess.Popen[bytes]", full: bool
) -> None:
    """fsck, say. Where its permission cannot be written, the state disk is ``full``, no lease is
    freed."""
    monkeypatch.setattr(blockdev, "by_path", lambda path: world.device)
    monkeypatch.setattr(blockdev, "in_use", lambda device: False)
    await world.checked()
    uses(world, formatter)
    formatter.kill()
    formatter.wait()
    world.verdict = Verdict(Kind.UNKNOWN_CONTENT, "/dev/rbd99", size=SIZE, diskseq=7)
    await looked_again(world)
    probe = world.probe

    async def slow(*words: str) -> Verdict:
        if not full:
            world.map[254, 99] = dataclasses.replace(world.map[254, 99], opens=4)
        return await probe(*words)

    def put(_: store.Entry) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(world, "probe", slow)
    if full:
        monkeypatch.setattr(world.ledger, "put", put)
    with pytest.raises(OSError) if full else contextlib.nullcontext():
        await world.manager.allow("/dev/rbd99", DEVICE.volume, "scratch", "me")
    assert (world.map[254, 99].writer is None) is not full


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("during", ["probe", "write"])
async def test_an_operators_permission_takes_the_lease_from_no_writer_that_opens_it_again(
    world: World, monkeypatch: pytest.MonkeyPatch, shell: "subprocess.Popen[bytes]", during: str,
    ends: bool,
) -> None:  # fmt: skip
    """It had closed the device when it was asked for. Two would write at once."""
    monkeypatch.setattr(blockdev, "by_path", lambda path: world.device)
    monkeypatch.setattr(blockdev, "in_use", lambda device: False)
    await world.checked()
    uses(world, shell)
    world.verdict = Verdict(Kind.UNKNOWN_CONTENT, "/dev/rbd99", size=SIZE, diskseq=7)
    function = getattr(world, during)

    async def slow(*words: Any) -> Any:
        world.map[254, 99] = dataclasses.replace(world.map[254, 99], opens=4)
        if ends:
            until = time.monotonic() - 0.01
            world.map[254, 99] = dataclasses.replace(world.map[254, 99], until=until)
        return await function(*words)

    monkeypatch.setattr(world, during, slow)
    refused = pytest.raises(kit.errors.RefusedError, match=f"process {shell.pid} formats it now")
    with refused if during == "probe" else contextlib.nullcontext():
        await world.manager.allow("/dev/rbd99", DEVICE.volume, "scratch", "me")
    writer = world.map[254, 99].writer
    assert writer is not None and writer.pid == shell.pid


async def test_who_comes_right_after_an_operators_permission_keeps_the_lease(
    world: World, monkeypatch: pytest.MonkeyPatch, formatter: "subprocess.Popen[bytes]"
) -> None:
    monkeypatch.setattr(blockdev, "by_path", lambda path: world.device)
    monkeypatch.setattr(blockdev, "in_use", lambda device: False)
    await world.checked()
    uses(world, formatter)
    formatter.kill()
    formatter.wait()
    grant, following = world.grant, procfs.StartedProcess(5, os.getpid())

    def granted(*words: Any) -> None:
        grant(*words)
        world.map[254, 99] = dataclasses.replace(world.map[254, 99], writer=following)

    monkeypatch.setattr(world, "grant", granted)
    world.map[254, 99] = dataclasses.replace(world.map[254, 99], until=time.monotonic() - 5)
    await world.manager.allow("/dev/rbd99", DEVICE.volume, "scratch", "me")
    assert world.map[254, 99].writer == following


async def test_looks_at_an_overdue_formatter_become_rare(
    world: World, formatter: "subprocess.Popen[bytes]"
) -> None:
    known = await world.checked()
    uses(world, formatter)
    waits = []
    for late in (5, 100, 10_000):
        until = time.monotonic() - late
        held = world.map[254, 99] = dataclasses.replace(world.map[254, 99], until=until)
        waits.append(await world.manager.checks._conclude(known, BLANK, held, over=False))
    assert waits == [10.0, pytest.approx(100, abs=20), 300.0]


async def test_a_device_that_is_detached_during_its_check_is_no_failure(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease is gone when the cluster answers."""
    known = await world.checked()
    everybody = procfs.StartedProcess(0, 0)
    world.map[254, 99] = dataclasses.replace(world.map[254, 99], opens=2, writer=everybody)
    held, ask = world.map[254, 99], world.ask

    async def slow(*words: Any, **more: Any) -> mirror.Answer:
        world.map.clear()
        return await ask(*words, **more)

    monkeypatch.setattr(world, "ask", slow)
    world.did.clear()
    assert await world.manager.checks._conclude(known, EXT4, held, over=False) is None
    assert world.did == ["record ext4", "mirror"]


async def test_a_lease_that_is_taken_during_the_last_step_is_not_shortened(world: World) -> None:
    known = await world.checked()
    world.map.clear()
    world.did.clear()
    await world.manager.executor.carry_out((Step.SHORTEN,), steps.Turn(known, None))
    assert not world.did


async def test_a_raw_block_volume_is_at_work_of_nobody(world: World) -> None:
    """What an earlier check said of a formatter is not said of the pod's volume."""
    known = await world.checked()
    known.writer = 7
    await published(world, True)
    assert known.raw and known.writer == 0


async def test_an_operators_lease_is_for_every_try(
    world: World, monkeypatch: pytest.MonkeyPatch, formatter: "subprocess.Popen[bytes]"
) -> None:
    """The first left something that nobody recognises."""
    monkeypatch.setattr(blockdev, "by_path", lambda path: world.device)
    monkeypatch.setattr(blockdev, "in_use", lambda device: False)
    await world.checked()
    await world.manager.allow("/dev/rbd99", DEVICE.volume, "scratch", "me")
    uses(world, formatter)
    formatter.kill()
    formatter.wait()
    world.verdict = Verdict(Kind.UNKNOWN_CONTENT, "/dev/rbd99", size=SIZE, diskseq=7)
    await looked_again(world)
    assert world.map[254, 99].writer is None


@pytest.mark.parametrize("everybodys", [True, False])
async def test_content_under_a_lease_of_an_agent_that_knew_no_writers_leaves_it_five_seconds(
    world: World, everybodys: bool
) -> None:
    """Whoever opened the device may still be at work, and opens it again. One that was freed has
    nobody at work on it."""
    await world.checked()
    writer = procfs.StartedProcess(0, 0) if everybodys else None
    world.map[254, 99] = dataclasses.replace(world.map[254, 99], opens=2, writer=writer)
    world.verdict = EXT4
    await looked_again(world)
    if everybodys:
        assert world.map[254, 99].until - time.monotonic() <= lease.LINGER_SECONDS
    else:
        assert (254, 99) not in world.map


@pytest.mark.parametrize("over", [None, EXT4])
async def test_a_formatter_that_left_nothing_leaves_the_lease_to_the_next(
    world: World, monkeypatch: pytest.MonkeyPatch, formatter: "subprocess.Popen[bytes]",
    over: Verdict | None,
) -> None:  # fmt: skip
    """``over``: what an operator gave up, and is still there."""
    await world.checked()
    if over is not None:
        world.verdict = over
        monkeypatch.setattr(blockdev, "by_path", lambda path: world.device)
        monkeypatch.setattr(blockdev, "in_use", lambda device: False)
        await world.manager.allow("/dev/rbd99", DEVICE.volume, "scratch", "me")
    uses(world, formatter)
    at_work = (f"process {formatter.pid} formats it now: wait for its end",)
    assert (await looked_again(world)).reasons == at_work
    assert world.map[254, 99].writer, "it is at work"
    formatter.kill()
    formatter.wait()
    if over is None:
        world.verdict = NO_ANSWER
        await looked_again(world)
        assert world.map[254, 99].writer, "nobody knows what it wrote"
        world.verdict = BLANK
    assert (await looked_again(world)).reasons == ()
    assert world.map[254, 99].writer is None and world.map[254, 99].opens == 2


async def behind_the_uevent(world: World) -> None:
    """The ledger is written there."""
    await waiting.until_async(lambda: not world.manager._chores, 5.0, "the ledger")


@pytest.mark.parametrize(("opens", "open_after"), [(0, False), (2, True)])
async def test_detach_closes_only_an_unused_permission(
    world: World, opens: int, open_after: bool
) -> None:
    await world.checked()
    world.map[254, 99] = dataclasses.replace(world.map[254, 99], opens=opens)
    world.device = None
    world.manager.forget("rbd99")
    assert world.map == {}
    await behind_the_uevent(world)
    entry = world.ledger.get(DEVICE.volume)
    assert entry is not None and bool(entry.permitted) is open_after


async def test_grant_fails_when_another_disk_came_after_the_reservation(world: World) -> None:
    def reserve(number: blockdev.Number, diskseq: int | None) -> None:
        world.map.pop(number, None)  # as the kernel does when the disk appears

    world.reserve = reserve  # type: ignore[method-assign]
    known = await world.checked()
    assert "another disk has the number" in known.reasons[0]
    assert world.map == {}


async def published(world: World, raw: bool) -> None:
    """kubelet's bind mount comes or goes, and the agent looks."""
    world.raw = raw
    world.manager.mounts_changed(raw_block.published(raw_block.host_table()))
    async with asyncio.timeout(waiting.limit(30)):
        while world.manager.known["rbd99"].raw is not raw:
            await asyncio.sleep(0.01)


async def test_raw_permission_lasts_as_long_as_the_publication(world: World) -> None:
    world.verdict = Verdict(Kind.UNKNOWN_CONTENT, "/dev/rbd99", size=SIZE, diskseq=7)
    await world.checked()
    assert world.map == {}
    world.did.clear()
    await published(world, True)
    await waiting.until_async(lambda: "mirror" in world.did, 5.0)
    assert world.did == [
        *("identify", "record permission", "reserve", "identify", "grant", "share", "mirror"),
    ]
    assert world.map[254, 99].until == math.inf  # no agent is needed for it
    await published(world, False)
    await waiting.until_async(lambda: world.map == {}, 5.0)


async def test_raw_permission_of_a_dead_agent_is_kept_while_published(world: World) -> None:
    world.raw = True
    world.manager.mounts_changed(raw_block.published(raw_block.host_table()))
    await world.checked()
    restarted = world.new_manager()
    world.did.clear()
    await world.checked(restarted)
    assert "revoke" not in world.did and "record permission" not in world.did
    assert world.map[254, 99].until == math.inf
    world.raw = False
    again = world.new_manager()  # the pod ended while no agent was there
    world.did.clear()
    await world.checked(again)
    assert world.did[0] == "revoke"
    entry = world.ledger.get(DEVICE.volume)
    assert entry is not None
    assert entry.permitted, "what the pod wrote may be invisible"
    for each in (restarted, again):
        await each.close()


async def test_raw_permission_of_a_dead_agent_waits_for_a_kubelet(world: World) -> None:
    """Nobody unpublishes without one, and its own namespace is out of sight."""
    world.raw = True
    world.manager.mounts_changed(raw_block.published(raw_block.host_table()))
    await world.checked()
    world.raw = False
    world.did.clear()
    restarted = world.new_manager()
    try:
        restarted.mounts_changed({}, whole=False)
        known = await world.checked(restarted)
        assert (known.reasons, world.map[254, 99].until) == ((), math.inf)
        assert "revoke" not in world.did
        restarted.mounts_changed({}, whole=True)
        await waiting.until_async(lambda: world.map == {}, 30, "the end of the permission")
    finally:
        await restarted.close()


async def test_raw_permission_of_a_dead_agent_ends_where_disks_stay_too(world: World) -> None:
    world.ends_with_disk = False
    await world.checked()
    world.did.clear()
    await published(world, True)
    await waiting.until_async(lambda: "mirror" in world.did, 5.0)
    world.raw = False
    again = world.new_manager()  # the pod ended while no agent was there
    world.verdict = Verdict(Kind.UNKNOWN_CONTENT, "/dev/rbd99", size=SIZE, diskseq=7)
    await world.checked(again)
    assert world.map == {}
    await again.close()


async def test_detach_of_a_raw_volume_does_not_close_its_permission(world: World) -> None:
    """Renewals begin the kernel's count anew, so it does not say whether the pod wrote."""
    await world.checked()
    await published(world, True)
    await waiting.until_async(lambda: world.map[254, 99].until == math.inf, 5.0)
    world.manager.forget("rbd99")
    await behind_the_uevent(world)
    entry = world.ledger.get(DEVICE.volume)
    assert entry is not None and entry.permitted


async def test_count_of_opens_never_closes_a_permission_of_a_pod(world: World) -> None:
    """The pod opened it once, maybe before the count began."""
    await world.checked()
    await published(world, True)
    await waiting.until_async(lambda: world.map[254, 99].until == math.inf, 5.0)
    world.raw = False
    world.map[254, 99] = kernel.KernelLease(
        time.monotonic() - 5, 0, 7
    )  # of 120 s, and it has ended
    again = world.new_manager()
    await world.checked(again)
    entry = world.ledger.get(DEVICE.volume)
    assert entry is not None and entry.permitted
    await again.close()


async def test_operators_word_waits_for_a_check_that_saw_the_device_before(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That check would end the lease, because there is content."""
    world.verdict = EXT4
    await world.checked()
    at_last, probe = asyncio.Event(), world.probe

    async def slow(path: str, below: str = "", cluster: str = "") -> Verdict:
        await at_last.wait()
        return await probe(path, below)

    monkeypatch.setattr(world, "probe", slow)
    monkeypatch.setattr(blockdev, "by_path", lambda _: world.device)
    monkeypatch.setattr(blockdev, "in_use", lambda _: False)
    world.manager.schedule("rbd99")
    await waiting.until_async(lambda: world.manager.known["rbd99"].order.locked(), 5.0)
    volume = DEVICE.volume
    allowed = asyncio.create_task(world.manager.allow("/dev/rbd99", volume, "scratch", "me"))
    await asyncio.sleep(0)
    at_last.set()
    await allowed
    await waiting.until_async(lambda: "rbd99" not in world.manager._checking, 5.0)
    assert world.map[254, 99].until - time.monotonic() > 60


async def test_a_write_during_the_last_look_at_an_unused_lease_gets_a_lease_and_no_finding(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That look was not asked for by a writer, and would answer him "the next attempt gets one"."""
    monkeypatch.setattr(checks, "LEASED_CHECK_SECONDS", 0.01)
    await world.checked()
    probe, refused = world.probe, list[denials.Denial]()

    async def met_by_a_writer(path: str, below: str = "", cluster: str = "") -> Verdict:
        if not refused:
            who = ("mkfs.ext4", "", "", "", "", "")
            refused.append(denials.Denial(time.time(), "rbd99", DEVICE.volume, "v", True, 9, *who))
            world.manager.denials.add(refused[0])
            world.manager.denied("rbd99", DEVICE)
        return await probe(path, below)

    monkeypatch.setattr(world, "probe", met_by_a_writer)
    world.map[254, 99] = dataclasses.replace(world.map[254, 99], until=time.monotonic() - 2.0)
    await waiting.until_async(lambda: refused and not world.manager.denials.waiting, 10.0)
    assert world.manager.denials.findings(time.time()) == []
    assert world.manager.denials.delayed == 1
    assert world.map[254, 99].until > time.monotonic()


async def test_a_lease_needs_a_living_agent_where_disks_stay(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "BEAT_SECONDS", 0.01)
    await world.checked()
    assert world.map[254, 99].grace == 0 and not world.beats  # the kernel ends it with its disk
    world.manager.forget("rbd99")
    world.ends_with_disk = False
    await world.checked()
    assert world.map[254, 99].grace == lease.GRACE_SECONDS
    await waiting.until_async(lambda: world.beats > 3, 5.0)
    restarted = world.new_manager()
    await world.manager.close()
    world.beats = 0
    restarted.revoke_unproven()  # of the same medium: it holds on
    await waiting.until_async(lambda: world.beats > 3, 5.0)
    world.device = dataclasses.replace(DEVICE, diskseq=8)
    restarted.revoke_unproven()
    assert world.map == {}
    await restarted.close()


async def test_raw_permission_is_short_where_disks_stay(world: World) -> None:
    world.ends_with_disk = False
    world.raw = True
    world.manager.mounts_changed(raw_block.published(raw_block.host_table()))
    await world.checked()
    assert 100 < world.map[254, 99].until - time.monotonic() <= lease.RAW_SECONDS


def content_findings(known: steps.Known) -> dict[str, str]:
    return {each.rule: str(each.severity) for each in status._of_device(known, False)}


async def looked_again(world: World) -> steps.Known:
    before = world.manager.known["rbd99"].checked
    world.manager.schedule("rbd99")
    async with asyncio.timeout(waiting.limit(30)):
        while (known := world.manager.known["rbd99"]).checked == before:
            await asyncio.sleep(0.01)
        while "rbd99" in world.manager._checking:  # what follows from it is not known before
            await asyncio.sleep(0.01)
    return known


@pytest.mark.parametrize("kind", [Kind.TIMEOUT, Kind.UNREADABLE, Kind.NO_MEDIA])
async def test_slow_is_not_missing_until_a_second_look_agrees(
    world: World, monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    world.verdict = EXT4
    await world.checked()
    for _ in range(10):  # stalls, each over by the second look
        world.verdict = dataclasses.replace(EXT4, verdict=kind)
        known = await looked_again(world)
        assert not known.missing
        assert known.doubt.wait is not None and 5 <= known.doubt.wait <= 30
        assert "critical" not in content_findings(known).values()
        known = await looked_again(world)  # a moment later: the same look
        assert not known.missing
        world.verdict = EXT4
        assert not (await looked_again(world)).doubt.looks
    world.verdict = dataclasses.replace(EXT4, verdict=kind)
    await looked_again(world)
    monkeypatch.setattr(pace, "DOUBT_SECONDS", 0.0)
    known = await looked_again(world)
    assert known.missing == "ext4 u1"
    assert content_findings(known)["content-missing"] == "critical"


async def test_clone_has_an_entry_of_its_own(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = store.Entry(volume="rbd:f1/3//parent", type="ext4", uuid="of the parent", last_seen=5)

    async def ask(
        image: RbdImage, extents: Extents | None = None, *, part: str = ""
    ) -> mirror.Answer:
        return mirror.Answer(store.Knowledge.CONTENT, store.Knowledge.CONTENT, parent, SIZE)

    monkeypatch.setattr(world, "ask", ask)
    world.verdict = EXT4  # with a UUID of its own
    known = await world.checked()
    assert not known.changed_from
    assert [each.volume for each in world.ledger.entries()] == [DEVICE.volume]
    world.verdict = Verdict(Kind.UNKNOWN_CONTENT, size=SIZE, diskseq=7)
    fresh = dataclasses.replace(IMAGE, image_id="another clone")
    world.device = dataclasses.replace(DEVICE, image=fresh, diskseq=8)
    world.manager.forget("rbd99")
    known = await world.checked()
    assert known.missing == "ext4 of the parent"


async def test_accident_on_a_node_that_never_saw_the_volume_is_explained(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = store.Entry(volume=DEVICE.volume, type="ext4", uuid="u1", last_seen=5, node="other")

    async def ask(
        image: RbdImage, extents: Extents | None = None, *, part: str = ""
    ) -> mirror.Answer:
        return mirror.Answer(store.Knowledge.CONTENT, store.Knowledge.CONTENT, entry, SIZE)

    monkeypatch.setattr(world, "ask", ask)
    known = await world.checked()
    row = json.loads(json.dumps(status.describe_device(known, time.monotonic())))
    assert row["cluster"]["entry"]["node"] == "other"
    step = list(explain.page(row, None, [], "enforce"))[-1]
    assert "held ext4 u1, its cluster says that something was written" in step
    assert "Do not format it" in step and "asks again" not in step


async def test_operators_permission_lasts_while_the_old_content_is_there(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.verdict = EXT4
    await world.checked()
    monkeypatch.setattr(blockdev, "by_path", lambda path: world.device)
    monkeypatch.setattr(blockdev, "in_use", lambda device: False)
    await world.manager.allow("/dev/rbd99", DEVICE.volume, "scratch", "me")
    for _ in range(2):
        await looked_again(world)
        assert world.map[254, 99].until - time.monotonic() > 60
    world.verdict = dataclasses.replace(EXT4, uuid="new")
    await looked_again(world)
    assert (254, 99) not in world.map
    entry = world.ledger.get(DEVICE.volume)
    assert entry is not None
    assert (entry.uuid, entry.permitted) == ("new", 0.0)


@pytest.mark.parametrize(("verdict", "step"), [
    (EXT4, "Nothing: it holds"),
    (dataclasses.replace(EXT4, uuid="other"), "ledger --accept"),
    (dataclasses.replace(BLANK, verdict=Kind.UNREADABLE, errno=5), "format nothing"),
    (BLANK, "Do not format it"),
])  # fmt: skip
async def test_explained_ends_with_the_next_safe_step(
    world: World, verdict: Verdict, step: str
) -> None:
    world.verdict = EXT4
    await world.checked()
    world.verdict = verdict
    known = await looked_again(world)
    entry = world.ledger.get(DEVICE.volume)
    assert entry is not None
    page = list(
        explain.page(
            json.loads(json.dumps(status.describe_device(known, time.monotonic()))),
            dataclasses.asdict(entry), [], "enforce",
        )
    )  # fmt: skip
    assert step in page[-1]
    assert "ext4 u1, seen on n" in "".join(page)


async def test_a_probe_that_was_refused_a_child_is_made_soon(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_manager, "NO_CHILD_SECONDS", 0.01)
    world.too_many_hang = 3
    known = await world.checked()
    assert known.reasons == (
        "the decision failed: the agent: 32 of its child processes hang; look",
    )
    assert not known.doubt.looks, "nothing was asked"
    await waiting.until_async(lambda: bool(world.map), 30, "the lease of the new volume")


async def test_monitor_that_no_mapping_was_given_concerns_every_device(world: World) -> None:
    """After a failover to a new address the kernel's lines are about one that nobody named."""
    mapped = [("rbd98", "10.0.0.9:6789,10.0.0.8:6789"), ("rbd99", "10.0.0.1:6789")]
    for name, monitors in mapped:
        client = RbdClient("0", "", "", config=f"{monitors} name=x,key=client.x rbd a -")
        device = dataclasses.replace(DEVICE, name=name, client=client)
        world.manager.known[name] = steps.Known(device)
    now, errors = time.monotonic(), world.manager.checks.errors
    errors.note("libceph: mon0 (1)10.0.0.8:6789 session lost, hunting for new mon", now - 1)
    world.device = world.manager.known["rbd99"].device
    assert (await world.checked()).reasons == (), "of the other device's monitor"
    errors.note("libceph: mon2 (1)10.7.7.7:6789 session lost, hunting for new mon", now)
    world.map.clear()
    again = world.new_manager()
    again.checks.errors = errors
    again.known["rbd98"] = world.manager.known["rbd98"]
    try:
        (reason,) = (await world.checked(again)).reasons
        assert "the kernel logged an I/O error" in reason
    finally:
        await again.close()


@pytest.mark.parametrize(
    ("device", "group"),
    [
        (DEVICE, "f1"),
        (blockdev.BlockDevice("rbd99", (43, 0), "nbd", SIZE, False, diskseq=7), "nbd"),
        (dataclasses.replace(DEVICE, image=dataclasses.replace(IMAGE, fsid="")), "rbd"),
    ],
)
async def test_devices_that_die_together_share_a_limit_of_hanging_probes(
    world: World, monkeypatch: pytest.MonkeyPatch, device: blockdev.BlockDevice, group: str
) -> None:
    """rbd-nbd does not say which cluster it shows."""
    groups: set[str] = set()

    async def probe(path: str, below: str = "", cluster: str = "") -> Verdict:
        groups.add(cluster)
        return dataclasses.replace(BLANK, verdict=Kind.TIMEOUT)

    monkeypatch.setattr(world, "probe", probe)
    world.device = device
    await world.checked()
    assert groups == {group}


async def test_missing_content_stays_missing_during_the_next_look(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the cluster knows what the volume held, and it is asked last."""
    entry = store.Entry(volume=DEVICE.volume, type="ext4", uuid="u1", last_seen=5, node="other")
    knows = mirror.Answer(store.Knowledge.CONTENT, store.Knowledge.CONTENT, entry, SIZE)
    forgot = mirror.Answer(store.Knowledge.NONE, store.Knowledge.CONTENT, None, SIZE)
    answers = [knows, mirror.unknown("no answer"), knows, forgot]
    during: list[str] = []

    async def ask(
        image: RbdImage, extents: Extents | None = None, *, part: str = ""
    ) -> mirror.Answer:
        during.append(world.manager.known["rbd99"].missing)
        return answers.pop(0)

    monkeypatch.setattr(world, "ask", ask)
    assert (await world.checked()).missing == "ext4 u1"
    assert (await looked_again(world)).missing == "ext4 u1"  # the cluster says nothing
    assert (await looked_again(world)).missing == "ext4 u1"
    assert (await looked_again(world)).missing == ""  # it says that it knows of nothing
    assert during == ["", "ext4 u1", "ext4 u1", "ext4 u1"]


async def test_a_disk_that_hangs_takes_no_thread_of_others(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    over, tries = threading.Event(), 8
    monkeypatch.setattr(kit.tasks, "STATE", kit.tasks.Apart("the test's"))
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
    monkeypatch.setattr(steps, "SAVE_SECONDS", 0.01)
    monkeypatch.setattr(world.ledger, "put", lambda _: over.wait())
    try:
        for _ in range(tries):
            with pytest.raises(TimeoutError):
                await world.manager.executor.save(store.Entry("volume"))
        async with asyncio.timeout(waiting.limit(60)):
            assert await asyncio.to_thread(lambda: "here") == "here"
    finally:
        over.set()


NBD = dataclasses.replace(
    DEVICE, number=(254, 99), driver="nbd", image=None, client=None, backing="first"
)


async def the_next_pods_publication_permits(
    world: World, manager: lease_manager.LeaseManager
) -> None:
    mount = PUBLISHED.replace(b"1 2", b"9 2")
    manager.mounts_changed(raw_block.published(PUBLISHED + b"\n" + mount))
    await waiting.until_async(lambda: world.map, 30, "the permission")


async def test_a_leaked_publication_permits_nothing_of_a_medium_that_a_check_meets_first(
    world: World,
) -> None:
    """rbd-nbd of a raw volume died, its bind mount stays, and nbd connects another volume under the
    number. The uevents were lost (Overflow), so the first to see it is a check: a denied mkfs."""
    world.raw = True
    world.ends_with_disk = False
    world.device = NBD
    manager = world.new_manager()
    known = await world.checked(manager)
    assert known.raw and NBD.number in world.map
    world.device = second = dataclasses.replace(NBD, backing="second")  # same number and DISKSEQ
    world.verdict = EXT4
    world.did.clear()
    # As Reports.denied does it for the mkfs that the kernel refused.
    manager.schedule("rbd99", second)
    manager.denied("rbd99", second)
    await waiting.until_async(
        lambda: manager.known["rbd99"].device == second
        and manager.known["rbd99"].reasons is not None,
        30, "the check",
    )  # fmt: skip
    try:
        assert "grant" not in world.did, world.did
        assert not world.map
        # A publication of the next one counts all the same, also after its uevent.
        await the_next_pods_publication_permits(world, manager)
    finally:
        await manager.close()


async def test_at_the_start_what_cannot_be_looked_at_takes_nothing_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nodes in a tmpfs whose numbers nobody tells in time; a kubelet's table that fails."""
    monkeypatch.setattr(raw_block, "spaces", lambda: (frozenset({1}), {b"1": 1}))
    told: list[tuple[raw_block.Table, bool]] = []
    watch = RawBlockWatch(lambda table, whole: told.append((table, whole)))
    row = PUBLISHED.replace(b"/rbd99 ", b"/node ").replace(b"devtmpfs udev", b"tmpfs tmpfs")

    async def read() -> bytes:
        return row

    async def late(*_: Any, **__: Any) -> Any:
        raise processes.DeadlineError("block nodes", "no answer within 5s", "")

    async def prompt(*_: Any, **__: Any) -> Any:
        return {row.split()[4].decode(): (254, 99)}

    async def fail() -> bytes:
        raise OSError(24, "Too many open files")

    try:
        mounted = watch._spaces[1].watch
        assert mounted is not None
        monkeypatch.setattr(mounted, "read", fail)
        await watch._tell()
        monkeypatch.setattr(mounted, "read", read)
        monkeypatch.setattr(kit.child, "call", late)
        await watch._tell()
        assert [whole for _, whole in told] == [False, False], told
        monkeypatch.setattr(kit.child, "call", prompt)
        await watch._tell()
        assert told[-1][1]
        monkeypatch.setattr(mounted, "read", fail)  # now it counts as it was
        await watch._tell()
        assert told[-1][1]
    finally:
        await watch.close()


async def test_at_the_start_a_kubelet_that_has_just_ended_leaves_the_tables_incomplete(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has a mount namespace of its own, which nobody can read any more."""
    no_process = 2**22 + 1
    spaces = (frozenset({1}), {b"1": 1, b"2": no_process})
    monkeypatch.setattr(raw_block, "spaces", lambda: spaces)
    told: list[bool] = []
    watch = RawBlockWatch(lambda _, whole: told.append(whole))
    try:
        await watch._tell()
        assert told == [False]
        spaces = (frozenset({1}), {b"1": 1})
        await watch._search()
        await watch._tell()
        assert told[-1]
    finally:
        await watch.close()


@pytest.mark.parametrize("verdict", [EXT4, NO_ANSWER])
async def test_an_ended_permission_of_nbd_is_no_permission_while_no_kubelet_runs(
    world: World, verdict: Verdict
) -> None:
    """The agent was away for longer than 120 s and no kubelet runs. What the kernel refuses must be
    a finding, and the device be looked at."""
    world.ends_with_disk = False
    world.device = NBD
    entry = store.Entry(NBD.volume).permit(f"{raw_block.BY}n", 1.0)
    world.ledger.put(entry)
    world.map[NBD.number] = kernel.KernelLease(time.monotonic() - 10.0, 3, 7)
    world.verdict = verdict
    manager = world.new_manager()
    manager.mounts_changed({}, whole=False)
    known = await world.checked(manager)
    await manager.close()
    assert known.reasons, "the kernel refuses, and it is said to be permitted"
    assert "probe" in world.did


async def test_a_uevent_of_another_volume_under_the_same_number_ends_publications(
    world: World, tmp_path: Path
) -> None:
    """The number and DISKSEQ are the same: the controller asks for the volume, too."""
    world.raw, world.ends_with_disk, world.device = True, False, NBD
    control = controller.Controller(
        settings.GuardSettings(), (), witness(), state_dir=tmp_path / "state"
    )
    control.manager = manager = world.new_manager()
    assert (await world.checked(manager)).raw
    world.verdict = EXT4  # nothing but its publication permits it
    world.device = dataclasses.replace(NBD, backing="second")
    control._seen("rbd99")
    try:
        assert "rbd99" not in manager.checks.published
        assert not world.map
        # The next pod's publication comes before the check, which ends nothing once more.
        await the_next_pods_publication_permits(world, manager)
    finally:
        await manager.close()


async def test_a_medium_that_gets_its_name_late_keeps_its_publication(world: World) -> None:
    """The kernel makes nbd's ``backend`` after the uevent of its size."""
    world.ends_with_disk, world.device = False, dataclasses.replace(NBD, backing="")
    world.verdict = EXT4  # a blank one would get a permission without its publication, too
    manager = world.new_manager()
    await world.checked(manager)
    world.device = NBD
    manager.mounts_changed(raw_block.published(PUBLISHED))
    try:
        await waiting.until_async(lambda: world.map, 30, "the permission")
    finally:
        await manager.close()
