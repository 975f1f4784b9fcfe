"""The power of a disk goes, and comes back."""

import fcntl
import os
import struct
import subprocess
from pathlib import Path

from tests.testbed import blockdev, waiting

# linux/fs.h: _IOR('X', 125, __u32); 1 flushes the journal first, 2 does not
SHUTDOWN = 0x8004587D
LOG_FLUSHED, LOG_LOST = 1, 2


def cut(disk: Path, flag: int) -> None:
    """From here on nothing more reaches the file system mounted at ``disk``."""
    descriptor = os.open(disk, os.O_RDONLY)
    try:
        fcntl.ioctl(descriptor, SHUTDOWN, struct.pack("I", flag))
    finally:
        os.close(descriptor)


def remount(disk: Path, image: Path) -> None:
    """Mount what ``image`` has of it now. Nothing may use ``disk`` any more."""
    subprocess.run(["umount", str(disk)], check=True, timeout=waiting.limit(60))
    # A loop device of its own: should anything still hold the file system that was cut (a mount
    # namespace of somebody else), the same device would bring back that one, dead as it is.
    blockdev.mount_image(image, disk, "nouuid" if image.name == "xfs.img" else "rw")
