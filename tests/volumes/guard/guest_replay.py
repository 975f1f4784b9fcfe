"""Runs inside the guest: the accident on real /dev/rbd devices. Says ``check: text`` lines.

One process without the agent's web server, because starting one takes long under emulation; the
controller is the agent's own.
"""

import asyncio
import errno
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import kit.findings
from ceph.protocol import Extents
from ceph.settings import ClusterSettings
from linux import blockdev
from tests.testbed import constants, formatters, waiting
from tests.volumes.guard import guest_luks, guest_nbd, guest_raw
from tests.volumes.guard.guest_shell import run, say
from tests.volumes.guard.world import witness
from volumes import settings
from volumes.guard import canary, controller, without_agent
from volumes.guard import status as volume_status
from volumes.guard.kernel import Mode

CONF, MONITOR, _, SECRET = sys.argv[1:]
TARGET = "/run/target"
findings: list[kit.findings.Finding] = []


def attach(image: str) -> str:
    """krbd without the rbd command: it is quicker and needs no udev."""
    before = set(os.listdir("/sys/bus/rbd/devices"))
    line = f"{MONITOR} name=admin,secret={SECRET} rbd {image} -"
    Path("/sys/bus/rbd/add_single_major").write_text(line)
    (new,) = set(os.listdir("/sys/bus/rbd/devices")) - before
    return f"/dev/rbd{new}"


def zeroed(device: str) -> None:
    """The primary superblock reads as zeros: written past the guard, as a broken backend would."""
    with open(device, "r+b", buffering=0) as stream:
        stream.write(bytes(64 * 1024))
        os.fsync(stream.fileno())


async def until(what: str, condition: Callable[[], Any]) -> None:
    pause = waiting.GUEST_PAUSE_SECONDS
    await waiting.until_async(condition, 60, what, pause=pause, detail=lambda: findings)


async def detach(device: str) -> None:
    """Unmap as ceph-csi does: again while the device is busy, with a probe for example."""

    def detached() -> bool:
        try:
            Path("/sys/bus/rbd/remove_single_major").write_text(device.removeprefix("/dev/rbd"))
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            return False
        return True

    await until(f"{device} to be unmapped", detached)


async def in_thread(*command: str) -> "subprocess.CompletedProcess[str]":
    return await asyncio.to_thread(run, *command)


async def main() -> None:
    Path(TARGET).mkdir()
    # Control, nothing attached yet: superblock gone, kubelet formats, the data is lost.
    device = attach("control")
    run("mkfs.ext4", "-q", device)
    zeroed(device)
    lost = formatters.kubelet(run, device, "ext4", TARGET, lambda: None)
    say(f"control mkfs {lost.mkfs} mounted {lost.mounted} {lost.error}".strip())
    run("umount", TARGET)
    await detach(device)
    device = attach("nbd-other")
    run("dd", "if=/dev/urandom", f"of={device}", "bs=1M", "count=8", "conv=fsync")
    await detach(device)

    wanted = constants.made(
        settings.GuardSettings,
        mode="enforce",
        quiet=0,  # pydantic takes seconds
        pins=Path("/sys/fs/bpf/nodeagent"),
        cluster_timeout=60,  # python starts slowly here
        probe_timeout=60,
    )

    def changed() -> None:
        findings[:] = volume_status.findings(guard, time.time())

    clusters = (ClusterSettings(name="c1", conf=Path(CONF), user="admin"),)
    canary.DEADLINE_SECONDS = 60.0  # its child is a python, too
    guard = controller.Controller(
        wanted, clusters, witness(), state_dir=Path("/run/state"), changed=changed
    )
    await guard.start()
    kernel = guard.in_force.guard
    assert kernel is not None
    status = await without_agent.kernel_status(wanted, Path("/run/state"))
    say(f"status {status['mode']} {status['proof']} whole {status['whole_node']}")

    # A new, blank image: leased by itself, formatted and mounted by kubelet's sequence.
    began = time.monotonic()
    device = attach("blank")
    name = Path(device).name
    for _ in range(60):
        outcome = await asyncio.to_thread(
            formatters.kubelet, run, device, "ext4", TARGET, lambda: None
        )
        if outcome.mounted:
            break
        await asyncio.sleep(0.5)
    say(f"blank mounted {outcome.mounted} after {time.monotonic() - began:.1f}s {outcome.error}")
    Path(TARGET, "data").write_text("precious")
    run("sync")
    identity = blockdev.identify(name)
    assert identity is not None and identity.image is not None
    say(f"volume {identity.volume}")
    ledger = guard.executor.ledger
    await until("the ledger", lambda: (ledger.get(identity.volume) or identity).title
                and (e := ledger.get(identity.volume)) and e.type == "ext4")  # fmt: skip
    online = await in_thread("resize2fs", device)
    say(f"resize2fs while mounted {online.returncode}")
    run("umount", TARGET)
    await until("the lease's end", lambda: not kernel.leases()
                or kernel.leases()[identity.number].until < time.monotonic())  # fmt: skip

    # The core of the matrix.
    os.mknod("/run/node", 0o60600, os.stat(device).st_rdev)
    for words in (
        ("mkfs.ext4", "-F", device), ("mkfs.xfs", "-f", device), ("wipefs", "-a", "-f", device),
        ("dd", "if=/dev/zero", f"of={device}", "count=1"), ("mkswap", "-f", device),
        ("blkdiscard", "-f", device), ("mkfs.ext4", "-F", "/run/node"),
        ("unshare", "-m", "mkfs.ext4", "-F", device),
    ):  # fmt: skip
        done = await in_thread(*words)
        say(f"denied {' '.join(words[:2])} {done.returncode != 0}")
    done = await in_thread("fsck.ext4", "-f", "-y", device)
    say(f"allowed fsck {done.returncode}")
    await detach(device)
    say(f"allowed unmap {not Path('/sys/block', name).exists()}")

    # The accident: the superblock reads as zeros (blkid: nothing there), kubelet wants mkfs.
    kernel.set_mode(Mode.DRY_RUN)
    device = attach("blank")
    with open(device, "rb") as whole:
        kept = whole.read(64 * 1024)
    zeroed(device)
    await guard.apply(wanted)
    accident = await asyncio.to_thread(
        formatters.ceph_csi, run, device, "ext4", TARGET, lambda: None
    )
    say(f"accident found {accident.found!r} mkfs {accident.mkfs} "
        f"EPERM {'Operation not permitted' in accident.mkfs_error}")  # fmt: skip
    await until("the finding", lambda: any(f.rule == "content-missing" for f in findings))
    say(f"findings {' '.join(sorted(f.rule for f in findings))}")
    kernel.set_mode(Mode.DRY_RUN)
    with open(device, "r+b", buffering=0) as stream:  # the fault clears
        stream.write(kept)
        os.fsync(stream.fileno())
    await guard.apply(wanted)
    run("mount", device, TARGET)
    say(f"data {Path(TARGET, 'data').read_text() == 'precious'}")
    run("umount", TARGET)

    # Another node without memory of its own: the image's metadata tells it.
    answer = await guard.executor.mirror.ask(identity.image, Extents())
    say(f"metadata {answer.mirror} extents {answer.extents}")
    for kind in ("luks1", "luks2"):
        secret = attach(f"secret-{kind}")
        await guest_luks.encrypted(guard, secret, TARGET, run, say, until, kind=kind)
        await detach(secret)
    await guest_luks.another(run, say)
    await guest_nbd.attached(guard, CONF, TARGET, run, say, until)
    await guest_raw.published(guard, attach, run, say, until)
    await detach(device)


asyncio.run(main())
