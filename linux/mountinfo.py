"""/proc/<pid>/mountinfo: the mounts of one namespace, and a call after each change of them.

See proc_pid_mountinfo(5).
"""

import os
import re
import select
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

_OCTAL = re.compile(r"\\([0-7]{3})")
_SYS = Path("/sys")
OWN = Path("/proc/self/mountinfo")
Place = tuple[tuple[int, int], str]  # a device, and a path within its file system


@dataclass(frozen=True)
class Mount:
    """One line. Paths are str with surrogateescape, so that any byte name survives."""

    mount_id: int
    parent_id: int
    major: int
    minor: int
    root: str  # what of the file system is mounted
    target: str  # where, below the root of the process whose table this is
    options: frozenset[str]
    shared: int | None  # peer group it sends to
    master: int | None  # peer group it receives from
    fstype: str
    source: str
    super_options: str

    @property
    def device(self) -> tuple[int, int]:
        return self.major, self.minor

    @property
    def read_only(self) -> bool:
        return "ro" in self.options

    @property
    def is_private(self) -> bool:
        """Neither sends nor receives mounts and unmounts."""
        return self.shared is None and self.master is None

    def below(self, path: str) -> Place:
        """Where on its file system ``path`` lies, which is on this mount."""
        part = os.path.relpath(path, self.target)
        return self.device, os.path.normpath(os.path.join(self.root, part))

    def shows(self, device: tuple[int, int], root: str) -> bool:
        """Whether it shows ``root``, a directory of that file system, or a part of it."""
        return self.device == device and (self.root == root or self.root.startswith(f"{root}/"))


def _decode(field: str) -> str:
    """The kernel writes space, tab, newline and backslash as octal."""
    raw = _OCTAL.sub(lambda match: chr(int(match[1], 8)), field) if "\\" in field else field
    return raw.encode("latin-1").decode("utf-8", "surrogateescape")


def parse_line(line: bytes) -> Mount:
    """One line of mountinfo. ValueError when it has another form."""
    text = line.decode("latin-1")
    head, separator, tail = text.partition(" - ")
    fields, after = head.split(" "), tail.split(" ")
    if not separator or len(fields) < 6 or len(after) < 3:
        raise ValueError(f"not a line of mountinfo: {text!r}")
    peers = dict(tag.split(":") for tag in fields[6:] if ":" in tag)
    major, minor = fields[2].split(":")
    decoded = [_decode(field) for field in (fields[3], fields[4], after[1], after[2])]
    return Mount(
        mount_id=int(fields[0]),
        parent_id=int(fields[1]),
        major=int(major),
        minor=int(minor),
        root=decoded[0],
        target=decoded[1],
        options=frozenset(fields[5].split(",")),
        shared=int(peers["shared"]) if "shared" in peers else None,
        master=int(peers["master"]) if "master" in peers else None,
        fstype=after[0],
        source=decoded[2],
        super_options=decoded[3],
    )


def parse(data: bytes) -> list[Mount]:
    return [parse_line(line) for line in data.split(b"\n") if line]


class Parser:
    """``parse``, again and again: of a table of thousands of lines few are new each time."""

    def __init__(self) -> None:
        self._known: dict[bytes, Mount] = {}

    def parse(self, data: bytes) -> list[Mount]:
        """The same object for a line that was there before."""
        before = self._known
        lines = [line for line in data.split(b"\n") if line]
        self._known = {line: before.get(line) or parse_line(line) for line in lines}
        return list(self._known.values())


def read(path: Path = OWN) -> list[Mount]:
    """All mounts of one process's namespace below its root. OSError when the process has ended."""
    return parse(path.read_bytes())


def of(pid: int) -> list[Mount]:
    """All mounts that a process sees. OSError when it has ended."""
    return read(Path(f"/proc/{pid}/mountinfo"))


class Table:
    """The table of this process's own namespace, read again only when the kernel says it changed.

    Every mount, unmount and change of a mount's own options counts as a change; what a file system
    says of itself (``super_options``) may be older. Threads may share it, forks may not.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._file: int | None = None
        self._poll = select.poll()
        self._parser = Parser()
        self._mounts: list[Mount] = []

    def now(self) -> list[Mount]:
        """All mounts, not to be changed. OSError."""
        with self._lock:
            first = self._file is None
            if self._file is None:
                self._file = os.open(OWN, os.O_RDONLY | os.O_CLOEXEC)
                self._poll.register(self._file, select.POLLPRI)
            # The poll comes before the read: the next poll tells what changes after this one.
            if self._poll.poll(0) or first:
                self._mounts = self._parser.parse(OWN.read_bytes())
            return self._mounts

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._poll.unregister(self._file)
                os.close(self._file)
                self._file = None


def at(target: str, mounts: Iterable[Mount]) -> list[Mount]:
    """Mounts whose mount point is exactly ``target``, the lowest first, the visible one last."""
    found = [mount for mount in mounts if mount.target == target]
    by_parent = {mount.parent_id: mount for mount in found}
    ids = {mount.mount_id for mount in found}
    lowest = next((mount for mount in found if mount.parent_id not in ids), None)
    ordered: list[Mount] = []
    while lowest is not None and len(ordered) < len(found):
        ordered.append(lowest)
        lowest = by_parent.get(lowest.mount_id)
    return ordered


def stacked(target: str | Path) -> list[Mount]:
    """As ``at`` in this process's namespace. Only these lines are parsed: there may be many."""
    wanted = str(target)
    lines = (line for line in OWN.read_bytes().split(b"\n") if line)
    return at(wanted, [parse_line(line) for line in lines if _target(line) == wanted])


def _target(line: bytes) -> str:
    return _decode(line.split(b" ", 5)[4].decode("latin-1"))


def top(target: str | Path) -> Mount | None:
    """What is mounted at ``target`` in this process's namespace, the uppermost; reads the table."""
    found = stacked(target)
    return found[-1] if found else None


def containing(path: str, mounts: Iterable[Mount]) -> Mount | None:
    """The mount that ``path`` (absolute, without links) lies on."""
    best: Mount | None = None
    for mount in mounts:
        # '>=': of two mounts on one target the later line lies on top
        if within(path, mount.target) and (best is None or len(mount.target) >= len(best.target)):
            best = mount
    return best


def inside(path: str, mounts: Sequence[Mount]) -> list[str]:
    """What is mounted below the directory ``path`` (absolute, without links), relative to it, in
    order. A mount that another one hides does not count."""
    top = containing(path, mounts)
    seen = set() if top is None else {top.mount_id}
    above = path.rstrip("/") + "/"
    below = [mount for mount in mounts if mount.target.startswith(above)]
    found: set[str] = set()
    while more := [m for m in below if m.parent_id in seen and m.mount_id not in seen]:
        seen |= {mount.mount_id for mount in more}
        found |= {mount.target[len(above) :] for mount in more}
    return sorted(found)


def place(path: str, mounts: Iterable[Mount]) -> Place | None:
    """Where a directory (absolute, without links) lies: a mount with this device and root shows
    that very directory."""
    disk = containing(path, mounts)
    return None if disk is None else disk.below(path)


def keeps_order(descriptor: int) -> bool:
    """Whether metadata changes of its file system become durable in the order they were made in.

    True on XFS and on ext4 with a journal; False on others and when unknown. Without a journal, a
    power cut may keep a later rename and lose an earlier one, so callers must sync between the two.
    """
    device = os.fstat(descriptor).st_dev
    number = os.major(device), os.minor(device)
    fstype = next((mount.fstype for mount in read() if mount.device == number), "")
    if fstype == "xfs":
        return True
    if fstype != "ext4":
        return False
    try:
        name = os.path.basename(os.readlink(_SYS / "dev/block" / f"{number[0]}:{number[1]}"))
        task = (_SYS / "fs/ext4" / name / "journal_task").read_text()
    except OSError:
        return False
    return task.strip() != "<none>"


def leads_to(path: str, mounts: Iterable[Mount]) -> Mount | None:
    """The mount that a look-up of ``path`` (absolute, without links) ends in.

    Unlike ``containing`` it leaves out what is hidden by a mount on a directory above.
    """
    on_way = [m for m in mounts if within(path, m.target)]
    ids = {mount.mount_id for mount in on_way}
    # The root of the namespace; a root that another one covers is the other one's parent.
    now = min(
        (mount for mount in on_way if mount.parent_id not in ids),
        key=lambda mount: len(mount.target),
        default=None,
    )
    passed: set[int] = set()
    while now is not None and now.mount_id not in passed:
        passed.add(now.mount_id)
        below = [mount for mount in on_way if mount.parent_id == now.mount_id]
        if not below:
            return now
        now = min(below, key=lambda mount: len(mount.target))
    return now


def within(path: str, upper: str) -> bool:
    """Whether ``path`` is the directory ``upper`` or lies below it."""
    return path == upper or path.startswith(upper.rstrip("/") + "/")


def is_above(target: str, path: str) -> bool:
    """Whether ``path`` lies below the directory ``target``."""
    return path != target and within(path, target)


def _whole(descriptor: int) -> bytes:
    """The file from its beginning; closes the descriptor."""
    with open(descriptor, "rb") as stream:
        stream.seek(0)
        return stream.read()


class Watch:
    """Calls ``changed`` from the event loop after each mount and unmount in a namespace.

    ``table`` is /proc/<pid>/mountinfo of a process in it. The file is always readable, so that an
    ordinary reader would spin: an epoll of our own waits for EPOLLPRI only, and the loop waits for
    that epoll.
    """

    def __init__(self, table: str, changed: Callable[[], None]) -> None:
        """OSError when the process has ended."""
        import asyncio  # small child processes import this module, too

        self._changed = changed
        self._table = os.open(table, os.O_RDONLY | os.O_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(self._table, select.EPOLLPRI | select.EPOLLERR)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._epoll.fileno(), self._ready)

    def _ready(self) -> None:
        self._epoll.poll(0)
        self._changed()

    async def read(self) -> bytes:
        """The table, also after the end of that process; in a thread, because with thousands of
        mounts, and others that mount, it takes long. OSError."""
        import asyncio

        return await asyncio.to_thread(_whole, os.dup(self._table))

    def close(self) -> None:
        self._loop.remove_reader(self._epoll.fileno())
        self._epoll.close()
        os.close(self._table)
