"""Part of guest_replay: LUKS over krbd, as ceph-csi uses it, and another device mapper device."""

import asyncio
import os
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from tests.testbed import formatters
from volumes.guard import controller
from volumes.guard.kernel import Mode

Run = Callable[..., "subprocess.CompletedProcess[str]"]
KEY, NEW = "/run/key", "/run/key2"
QUICK = ("--pbkdf", "pbkdf2", "--pbkdf-force-iterations", "1000")
HIDDEN = 64 * 1024  # of the mapping: the primary superblock


async def encrypted(
    guard: controller.Controller,
    device: str,
    target: str,
    run_now: Run,
    tell: Callable[[str], None],
    until: Callable[[str, Callable[[], Any]], Awaitable[None]],
    *,
    kind: str,
) -> None:
    """``kind``: luks1 or luks2."""
    kernel = guard.in_force.guard
    assert kernel is not None
    opened = f"secret-{kind}"
    mapper = f"/dev/mapper/{opened}"

    def say(text: str) -> None:
        tell(f"{kind} {text}")

    async def run(*words: str) -> "subprocess.CompletedProcess[str]":
        return await asyncio.to_thread(run_now, *words)

    async def retried(*words: str) -> int:
        """As kubelet does: at once, then again and again."""
        for attempt in range(60):
            done = await run(*words)
            if done.returncode == 0:
                return attempt
            await asyncio.sleep(0.5)
        raise RuntimeError(f"{words}: never allowed: {done.stderr}")

    os.environ["DM_DISABLE_UDEV"] = "1"
    Path(KEY).write_bytes(b"k" * 64)
    Path(NEW).write_bytes(b"n" * 64)
    luks = ("cryptsetup", "-q", "luksFormat", "--type", kind, *QUICK, device, "-d", KEY)
    say(f"formatted after a refusal {await retried(*luks) > 0}")
    done = await run("cryptsetup", "luksOpen", device, opened, "--disable-keyring", "-d", KEY)
    say(f"opened {done.returncode} {done.stderr}".strip())
    number = os.major(os.stat(mapper).st_rdev), os.minor(os.stat(mapper).st_rdev)
    say(f"guarded at once {number in kernel.read().devices}")
    for _ in range(60):
        outcome = await asyncio.to_thread(
            formatters.kubelet, run_now, mapper, "ext4", target, lambda: None
        )
        if outcome.mounted:
            break
        await asyncio.sleep(0.5)
    say(f"mounted {outcome.mounted}")
    Path(target, "data").write_text("secret")
    await run("sync")
    name = f"dm-{number[1]}"
    await until(
        "the mapping's entry",
        lambda: (
            (known := guard.manager.known.get(name))
            and (entry := guard.executor.ledger.get(known.device.volume))
            and entry.type == "ext4"
        ),
    )
    say(f"volume {guard.manager.known[name].device.volume}")
    # The very command lines of ceph-csi's key rotation.
    rotated = ("--verbose", f"--key-file={KEY}", "--key-slot=1", *(f"{QUICK[0]}={QUICK[1]}",),
               f"{QUICK[2]}={QUICK[3]}", "luksAddKey", device, NEW)  # fmt: skip
    say(f"key rotation {(await run('cryptsetup', *rotated)).returncode}")
    killed = ("--verbose", f"--key-file={NEW}", "luksKillSlot", device, "0")
    say(f"old key removed {(await run('cryptsetup', *killed)).returncode}")
    done = await run("cryptsetup", "resize", opened, "--disable-keyring", "-d", NEW)
    say(f"resize {done.returncode} {done.stderr}".strip())
    say(f"grown {(await run('resize2fs', mapper)).returncode}")
    await run("umount", target)
    await until("the leases' end", lambda: number not in kernel.leases())
    say(f"reformat denied {(await run('mkfs.ext4', '-F', mapper)).returncode != 0}")
    say(f"luksFormat denied {(await run(*luks)).returncode != 0}")

    # The mapping's superblock cannot be seen any more, and kubelet would format.
    kernel.set_mode(Mode.DRY_RUN)
    with open(mapper, "r+b", buffering=0) as stream:
        kept = stream.read(HIDDEN)
        stream.seek(0)
        stream.write(bytes(HIDDEN))
        os.fsync(stream.fileno())
    kernel.set_mode(Mode.ENFORCE)
    done = await run("mkfs.ext4", "-F", mapper)
    say(f"accident EPERM {'not permitted' in done.stderr}")
    kernel.set_mode(Mode.DRY_RUN)
    with open(mapper, "r+b", buffering=0) as stream:
        stream.write(kept)
        os.fsync(stream.fileno())
    kernel.set_mode(Mode.ENFORCE)
    say(f"again {(await run('mount', mapper, target)).returncode}")
    say(f"data {Path(target, 'data').read_text() == 'secret'}")
    await run("umount", target)

    await run("cryptsetup", "close", opened)


async def another(run_now: Run, say: Callable[[str], None]) -> None:
    """Another device of the same driver is left alone."""

    async def run(*words: str) -> "subprocess.CompletedProcess[str]":
        return await asyncio.to_thread(run_now, *words)

    os.environ["DM_DISABLE_UDEV"] = "1"
    Path("/run/disk").write_bytes(bytes(16 * 2**20))
    await run("losetup", "/dev/loop0", "/run/disk")
    await run("dmsetup", "create", "other", "--table", "0 32768 linear /dev/loop0 0")
    done = await run("mkfs.ext4", "-q", "/dev/mapper/other")
    say(f"another mapping formatted {done.returncode} {done.stderr}".strip())
    await run("dmsetup", "remove", "other")
