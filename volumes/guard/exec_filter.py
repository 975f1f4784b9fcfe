"""The exec filter: asks before a formatter is executed. Weaker than the guard program.

For kernels that do not take the program. A child process marks the known formatters of every
container with fanotify (FAN_OPEN_EXEC_PERM): the kernel then stops each execution until the child
has answered, which it does within ``DECISION_SECONDS``. A helper of it reads the arguments from the
stopped task's memory; it is refused when one names a guarded device without a lease.

It does not see programs that format by themselves, copies under other names, or files written by
redirection. It dies with the agent, and then nothing is refused (fail-open). It runs in mode
enforce only.
"""

import os
import re
import select
import signal
import socket
import stat
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import kit.line_worker
from kit import messages
from linux import fanotify
from volumes import settings

_FORMATTERS = re.compile(
    r"(mkfs(\..+)?|mke2fs|mkswap|wipefs|blkdiscard|parted|sfdisk|fdisk|sgdisk|cryptsetup|dd|pvcreate"
    r"|mdadm|mkntfs|mkdosfs)"
)
_FOLDERS = ("sbin", "usr/sbin", "bin", "usr/bin", "usr/local/sbin")
_SAFE_CRYPTSETUP = frozenset(
    {"luksOpen", "open", "luksClose", "close", "luksDump", "isLuks", "status"}
)
DECISION_SECONDS = 1.0
_RESCAN_SECONDS = 10.0
_FIND_SECONDS = 20.0
_MOST_GIVEN_UP = 4  # helpers that did not answer; then nothing is decided or found any more
_MOST_MESSAGE = 2**17
_MOST_MARKS = 8192


@dataclass(frozen=True)
class Lease:
    """``until``: CLOCK_MONOTONIC seconds."""

    number: tuple[int, int]
    until: float


@dataclass(frozen=True)
class Config:
    """What the agent sends; the last message counts. ``cgroup``: from the root of cgroup v2."""

    majors: tuple[int, ...] = ()
    cgroup: str = "/"
    leases: tuple[Lease, ...] = ()


@dataclass(frozen=True)
class Refusal:
    number: tuple[int, int]
    tid: int
    words: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """What the child says: a refusal, what it had to allow undecided, or only that it watches."""

    refusal: Refusal | None = None
    undecided: int = 0


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
        lines = Path(f"/proc/{tid}/cgroup").read_text(errors="replace").splitlines()
    except OSError:
        return False
    mine = next((line[3:] for line in lines if line.startswith("0::")), "")
    return mine == cgroup or mine.startswith(cgroup + "/")


def refused(tid: int, words: list[str], config: Config) -> tuple[int, int] | None:
    """The guarded device without a lease that the program would write to; None lets it run."""
    name = os.path.basename(words[0]) if words else ""
    if not inside(tid, config.cgroup):
        return None
    never = settings.NEVER.get(name, ())
    if name == "cryptsetup" and _SAFE_CRYPTSETUP & set(words) and not set(never) & set(words):
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


@dataclass(frozen=True)
class _Question:
    tid: int
    config: Config


@dataclass(frozen=True)
class _Decision:
    words: tuple[str, ...]
    number: tuple[int, int] | None = None


class _Helper:
    """A forked process for what may hang in the kernel: another container's root, a stopped task's
    memory. It closes the fanotify group: a process that cannot be killed would keep it open, and
    then nobody would answer the kernel any more."""

    def __init__(self, work: Callable[[socket.socket], None], group: int) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if not self.pid:
            try:
                os.close(group)
                self.socket.close()
                nothing = os.open(os.devnull, os.O_RDWR)
                os.dup2(nothing, 0)
                os.dup2(nothing, 1)
                work(theirs)
            finally:
                os._exit(0)
        theirs.close()

    def end(self) -> None:
        """Without waiting for it."""
        os.kill(self.pid, signal.SIGKILL)
        self.socket.close()


def _decide(link: socket.socket) -> None:
    while data := link.recv(_MOST_MESSAGE):
        question = messages.decode(data, _Question)
        words = fanotify.exec_arguments(question.tid)
        number = refused(question.tid, words, question.config)
        shown = tuple(word[:200] for word in words[:32])
        link.send(messages.encode(_Decision(shown, number)).encode())


def _find(link: socket.socket) -> None:
    """Sends the formatters as descriptors, which can be marked without another look at the path."""
    while link.recv(1):
        for path in formatters():
            try:
                found = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except OSError:
                continue
            socket.send_fds(link, [b"f"], [found])
            os.close(found)
        link.send(b"end")


class Filter:
    """Answers the kernel within ``DECISION_SECONDS``, whatever hangs: what is not decided by then
    is allowed, because a node whose formatters wait is worse than one without this filter."""

    def __init__(self) -> None:
        self.group = fanotify.ExecPermission()
        self.config = Config()
        self._rest = b""  # of a message that has not come whole
        self._waiting: deque[tuple[fanotify.ExecRequest, float]] = deque()
        self._asked = False  # the first that waits
        self._given_up = 0
        self._decider: _Helper | None = _Helper(_decide, self.group.fd)
        self._finder: _Helper | None = _Helper(_find, self.group.fd)
        self._find_by = 0.0  # when the finder must have ended; 0: it is not looking
        self._found = -1e9

    def step(self) -> None:
        """Wait for something to do, at most until the next deadline, and do it."""
        now = time.monotonic()
        if self._finder is not None and not self._find_by and now - self._found > _RESCAN_SECONDS:
            self._find_by = now + _FIND_SECONDS
            self._finder.socket.send(b"f")
        ends = [self._find_by or self._found + _RESCAN_SECONDS, now + _RESCAN_SECONDS]
        if self._waiting:
            ends.append(self._waiting[0][1])
        sources = [self.group.fd, 0]
        sources += [each.socket.fileno() for each in (self._decider, self._finder) if each]
        ready, _, _ = select.select(sources, [], [], max(0.0, min(ends) - now))
        if 0 in ready:
            self._configure(os.read(0, 65536))
        if self._finder is not None and self._finder.socket.fileno() in ready:
            self._mark(self._finder)
        if self._decider is not None and self._decider.socket.fileno() in ready:
            self._decided(self._decider)
        if self.group.fd in ready:
            by = time.monotonic() + DECISION_SECONDS
            self._waiting.extend((request, by) for request in self.group.read())
        self._late(time.monotonic())
        self._ask()

    def _configure(self, data: bytes) -> None:
        if not data:
            raise SystemExit  # the agent has ended
        *lines, self._rest = (self._rest + data).split(b"\n")
        if lines:
            self.config = messages.decode(lines[-1], Config)

    def _mark(self, finder: _Helper) -> None:
        text, found, _, _ = socket.recv_fds(finder.socket, 16, 1)
        for descriptor in found:
            try:
                self.group.mark(f"/proc/self/fd/{descriptor}")
            except OSError:
                pass  # it was removed, or its file system cannot be marked
            os.close(descriptor)
        if text == b"end":
            self._find_by, self._found = 0.0, time.monotonic()
            kit.line_worker.say(Report())

    def _ask(self) -> None:
        if self._waiting and not self._asked and self._decider is not None:
            question = _Question(self._waiting[0][0].tid, self.config)
            self._decider.socket.send(messages.encode(question).encode())
            self._asked = True

    def _decided(self, decider: _Helper) -> None:
        decision = messages.decode(decider.socket.recv(_MOST_MESSAGE), _Decision)
        request, _ = self._waiting.popleft()
        self._asked = False
        self.group.answer(request, decision.number is None)
        if decision.number is not None:
            refusal = Refusal(decision.number, request.tid, decision.words)
            kit.line_worker.say(Report(refusal))

    def _late(self, now: float) -> None:
        late = 0
        while self._waiting and (self._decider is None or now >= self._waiting[0][1]):
            request, _ = self._waiting.popleft()
            self.group.answer(request, True)
            late += 1
            if self._asked and self._decider is not None:
                self._decider = self._another(self._decider, _decide)
                self._asked = False
        if late:
            kit.line_worker.say(Report(undecided=late))
        if self._finder is not None and self._find_by and now >= self._find_by:
            self._finder = self._another(self._finder, _find)
            self._find_by, self._found = 0.0, now

    def _another(self, former: _Helper, work: Callable[[socket.socket], None]) -> _Helper | None:
        former.end()
        self._given_up += 1
        return None if self._given_up > _MOST_GIVEN_UP else _Helper(work, self.group.fd)


def main() -> None:
    """The child process."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # helpers are never waited for
    running = Filter()
    while True:
        running.step()
