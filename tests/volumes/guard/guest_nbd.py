"""Part of guest_replay: images over rbd-nbd, mapped as ceph-csi maps them."""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any

import kit.errors
from linux import blockdev
from tests.testbed import formatters
from tests.volumes.guard.guest_raw import Run, writes
from volumes.audit import executors
from volumes.guard import controller

COOKIE = "0001-0009-ceph-csi-0000000000000001-{}"
LEASE_SECONDS = 600.0


async def mapped(run: Run, say: Callable[[str], None], conf: str, image: str) -> str:
    """The device of a new mapping."""
    done = await asyncio.to_thread(
        run, "rbd-nbd", "--conf", conf, "map", f"rbd/{image}", "--try-netlink",
        "--cookie", COOKIE.format(image), "--run-dir=/run", "--log-file=/run/rbd-nbd.log",
        "--admin-socket=",
    )  # fmt: skip
    if done.returncode:
        say(f"nbd map {done.returncode} {done.stderr.strip()}")
    return done.stdout.strip()


async def attached(
    guard: controller.Controller,
    conf: str,
    target: str,
    run: Run,
    say: Callable[[str], None],
    until: Callable[[str, Callable[[], Any]], Awaitable[None]],
) -> None:
    """``nbd-blank`` is blank, ``nbd-other`` has content that no probe knows."""
    kernel = guard.in_force.guard
    assert kernel is not None
    device = await mapped(run, say, conf, "nbd-blank")
    name = os.path.basename(device)
    for _ in range(60):
        outcome = await asyncio.to_thread(
            formatters.kubelet, run, device, "ext4", target, lambda: None
        )
        if outcome.mounted:
            break
        await asyncio.sleep(0.5)
    say(f"nbd blank mounted {outcome.mounted} {outcome.error}".strip())
    found = blockdev.identify(name)
    assert found is not None
    say(f"nbd volume {found.volume}")
    (seen,) = (each for each in blockdev.Scans().scan(["nbd"]) if each.name == name)
    say(f"nbd image {seen.image and seen.image.name}")
    await until(
        "the ledger", lambda: (e := guard.executor.ledger.get(found.volume)) and e.type == "ext4"
    )
    try:
        await asyncio.to_thread(_unmap, found)
    except kit.errors.RefusedError as error:
        say(f"nbd unmap in use {type(error).__name__}")
    run("umount", target)
    # The agent ends a lease soon after the content is there, and this guest is slow. One that is
    # open whatever that took: the next image on this device must be denied despite it.
    kernel.reserve(found.number, found.diskseq)
    kernel.grant(found.number, time.monotonic() + LEASE_SECONDS, found.diskseq)
    await until("its unmap", lambda: asyncio.to_thread(_unmapped, found, say))
    other = await mapped(run, say, conf, "nbd-other")
    say(f"nbd same device {other == device}")
    say(f"nbd other denied {not writes(run, other)}")
    again = blockdev.identify(name)
    assert again is not None
    await until("its verdict", lambda: (k := guard.manager.known.get(name))
                and k.device.attachment == again.attachment and k.reasons)  # fmt: skip
    say(f"nbd other still denied {not writes(run, other)}")
    await until("its unmap", lambda: asyncio.to_thread(_unmapped, again, say))
    device = await mapped(run, say, conf, "nbd-blank")
    done = await asyncio.to_thread(run, "mkfs.ext4", "-F", device)
    say(f"nbd reformat denied {done.returncode != 0}")
    done = await asyncio.to_thread(run, "mount", device, target)
    say(f"nbd mounted again {done.returncode}")
    run("umount", target)
    third = blockdev.identify(name)
    assert third is not None
    await until("its unmap", lambda: asyncio.to_thread(_unmapped, third, say))


def _unmap(device: blockdev.BlockDevice) -> None:
    """As the audit's action does it."""
    executors.unmap(device.name, "nbd", list(device.number), device.diskseq, "", [])


def _unmapped(device: blockdev.BlockDevice, say: Callable[[str], None]) -> bool:
    """Tried again while a probe has the device open."""
    now = blockdev.identify(device.name)
    if now is None or not now.size:
        return True
    try:
        _unmap(device)
    except (kit.errors.AgentError, OSError) as error:
        say(f"unmap again {error}")
        time.sleep(1)
        return False
    return True
