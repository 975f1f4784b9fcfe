"""The guard program in the kernel: its layouts, and how it is attached, adopted, upgraded and read.

What is attached to the cgroup is the truth: programs are found by asking the kernel, their maps by
the program's own list, so a lost bpf file system or state directory loses nothing. Pins are a
second reference, and names for people with bpftool. An upgrade attaches the new program before it
detaches the old one, so there is no moment without a guard.

All calls are short and never wait for a device; loading takes tens of milliseconds. Errors are
OSError from the kernel, HostError and InUseError.
"""

import contextlib
import errno
import math
import os
import struct
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import kit.child
import kit.errors
import kit.files
from linux import bpf, mountinfo, procfs
from volumes import settings
from volumes.guard import pins

# --- layouts shared with guard.bpf.c: change both together

OBJECT = Path(__file__).with_name("guard.bpf.o")
PROGRAM = "nodeagent_guard"
COUNTERS = ("by_lease", "by_name", "by_word", "would_deny", "denied", "lost")
NAME_BYTES = 16
WORD_BYTES = 32
_LEASE = struct.Struct("=QQQQ")
_WRITER = struct.Struct("=QQ")
_OPEN = struct.Struct("=IIQQ")
_EVERYBODY = _WRITER.pack(0, 0)
_EVENT = struct.Struct("=QQ6I16s16s256s")
_CALLER = struct.Struct("=IIQ16s")
_FOREVER = 2**63
_NOBODY = (0, 0)  # no disk has this number
_LOCK_SECONDS = 10.0
WRITING_SECONDS = 5.0  # 0.2 us for each open file of the node

Number = tuple[int, int]  # major, minor


class Kind(IntEnum):
    """What an argument of a program is to the guard."""

    ALLOWED = 1  # the command with which it may write
    NEVER = 2  # it may not write with this word anywhere among its arguments
    TAKES_VALUE = 3  # an option: the next argument is no command


class Word(NamedTuple):
    """An argument of a program, of which the first 15 bytes of the name count."""

    program: str
    text: str
    kind: Kind


class Mode(StrEnum):
    OFF = "off"
    DRY_RUN = "dry-run"
    ENFORCE = "enforce"

    @property
    def number(self) -> int:
        return list(Mode).index(self)


def _key(number: Number) -> bytes:
    return struct.pack("=II", *number)


def _number(key: bytes) -> Number:
    major, minor = struct.unpack("=II", key)
    return major, minor


def task_name(text: str) -> bytes:
    """As the kernel keeps a task's name: at most 15 bytes."""
    return text.encode()[: NAME_BYTES - 1].ljust(NAME_BYTES, b"\0")


def _word_key(word: Word) -> bytes:
    return task_name(word.program) + word.text.encode().ljust(WORD_BYTES, b"\0")


def _word(key: bytes, kind: bytes) -> Word:
    """Of the map of an earlier program, too: it has only commands, and shorter keys."""
    return Word(task_text(key[:NAME_BYTES]), task_text(key[NAME_BYTES:]), Kind(kind[0]))


def task_text(raw: bytes) -> str:
    return raw.split(b"\0")[0].decode(errors="replace")


@dataclass(frozen=True)
class KernelLease:
    """``until``: CLOCK_MONOTONIC seconds; infinite: as long as the disk is there. ``opens``: checks
    that let anybody pass while it held; the kernel checks one open twice. 0: nothing was opened.
    ``diskseq``: the attachment it was given to; 0 where the kernel does not number attachments. The
    program ignores it. ``grace``: seconds that it holds without a ``beat``; 0: to its end.
    ``writer``: the first that used it; None: nobody yet; without a pid: everybody may."""

    until: float
    opens: int
    diskseq: int = 0
    grace: float = 0.0
    writer: procfs.StartedProcess | None = None

    @property
    def is_everybodys(self) -> bool:
        return self.writer is not None and not self.writer.pid

    @property
    def at_work(self) -> int:
        """The writer's pid until it ends; 0: none. Where nobody sees its end: until the lease's."""
        if self.writer is None or self.is_everybodys:
            return 0
        seen = procfs.sees_host()
        over = self.writer.has_ended() if seen else time.monotonic() > self.until
        return 0 if over else self.writer.pid

    def pack(self) -> bytes:
        until = _FOREVER if self.until == math.inf else int(self.until * 1e9)
        return _LEASE.pack(until, self.opens, self.diskseq, int(self.grace * 1e9))

    @classmethod
    def unpack(cls, raw: bytes) -> "KernelLease":
        # The map of an earlier program has shorter values.
        until, opens, diskseq, grace = _LEASE.unpack(raw.ljust(_LEASE.size, b"\0"))
        return cls(math.inf if until >= _FOREVER else until / 1e9, opens, diskseq, grace / 1e9)


@dataclass(frozen=True)
class Event:
    """A write open that the guard denied, or in dry-run would have denied. Of one caller (a
    program's name in one cgroup, on one device) the program reports 16 in a second, of all callers
    on one device 64, and counts the rest."""

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
            program=task_text(name),
            parent=task_text(parent),
            arguments=tuple(word.decode(errors="replace") for word in words),
        )

    @property
    def caller(self) -> bytes:
        """Its key in the kernel's map of callers."""
        return _CALLER.pack(*self.number, self.cgroup, task_name(self.program))


def whole_device(caller: bytes) -> bytes:
    """The key in the kernel's map of callers for all of the caller's device."""
    major, minor, *_ = _CALLER.unpack(caller)
    return _CALLER.pack(major, minor, 0, b"")


# --- what is wanted and what is there


@dataclass(frozen=True)
class Wanted:
    """What must be in force."""

    mode: Mode = Mode.OFF
    majors: frozenset[int] = frozenset()
    devices: frozenset[Number] = frozenset()
    openers: frozenset[str] = frozenset()
    words: frozenset[Word] = frozenset()

    def allowed(self) -> frozenset[tuple[str, str]]:
        """Programs and the commands with which they may write."""
        return frozenset((w.program, w.text) for w in self.words if w.kind is Kind.ALLOWED)


def wanted(
    guard: settings.GuardSettings,
    mode: Mode,
    majors: Mapping[int, str],
    parts: frozenset[Number] = frozenset(),
) -> Wanted:
    """The settings in the kernel's terms. ``majors``: as blockdev.majors() returns them."""
    pairs = {
        Kind.ALLOWED: (pair.split() for pair in guard.words),
        Kind.NEVER: settings.of_programs(settings.NEVER),
        Kind.TAKES_VALUE: settings.of_programs(settings.TAKE_VALUE),
    }
    return Wanted(
        mode=mode,
        majors=frozenset(major for major, name in majors.items() if name in guard.drivers),
        devices=parts,
        openers=frozenset(task_text(task_name(name)) for name in guard.openers),
        words=frozenset(
            Word(task_text(task_name(program)), text, kind)
            for kind, words in pairs.items()
            for program, text in words
        ),
    )


@dataclass(frozen=True)
class Present(Wanted):
    """What the kernel says is in force."""

    cgroup: str = ""
    whole_node: bool = False  # the cgroup is the root of the hierarchy
    programs: Sequence[bpf.ProgramInfo] = ()
    leases: Mapping[Number, KernelLease] = field(default_factory=dict)
    counters: Mapping[str, int] = field(default_factory=dict)
    pinned: bool = False
    judges: Mode = Mode.OFF  # devices that are neither guarded nor the node's own

    @property
    def attached(self) -> bool:
        return bool(self.programs)

    def is_as(self, wanted: Wanted) -> bool:
        """The kernel's own program may guard more devices: new ones on top of guarded ones."""
        same = (f.name for f in fields(Wanted) if f.name != "devices")
        return wanted.devices <= self.devices and all(
            getattr(self, name) == getattr(wanted, name) for name in same
        )


def at_least(wanted: Wanted, present: Present) -> Wanted:
    """What to bring to the kernel while the last settings are lost: the mode as wanted, no major
    less than there is, and nobody admitted who is not now."""
    if not present.attached:
        return wanted
    return replace(
        wanted,
        majors=wanted.majors | present.majors,
        openers=present.openers,
        words=frozenset(
            {word for word in present.words if word.kind is Kind.ALLOWED}
            | {word for word in wanted.words if word.kind is not Kind.ALLOWED}
        ),
    )


def find_cgroup() -> Path:
    """The mount point of the whole cgroup v2 hierarchy. HostError without one."""
    for mount in mountinfo.read():
        # Not mount.root: in a cgroup namespace of its own, a pod sees the host's root as /../..
        if mount.fstype == "cgroup2" and is_root_cgroup(Path(mount.target)):
            return Path(mount.target)
    raise kit.errors.HostError(
        "cgroup v2",
        "its root is not mounted here",
        "in a pod, mount the host's /sys/fs/cgroup and use the host's cgroup namespace; on a node "
        "with cgroup v1 only: mount -t cgroup2 none /sys/fs/cgroup/unified; or set "
        "volumes.guard.cgroup",
    )


def is_root_cgroup(cgroup: Path) -> bool:
    """Only the real root has no cgroup.events; a container's root has one."""
    return not (cgroup / "cgroup.events").exists()


Programs = list[tuple[bpf.Program, bpf.ProgramInfo]]


class Kernel:
    """Handles on one cgroup's guard. ``maps`` are those of the attached program."""

    def __init__(self, cgroup: Path, pin_folder: Path, object_file: Path = OBJECT) -> None:
        self.cgroup = cgroup
        self.pins = pin_folder
        self.object_file = object_file
        self.maps: dict[str, bpf.Map] = {}
        self.no_watch = ""  # why not
        self.ends_with_disk = False  # the kernel ends a lease when another disk gets its number
        self._program_id: int | None = None
        # apply() may run in a thread beside grant() and revoke(): nobody uses a closed map.
        self._hold = threading.RLock()

    # --- reading

    @contextlib.contextmanager
    def _directory(self, lock: bool = False) -> Iterator[int]:
        """``lock``: against the command line, which may also change what is attached."""
        try:
            if lock:
                fd = kit.files.lock(self.cgroup, _LOCK_SECONDS)
            else:
                fd = os.open(self.cgroup, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            if error.errno == errno.EBUSY:
                raise kit.errors.InUseError(
                    f"guard of {self.cgroup}",
                    f"another process has been changing it for {_LOCK_SECONDS:g}s",
                    f"find it with: fuser {self.cgroup}",
                ) from None
            raise kit.errors.HostError(
                f"cgroup {self.cgroup}", str(error.strerror), "correct volumes.guard.cgroup"
            ) from error
        try:
            yield fd
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def _programs(self, lock: bool = False) -> Iterator[tuple[int, Programs]]:
        """The cgroup's descriptor, and our programs attached there, the newest first."""
        found = []
        with self._directory(lock) as fd, contextlib.ExitStack() as opened:
            for number in bpf.attached(fd):
                try:
                    program = bpf.Program.by_id(number)
                except OSError as error:
                    if error.errno == errno.ENOENT:
                        continue  # detached meanwhile
                    raise
                opened.callback(program.close)
                info = program.info()
                if info.name == PROGRAM:
                    found.append((program, info))
            found.sort(key=lambda each: -each[1].loaded_ns)
            yield fd, found

    def _open(self, info: bpf.ProgramInfo) -> None:
        """Open the program's maps, unless they are open already."""
        if self._program_id == info.id:
            return
        opened = {}
        for number in info.map_ids:
            each = bpf.Map.by_id(number)
            if each.info.name.startswith("."):
                each.close()
            else:
                opened[each.info.name] = each
        with self._hold:
            self.close()
            self.maps = opened
            self._program_id = info.id

    def close(self) -> None:
        """Close descriptors; what is attached stays."""
        with self._hold:
            for each in self.maps.values():
                each.close()
            self.maps = {}
            self._program_id = None

    def read(self) -> Present:
        """What is attached and in force now."""
        with self._programs() as (_, ours):
            pass
        where: dict[str, Any] = {
            "cgroup": str(self.cgroup),
            "whole_node": is_root_cgroup(self.cgroup),
        }
        if not ours:
            self.close()
            return Present(**where)
        self._open(ours[0][1])
        return Present(
            **where,
            programs=[info for _, info in ours],
            mode=_mode(self.maps["config"]),
            judges=_mode(self.maps.get("scope")),
            majors=frozenset(struct.unpack("=I", k)[0] for k in self.maps["majors"].snapshot()),
            devices=frozenset(_number(k) for k in self.maps["devices"].snapshot()),
            openers=frozenset(task_text(k) for k in self.maps["openers"].snapshot()),
            words=frozenset(
                _word(key, kind)
                for key in self.maps["words"].snapshot()
                if (kind := self.maps["words"].get(key))
            ),
            leases=self.leases(),
            counters=_counters(self.maps["counters"]),
            pinned=(self.pins / "program").exists()
            and not (self.ends_with_disk and not (self.pins / pins.DISKS).exists()),
        )

    # --- changing

    def apply(self, wanted: Wanted) -> Present:
        """Bring the kernel to ``wanted``: attach, adopt what an earlier agent left, or replace it
        without a gap (the new program is attached before the old one is detached)."""
        if wanted.mode is Mode.OFF:
            self.detach()
            return self.read()
        with self._programs(lock=True) as (fd, ours):
            self._adopt_or_replace(fd, ours, wanted)
        return self.read()

    def _adopt_or_replace(self, fd: int, ours: Programs, wanted: Wanted) -> None:
        if ours:
            self._open(ours[0][1])
        program, maps = self._load()
        try:
            same = [i for _, i in ours if i.tag == program.info().tag]
            kept = {n: m.info.id for n, m in maps.items()} == {
                n: m.info.id for n, m in self.maps.items()
            }
            if same and kept and same[0].id == ours[0][1].id:
                fill(self.maps, wanted)
                keep = ours[0][1].id
                self._keep(ours[0][0], self.maps)
            else:
                fill(maps, wanted)
                with pins.watched(self.pins):
                    self._keep(program, maps)
                    for name in ("leases", "own"):
                        _take_over(self.maps.get(name), maps[name])
                    if "writers" not in self.maps:  # leases of a program with which they had none
                        for key in maps["leases"].snapshot():
                            maps["writers"].set(key, _EVERYBODY)
                    judges = _mode(self.maps.get("scope")).number
                    maps["scope"].set(struct.pack("=I", 0), struct.pack("=I", judges))
                    program.attach(fd)
                    # Both programs guard, and both keep their maps. So what only the earlier one
                    # has came from an open, or is a disk, that the later one did not see.
                    for name in ("connecting", "devices", "writers"):
                        _take_over(self.maps.get(name), maps[name])
                keep = program.info().id
            for old, info in ours:
                if info.id != keep:
                    old.detach(fd)
        finally:
            program.close()
            for each in maps.values():
                each.close()

    def _load(self) -> tuple[bpf.Program, dict[str, bpf.Map]]:
        """HostError with the kernel's reason where it does not take the program."""
        if not self.object_file.exists():
            raise kit.errors.HostError(
                f"guard program {self.object_file}",
                "is missing",
                "build it: scripts/bpf.sh (needs clang and libbpf's headers)",
            )
        causes = []
        for reuse in (dict(self.maps), {}):
            try:
                with bpf.loaded(self.object_file, PROGRAM, reuse) as (program, maps):
                    return program, maps
            except OSError as error:
                causes.append(str(error.strerror or error))
                if not reuse:
                    break
        raise kit.errors.HostError(
            "guard program",
            f"this kernel ({os.uname().release}) does not take it ({'; '.join(causes)[:1500]})",
            "Linux 5.8, CONFIG_DEBUG_INFO_BTF, CONFIG_CGROUP_BPF, and CAP_SYS_ADMIN are needed",
        )

    def try_load(self) -> None:
        """Whether this kernel takes the program; loaded and dropped. HostError where not."""
        program, maps = self._load()
        program.close()
        for each in maps.values():
            each.close()

    def add(self, majors: Iterable[int], devices: Iterable[Number]) -> None:
        """Guard these as well. All else stays as the kernel has it, the mode above all: a command
        may have changed that without the agent."""
        with self._hold:
            for major in majors:
                self._attached()["majors"].set(struct.pack("=I", major), b"\1")
            for number in devices:
                self._attached()["devices"].set(_key(number), b"\1")

    def release(self, numbers: Iterable[Number]) -> None:
        """Guard these devices no longer, except by their majors."""
        for number in numbers:
            self._attached()["devices"].delete(_key(number))

    def reserve_own(self, numbers: Iterable[Number]) -> None:
        """A place for each in the table of the node's own, which counts for nothing before
        ``judge`` fills it. A new disk takes away the place of its number."""
        with self._hold:
            own = self._attached().get("own")
            if own is None:
                raise kit.errors.RefusedError(
                    f"guard of {self.cgroup}", "an earlier program is attached: it knows no scope",
                    "see why this version's is not: nodeagent volume guard status",
                )  # fmt: skip
            for number in numbers:
                with contextlib.suppress(FileExistsError):
                    own.set(_key(number), _key(_NOBODY), bpf.IF_NEW)

    def judge(self, mode: Mode, own: Mapping[Number, Number]) -> None:
        """Judge by ``mode`` what is neither guarded nor the node's own. ``own``: numbers, each with
        that of its disk. One without a reservation is not own."""
        with self._hold:
            maps = self._attached()
            for key in maps["own"].snapshot():
                if _number(key) not in own:
                    maps["own"].delete(key)
            for number, disk in own.items():
                with contextlib.suppress(FileNotFoundError):  # another disk has the number
                    maps["own"].set(_key(number), _key(disk), bpf.IF_THERE)
            maps["scope"].set(struct.pack("=I", 0), struct.pack("=I", mode.number))

    def set_mode(self, mode: Mode) -> None:
        """One map write. RefusedError when nothing is attached."""
        if not self.read().attached:
            raise kit.errors.RefusedError(
                f"guard of {self.cgroup}", "is not attached", "start the agent, which attaches it"
            )
        self.maps["config"].set(struct.pack("=I", 0), struct.pack("=I", mode.number))

    def detach(self) -> int:
        """The kill switch: detach every guard program and remove the pins. Returns how many."""
        with self._programs(lock=True) as (fd, ours):
            for program, _ in ours:
                program.detach(fd)
        self.close()
        pins.drop(self.pins)
        return len(ours)

    def repin(self) -> None:
        """Make lost pins anew, under the names that ``read`` misses."""
        with self._programs(lock=True) as (_, ours):
            if ours and self._program_id == ours[0][1].id:
                self._keep(ours[0][0], self.maps)

    def _keep(self, program: bpf.Program, maps: Mapping[str, bpf.Map]) -> None:
        """An attached program stays without a pin, so an error only leaves leases to their end."""
        try:
            pins.keep(self.pins, program, maps)
            pins.watch_disks(self.pins, self.object_file, maps)
            self.ends_with_disk, self.no_watch = pins.outlive_us(self.pins), ""
            if not self.ends_with_disk:
                self.no_watch = f"the host does not have the bpf file system of {self.pins} mounted"
        except OSError as error:
            self.ends_with_disk, self.no_watch = False, str(error.strerror or error)

    # --- leases

    def reserve(self, number: Number, diskseq: int | None) -> None:
        """A lease that has ended already and belongs to nobody, unless there is one that holds. A
        new disk takes it away, and then ``grant`` fails. RefusedError when nothing is attached."""
        with self._hold:
            leases, key = self._attached()["leases"], _key(number)
            with contextlib.suppress(FileExistsError):
                leases.set(key, KernelLease(0.0, 0, diskseq or 0).pack(), bpf.IF_NEW)
            raw = leases.get(key)
            if raw is None or KernelLease.unpack(raw).until <= time.monotonic():
                self.free(number)

    def free(self, number: Number, *, everybodys: bool = False) -> None:
        """The lease belongs to who uses it next, or to everybody until its end."""
        with self._hold:
            if "writers" in self.maps and everybodys:
                self.maps["writers"].set(_key(number), _EVERYBODY)
            elif "writers" in self.maps:
                self.maps["writers"].delete(_key(number))

    def grant(self, number: Number, until: float, diskseq: int | None, grace: float = 0.0) -> None:
        """Let write opens of the device pass until CLOCK_MONOTONIC ``until`` (seconds).

        ``diskseq``: the attachment that the lease is given to. ``grace``: see ``KernelLease``. The
        count of opens under a lease that this one replaces is carried over. One that the kernel
        counts meanwhile would be lost, so a lease that still held counts as used.
        RefusedError when nothing is attached, or when another disk has the number since
        ``reserve``.
        """
        with self._hold:
            if grace:
                self.beat()
            leases = self._attached()["leases"]
            opens = 0
            if raw := leases.get(_key(number)):
                old = KernelLease.unpack(raw)
                if old.diskseq == (diskseq or 0):
                    opens = max(old.opens, int(old.until > time.monotonic()))
            try:
                new = KernelLease(until, opens, diskseq or 0, grace).pack()
                leases.set(_key(number), new, bpf.IF_THERE)
            except FileNotFoundError:
                raise kit.errors.RefusedError(
                    f"lease of {number[0]}:{number[1]}", "another disk has the number", "try again"
                ) from None

    def beat(self) -> None:
        """An agent is alive, and hears when another medium comes to a device. OSError."""
        with self._hold:
            if "beats" in self.maps:
                now = struct.pack("=Q", time.monotonic_ns())
                self.maps["beats"].set(struct.pack("=I", 0), now)

    def _attached(self) -> dict[str, bpf.Map]:
        if "leases" not in self.maps:
            raise kit.errors.RefusedError(
                f"guard of {self.cgroup}", "is not attached", "attach it first"
            )
        return self.maps

    def revoke(self, number: Number) -> KernelLease | None:
        """End the lease now. Returns what it was."""
        key = _key(number)
        with self._hold:
            if "leases" not in self.maps:
                return None
            raw = self.maps["leases"].get(key)
            self.maps["leases"].delete(key)
            self.free(number)
        return KernelLease.unpack(raw) if raw else None

    def held_back(self, caller: bytes) -> int:
        """Denials of this caller (a key of that map) that the kernel counted and did not report,
        since it first heard of it."""
        with self._hold:
            raw = self.maps["callers"].get(caller) if "callers" in self.maps else None
        return struct.unpack("=QQQ", raw)[2] if raw else 0

    def leases(self) -> dict[Number, KernelLease]:
        """All in the map, expired ones too."""
        found = {}
        with self._hold:
            for key in self.maps["leases"].snapshot() if "leases" in self.maps else ():
                raw = self.maps["leases"].get(key)
                if raw is not None:
                    named = self.maps["writers"].get(key) if "writers" in self.maps else _EVERYBODY
                    writer = procfs.StartedProcess(*_WRITER.unpack(named)) if named else None
                    found[_number(key)] = replace(KernelLease.unpack(raw), writer=writer)
        return found


async def writing(number: Number) -> frozenset[procfs.StartedProcess]:
    """The processes of this pid namespace that have the device open for writing. An open that is
    still under way does not count, and one that moves to another descriptor meanwhile may not.
    OSError where the kernel has no CONFIG_BPF_EVENTS; AgentError, RuntimeError."""
    # The reader has a reference to each file that it looks at. If its process closes that file
    # meanwhile, the reader closes it at last, which may wait for a dead server: so a child.
    read = kit.child.call(bpf.iterated, str(OBJECT), "nodeagent_open", deadline=WRITING_SECONDS)
    found = _OPEN.iter_unpack(os.fsencode(await read))
    return frozenset(
        procfs.StartedProcess(started, pid)
        for major, minor, started, pid in found
        if (major, minor) == number
    )


def _counters(held: bpf.Map) -> dict[str, int]:
    found = {}
    for index, name in enumerate(COUNTERS):
        raw = held.get(struct.pack("=I", index)) or b""
        found[name] = sum(struct.unpack(f"={len(raw) // 8}Q", raw))
    return found


def _mode(held: bpf.Map | None) -> Mode:
    """What a map of one mode says; an earlier program may not have it."""
    raw = held.get(struct.pack("=I", 0)) if held is not None else None
    number = struct.unpack("=I", raw)[0] if raw else 0
    return list(Mode)[number] if number < len(Mode) else Mode.OFF


def fill(maps: Mapping[str, bpf.Map], wanted: Wanted) -> None:
    """Write the maps entry by entry: what stays wanted is never missing. The mode last, so that it
    never applies to half of them."""
    one = b"\1"
    maps["majors"].replace({struct.pack("=I", n): one for n in wanted.majors})
    for number in wanted.devices:
        maps["devices"].set(_key(number), one)
    maps["openers"].replace({task_name(n): one for n in wanted.openers})
    maps["words"].replace({_word_key(word): bytes([word.kind]) for word in wanted.words})
    maps["config"].set(struct.pack("=I", 0), struct.pack("=I", wanted.mode.number))


def _take_over(source: bpf.Map | None, target: bpf.Map) -> None:
    """Copy what an earlier program's map has, unless it is the same map. What that one loses
    meanwhile is not kept: another disk got the number."""
    if source is None or source.info.id == target.info.id:
        return
    for key in _copy(source, target):
        if source.get(key) is None:
            target.delete(key)


def _copy(source: bpf.Map, target: bpf.Map) -> list[bytes]:
    """What a later program has at the end of its values begins as zeros. Returns the keys."""
    if source.info.value_size > target.info.value_size:
        return []
    keys = []
    for key in source.snapshot():
        value = source.get(key)
        if value is not None:
            target.set(key, value.ljust(target.info.value_size, b"\0"))
            keys.append(key)
    return keys
