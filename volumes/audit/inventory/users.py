"""Processes that keep a file system in use without a mount of their own. In the scan child only.

A descriptor's file system is asked for by statx with AT_STATX_DONT_SYNC, so that a dead network
file system that somebody else has open does not stop the scan.
"""

import ctypes
import os
import struct

from linux import syscalls
from volumes.inventory.model import Number, User
from volumes.inventory.processes import Processes

_AT_FDCWD = -100
_DONT_SYNC = 0x4000
_NO_AUTOMOUNT = 0x800
_BLOCK = 0o060000
_TYPE = 1  # STATX_TYPE: the least that can be asked for
# struct statx: mode at 28; rdev and dev numbers at 128
_MODE = struct.Struct("=28xH")
_NUMBERS = struct.Struct("=128xIIII")
MOST_USERS = 256


class _Asker:
    def __init__(self) -> None:
        self._buffer = ctypes.create_string_buffer(256)
        self._statx = syscalls.libc.statx

    def __call__(self, path: str) -> tuple[Number, Number | None] | None:
        """(device of the file system, number of a block device node or None)."""
        flags = _DONT_SYNC | _NO_AUTOMOUNT
        if self._statx(_AT_FDCWD, os.fsencode(path), flags, _TYPE, self._buffer) < 0:
            return None
        raw = self._buffer.raw
        rmajor, rminor, major, minor = _NUMBERS.unpack_from(raw)
        is_block = _MODE.unpack_from(raw)[0] & 0o170000 == _BLOCK
        return (major, minor), ((rmajor, rminor) if is_block else None)


def find(processes: Processes, proc: str, wanted: set[Number], host_spaces: set[int]) -> list[User]:
    """Every process with a file, a directory or a mapping on ``wanted``, or the device open."""
    ask = _Asker()
    found: list[User] = []
    for space, pids in processes.by_space.items():
        for pid in pids:
            ways: dict[Number, list[str]] = {}
            for name, path in _paths(proc, pid):
                answer = ask(path)
                if answer is None:
                    continue
                on, node = answer
                if on in wanted:
                    ways.setdefault(on, []).append(name)
                if node is not None and node in wanted:
                    ways.setdefault(node, []).append(f"device {name}")
            for number in _mapped(proc, pid, wanted):
                ways.setdefault(number, []).append("map")
            for number, names in ways.items():
                owner = processes.owner(pid, host=space in host_spaces)
                found.append(User(owner, number, tuple(names[:8]), space))
                if len(found) >= MOST_USERS:
                    return found
    return found


def _paths(proc: str, pid: int) -> list[tuple[str, str]]:
    home = f"{proc}/{pid}"
    paths = [(name, f"{home}/{name}") for name in ("cwd", "root", "exe")]
    try:
        paths += [(f"fd {fd}", f"{home}/fd/{fd}") for fd in os.listdir(f"{home}/fd")]
    except OSError:
        pass  # it ended
    return paths


def _mapped(proc: str, pid: int, wanted: set[Number]) -> set[Number]:
    """File systems whose files are mapped: a mapping outlives its descriptor."""
    try:
        with open(f"{proc}/{pid}/maps", "rb") as stream:  # noqa: PTH123
            maps = stream.read()
    except OSError:
        return set()
    return {number for number in wanted if b" %02x:%02x " % number in maps}
