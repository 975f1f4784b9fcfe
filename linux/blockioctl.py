"""Small ioctls of block devices (linux/fs.h, linux/loop.h). All raise OSError; all can hang."""

import array
import contextlib
import fcntl
import os
from collections.abc import Iterator

_BLKROSET = 0x125D
_LOOP_CLR_FD = 0x4C01


def set_read_only(path: str, device: tuple[int, int]) -> None:
    """Refuse writes from now on; any privileged process can take it back.

    EBUSY while the device is mounted or claimed: O_EXCL holds off both until the flag is set.
    """
    descriptor = _open(path, device, os.O_EXCL)
    try:
        fcntl.ioctl(descriptor, _BLKROSET, array.array("i", [1]))
    finally:
        os.close(descriptor)


def detach_loop(path: str, device: tuple[int, int]) -> None:
    """Take the file off a loop device; the kernel waits with it while somebody has it open."""
    descriptor = _open(path, device)
    try:
        fcntl.ioctl(descriptor, _LOOP_CLR_FD)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def claimed(path: str, device: tuple[int, int]) -> Iterator[None]:
    """Nobody mounts it or stacks a device on it meanwhile; EBUSY where somebody has. Others may
    still have it open."""
    descriptor = _open(path, device, os.O_EXCL)
    try:
        yield
    finally:
        os.close(descriptor)


def _open(path: str, device: tuple[int, int], flags: int = 0) -> int:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags)
    if os.fstat(descriptor).st_rdev != os.makedev(*device):
        os.close(descriptor)
        raise OSError(0, f"{path} is no longer device {device[0]}:{device[1]}")
    return descriptor
