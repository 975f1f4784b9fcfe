"""Mapping snapshots of RBD images with the kernel's client. All functions can hang.

The kernel takes ``MONITORS OPTIONS POOL IMAGE SNAPSHOT`` in /sys/bus/rbd/add_single_major and the
number of a device in remove_single_major (Documentation/ABI/testing/sysfs-bus-rbd). The key goes
through that file and shows nowhere. A snapshot is mapped without a watch and without a lock.
"""

import errno
import os
import re
from collections.abc import Sequence
from pathlib import Path

import kit.files
from linux import rbd_sysfs

_BUS = "bus/rbd"
_WORD = re.compile(r"[^\s,\0]+")  # of what the kernel takes apart at spaces and commas


def available(sysfs: str | Path = "/sys") -> bool:
    """Whether the kernel has the client; loads its module if there is one."""
    if not os.path.isdir(f"{sysfs}/{_BUS}"):
        os.spawnlp(os.P_WAIT, "modprobe", "modprobe", "-q", "rbd", "single_major=Y")
    return os.path.isdir(f"{sysfs}/{_BUS}")


def lacking() -> str:
    """Of a kernel without the client: what it lacks, and why no other client maps instead.

    rbd-nbd needs the kernel's network block devices. rbd-fuse needs neither, but it opens the image
    itself, for writing: it shows no snapshot, and leaves a watcher (Ceph 16, seen).
    """
    # -n: only whether there is such a module.
    has_nbd = os.spawnlp(os.P_WAIT, "modprobe", "modprobe", "-n", "-q", "nbd") == 0
    of_nbd = "rbd-nbd is not used" if has_nbd else "rbd-nbd cannot map it (no module nbd either)"
    return (
        f"this kernel ({os.uname().release}) has no RBD client (module rbd), {of_nbd}, and "
        "rbd-fuse shows no snapshots"
    )


def mapped(image: rbd_sysfs.RbdImage, sysfs: str | Path = "/sys") -> list[str]:
    """Numbers of the devices that show this snapshot (by its names), whoever mapped them."""
    numbers = sorted(rbd_sysfs.listed(f"{sysfs}/{_BUS}/devices"), key=rbd_sysfs.integer)
    shown = ((number, rbd_sysfs.mapping(number, sysfs)[0]) for number in numbers)
    return [number for number, each in shown if each and each.spec == image.spec]


def diskseq(number: str, sysfs: str | Path = "/sys") -> str:
    """What tells this /dev/rbdN from a later one with its number; '' before kernel 5.15."""
    return rbd_sysfs.text(f"{sysfs}/block/rbd{number}/diskseq")


def map_snapshot(
    monitors: Sequence[str], user: str, secret: str, image: rbd_sysfs.RbdImage, protocol: str
) -> str:
    """The number N of the new /dev/rbdN. ``protocol``: v1 or v2, of these monitors. OSError."""
    options = [f"name={user}", f"secret={secret}", "ro"]
    if protocol == "v2":
        options.append("ms_mode=prefer-crc")
    if image.namespace:
        options.append(f"_pool_ns={image.namespace}")
    for text in (*monitors, *options, image.pool, image.name, image.snapshot):
        if not _WORD.fullmatch(text):
            raise OSError(errno.EINVAL, "a name has a character that the kernel takes as an end")
    words = (",".join(monitors), ",".join(options), image.pool, image.name, image.snapshot)
    before = set(mapped(image))
    _write("add", " ".join(words))
    new = [number for number in mapped(image) if number not in before]
    if not new:
        raise OSError(0, "the kernel mapped the image and shows no device")
    return new[-1]


def unmap(number: str) -> None:
    """OSError: EBUSY while it is open or mounted, ENOENT when it is not there."""
    _write("remove", number)


def _write(what: str, text: str) -> None:
    single = f"/sys/{_BUS}/{what}_single_major"
    path = single if os.path.exists(single) else f"/sys/{_BUS}/{what}"
    with kit.files.closing(os.open(path, os.O_WRONLY | os.O_CLOEXEC)) as descriptor:
        os.write(descriptor, text.encode())
