"""What the guard program reports: a write open that it denied, or in dry-run would have denied.

Of one caller (a program's name in one cgroup, on one device) it reports 16 denials in a second, of
all callers on one device 64, and counts the rest.
"""

import struct
from dataclasses import dataclass

from volumes.guard import kernel

# Shared with guard.bpf.c: change both together.
_EVENT = struct.Struct("=QQ6I16s16s256s")
_CALLER = struct.Struct("=IIQ16s")


@dataclass(frozen=True)
class Event:
    """A write open that the guard denied, or in dry-run would have denied."""

    time: float  # CLOCK_MONOTONIC seconds
    cgroup: int  # id in the cgroup v2 hierarchy: the directory's inode number
    pid: int
    parent_pid: int
    number: kernel.Number
    denied: bool
    program: str  # the task's name
    parent: str
    arguments: tuple[str, ...]  # the first 256 bytes of the command line; may be empty

    @classmethod
    def unpack(cls, raw: bytes) -> "Event":
        time_ns, cgroup, pid, ppid, major, minor, mode, size, name, parent, args = _EVENT.unpack(
            raw[: _EVENT.size]
        )
        words = args[: min(size, 256)].rstrip(b"\0").split(b"\0") if size else []
        return cls(
            time=time_ns / 1e9,
            cgroup=cgroup,
            pid=pid,
            parent_pid=ppid,
            number=(major, minor),
            denied=mode == kernel.Mode.ENFORCE.number,
            program=kernel.task_text(name),
            parent=kernel.task_text(parent),
            arguments=tuple(word.decode(errors="replace") for word in words),
        )

    @property
    def caller(self) -> bytes:
        """Its key in the kernel's map of callers."""
        return _CALLER.pack(*self.number, self.cgroup, kernel.task_name(self.program))


def whole_device(caller: bytes) -> bytes:
    """The key in the kernel's map of callers for all of the caller's device."""
    major, minor, *_ = _CALLER.unpack(caller)
    return _CALLER.pack(major, minor, 0, b"")
