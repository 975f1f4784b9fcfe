"""The layouts that guard.bpf.c and the agent share. Change both together."""

import struct
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

OBJECT = Path(__file__).with_name("guard.bpf.o")
FULL, PLAIN = "nodeagent_guard", "nodeagent_plain"  # the object's programs, the better one first
CANARY_MAJOR = 4095
NAME_BYTES = 16


class Mode(StrEnum):
    OFF = "off"
    DRY_RUN = "dry-run"
    ENFORCE = "enforce"

    @property
    def number(self) -> int:
        return list(Mode).index(self)


COUNTERS = ("by_lease", "by_name", "by_word", "would_deny", "denied", "lost")

Number = tuple[int, int]  # major, minor

_EVENT = struct.Struct("=QQ6I16s16s256s")


def u32(number: int) -> bytes:
    return struct.pack("=I", number)


def device(number: Number) -> bytes:
    return struct.pack("=II", *number)


def device_of(key: bytes) -> Number:
    major, minor = struct.unpack("=II", key)
    return major, minor


def name(text: str) -> bytes:
    """As the kernel keeps a task's name: cut to 15 bytes."""
    return text.encode()[: NAME_BYTES - 1].ljust(NAME_BYTES, b"\0")


def text(raw: bytes) -> str:
    return raw.split(b"\0")[0].decode(errors="replace")


@dataclass(frozen=True)
class Lease:
    """``until``: CLOCK_MONOTONIC seconds. ``opens``: checks that it let pass; the kernel makes two
    for one open, so it is zero exactly when nothing was opened."""

    until: float
    opens: int

    def pack(self) -> bytes:
        return struct.pack("=QQ", int(self.until * 1e9), self.opens)

    @classmethod
    def unpack(cls, raw: bytes) -> "Lease":
        until, opens = struct.unpack("=QQ", raw)
        return cls(until / 1e9, opens)


@dataclass(frozen=True)
class Event:
    """A write open that the guard refused, or in dry-run would have."""

    time: float  # CLOCK_MONOTONIC seconds
    cgroup: int  # id in the cgroup v2 hierarchy: the directory's inode number
    pid: int
    parent_pid: int
    number: Number
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
            denied=mode == Mode.ENFORCE.number,
            program=text(name),
            parent=text(parent),
            arguments=tuple(word.decode(errors="replace") for word in words),
        )
