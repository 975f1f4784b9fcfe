"""Carrying a plan out. Each function runs in a child process (kit.child) and checks again there."""

import os
import subprocess
from pathlib import Path

import kit.errors
from linux import blockioctl, mount_namespaces
from volumes.inventory import processes, users

_UNMAP_SECONDS = 20


def detach(way: str, namespace_id: int, inode: int, copies: list[tuple[int, int, str]]) -> int:
    """How many copies were unmounted; 0 when nothing was there any more. OSError.

    ``copies``: major and minor of each mount itself, and where it is in that namespace.
    """
    wanted = [mount_namespaces.Copy((major, minor), target) for major, minor, target in copies]
    if _mounted_on_host({copy.device for copy in wanted}):
        raise kit.errors.RefusedError(
            "detach-leaked", "the host has the device mounted again", "nothing was done"
        )
    if way:
        return mount_namespaces.detach(way, inode, wanted)
    return mount_namespaces.detach_by_id(namespace_id, inode, wanted)


def _mounted_on_host(numbers: set[tuple[int, int]]) -> bool:
    wanted = {f"{major}:{minor}" for major, minor in numbers}
    lines = Path("/proc/1/mountinfo").read_text(errors="replace").splitlines()
    return any(line.split(" ", 3)[2] in wanted for line in lines)


def unmap(name: str, driver: str, device: list[int], diskseq: int, mapping: str) -> int:
    """Unmap a device that is still the same and still idle. OSError (EBUSY) when it is not."""
    home = Path("/sys/block", name)
    number = f"{device[0]}:{device[1]}"
    if (home / "dev").read_text().strip() != number or _sequence(home) not in (0, diskseq):
        raise kit.errors.RefusedError(f"unmap {name}", "another device by now", "nothing was done")
    if (
        any(Path("/sys/fs", fs, name).exists() for fs in ("ext4", "xfs", "f2fs"))
        or any((home / "holders").iterdir())
        or any(home.glob("*/partition"))
    ):
        raise kit.errors.RefusedError(f"unmap {name}", "it is in use again", "nothing was done")
    if driver == "rbd":
        # The kernel refuses with EBUSY while anything has it open; 'force' is never used.
        single = Path("/sys/bus/rbd/remove_single_major")
        target = single if single.exists() else Path("/sys/bus/rbd/remove")
        target.write_text(mapping)
    elif driver == "nbd":
        # rbd-nbd takes the device away from whoever has it open: nobody may.
        with blockioctl.claimed(f"/dev/{name}", (device[0], device[1])):
            _refuse_users(name, (device[0], device[1]))
            subprocess.run(
                ("rbd-nbd", "unmap", f"/dev/{name}"),
                check=True,
                timeout=_UNMAP_SECONDS,
                capture_output=True,
            )
    elif driver == "loop":
        blockioctl.detach_loop(f"/dev/{name}", (device[0], device[1]))
    else:
        raise kit.errors.RefusedError(
            f"unmap {name}", f"nothing is known of driver {driver}", "unmap it by hand"
        )
    return 1


def _refuse_users(name: str, number: tuple[int, int]) -> None:
    everything = processes.Processes("/proc", "")
    for user in users.find(everything, "/proc", {number}, set()):
        if user.owner.pid != os.getpid():  # the claim
            raise kit.errors.RefusedError(
                f"unmap {name}",
                f"{user.owner.label} has it open ({', '.join(user.ways)})",
                "nothing was done",
            )


def _sequence(home: Path) -> int:
    try:
        return int((home / "diskseq").read_text())
    except (OSError, ValueError):
        return 0


def set_read_only(path: str, device: list[int], diskseq: int) -> int:
    """OSError, EBUSY among them: while it is mounted, or claimed by what is stacked on it."""
    name = path.rpartition("/")[2]
    if _sequence(Path("/sys/block", name)) not in (0, diskseq):
        raise kit.errors.RefusedError(f"flag {name}", "another device by now", "nothing was done")
    blockioctl.set_read_only(path, (device[0], device[1]))
    return 1
