"""Loop devices (linux/loop.h): ours end by themselves. All functions can hang.

A device that ``attached`` makes is detached by the kernel when nobody has it open or mounted any
more (LO_FLAGS_AUTOCLEAR), so that a killed agent leaves no loop device behind.
"""

import contextlib
import errno
import fcntl
import os
import stat
import struct
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import kit.files
from linux import mountinfo, procfs, rbd_sysfs, syscalls

_LOOP_GET_STATUS64, _LOOP_SET_DIRECT_IO, _LOOP_CONFIGURE = 0x4C05, 0x4C08, 0x4C0A
_LOOP_CTL_GET_FREE = 0x4C82
_BLKRASET = 0x1262  # linux/fs.h
_READ_ONLY, _AUTOCLEAR = 1, 4
_MAJOR = 7
_BLOCK = Path("/sys/block")
# struct loop_config: fd, block_size, struct loop_info64 (232 bytes: offset at 24, sizelimit at 32,
# flags at 52), 64 reserved.
_CONFIG = struct.Struct("II24xQQ12xI176x64x")
_INFO_BYTES = 232  # struct loop_info64: lo_device, lo_inode, lo_rdevice, ...
_ATTEMPTS = 50  # another process may take the free number first


@contextlib.contextmanager
def attached(file: str, *, read_only: bool = True, offset: int = 0, size: int = 0) -> Iterator[str]:
    """The path of a loop device over ``file`` while the block runs; a mount of it keeps it.

    ``offset`` and ``size`` in bytes: of the part that it shows; 0 and 0: all of it.

    Reads go past the page cache of the file system below where that can do it: the file system on
    the device has a cache of its own. It reads ahead as on the disk below. OSError.
    """
    flags = (os.O_RDONLY if read_only else os.O_RDWR) | os.O_CLOEXEC
    with kit.files.closing(os.open(file, flags)) as backing:
        for _ in range(_ATTEMPTS):
            with _node(_free()) as node, kit.files.closing(os.open(node, flags)) as device:
                try:
                    wanted = _AUTOCLEAR | (_READ_ONLY if read_only else 0)
                    fcntl.ioctl(
                        device, _LOOP_CONFIGURE, _CONFIG.pack(backing, 0, offset, size, wanted)
                    )
                except OSError as error:
                    if error.errno != errno.EBUSY:
                        raise
                    continue
                with contextlib.suppress(OSError):  # a file system without O_DIRECT
                    fcntl.ioctl(device, _LOOP_SET_DIRECT_IO, 1)
                _read_ahead_as(os.fstat(backing).st_dev, device)
                yield node
                return
    raise OSError(errno.EBUSY, "no loop device is free", file)


def _read_ahead_as(disk: int, device: int) -> None:
    """A free device has what the kernel, or who had it before, gave it: too little for large files.

    Where the disk below is not known by its number (btrfs) it keeps that.
    """
    home = f"/sys/dev/block/{os.major(disk)}:{os.minor(disk)}"
    if os.path.exists(f"{home}/partition"):
        home = os.path.dirname(os.path.realpath(home))
    sectors = rbd_sysfs.integer(rbd_sysfs.text(f"{home}/queue/read_ahead_kb")) * 2
    if sectors:
        with contextlib.suppress(OSError):
            fcntl.ioctl(device, _BLKRASET, sectors)


@contextlib.contextmanager
def held(number: int, file: str) -> Iterator[bool]:
    """Keep a device while the block runs; whether it shows ``file``. OSError."""
    flags = os.O_RDONLY | os.O_CLOEXEC
    with _node(number) as node, kit.files.closing(os.open(node, flags)):
        yield rbd_sysfs.text(f"/sys/block/loop{number}/loop/backing_file") == file


def over(file: str) -> list[str]:
    """The loop devices that show ``file``, for example loop3; it is named as the kernel does."""
    found = _BLOCK.glob("loop*/loop/backing_file")
    return sorted(each.parents[1].name for each in found if rbd_sysfs.text(str(each)) == file)


Backing = tuple[str, str, list[list[int]]]


def backings() -> tuple[list[Backing], list[str]]:
    """The ``backing`` of each loop device; and the names of those that were not asked, for their
    server may be dead."""
    found, served, mounts = list[Backing](), [], mountinfo.of(1)
    for each in sorted(_BLOCK.glob("loop*/loop/backing_file")):
        file = rbd_sysfs.text(str(each))
        mount = mountinfo.containing(file, mounts)
        # After a lazy unmount, or of another mount namespace, the path is of no file here.
        here = mount is not None and not _is_served(mount)
        if not (here and file != "/" and os.path.lexists(f"/proc/1/root{file}")):
            served.append(each.parents[1].name)
        else:
            found += backing(each.parents[1].name)
    return found, served


def backing(name: str) -> list[Backing]:
    """Of a loop device its name, its file, and the numbers of the file's file system and of the
    device that the file stands for; nothing of one that is detached. OSError."""
    status = bytearray(_INFO_BYTES)
    try:
        with (
            _node(int(name.removeprefix("loop"))) as node,
            kit.files.closing(os.open(node, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)) as fd,
        ):
            # The kernel asks the file system for the file, so a dead server keeps this waiting.
            fcntl.ioctl(fd, _LOOP_GET_STATUS64, status)
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.ENOENT, errno.ENODEV):
            return []
        raise
    on, _, device = struct.unpack_from("=QQQ", status)
    numbers = [[os.major(number), os.minor(number)] for number in sorted({on, device})]
    return [(name, rbd_sysfs.text(str(_BLOCK / name / "loop/backing_file")), numbers)]


def _is_served(mount: mountinfo.Mount) -> bool:
    """A file system that lies on no block device, and whose server may be dead."""
    return not mount.major and mount.fstype not in procfs.LOCAL and mount.fstype != "overlay"


def _free() -> int:
    with kit.files.closing(os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)) as control:
        return fcntl.ioctl(control, _LOOP_CTL_GET_FREE)


def _node(number: int) -> AbstractContextManager[str]:
    return syscalls.device_node(f"/dev/loop{number}", stat.S_IFBLK, os.makedev(_MAJOR, number))
