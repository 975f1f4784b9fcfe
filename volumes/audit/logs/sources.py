"""The log child: follows the kernel's log, files and journal units, and reports matches.

It is a process of its own (``main``, started by ``follower``), so that a flood of lines or a hung
disk does not touch the agent. It gets one Configuration and then says a Report within half a second
of whatever is new, and its counters every five seconds.

Files are followed by name across rotation. Their size is read twice a second and their names come
from inotify on the directories, so a flood of writes does not become a flood of events. Journal
units are followed by journalctl. Of each source the child reports counters and whether it can be
read; a source that fails is tried again.

Of containers' logs only those of the configured namespaces are read: who may make a pod chooses its
name and what it logs, but not its namespace.
"""

import asyncio
import contextlib
import errno
import glob
import math
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from asyncinotify import Inotify, Mask

import kit.errors
import kit.messages
import kit.processes
from linux import kmsg
from volumes.audit.logs.matcher import Counters, Expression, Hit, Matcher

# Where systemd keeps the journal: on disk, in memory. Below them is a directory per machine id.
JOURNALS = ("/var/log/journal", "/run/log/journal")
OVERLAP_SECONDS = 1.0  # rather read a line twice than not at all
_REPORT_SECONDS = 0.5
_RETRY_SECONDS = 30.0
_RECORDS_AT_ONCE = 500
_SIZES_SECONDS = 0.5
_NAMES_SECONDS = 10.0  # in case inotify misses a name
_BLOCK = 1 << 16
_BLOCKS_AT_ONCE = 64  # of one file, then it is the turn of the others
_MOST_FILES = 256
_ROUNDS_AFTER_RENAME = 4  # a renamed file is read so long after its last line
_NAME_EVENTS = Mask.CREATE | Mask.MOVED_TO | Mask.MOVED_FROM | Mask.DELETE
_LAST_LINE_SECONDS = 20.0  # to find a unit's last line in gigabytes on a slow disk
_STEADY_SECONDS = 5.0  # a journalctl that lives so long is following


@dataclass(frozen=True)
class FollowedLog:
    """A log: files by a pattern, or a systemd unit."""

    name: str
    files: str | None = None
    unit: str | None = None


@dataclass(frozen=True)
class Configuration:
    kernel: bool
    sources: tuple[FollowedLog, ...]
    expressions: tuple[Expression, ...]
    devices: str  # regex of the names of watched devices
    lines_per_second: int
    namespaces: tuple[str, ...] = ()  # whose containers' logs are believed
    user_records: bool = False  # believe what processes wrote to the kernel's log (tests)
    journals: tuple[str, ...] = JOURNALS
    heartbeat: float = 5.0  # seconds between two reports in which only counters are new
    kernel_after: int | None = None  # the last record of the kernel's log that a child before read


@dataclass(frozen=True)
class SourceReport:
    counters: Counters
    state: str | None  # why it cannot be read; "" when it can; None when not known yet


@dataclass(frozen=True)
class Report:
    hits: tuple[Hit, ...]
    sources: Mapping[str, SourceReport]
    kernel_read: int | None = None  # the last record of the kernel's log that was matched


def main() -> None:
    """The child's function; see kit.messages."""
    os.nice(5)
    configuration = kit.messages.hear(Configuration)
    if configuration is not None:
        asyncio.run(_Child(configuration).run())


class _Child:
    def __init__(self, configuration: Configuration) -> None:
        self._configuration = configuration
        self._matchers: dict[str, Matcher] = {}
        self._states: dict[str, str] = {}
        self._kernel_read = configuration.kernel_after

    def _matcher(self, name: str, kind: str) -> Matcher:
        configuration = self._configuration
        self._matchers[name] = Matcher(
            source=name,
            expressions=[each for each in configuration.expressions if each.source == kind],
            devices=configuration.devices,
            budget=configuration.lines_per_second,
        )
        return self._matchers[name]

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._report())
            if self._configuration.kernel:
                tasks.create_task(self._follow_kernel())
            for source in self._configuration.sources:
                tasks.create_task(self._follow(source))

    async def _report(self) -> None:
        """Counters alone are not worth a report twice a second."""
        said: dict[str, str] = {}
        at, beat = -math.inf, self._configuration.heartbeat
        while True:
            await asyncio.sleep(_REPORT_SECONDS)
            report = Report(
                hits=tuple(hit for each in self._matchers.values() for hit in each.flush()),
                sources={
                    name: SourceReport(each.counters, self._states.get(name))
                    for name, each in self._matchers.items()
                },
                kernel_read=self._kernel_read,
            )
            if report.hits or self._states != said or time.monotonic() - at >= beat:
                said, at = dict(self._states), time.monotonic()
                kit.messages.say(report)

    async def _follow_kernel(self) -> None:
        matcher = self._matcher("kernel", "kernel")
        try:
            log = kmsg.Kmsg(user=self._configuration.user_records, after=self._kernel_read)
        except OSError as error:
            self._states["kernel"] = f"/dev/kmsg: {error.strerror}"
            return
        if self._kernel_read is None:
            # Read, not seek: only a record tells its number.
            before: int | None = -1
            while log.last != before:
                before = log.last
                log.read(_RECORDS_AT_ONCE)
                await asyncio.sleep(0)
            self._kernel_read, log.lost = log.last, 0
        self._states["kernel"] = ""
        wake = asyncio.Event()
        asyncio.get_running_loop().add_reader(log.fd, wake.set)
        while True:
            await wake.wait()
            wake.clear()
            records = log.read(_RECORDS_AT_ONCE)
            matcher.counters.lost = log.lost
            if records:
                matcher.feed("".join(f"{r.text}\n" for r in records).encode())
            self._kernel_read = log.last
            await asyncio.sleep(0.01)  # a flood is read in large steps

    async def _follow(self, source: FollowedLog) -> None:
        matcher = self._matcher(source.name, "userspace")

        def lose(count: int) -> None:
            matcher.counters.lost += count

        def state(text: str) -> None:
            self._states[source.name] = text

        log: LogFiles | JournalUnit
        if source.files is not None:
            log, what = (
                LogFiles(source.files, matcher.feed, lose, state, self._configuration.namespaces),
                source.files,
            )
        else:
            assert source.unit is not None
            log = JournalUnit(source.unit, matcher.feed, state, self._configuration.journals)
            what = "journalctl"
        while True:
            try:
                await log.run()
            except OSError as error:
                state(f"{what}: {error.strerror}")
            except kit.errors.AgentError as error:
                state(f"{what}: {error.cause}")
            await asyncio.sleep(_RETRY_SECONDS)


# kubelet's name of a container's log: POD_NAMESPACE_CONTAINER-ID.log. It cuts longer ones off at
# 255 bytes, and what is left may lack the namespace: such a log is nobody's.
_CONTAINER_LOG = re.compile(r"[^_/]+_(?P<namespace>[^_/]+)_[^_/]+-[0-9a-f]{64}\.log")


def believed(path: str, namespaces: Collection[str]) -> bool:
    """Whether a file is no container's log, or that of a pod in one of the namespaces. Such a log
    is known by its directory, or by its name where that is mounted or linked elsewhere."""
    directory, name = os.path.split(os.path.normpath(path))
    match = _CONTAINER_LOG.fullmatch(name)
    if match is None and os.path.basename(directory) != "containers":
        return True
    return match is not None and match["namespace"] in namespaces


@dataclass
class _File:
    path: str
    descriptor: int
    identity: tuple[int, int]
    offset: int
    begun: bytes = b""  # of a line that is not finished yet

    def size(self) -> int:
        return os.fstat(self.descriptor).st_size


@dataclass
class LogFiles:
    """All files that a pattern names.

    ``feed`` gets a block and the unfinished line before it, and returns the unfinished line at its
    end. ``lose`` is called with a number of losses, ``state`` with why nothing can be read ("" when
    it can).
    Invariants: what was written to a file before it was renamed is read before its successor. After
    an OSError ``run`` may be called again and continues where it stopped.
    """

    pattern: str
    feed: Callable[[bytes, bytes], bytes]
    lose: Callable[[int], None]
    state: Callable[[str], None]
    namespaces: Collection[str] = ()
    files: dict[str, _File] = field(default_factory=dict)
    # Renamed files, read until nothing comes for a while: their writer may still have them open.
    old: list[tuple[_File, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._first = True
        self._left: dict[tuple[int, int], _File] = {}  # where an earlier run stopped
        self._unread = ""  # why no file can be opened

    async def run(self) -> None:
        """Until cancelled. OSError when a file or the names can no longer be read."""
        self._open_new()
        for _ in self._left.keys() - {file.identity for file in self.files.values()}:
            self.lose(1)  # rotated away since; nobody knows how much of it was not read
        self._left = {}
        names = asyncio.create_task(self._follow_names())
        try:
            while True:
                more = await self._read_all()
                self.state(self._unread)
                if names.done():
                    names.result()  # raises what ended it
                if not more:
                    await asyncio.sleep(_SIZES_SECONDS)
        finally:
            names.cancel()
            self._leave()

    def _leave(self) -> None:
        """Close everything and remember how far it was read."""
        for file, _ in self.old:
            with contextlib.suppress(OSError):
                if file.offset < file.size():
                    self.lose(1)  # its name is gone: nobody finds the rest again
            os.close(file.descriptor)
        for file in self.files.values():
            os.close(file.descriptor)
        self._left = {file.identity: file for file in self.files.values()}
        self.files, self.old = {}, []

    async def _follow_names(self) -> None:
        while True:
            self._open_new()
            with Inotify() as inotify:
                for directory in self._directories():
                    with contextlib.suppress(OSError):
                        inotify.add_watch(directory, _NAME_EVENTS)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_NAMES_SECONDS):
                        await inotify.get()
            await asyncio.sleep(0.1)

    def _directories(self) -> set[str]:
        upper = os.path.dirname(self.pattern)
        found = {os.path.dirname(path) for path in self.files}
        found |= {os.path.dirname(os.path.realpath(path)) for path in self.files}
        found |= {os.path.dirname(upper)} if "*" in upper else {upper}
        return {path for path in found if os.path.isdir(path)}

    def _open_new(self) -> None:
        """Open files that are new under the pattern; those of the first call from their end."""
        named = sorted(glob.glob(self.pattern))
        # Limited after this, or many pods of others keep the believed ones out.
        paths = [path for path in named if believed(path, self.namespaces)][:_MOST_FILES]
        refused = ""
        for path in paths:
            try:
                status = os.stat(path)
            except OSError as error:
                refused = refused or f"{path}: {error.strerror}"
                continue
            known = self.files.get(path)
            if known is not None and known.identity == (status.st_dev, status.st_ino):
                continue
            if known is not None:
                self.old.append((known, _ROUNDS_AFTER_RENAME))
            try:
                self._open(path, at_end=self._first)
            except OSError as error:
                refused = refused or f"{path}: {error.strerror}"
        for path in self.files.keys() - set(paths):
            self.old.append((self.files.pop(path), _ROUNDS_AFTER_RENAME))
        self._first = False
        self._unread = "" if self.files else refused or self._missing(named)

    def _missing(self, named: Sequence[str]) -> str:
        """What does not exist. A directory without matching files is fine: they may come."""
        if named:
            return (
                f"no file of {self.pattern} is of a namespace in volumes.audit.logs.namespaces "
                f"(the first is {os.path.basename(named[0])})"
            )
        if "*" not in self.pattern:
            return f"{self.pattern} does not exist"
        directory = os.path.dirname(self.pattern)
        directory = os.path.dirname(directory) if "*" in directory else directory
        return "" if os.path.isdir(directory) else f"{directory} does not exist"

    def _open(self, path: str, *, at_end: bool) -> None:
        self.files.pop(path, None)
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "it is no regular file", path)
        identity = status.st_dev, status.st_ino
        left = self._left.get(identity)
        if left is not None:
            self.files[path] = _File(path, descriptor, identity, left.offset, left.begun)
            return
        offset = status.st_size if at_end else 0
        self.files[path] = _File(path, descriptor, identity, offset)

    async def _read_all(self) -> bool:
        """Read what is new in every file; whether there is more."""
        more = False
        for file in [file for file, _ in self.old]:
            more |= self._read(file)
        self.old = self._still_written()
        for file in list(self.files.values()):
            more |= self._read(file)
            await asyncio.sleep(0)
        return more

    def _still_written(self) -> list[tuple[_File, int]]:
        kept = []
        for file, rounds in self.old:
            if file.offset < file.size():
                kept.append((file, _ROUNDS_AFTER_RENAME))
            elif rounds > 0:
                kept.append((file, rounds - 1))
            else:
                os.close(file.descriptor)
        return kept

    def _read(self, file: _File) -> bool:
        if file.size() < file.offset:
            self.lose(1)  # truncated in place: what was not read yet is gone
            file.offset, file.begun = 0, b""
        for _ in range(_BLOCKS_AT_ONCE):
            block = os.pread(file.descriptor, _BLOCK, file.offset)
            if not block:
                return False
            file.offset += len(block)
            file.begun = self.feed(block, file.begun)
        return True


@dataclass
class JournalUnit:
    """One unit of systemd's journal, followed by journalctl. ``feed`` and ``state`` as in Files.

    Invariant: ``run`` after ``run`` continues where the first one stopped.
    """

    unit: str
    feed: Callable[[bytes, bytes], bytes]
    state: Callable[[str], None]
    directories: tuple[str, ...] = JOURNALS

    def __post_init__(self) -> None:
        self._since = time.time()  # lines from then on are read

    async def run(self) -> None:
        """Until journalctl ends; the state then says so. OSError or DeadlineError when it cannot be
        started."""
        program = shutil.which("journalctl")
        if program is None:
            self.state("journalctl is missing: mount the logs as files instead")
            return
        # Without persistent storage the directory on disk can exist and be empty.
        directory = next((d for d in self.directories if glob.glob(f"{d}/*/*.journal")), None)
        if directory is None:
            self.state(f"no journal in {' or '.join(self.directories)}: mount the host's there")
            return
        # --directory, because journalctl else searches for this container's machine id.
        command = (
            *(program, f"--directory={directory}", f"--unit={self.unit}"),
            *("--output=cat", "--quiet"),
        )
        # A container cannot ask systemd, so only a line tells that the unit exists.
        has_lines = bool(await self._last_line(command))
        if not has_lines:
            # Followed all the same: a unit just installed writes nothing before it runs.
            self.state(f"{directory} has no line of {self.unit}: is this the unit's name here?")
        # By time and not from the journal's end: lines written while journalctl starts count too.
        since = ("--no-tail", f"--since=@{self._since:.6f}")
        code = await self._follow((*command, "--follow", *since), has_lines=has_lines)
        self.state(f"journalctl for {self.unit} ended with {code}")

    async def _last_line(self, command: tuple[str, ...]) -> bytes:
        """Empty when journalctl fails or is too slow."""
        try:
            ended = await kit.processes.run(
                (*command, "--lines=1"),
                about=f"journalctl of {self.unit}",
                deadline=_LAST_LINE_SECONDS,
            )
        except kit.processes.DeadlineError:
            return b""
        return ended.out

    async def _follow(self, command: tuple[str, ...], *, has_lines: bool) -> int:
        process = await kit.processes.start(
            command, stdin=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
        )
        assert process.stdout is not None
        steady = asyncio.get_running_loop().call_later(_STEADY_SECONDS, self.state, "")
        if not has_lines:
            steady.cancel()
        begun = b""
        try:
            while block := await process.stdout.read(_BLOCK):
                self._since = max(self._since, time.time() - OVERLAP_SECONDS)
                self.state("")
                begun = self.feed(block, begun)
            return await process.wait()
        finally:
            steady.cancel()
            await kit.processes.end(process, f"journalctl of {self.unit}")
