"""Part of test_ways: ways to write that need SCSI or the device mapper, on Debian's kernel."""

import asyncio
import ctypes
import fcntl
import os
from pathlib import Path

from tests.volumes.guard.guest_shell import run, say
from volumes import settings
from volumes.guard import kernel

_SG_IO = 0x2285
_TO_DEVICE = -2
_MARK = b"written by SG_IO".ljust(512, b".")


class _SgHeader(ctypes.Structure):
    """struct sg_io_hdr of scsi/sg.h."""

    _fields_ = [
        ("interface_id", ctypes.c_int), ("direction", ctypes.c_int),
        ("command_bytes", ctypes.c_ubyte), ("most_sense_bytes", ctypes.c_ubyte),
        ("pieces", ctypes.c_ushort), ("data_bytes", ctypes.c_uint), ("data", ctypes.c_void_p),
        ("command", ctypes.c_void_p), ("sense", ctypes.c_void_p), ("timeout_ms", ctypes.c_uint),
        ("flags", ctypes.c_uint), ("pack_id", ctypes.c_int), ("user", ctypes.c_void_p),
        ("status", ctypes.c_ubyte * 4), ("rest", ctypes.c_ushort * 2), ("residual", ctypes.c_int),
        ("duration", ctypes.c_uint), ("info", ctypes.c_uint),
    ]  # fmt: skip


def sg_write(node: str, block: int) -> None:
    """WRITE(10) of one block."""
    command = (ctypes.c_ubyte * 10)(0x2A, 0, *block.to_bytes(4), 0, 0, 1, 0)
    data = ctypes.create_string_buffer(_MARK, 512)
    header = _SgHeader(
        interface_id=ord("S"), direction=_TO_DEVICE, command_bytes=10, data_bytes=512,
        data=ctypes.addressof(data), command=ctypes.addressof(command), timeout_ms=20_000,
    )  # fmt: skip
    with open(node, "rb+", buffering=0) as opened:
        fcntl.ioctl(opened, _SG_IO, header)


def wrote(path: str) -> str:
    done = run("dd", "if=/dev/zero", f"of={path}", "count=1", "conv=notrunc,fsync")
    return "wrote" if done.returncode == 0 else "refused"


def linear(name: str, disk: str, start: int) -> None:
    run("dmsetup", "create", name, "--table", f"0 8192 linear {disk} {start}")


def writers(number: kernel.Number) -> set[int]:
    return {each.pid for each in asyncio.run(kernel.writing(number))}


def main() -> None:
    os.environ["DM_DISABLE_UDEV"] = "1"
    models = {each: Path(f"/sys/block/{each}/device/model") for each in os.listdir("/sys/block")}
    (name,) = (each for each, at in models.items() if at.exists() and "debug" in at.read_text())
    (generic,) = os.listdir(f"/sys/block/{name}/device/scsi_generic")
    disk = f"/dev/{name}"
    rdev = os.stat(disk).st_rdev
    linear("before", disk, 0)
    held = os.open(disk, os.O_WRONLY)
    guard = kernel.Kernel(kernel.find_cgroup(), Path("/sys/fs/bpf/nodeagent"))
    number = os.major(rdev), os.minor(rdev)
    wanted = kernel.wanted(settings.GuardSettings(), kernel.Mode.ENFORCE, {}, frozenset({number}))
    guard.apply(wanted)
    say(f"device {wrote(disk)}")
    say(f"open for writing by us: {os.getpid() in writers(number)}")
    os.close(held)
    say(f"open for writing by us: {os.getpid() in writers(number)}")
    sg_write(f"/dev/{generic}", 65536)
    with open(disk, "rb") as opened:
        opened.seek(65536 * 512)
        say(f"SG_IO {'wrote' if opened.read(512) == _MARK else 'did nothing'}")
    say(f"dm from before {wrote('/dev/mapper/before')}")
    linear("now", disk, 16384)
    there = os.path.exists("/dev/mapper/now")
    say(f"dm from now {wrote('/dev/mapper/now') if there else 'refused'}")
    guard.detach()


main()
