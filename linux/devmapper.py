"""Read-only linear devices of the device mapper (linux/dm-ioctl.h). All functions can hang.

The kernel's own interface and not libdevmapper or dmsetup: those wait for a semaphore that udev of
the host releases, which a container does not share, and make nodes in a /dev that is not the
host's. What is needed of the interface is small and has not changed since 2001.

A device that ``created`` makes is removed by the kernel when nobody has it open or mounted any more
(DM_DEFERRED_REMOVE), so that a killed agent leaves none behind.

``switch`` is one system call: the kernel suspends the device, changes the table and resumes it, so
that nobody who is killed leaves it suspended.
"""

import contextlib
import errno
import fcntl
import os
import signal
import stat
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import kit.files
from linux import rbd_sysfs, syscalls

SECTOR = 512
_SYSFS = "/sys"
_CONTROL = "/dev/mapper/control"
# struct dm_ioctl: version, data_size, data_start, target_count, open_count, flags, event_nr,
# padding, dev, name, uuid, 7 bytes.
_HEAD = struct.Struct("=3I2IIiII4xQ128s129s7x")
# struct dm_target_spec: sector_start, length, status, next, target_type.
_TARGET = struct.Struct("=QQiI16s")
_NAME = struct.Struct("=QI")  # struct dm_name_list: dev, next, then the name
_VERSION = (4, 0, 0)
_LIST, _CREATE, _REMOVE, _SUSPEND, _STATUS, _LOAD, _TABLE = 2, 3, 4, 6, 7, 9, 12
_READ_ONLY, _STATUS_TABLE, _BUFFER_FULL = 1 << 0, 1 << 4, 1 << 8
_SKIP_LOCKFS, _NOFLUSH, _DEFERRED_REMOVE = 1 << 10, 1 << 11, 1 << 17
_REPLY_BYTES, _LONGEST_REPLY = 1 << 16, 1 << 24


@dataclass(frozen=True)
class Line:
    """A range of a table, in sectors. ``device``: major:minor of what it shows from ``offset``."""

    start: int
    length: int
    device: str
    offset: int


def available(sysfs: str | Path = _SYSFS) -> bool:
    """Whether the kernel has the device mapper; loads its module if there is one."""
    if not is_loaded(sysfs):
        os.spawnlp(os.P_WAIT, "modprobe", "modprobe", "-q", "dm_mod")
    return is_loaded(sysfs)


def is_loaded(sysfs: str | Path = _SYSFS) -> bool:
    """As ``available``, without loading anything. Cheap."""
    return os.path.isdir(f"{sysfs}/class/misc/device-mapper")


def uuid_of(number: tuple[int, int], sysfs: str | Path = _SYSFS) -> str:
    """The uuid of the device with that number; '' when the device mapper did not make it. Cheap.

    One that ``created`` made has its name as uuid; those of others begin with their maker's word.
    """
    return rbd_sysfs.text(f"{sysfs}/dev/block/{number[0]}:{number[1]}/dm/uuid")


def below(number: tuple[int, int], sysfs: str | Path = _SYSFS) -> list[str]:
    """The kernel's names of the devices that its table shows, for example loop0. Cheap."""
    return sorted(rbd_sysfs.listed(f"{sysfs}/dev/block/{number[0]}:{number[1]}/slaves"))


def names(prefix: str) -> list[str]:
    """Of all devices whose name begins so. OSError."""
    _, data = _ask(_LIST, "")
    found, at = [], 0
    while len(data) >= at + _NAME.size:
        device, step = _NAME.unpack_from(data, at)
        if device:
            found.append(_text(data[at + _NAME.size :]))
        if not step:
            break
        at += step
    return sorted(name for name in found if name.startswith(prefix))


def table(name: str) -> list[Line]:
    """OSError: ENXIO when there is no such device; EINVAL for another target than linear."""
    head, data = _ask(_TABLE, name, flags=_STATUS_TABLE)
    found, at = [], 0
    for _ in range(head[5]):
        start, length, _, after, kind = _TARGET.unpack_from(data, at)
        words = _text(data[at + _TARGET.size :]).split()
        if _text(kind) != "linear" or len(words) != 2:
            raise OSError(errno.EINVAL, f"it has a target {_text(kind)}", name)
        found.append(Line(start, length, words[0], int(words[1])))
        at = after
    return found


@contextlib.contextmanager
def created(name: str, lines: Sequence[Line]) -> Iterator[str]:
    """The node of a new read-only device while the block runs; a mount of it keeps it. OSError."""
    _ask(_CREATE, name, uuid=name)
    try:
        _load(name, lines)
        _ask(_SUSPEND, name)  # without the flag that suspends: it resumes
        head, _ = _ask(_STATUS, name)
        number, flags = _number(head[9]), os.O_RDONLY | os.O_CLOEXEC
        with (
            syscalls.device_node(f"/dev/dm-{os.minor(number)}", stat.S_IFBLK, number) as node,
            kit.files.closing(os.open(node, flags)),
        ):
            _ask(_REMOVE, name, flags=_DEFERRED_REMOVE)
            yield node
    except BaseException:
        with contextlib.suppress(OSError):  # it may have gone by itself
            _ask(_REMOVE, name, flags=_DEFERRED_REMOVE)
        raise


def switch(name: str, lines: Sequence[Line], seconds: float) -> None:
    """Have a device show other ``lines``, under its readers. In the main thread of a process.

    It waits for reads that are under way, and others wait meanwhile: after ``seconds`` it gives
    up, and the device goes on with the table that it had. OSError ETIMEDOUT then.
    """

    def late(_: int, __: object) -> None:
        raise OSError(errno.ETIMEDOUT, f"reads under way did not end within {seconds:g}s", name)

    _load(name, lines)
    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        _ask(_SUSPEND, name, flags=_SKIP_LOCKFS | _NOFLUSH)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def remove(name: str) -> None:
    """Now, or when nobody has it open or mounted any more. OSError: ENXIO when it is not there."""
    _ask(_REMOVE, name, flags=_DEFERRED_REMOVE)


def _load(name: str, lines: Sequence[Line]) -> None:
    specs = []
    for line in lines:
        words = f"{line.device} {line.offset}".encode() + b"\0"
        words = words.ljust(-(-len(words) // 8) * 8, b"\0")
        size = _TARGET.size + len(words)
        specs.append(_TARGET.pack(line.start, line.length, 0, size, b"linear") + words)
    _ask(_LOAD, name, flags=_READ_ONLY, targets=len(lines), data=b"".join(specs))


def _ask(
    command: int, name: str, *, uuid: str = "", flags: int = 0, targets: int = 0, data: bytes = b""
) -> tuple[tuple[int, ...], bytes]:
    """The head and the data of the kernel's answer. OSError."""
    size = max(_REPLY_BYTES, _HEAD.size + len(data))
    with _control() as control:
        while True:
            head = _HEAD.pack(
                *_VERSION, size, _HEAD.size, targets, 0, flags, 0, 0, name.encode(), uuid.encode()
            )
            buffer = bytearray((head + data).ljust(size, b"\0"))
            request = 3 << 30 | _HEAD.size << 16 | 0xFD << 8 | command
            try:
                fcntl.ioctl(control, request, buffer)
            except OSError as error:
                raise OSError(error.errno, error.strerror, f"device mapper {name}") from error
            answer = _HEAD.unpack_from(buffer)
            if answer[7] & _BUFFER_FULL and size < _LONGEST_REPLY:
                size *= 4
                continue
            return answer, bytes(buffer[answer[4] : answer[3]])


@contextlib.contextmanager
def _control() -> Iterator[int]:
    """The control device. OSError."""
    major, _, minor = rbd_sysfs.text(f"{_SYSFS}/class/misc/device-mapper/dev").partition(":")
    if not minor:
        raise OSError(errno.ENODEV, "the kernel has no device mapper")
    number, flags = os.makedev(int(major), int(minor)), os.O_RDWR | os.O_CLOEXEC
    with (
        syscalls.device_node(_CONTROL, stat.S_IFCHR, number) as path,
        kit.files.closing(os.open(path, flags)) as control,
    ):
        yield control


def _number(device: int) -> int:
    """The kernel's huge_encode_dev, as os.stat has it."""
    return os.makedev(device >> 8 & 0xFFF, device & 0xFF | device >> 12 & 0xFFF00)


def _text(raw: bytes) -> str:
    return raw.partition(b"\0")[0].decode(errors="replace")
