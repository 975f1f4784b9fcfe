"""The coordinator: the process that runs one pass over a generation.

The agent must not block on a disk or a cluster, and a pass over millions of files must not grow its
memory. So each pass is a process of its own, with the index, a pool of workers and a pipe to the
agent. Its one thread does four things in turn: commit what is staged, give jobs to idle workers,
take their answers, report progress.

``Coordinator`` is what all passes share. What is particular to one kind (fill, verify, withdraw) is
a ``Pass``: it says which job is next, takes the answers, and raises ``Ended`` when it is over.

Invariants: only the committing worker changes names in the tree; one coordinator has the lock of a
generation. It may be killed at any point: what is in the tree stays right, and the next pass goes
on from there.
"""

import errno
import os
import signal
import sqlite3
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import kit.files
import kit.messages
from cache.fill import control, protocol, worker_pool
from cache.fill.protocol import Commit, Copy, Finish, Hint, Scan
from cache.fill.worker_pool import Assignment
from cache.store import index, tree
from ceph.protocol import Access

PROGRESS_SECONDS = 0.5
LOCK_SECONDS = 10.0
# A batch is committed when it has this much, or is this old. One syncfs costs 5-100 ms.
BATCH_FILES = 4096
BATCH_BYTES = 256 * 1024 * 1024
BATCH_SECONDS = 1.0
# For what grows beside the files: the index's log, directories, preallocation of XFS.
HEADROOM_BYTES = 16 * 1024 * 1024

TaskT = TypeVar("TaskT", bound=protocol.Task)


class Ended(Exception):
    """The pass is over; ``result`` as in ``protocol.End``."""

    def __init__(self, result: str, why: str = "") -> None:
        super().__init__(why)
        self.result = result
        self.why = why


class Pass(ABC):
    """What one kind of pass decides. Called by the coordinator only, in its one thread."""

    @property
    @abstractmethod
    def phase(self) -> str:
        """As the agent shows it."""

    @abstractmethod
    def next_assignment(self) -> Assignment | None:
        """Work for an idle worker, None when there is none now."""

    @abstractmethod
    def take(self, assignment: Assignment, answer: protocol.Answer) -> None:
        """An answer to a job; a ``ScanPart`` is followed by others."""

    @abstractmethod
    def failed(self, assignment: Assignment, failure: protocol.NotDone) -> None:
        """A job came to nothing, and the pass may go on without it."""

    @abstractmethod
    def forget(self, assignment: Assignment) -> None:
        """A job was cancelled or its worker died: nothing of it was kept, it may be given again."""

    @abstractmethod
    def incomplete(self, directory: int) -> None:
        """A directory of the tree lacks what the index says (inside a transaction)."""

    @abstractmethod
    def end_if_done(self) -> None:
        """Called while nothing is under way or staged; raises Ended."""

    @abstractmethod
    def counts(self) -> index.Counts: ...

    @abstractmethod
    def end(self, ended: Ended) -> protocol.End:
        """The last report. Also saves what the next pass needs."""

    def seals(self) -> list[int]:
        """Directories that are complete and not sealed."""
        return []

    def hint(self, paths: list[str]) -> None:
        """Paths that a job opened; only a fill uses them."""
        return


class Coordinator:
    """Runs a pass: workers, commits, room on the SSD and the pipe to the agent."""

    def __init__(
        self, task: protocol.Task, serve: Callable[[int, int], None], access: Access | None = None
    ) -> None:
        """``serve``: the life of a worker, as ``worker.serve``. ``access``: for native reads."""
        self.limits = task.limits
        self.generation = Path(task.generation)
        # The coordinator of an agent that was killed may need a moment to end.
        self._lock = kit.files.lock(self.generation / "lock", LOCK_SECONDS)
        self.tree_was_empty = self._prepare()
        if self.tree_was_empty:
            index.Index.discard(self.generation / index.NAME)  # it describes another tree
        self.index = index.Index.open(self.generation / index.NAME)
        self.page = control.Control.create()
        # Each native worker has many reads in flight; more workers would only contend.
        self._most_workers = (os.cpu_count() or 1) + 1 if access else control.MOST_WORKERS
        setup = protocol.Setup(task.source, task.stamp, task.generation, task.immutable, access)
        self.pool = worker_pool.WorkerPool(self.page, setup, serve)
        self.batch = Batch()
        self.agent = protocol.AgentChannel()
        self.cancelled = False
        self.totals = self.index.totals()
        # While a directory is listed again, the totals lack what the tree has of it. Until all are
        # listed the space used is what was known before, plus what was added since.
        self._used_before = 0
        self._added = 0
        self.commits = 0
        self._reported = 0.0
        self._pass: Pass

    def _prepare(self) -> bool:
        """Make the folders, empty the staging folder; whether the tree is empty."""
        with tree.opened_root(self.generation) as directory:
            tree.remove(directory, "staging")
        for name in ("staging", "links", "tree"):
            (self.generation / name).mkdir(mode=0o700, exist_ok=True)
        with os.scandir(self.generation / "tree") as found:
            return next(found, None) is None

    # --- the loop

    def run(self, decides: Pass) -> None:
        """To the end of the pass, which is reported to the agent."""
        self.start(decides)
        self.pool.watch(0)
        try:
            while True:
                self.step()
        except Ended as ended:
            self._report_progress(force=True)
            end = decides.end(ended)
        finally:
            self.pool.stop()
            self.index.close()
        # The last word: the agent kills this process when it has read it.
        self.agent.say(protocol.Report(end=end))

    def start(self, decides: Pass) -> None:
        self._pass = decides
        self.set_limits(self.limits)
        self.pool.resize(self._workers)

    def step(self) -> None:
        self._commit_if_due()
        for member in self.pool.idle():
            assignment = self._pass.next_assignment()
            if assignment is None:
                break
            self.pool.give(member, assignment)
        if self.pool.resting and not self.batch.all():
            self._pass.end_if_done()
        for event in self.pool.wait(min(0.2, self.batch.patience())):
            if event.member is None:
                self._obey()
            elif event.answer is None:
                self._lost(event.member)
            else:
                self._answered(event.member, event.answer)
        self._report_progress()

    def _answered(self, member: worker_pool.Member, answer: protocol.Answer) -> None:
        if member.starting:
            member.starting = False
            if isinstance(answer, protocol.NotDone):
                raise Ended("failed", f"start: {answer.error}")
            return
        assignment = member.assignment
        assert assignment is not None
        if not isinstance(answer, protocol.ScanPart):
            member.assignment = None
        match answer:
            case protocol.Committed():
                self._committed(answer)
            case protocol.NotDone():
                self._not_done(assignment, answer)
            case _:
                self._pass.take(assignment, answer)

    def _not_done(self, assignment: Assignment, failure: protocol.NotDone) -> None:
        if failure.cancelled:
            self._pass.forget(assignment)
            return
        source_gone = failure.errno in tree.SOURCE_GONE and not isinstance(assignment.job, Hint)
        if source_gone or isinstance(assignment.job, Commit | Finish):
            raise failed_by(assignment, failure)
        self._pass.failed(assignment, failure)

    def _lost(self, member: worker_pool.Member) -> None:
        """A worker died. Another one gets its job."""
        if member.assignment is None:
            return
        if isinstance(member.assignment.job, Commit | Finish):
            raise Ended("failed", "the committing worker ended unexpectedly")
        self._pass.forget(member.assignment)

    def discard_staged(self, folder: str) -> None:
        with tree.opened_root(self.generation / "staging") as staging:
            tree.remove(staging, folder)

    # --- commit and seal

    def _commit_if_due(self) -> None:
        committer = self.pool.committer
        if committer is None:
            return
        copying = bool(self.pool.assigned(Copy, Hint))
        due = self.batch.due(more_is_coming=copying)
        if not due and (self.batch.waiting or copying or self.pool.assigned(Scan)):
            return
        seals = [] if self.cancelled else self._pass.seals()
        if not due and not seals:
            return
        known = self.index.directory
        folders = [
            protocol.StagedFolder(
                staged.folder, staged.directory, self.index.path(staged.directory), staged.links,
                known(staged.directory).attributes.mtime_ns,
            )
            for staged in self.batch.begin_commit()
        ]  # fmt: skip
        marks = [
            protocol.Seal(each.id, self.index.path(each.id), each.entries, each.attributes.mtime_ns)
            for each in map(known, seals)
        ]
        commit = Commit(folders=folders, seals=marks)
        self.pool.give(committer, Assignment(commit))

    def _committed(self, answer: protocol.Committed) -> None:
        kept = [staged for staged in self.batch.committing if staged.directory not in answer.lost]
        with self.index.transaction():
            for staged in kept:
                self.index.brought_ahead(staged.directory, staged.ahead)
            # Chunks come second: their commit deletes the rows of their files that were ahead.
            for staged in kept:
                if staged.chunk is None:
                    continue
                for name, reason, lasting in staged.failed:
                    self.index.fail(staged.directory, name, reason, lasting=lasting)
                self.index.committed(
                    staged.chunk, staged.files, staged.bytes, staged.allocated, len(staged.failed),
                    [entry for entry in staged.chunk.entries if entry.name in staged.left],
                )  # fmt: skip
            for number in answer.sealed:
                self.index.sealed(number)
            for number in {*answer.missing, *answer.lost}:
                self._pass.incomplete(number)
        if self.batch.committing or answer.sealed:
            self.commits += 1
        self.batch.end_commit()
        self.totals = self.index.totals()
        self._added += sum(staged.allocated for staged in kept)

    # --- space

    def room(self, *, inodes: int) -> "Room":
        """What may still be stored, with ``inodes`` more about to be used."""
        jobs = self.pool.assigned(Copy, Hint)
        pending = Room(
            sum(each.allocated for each in jobs) + sum(s.allocated for s in self.batch.all()),
            sum(each.inodes for each in jobs) + inodes,
        )
        return room(
            os.statvfs(self.generation), reserve=self.limits.reserve, budget=self.limits.budget,
            used=self.limits.others + self.used(), pending=pending,
        )  # fmt: skip

    @property
    def copies_in_flight(self) -> bool:
        """While copies are in flight their space is over-estimated and briefly counted twice."""
        return bool(self.pool.assigned(Copy, Hint) or self.batch.all())

    def used(self) -> int:
        """SSD bytes of this generation, its directories and index included."""
        of_index = sum(
            file.stat().st_size
            for suffix in ("", "-wal", "-shm")
            if (file := self.generation / (index.NAME + suffix)).exists()
        )
        return max(self.totals.used + of_index, self._used_before + self._added)

    def count_at_least(self, used: int) -> None:
        """The generation takes at least these SSD bytes, whatever the index knows of them."""
        self._used_before = max(self.used(), used)

    def list_again(self, number: int) -> None:
        """Forget the figures of a directory until it is listed; its space still counts."""
        self._used_before, self._added = self.used(), 0
        self.index.restart_listing(number)

    def count_added(self, size: int) -> None:
        """SSD bytes of new directories."""
        self._added += size

    def all_listed(self) -> None:
        """Every directory is listed: the totals of the index are complete again."""
        self.totals = self.index.totals()
        self._used_before = self._added = 0

    # --- the agent

    def _obey(self) -> None:
        commands = self.agent.commands()
        if commands is None:
            self.pool.unwatch(0)
            raise Ended("cancelled", "the agent has ended")
        for command in commands:
            if command.limits is not None:
                self.set_limits(command.limits)
                self.pool.resize(self._workers)
            if command.hints:
                self._pass.hint(command.hints)
            if command.cancel:
                self.cancelled = True
                self.page.cancel()

    def set_limits(self, limits: protocol.Limits) -> None:
        self.limits = limits
        self._workers = min(limits.workers, self._most_workers)
        share = max(1, self._workers)
        self.page.set_limits(limits.bytes_per_second / share, limits.files_per_second / share)

    def _report_progress(self, *, force: bool = False) -> None:
        now = time.monotonic()
        if not force and now - self._reported < PROGRESS_SECONDS:
            return
        self._reported = now
        counts = self._pass.counts()  # may bring the totals up to date
        copied_files, copied_bytes = self.page.counted()
        progress = protocol.Progress(
            phase=self._pass.phase, counts=counts, sealed=self.totals.sealed,
            copied_files=copied_files, copied_bytes=copied_bytes, beats=self.page.beats(),
            commits=self.commits, used=self.used(),
            syncing=bool(self.pool.assigned(Commit, Finish)),
        )  # fmt: skip
        self.agent.say(protocol.Report(progress=progress))

    def note(self, text: str) -> None:
        """Have the agent log this."""
        self.agent.say(protocol.Report(note=text))


def failed_by(assignment: Assignment, failure: protocol.NotDone) -> Ended:
    """The end of a pass that cannot go on without this job."""
    if failure.errno in (errno.ENOSPC, errno.EDQUOT) and not isinstance(
        assignment.job, Commit | Finish
    ):
        return Ended("failed", "the disk is full")
    return Ended("failed", f"{type(assignment.job).__name__.lower()}: {failure.error}")


# --- what is staged


@dataclass
class Staged:
    """A folder of the staging directory: copied and not committed."""

    folder: str
    directory: int
    chunk: index.Chunk | None = None  # None: a hint, or a replacement, which counts nowhere
    files: int = 0
    bytes: int = 0
    allocated: int = 0
    failed: list[protocol.Failure] = field(default_factory=list)
    links: list[protocol.Link] = field(default_factory=list)
    left: set[str] = field(default_factory=set)  # names of the chunk that were not copied
    ahead: dict[str, int] = field(default_factory=dict)  # of a hint: name, SSD bytes


class Batch:
    """Staged folders that wait for a commit, and those that are being committed."""

    def __init__(self) -> None:
        self.waiting: list[Staged] = []
        self.committing: list[Staged] = []
        self._since = 0.0

    def add(self, staged: Staged) -> None:
        if not self.waiting:
            self._since = time.monotonic()
        self.waiting.append(staged)

    def all(self) -> list[Staged]:
        return self.waiting + self.committing

    def due(self, *, more_is_coming: bool) -> bool:
        return bool(self.waiting) and (
            not more_is_coming
            or sum(staged.files for staged in self.waiting) >= BATCH_FILES
            or sum(staged.bytes for staged in self.waiting) >= BATCH_BYTES
            or time.monotonic() - self._since >= BATCH_SECONDS
        )

    def patience(self) -> float:
        """Seconds until the batch is old enough."""
        if not self.waiting:
            return BATCH_SECONDS
        return max(0.01, BATCH_SECONDS - (time.monotonic() - self._since))

    def begin_commit(self) -> list[Staged]:
        self.committing, self.waiting = self.waiting, []
        return self.committing

    def end_commit(self) -> None:
        self.committing = []


# --- room on the SSD


@dataclass(frozen=True)
class Room:
    """Bytes and inodes that may still be used."""

    bytes: int
    inodes: int

    def holds(self, size: int, inodes: int) -> bool:
        return size <= self.bytes and inodes <= self.inodes


def room(disk: os.statvfs_result, *, reserve: float, budget: int, used: int, pending: Room) -> Room:
    """What budget and reserve leave.

    ``used``: SSD bytes of the whole store. ``pending``: what jobs and staged files take, which may
    or may not be in ``disk`` yet. A file system that does not count inodes (f_files is 0, btrfs)
    has enough of them.
    """
    floor = int(disk.f_blocks * disk.f_frsize * reserve)
    free = disk.f_bavail * disk.f_frsize - floor - HEADROOM_BYTES
    inodes = disk.f_favail - int(disk.f_files * reserve) if disk.f_files else 2**62
    return Room(max(0, min(budget - used, free) - pending.bytes), max(0, inodes - pending.inodes))


# --- the process


def serve(kind: type[TaskT], begin: Callable[[TaskT], tuple[Coordinator, Pass]]) -> None:
    """The life of a coordinator process: read the task, run its pass, report why it failed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the agent cancels or kills
    os.umask(0)
    with os.fdopen(0, "rb", buffering=0, closefd=False) as agent:
        line = agent.readline()  # unbuffered: the channel reads what follows
    if not line.endswith(b"\n"):
        return
    try:
        coordinator, decides = begin(kit.messages.decode(line, kind))
        coordinator.run(decides)
    except (OSError, worker_pool.PoolError) as error:
        # By number: Python makes a BrokenPipeError of ESHUTDOWN too, which a source may raise.
        if isinstance(error, OSError) and error.errno == errno.EPIPE:
            return  # the agent has ended
        why = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
        protocol.AgentChannel.say(protocol.Report(end=protocol.End("failed", why)))
    except sqlite3.DatabaseError as error:
        why = f"the index is damaged ({error}); the next pass makes it again"
        if error.sqlite_errorcode == sqlite3.SQLITE_FULL:
            why = "the disk is full, not even the index can grow"
        protocol.AgentChannel.say(protocol.Report(end=protocol.End("failed", why)))
