"""Flags of inodes (ioctl_iflags(2)): the one that keeps a directory as it is."""

import array
import fcntl

_GET, _SET = 0x80086601, 0x40086602  # FS_IOC_GETFLAGS, FS_IOC_SETFLAGS; the kernel uses an int
_IMMUTABLE = 0x10


def set_immutable(descriptor: int, on: bool) -> bool:
    """Set or clear FS_IMMUTABLE_FL; False where the file system has no such flag, or we may not.

    With it nobody makes, renames or removes anything in a directory, nor the directory itself.
    Mounting on it works. Clearing it takes CAP_LINUX_IMMUTABLE, which pods do not have by default.
    """
    flags = array.array("i", [0, 0])  # the ioctls are declared with a long
    try:
        fcntl.ioctl(descriptor, _GET, flags, True)
        wanted = flags[0] | _IMMUTABLE if on else flags[0] & ~_IMMUTABLE
        if wanted != flags[0]:
            flags[0] = wanted
            fcntl.ioctl(descriptor, _SET, flags)
    except OSError:
        return False
    return True
