"""Runs inside the guest: ceph-csi's stages of new volumes on krbd, each undone when its format was
refused (internal/rbd/nodeserver.go, undoStagingTransaction). Says ``check: text`` lines."""

import asyncio
import errno
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.testbed import constants, formatters, waiting
from tests.volumes.guard.guest_shell import run, say
from tests.volumes.guard.world import witness
from volumes import settings
from volumes.guard import controller
from volumes.guard.kernel import Mode

_, MONITOR, _, SECRET = sys.argv[1:]
SYSFS = Path("/sys/bus/rbd")
TARGET = "/run/target"
KEY = "/run/key"
LUKS = ("cryptsetup", "-q", "luksFormat", "--type", "luks2", "--pbkdf", "pbkdf2",
        "--pbkdf-force-iterations", "1000", "-d", KEY)  # fmt: skip
MOST_STAGES = 7
LEASE_SECONDS = 40.0


def figure(text: str) -> None:
    print(f"figure: {text}", flush=True)


class Csi:
    """Its node plugin, for one image. ``maps``: how often it was mapped."""

    def __init__(self, image: str) -> None:
        self.image = image
        self.maps = 0
        self.refused = 0

    def attach(self) -> str:
        """attachRBDImage: the mapping that there is, else a new one."""
        if not (device := self.mapped()):
            line = f"{MONITOR} name=admin,secret={SECRET} rbd {self.image} -"
            (SYSFS / "add_single_major").write_text(line)
            self.maps += 1
            device = self.mapped()
        return device

    def mapped(self) -> str:
        for each in (SYSFS / "devices").iterdir():
            if (each / "name").read_text().strip() == self.image:
                return f"/dev/rbd{each.name}"
        return ""

    def detach(self, device: str) -> bool:
        """'rbd unmap': tries again after 0.25 s, and once more."""
        for pause in (0.25, 0.0, None):
            try:
                (SYSFS / "remove_single_major").write_text(device.removeprefix("/dev/rbd"))
            except OSError as error:
                if error.errno != errno.EBUSY:
                    raise
                if pause is not None:
                    time.sleep(pause)
            else:
                return True
        return False

    def close_mapping(self) -> bool:
        return run("cryptsetup", "luksClose", self.image).returncode == 0

    def stage(self) -> bool:
        device = self.attach()
        done = formatters.ceph_csi(run, device, "ext4", TARGET, lambda: None)
        if not done.mounted:
            self.refused += "not permitted" in done.mkfs_error
            self.detach(device)
        return done.mounted

    def stage_encrypted(self) -> bool:
        """processEncryptedDevice, then the file system of the mapping."""
        device, mapper = self.attach(), f"/dev/mapper/{self.image}"
        if not formatters.disk_format(run, device):
            done = run(*LUKS, device)
            if done.returncode:
                self.refused += 1
                self.detach(device)
                return False
        if not Path(mapper).exists():
            run("cryptsetup", "luksOpen", device, self.image, "--disable-keyring", "-d", KEY)
        outcome = formatters.ceph_csi(run, mapper, "ext4", TARGET, lambda: None)
        if not outcome.mounted:
            self.refused += "not permitted" in outcome.mkfs_error
            if self.close_mapping():
                self.detach(device)
        return outcome.mounted


async def stages(csi: Csi, stage: Callable[[], bool]) -> bool:
    """kubelet: after 0.5 s, then after twice as long each time."""
    for attempt in range(MOST_STAGES):
        if await asyncio.to_thread(stage):
            return True
        await asyncio.sleep(0.5 * 2**attempt)
    return False


async def possible(what: str, attempt: Callable[[], bool]) -> float:
    """Seconds until it could be done, as kubelet tries again and again."""
    began = time.monotonic()
    pause = waiting.GUEST_PAUSE_SECONDS
    await waiting.until_async(attempt, 2 * LEASE_SECONDS, what, pause=pause)
    return time.monotonic() - began


async def detached(csi: Csi, device: str) -> float:
    return await possible(f"{device} to be unmapped", lambda: csi.detach(device))


async def main() -> None:
    Path(TARGET).mkdir()
    Path(KEY).write_bytes(b"k" * 64)
    os.environ["DM_DISABLE_UDEV"] = "1"
    wanted = constants.made(
        settings.GuardSettings, mode="enforce", quiet=0, pins=Path("/sys/fs/bpf/nodeagent"),
        probe_timeout=60, lease=LEASE_SECONDS,
        settle=2,  # no lease before the first mkfs, however slow that is
    )  # fmt: skip
    guard = controller.Controller(wanted, (), witness(), state_dir=Path("/run/state"))
    await guard.start()

    plain = Csi("plain")
    say(f"plain mounted {await stages(plain, plain.stage)} refused first {plain.refused > 0}")
    figure(f"plain: {plain.refused} refused, {plain.maps} maps")
    run("umount", TARGET)
    await detached(plain, plain.mapped())
    say(f"plain detached {not plain.mapped()}")

    secret = Csi("secret")
    mounted = await stages(secret, secret.stage_encrypted)
    say(f"secret mounted {mounted} refused twice {secret.refused >= 2}")
    figure(f"secret: {secret.refused} refused, {secret.maps} maps")
    run("umount", TARGET)
    await possible("the mapping to be closed", secret.close_mapping)
    await detached(secret, secret.mapped())

    # The pod goes away after its first try: nobody comes to use the lease.
    left = Csi("left")
    for _ in range(MOST_STAGES):  # as long as the unmap is quicker than this slow machine's agent
        found = await asyncio.to_thread(left.stage), bool(left.mapped())
        if any(found):
            break
    say(f"left mounted, held {found}")
    taken = await detached(left, left.mapped())
    say(f"left detached {not left.mapped()}")
    figure(f"left: {taken:.1f} s until an unused hold ended")

    # What holds data is looked at, and let go.
    full = Csi("full")
    device = full.attach()
    assert guard.in_force.guard is not None
    guard.in_force.guard.set_mode(Mode.DRY_RUN)
    await asyncio.to_thread(run, "dd", "if=/dev/urandom", f"of={device}", "bs=1M", "count=1")
    guard.in_force.guard.set_mode(Mode.ENFORCE)
    await detached(full, device)
    device = full.attach()
    done = await asyncio.to_thread(run, "mkfs.ext4", "-F", device)
    taken = await detached(full, device)
    say(f"full denied {'not permitted' in done.stderr} detached {not full.mapped()}")
    figure(f"full: {taken:.1f} s until data could be detached")

    # An agent that stops leaves nobody in the way.
    last = Csi("last")
    await asyncio.to_thread(last.stage)
    await guard.stop()
    say(f"last detached {await asyncio.to_thread(last.detach, last.mapped())}")


asyncio.run(main())
