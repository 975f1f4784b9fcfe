"""Part of test_own: the scope in a guest that has the device mapper, on Debian's kernel."""

import asyncio
import os
from pathlib import Path

from linux import stack
from tests.volumes.guard.guest_shell import run, say
from volumes import settings
from volumes.guard import kernel, own, record, scope

STATE, DATA = Path("/run/state"), Path("/run/data")
WANTED = settings.GuardSettings(drivers=("rbd",), scope="csi", openers=("mount", "lvm", "dmsetup"))


def opens(name: str) -> bool:
    return run("sh", "-c", f"exec 3<>/dev/mapper/{name}").returncode == 0


def number_of(name: str) -> kernel.Number:
    status = os.stat(f"/dev/mapper/{name}").st_rdev
    return os.major(status), os.minor(status)


def linear(name: str, start: int, *more: str) -> None:
    done = run("dmsetup", "create", name, *more, "--table", f"0 65536 linear /dev/loop0 {start}")
    say(f"made {name} {done.returncode} {done.stderr}".strip())


async def main() -> None:
    own.BOOT_SECONDS = 0.0  # the guest booted a moment ago
    os.environ["DM_DISABLE_UDEV"] = "1"
    for folder in (STATE, DATA):
        folder.mkdir()
    run("mount", "-t", "tmpfs", "none", "/run/data")
    run("truncate", "-s", "192M", "/run/data/image")
    run("losetup", "/dev/loop0", "/run/data/image")
    linear("used", 0, "--uuid", "LVM-used")
    linear("spare", 65536, "--uuid", "LVM-spare")
    run("mkfs.ext4", "-q", "/dev/mapper/used")
    Path("/run/used").mkdir()
    say(f"mounted {run('mount', '/dev/mapper/used', '/run/used').returncode}")

    guard = kernel.Kernel(kernel.find_cgroup(), WANTED.pins)
    guard.apply(kernel.wanted(WANTED, kernel.Mode.ENFORCE, {}))
    devices = own.OwnDevices(STATE)
    devices.apply(guard, WANTED, 1)
    await devices.look()
    say(f"problem '{devices.seen.problem}' judges {guard.read().judges}")
    by_mapping = {each.mapping: each for each in devices.seen.devices if each.mapping}
    for mapping, device in sorted(by_mapping.items()):
        say(f"{mapping} {devices.seen.found[device.name]}")
    say(f"written {record.read_own(str(STATE))}")
    say(f"lies on {by_mapping['used'].below}")

    # As it will be when a scope refuses.
    guard.judge(
        kernel.Mode.ENFORCE, own.table(stack.Stack(devices.seen.devices), devices.seen.found)
    )
    say(f"opens used {opens('used')} spare {opens('spare')}")
    linear("new", 131072)
    say(f"opens new {opens('new')}")
    done = run("mkfs.ext4", "-F", "/dev/mapper/new")
    say(f"mkfs new {done.returncode != 0} {'not permitted' in done.stderr}")
    say(f"remount {run('mount', '-o', 'remount,ro', '/run/used').returncode}")

    number = number_of("used")
    run("umount", "/run/used")
    run("dmsetup", "remove", "used")
    linear("other", 0, "--major", str(number[0]), "--minor", str(number[1]))
    say(f"same number {number_of('other') == number} opens {opens('other')}")
    await devices.look()
    whose = devices.seen.found[f"dm-{number[1]}"]
    say(f"other {whose.whose} {whose.why is scope.Why.NEW}")
    guard.detach()
    say(f"without a guard {opens('other')}")


asyncio.run(main())
