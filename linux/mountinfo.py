"""/proc/<pid>/mountinfo: the mounts of one namespace, and a call after each change of them.

See proc_pid_mountinfo(5).
"""

import os
import re
import select
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

_OCTAL = re.compile(r"\\([0-7]{3})")
_SYS = Path("/sys")


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


def read(path: Path = Path("/proc/self/mountinfo")) -> list[Mount]:
    """All mounts of one process's namespace below its root. OSError when the process has ended."""
    return parse(path.read_bytes())


def at(target: str, mounts: Iterable[Mount]) -> list[Mount]:
    """Mounts whose mount point is exactly ``target``, the lowest first, the visible one last."""
    stacked = [mount for mount in mounts if mount.target == target]
    by_parent = {mount.parent_id: mount for mount in stacked}
    ids = {mount.mount_id for mount in stacked}
    lowest = next((mount for mount in stacked if mount.parent_id not in ids), None)
    ordered: list[Mount] = []
    while lowest is not None and len(ordered) < len(stacked):
        ordered.append(lowest)
        lowest = by_parent.get(lowest.mount_id)
    return ordered


def containing(path: str, mounts: Iterable[Mount]) -> Mount | None:
    """The mount that ``path`` (absolute, without links) lies on."""
    best: Mount | None = None
    for mount in mounts:
        inside = mount.target == "/" or path == mount.target or path.startswith(mount.target + "/")
        # '>=': of two mounts on one target the later line lies on top
        if inside and (best is None or len(mount.target) >= len(best.target)):
            best = mount
    return best


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

    def close(self) -> None:
        self._loop.remove_reader(self._epoll.fileno())
        self._epoll.close()
        os.close(self._table)
