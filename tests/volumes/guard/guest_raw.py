"""Part of guest_replay: a raw block volume over krbd, with and without an agent."""

import math
import os
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from volumes.guard import controller

Run = Callable[..., "subprocess.CompletedProcess[str]"]
PUBLISHED = Path("/run/kubelet/plugins/kubernetes.io/csi/volumeDevices/publish/pvc/pod")


def writes(run: Run, device: str) -> bool:
    return run("dd", "if=/dev/zero", f"of={device}", "count=1").returncode == 0


async def published(
    guard: controller.Controller,
    attach: Callable[[str], str],
    run: Run,
    say: Callable[[str], None],
    until: Callable[[str, Callable[[], Any]], Awaitable[None]],
) -> None:
    """``guard`` is stopped in here, as if the agent were killed."""
    kernel = guard.in_force.guard
    assert kernel is not None
    device = attach("raw")
    status = os.stat(device)
    number = os.major(status.st_rdev), os.minor(status.st_rdev)
    PUBLISHED.parent.mkdir(parents=True)
    PUBLISHED.touch()
    run("mount", "--bind", device, str(PUBLISHED))
    await until("the permission", lambda: number in (now := kernel.leases())
                and now[number].until == math.inf)  # fmt: skip
    say(f"raw while published {writes(run, device)}")
    run("umount", str(PUBLISHED))
    await until("its end", lambda: number not in kernel.leases()
                or kernel.leases()[number].until != math.inf)  # fmt: skip
    run("mount", "--bind", device, str(PUBLISHED))
    await until("it again", lambda: number in (now := kernel.leases())
                and now[number].until == math.inf)  # fmt: skip
    await guard.stop()
    say(f"raw without an agent {writes(run, device)}")
    run("umount", str(PUBLISHED))
    Path("/sys/bus/rbd/remove_single_major").write_text(device.removeprefix("/dev/rbd"))
    other = attach("raw2")
    status = os.stat(other)
    say(f"raw same number {(os.major(status.st_rdev), os.minor(status.st_rdev)) == number}")
    say(f"raw next device {writes(run, other)}")
    Path("/sys/bus/rbd/remove_single_major").write_text(other.removeprefix("/dev/rbd"))
