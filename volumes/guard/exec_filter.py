"""The exec filter: asks before a formatter is executed. Weaker than the guard program.

For kernels that do not take the program. A child process marks the known formatters of every
container with fanotify (FAN_OPEN_EXEC_PERM): the kernel then stops each execution until the child
has answered. The child reads the arguments from the stopped task's memory and refuses when one
names a guarded device without a lease.

It does not see programs that format by themselves, copies under other names, or files written by
redirection. It dies with the agent, and then nothing is refused (fail-open).
"""

import os
import re
import select
import stat
import time
from dataclasses import dataclass
from pathlib import Path

import kit.line_worker
from kit import messages
from linux import fanotify

_FORMATTERS = re.compile(
    r"(mkfs(\..+)?|mke2fs|mkswap|wipefs|blkdiscard|parted|sfdisk|fdisk|sgdisk|cryptsetup|dd|pvcreate"
    r"|mdadm|mkntfs|mkdosfs)"
)
_FOLDERS = ("sbin", "usr/sbin", "bin", "usr/bin", "usr/local/sbin")
_SAFE_CRYPTSETUP = frozenset(
    {"luksOpen", "open", "luksClose", "close", "luksDump", "isLuks", "status"}
)
_RESCAN_SECONDS = 10.0
_MOST_MARKS = 8192


@dataclass(frozen=True)
class Lease:
    """``until``: CLOCK_MONOTONIC seconds."""

    number: tuple[int, int]
    until: float


@dataclass(frozen=True)
class Config:
    """What the agent sends; the last message counts. ``cgroup``: from the root of cgroup v2."""

    mode: str = "dry-run"
    majors: tuple[int, ...] = ()
    cgroup: str = "/"
    leases: tuple[Lease, ...] = ()


@dataclass(frozen=True)
class Refusal:
    """``denied`` False: it was only a dry run."""

    number: tuple[int, int]
    tid: int
    words: tuple[str, ...]
    denied: bool


@dataclass(frozen=True)
class Report:
    """What the child says: a refusal, or only that it watches the formatters."""

    refusal: Refusal | None = None


def formatters(proc: Path = Path("/proc")) -> list[str]:
    """Formatters in the root directory of every mount namespace, found by one process of each."""
    found, seen = [], set()
    for entry in proc.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            status = os.stat(entry / "root/.")
            key = (os.readlink(entry / "ns/mnt"), status.st_dev, status.st_ino)
        except OSError:
            continue
        if key in seen:
            continue
        seen.add(key)
        for folder in _FOLDERS:
            try:
                names = os.listdir(entry / "root" / folder)
            except OSError:
                continue
            found += [str(entry / "root" / folder / n) for n in names if _FORMATTERS.fullmatch(n)]
    return found[:_MOST_MARKS]


def device_of(tid: int, word: str, majors: set[int]) -> tuple[int, int] | None:
    """The guarded device that an argument names in the task's own file tree."""
    path = word.partition("=")[2] if word.startswith("of=") else word
    if not path or path.startswith("-"):
        return None
    base = f"/proc/{tid}/root" if path.startswith("/") else f"/proc/{tid}/cwd"
    try:
        status = os.stat(f"{base}/{path.lstrip('/')}")
    except (OSError, ValueError):
        return None
    number = (os.major(status.st_rdev), os.minor(status.st_rdev))
    return number if stat.S_ISBLK(status.st_mode) and number[0] in majors else None


def inside(tid: int, cgroup: str) -> bool:
    """Whether the task is in the guarded cgroup, named from the root of cgroup v2."""
    if cgroup in ("", "/"):
        return True
    try:
        lines = Path(f"/proc/{tid}/cgroup").read_text().splitlines()
    except OSError:
        return False
    mine = next((line[3:] for line in lines if line.startswith("0::")), "")
    return mine == cgroup or mine.startswith(cgroup + "/")


def refused(tid: int, words: list[str], config: Config) -> tuple[int, int] | None:
    """The guarded device without a lease that the program would write to; None lets it run."""
    name = os.path.basename(words[0]) if words else ""
    if not inside(tid, config.cgroup):
        return None
    if name == "cryptsetup" and _SAFE_CRYPTSETUP & set(words):
        return None
    if name == "dd":  # it may read from any device
        words = [word for word in words if word.startswith("of=")]
    majors = set(config.majors)
    for word in words[1:] if name != "dd" else words:
        number = device_of(tid, word, majors)
        if number is not None:
            until = max((each.until for each in config.leases if each.number == number), default=0)
            if time.monotonic() >= until:
                return number
    return None


def main() -> None:
    """The child process."""
    guard = fanotify.ExecPermission()
    config = Config()
    pending = b""
    scanned = -1e9
    while True:
        if time.monotonic() - scanned > _RESCAN_SECONDS:
            scanned = time.monotonic()
            for path in formatters():
                try:
                    guard.mark(path)
                except OSError:
                    continue  # it was removed, or its file system cannot be marked
            kit.line_worker.say(Report())
        ready, _, _ = select.select([guard.fd, 0], [], [], _RESCAN_SECONDS)
        if 0 in ready:
            data = os.read(0, 65536)
            if not data:
                return
            *lines, pending = (pending + data).split(b"\n")
            if lines:
                config = messages.decode(lines[-1], Config)
        for request in guard.read() if guard.fd in ready else ():
            allow = True
            try:
                words = fanotify.exec_arguments(request.tid)
                number = refused(request.tid, words, config)
                if number is not None:
                    allow = config.mode != "enforce"
                    refusal = Refusal(number, request.tid, tuple(words[:32]), not allow)
                    kit.line_worker.say(Report(refusal))
            finally:
                guard.answer(request, allow)
