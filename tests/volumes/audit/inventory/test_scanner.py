"""The scan child on the real node: hangs, gaps, and what it leaves open."""

import asyncio
import errno
import os
import signal
from pathlib import Path
from typing import Any

import pytest

import kit.child
import kit.processes
from linux import mount_namespaces
from tests.testbed import blockdev, waiting
from tests.volumes.audit.inventory import visits
from tests.volumes.audit.stage import Stage, children, run, settings, watching
from volumes.audit.inventory import holders, scan

pytestmark = pytest.mark.real

ANSWER_SECONDS = waiting.limit(20.0)  # of a child that is not held up

CHILD = "volumes.audit.inventory.scan"


def request(stage: Stage, **changes: object) -> scan.Request:
    fields: dict[str, object] = {
        "drivers": ("loop",),
        "names": (blockdev.NAMES,),
        "kubelet": str(stage.kubelet),
        "proc": "/proc",
        "sys": "/sys",
        "containers": "/nonexistent",
        "deep": True,
    }
    return scan.Request(**(fields | changes))  # type: ignore[arg-type]


async def test_scanner_abandons_a_hanging_scan(stage: Stage) -> None:
    scanner = scan.Scanner()
    await scanner.scan(request(stage), ANSWER_SECONDS)
    (child,) = children(CHILD)
    os.kill(child, signal.SIGSTOP)
    with pytest.raises(scan.BlindError, match=r"no answer within 0\.5s"):
        await scanner.scan(request(stage), 0.5)
    inventory = await scanner.scan(request(stage), ANSWER_SECONDS)
    assert inventory.namespaces > 0
    assert scanner.failures == 1
    await scanner.close()


async def test_close_waits_for_an_interrupted_child(stage: Stage) -> None:
    scanner = scan.Scanner()
    await scanner.scan(request(stage), ANSWER_SECONDS)
    (child,) = children(CHILD)
    os.kill(child, signal.SIGSTOP)
    task = asyncio.create_task(scanner.scan(request(stage), ANSWER_SECONDS))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await scanner.close()
    assert not Path(f"/proc/{child}").exists()


async def test_scanner_bounds_children_that_cannot_be_killed(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL does nothing to a process in an uninterruptible sleep; here it is not sent."""
    monkeypatch.setattr(kit.processes, "kill", lambda _: None)
    scanner = scan.Scanner()
    frozen: list[int] = []
    try:
        for _ in range(scan.MOST_ABANDONED):
            await scanner.scan(request(stage), ANSWER_SECONDS)
            (child,) = set(children(CHILD)) - set(frozen)
            frozen.append(child)
            os.kill(child, signal.SIGSTOP)
            with pytest.raises(scan.BlindError):
                await scanner.scan(request(stage), 0.2)
        assert scanner.stuck == scan.MOST_ABANDONED
        with pytest.raises(scan.BlindError, match="still hang in the kernel"):
            await scanner.scan(request(stage), ANSWER_SECONDS)
        assert len(children(CHILD)) == scan.MOST_ABANDONED
    finally:
        for pid in frozen:
            os.kill(pid, signal.SIGKILL)
        await scanner.close()


async def test_blind_audit_keeps_its_findings(stage: Stage) -> None:
    device = stage.loop()
    target, _ = stage.staged(device)
    stage.chrooted()
    rules = {"audit-blind": {"patience": "0s"}}
    patient, impatient = (
        settings(stage, rules=rules),
        settings(stage, look_timeout="1s", rules=rules, names=[f"{blockdev.NAMES}*"]),
    )
    async with watching(stage, patient) as watch:
        run("umount", target)
        found = await watch.finding(device, "leaked-mount")
        await watch.reconcile(impatient)

        def stale() -> list[dict[str, Any]]:
            for child in children(CHILD):
                os.kill(child, signal.SIGSTOP)
            watch.audit.wake()
            still = watch.found(device, "leaked-mount")
            return still if "not_looked_at_again" in still[0]["evidence"] else []

        still = await watch.until(stale, "a scan that hangs")
        assert watch.found("", "audit-blind")
        assert [f["id"] for f in still] == [found["id"]]
        assert "no answer" in still[0]["evidence"]["not_looked_at_again"]
        await watch.reconcile(patient)
        await watch.until(lambda: not watch.found("", "audit-blind"), "sees again")


async def test_scan_keeps_nothing_busy(stage: Stage) -> None:
    device = stage.loop()
    target, _ = stage.staged(device)
    scanner = scan.Scanner()
    for _ in range(3):
        inventory = await scanner.scan(request(stage, users_of=(device,)), ANSWER_SECONDS)
        assert [user for user in inventory.users if user.device[1] == int(device[4:])] == []
    run("umount", target)  # would fail with 'target is busy' if the child were inside
    await scanner.close()


async def test_namespaces_are_found_without_the_kernels_list(
    stage: Stage,
) -> None:
    """Kernels before 6.12: what the walk is replaced by, on the same scene."""
    device = stage.loop()
    stage.staged(device)
    pid = stage.holder("thread", stage.folder)
    number = os.stat(f"/dev/{device}").st_rdev
    walked, again = await kit.child.call(
        visits.both_ways, os.major(number), os.minor(number), deadline=waiting.limit(30)
    )
    # Another test's process may have copied the mounts of this machine just now.
    ours = [[each for each in found if each[0] == pid] for found in (walked, again)]
    assert [each[:2] for each in ours[0]] == [[pid, True]]
    assert ours[1] == ours[0]


@pytest.mark.parametrize("listed", [True, False], ids=["listed", "by processes"])
async def test_forbidden_namespace_is_a_gap_ended_one_is_not(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, listed: bool
) -> None:
    stage.holder("chroot", stage.kubelet, stage.folder)
    refused = OSError(errno.EPERM, "Operation not permitted")
    ended = OSError(errno.ESRCH, "No such process")
    own = os.stat("/proc/self/ns/mnt").st_ino

    def found_with(error: OSError) -> holders.Visited:
        def table(visitor: mount_namespaces.Visitor, descriptor: int) -> bytes:
            if os.fstat(descriptor).st_ino != own:
                raise error
            return b""

        monkeypatch.setattr(mount_namespaces.Visitor, "table", table)
        everything = holders.Processes("/proc", "/nonexistent")
        return holders.Namespaces(everything, "/proc", {own}, set(), None).visit(set())

    if not listed:
        monkeypatch.setattr(mount_namespaces, "walk", _not_there)
    found = found_with(refused)
    assert found.gaps and all("not permitted" in gap for gap in found.gaps)
    assert found.by_processes is not listed
    assert found_with(ended).gaps == []


def _not_there(start: str = "") -> object:
    raise OSError(25, "Inappropriate ioctl for device")


def test_statmount_agrees_with_mountinfo(stage: Stage) -> None:
    device = stage.loop()
    target = stage.mount(device, stage.folder / "m")
    own = os.stat("/proc/self/ns/mnt").st_ino
    listed = next(each for each in mount_namespaces.walk() if each.inode == own)

    def targets() -> list[str]:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
        return sorted(line.split()[4].replace("\\040", " ") for line in lines)

    def agreed() -> list[mount_namespaces.MountedIn] | None:
        before, mounts = targets(), list(mount_namespaces.mounts(listed.id))
        return mounts if sorted(m.target for m in mounts) == before == targets() else None

    # Other tests mount and unmount meanwhile.
    mounts = waiting.until(agreed, 10, "a listing that agrees with the table")
    assert [m.fstype for m in mounts if m.target == str(target)] == ["ext4"]


def test_scan_without_proc_is_an_error(stage: Stage) -> None:
    with pytest.raises(OSError):
        scan.scan(request(stage, proc=str(stage.folder / "none")))
