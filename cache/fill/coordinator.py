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
import sqlite3
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

import kit.files
from cache.fill import control, protocol, space, worker_pool
from cache.fill.protocol import Commit, Copy, Extents, Finish, Scan, Whole
from cache.fill.staged import Batch, Staged
from cache.fill.worker_pool import Assignment
from cache.store import index, large, tree
from ceph.protocol import Access

# What a generation takes of the SSD, also while its directories are listed again.
#
# The index forgets the figures of a directory until it is listed again, but its files are still
# there. So until all are listed, what was known before counts, plus what was added since.


def _size(path: str) -> int:
    """0 when there is no such file."""
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0


class Usage:
    """Of one pass. Bytes and inodes of the tree and the index."""

    def __init__(self, generation: Path) -> None:
        # As text: it is asked several times for each directory, and a Path costs more than a stat.
        self._index = [str(generation / f"{index.NAME}{end}") for end in ("", "-wal", "-shm")]
        self._before = self._added = 0
        self._inodes_before = self._inodes_added = 0

    def bytes(self, totals: index.Totals) -> int:
        """SSD bytes. ``totals``: as the index knows them now."""
        of_index = sum(_size(file) for file in self._index)
        return max(totals.used + of_index, self._before + self._added)

    def inodes(self, totals: index.Totals) -> int:
        """Of its files and directories."""
        return max(totals.inodes, self._inodes_before + self._inodes_added)

    def at_least(self, totals: index.Totals, used: int = 0, inodes: int = 0) -> None:
        """From now on it takes no less than now, nor than this, whatever the index knows of it."""
        self._before, self._inodes_before = (
            max(self.bytes(totals), used), max(self.inodes(totals), inodes)
        )  # fmt: skip
        self._added = self._inodes_added = 0

    def add(self, size: int, inodes: int = 0) -> None:
        """Something was stored since."""
        self._added += size
        self._inodes_added += inodes

    def all_listed(self) -> None:
        """The totals of the index are complete again."""
        self._before = self._added = 0
        self._inodes_before = self._inodes_added = 0


PROGRESS_SECONDS = 0.5
LOCK_SECONDS = 10.0
MOST_NOTES = 20
# A worker that neither lists nor reads anything for this long hangs in its source: it is killed,
# and what it hung in is recorded. Less than half of what the agent gives a whole pass.
HANG_SECONDS = 25.0
HANGS = f"the source gave no answer within {HANG_SECONDS:g}s"
LOOK_SECONDS = 1.0  # between two looks for workers that hang

COPIES = (Copy, Extents, Whole)  # jobs after which something is to be committed
STORING = (Copy, protocol.Fetch)  # jobs whose ``Assignment`` says what they take at most

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

    def placed(self, staged: list[Staged]) -> None:
        """These are in the tree (inside the transaction that counts them)."""
        return

    @property
    def begun(self) -> tuple[int, int]:
        """SSD bytes and inodes that files will take which are copied by more than one job."""
        return 0, 0

    @property
    def unplaced(self) -> int:
        """SSD bytes of such files, and of records beside the tree."""
        return 0

    @property
    def busy(self) -> set[int]:
        """Chunks that are being copied, or are copied and not committed."""
        return set()

    may_hang: tuple[type[msgspec.Struct], ...] = ()  # jobs whose worker may be killed

    def gave_up(self, assignment: Assignment, at: int) -> None:
        """Its worker hung in the entry ``at`` of the job and was killed."""
        raise NotImplementedError

    def seals(self) -> list[int]:
        """Directories that are complete and not sealed."""
        return []


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
        self.tree_was_empty = self._prepare(fills=isinstance(task, protocol.FillTask))
        if self.tree_was_empty:
            index.Index.discard(self.generation / index.NAME)  # it describes another tree
        self.index = index.Index.open(self.generation / index.NAME)
        self.page = control.Control.create()
        # Each native worker has many reads in flight; more workers would only contend.
        self._most_workers = (os.cpu_count() or 1) + 1 if access else control.MOST_WORKERS
        fill = task if isinstance(task, protocol.FillTask) else None
        setup = protocol.Setup(
            source=task.source, stamp=task.stamp, generation=task.generation,
            immutable=task.immutable, native=access,
            before=fill.before if fill else "", before_made_ns=fill.before_made_ns if fill else 0,
        )  # fmt: skip
        self.pool = worker_pool.WorkerPool(self.page, setup, serve)
        self.batch = Batch()
        self.agent = protocol.AgentChannel()
        self.cancelled = False
        self.totals = self.index.totals()
        # Of what is used, what the generation before has too; nothing when that has gone.
        self.shared, self.shared_files = (
            self.index.shared() if task.beside or setup.before else (0, 0)
        )
        self.usage = Usage(self.generation)
        # SSD bytes of what is copied in parts, and of records beside the tree.
        self.unplaced: Callable[[], int] = lambda: 0
        self.commits = 0
        self._reported = 0.0
        self._looked = 0.0
        self._gave_up = 0  # workers that were killed in a row, without progress in between
        self._moved: tuple[int, ...] = ()
        self._notes: set[str] = set()  # what the log has of this pass
        self._pass: Pass

    def _prepare(self, *, fills: bool) -> bool:
        """Make the folders, empty the staging folder; whether the tree is empty.

        Only a fill keeps the spare links. Another pass looks for bad files, and the fill after it
        must not give an inode that was found bad a name again.
        """
        with tree.opened_root(self.generation) as directory:
            tree.remove(directory, "staging")
            if not fills:
                tree.remove(directory, "links")
        for name in ("staging", "links", "tree", large.PARTS, large.RECORDS):
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
        self.unplaced = lambda: decides.unplaced
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
        self._replace_hanging()
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
        if failure.errno in tree.SOURCE_GONE or isinstance(assignment.job, Commit | Finish):
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

    def _replace_hanging(self) -> None:
        """Kill workers that hang, so that what they hang in costs nobody else more."""
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        if self.pool.assigned(Commit, Finish):
            self.pool.alive()  # while the disk is flushed, writers may wait for it
            return
        for member in self.pool.hanging(self._pass.may_hang, HANG_SECONDS):
            if self.page.at(member.number) == control.FLUSHING:
                continue
            moved = (*self.page.counted(), self.page.beats())
            self._gave_up = self._gave_up + 1 if moved == self._moved else 1
            self._moved = moved
            assignment, at = member.assignment, self.page.at(member.number)
            assert assignment is not None
            self.pool.replace(member)
            self._pass.gave_up(assignment, at)
            path = getattr(assignment.job, "path", None)  # what has none was named by the pass
            if path is not None:
                self.note(f"a worker was killed in {'/'.join(path)!r}: {HANGS}")
            if self._gave_up > self._workers:
                raise Ended("failed", f"nothing can be read: {HANGS}")

    # --- commit and seal

    def _commit_if_due(self) -> None:
        committer = self.pool.committer
        if committer is None:
            return
        copying = bool(self.pool.assigned(*COPIES))
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
                known(staged.directory).attributes.mtime_ns, staged.part, staged.name,
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
                if staged.chunk is None:
                    continue
                for name, reason, lasting, _ in staged.failed:
                    self.index.fail(staged.directory, name, reason, lasting=lasting)
                self.index.committed(
                    staged.chunk, staged.files, staged.bytes, staged.allocated, len(staged.failed),
                    [entry for entry in staged.chunk.entries if entry.name in staged.left],
                )  # fmt: skip
                self.index.keep(staged.directory, staged.kept)
                if staged.silent:
                    entries = [e for e in staged.chunk.entries if e.name in staged.silent]
                    self.index.put_off(staged.directory, entries, self._pass.busy)
            self._pass.placed(kept)
            for number in answer.sealed:
                self.index.sealed(number)
            for number in {*answer.missing, *answer.lost}:
                self._pass.incomplete(number)
        if self.batch.committing or answer.sealed:
            self.commits += 1
        self.batch.end_commit()
        self.totals = self.index.totals()
        self.usage.add(sum(each.allocated for each in kept), sum(each.files for each in kept))

    # --- space

    def room(self, *, inodes: int) -> space.SpaceLeft:
        """What may still be stored, with ``inodes`` more about to be used."""
        jobs, staged = self.pool.assigned(*STORING), self.batch.all()
        size, files = self._pass.begun
        in_staging = sum(each.allocated for each in staged if not each.part)
        pending = space.SpaceLeft(
            sum(each.allocated for each in jobs) + in_staging + size,
            sum(each.inodes for each in jobs) + sum(s.files for s in staged) + files + inodes,
        )
        return self.balance().room(pending)

    def balance(self) -> space.Balance:
        """What is left, or negative, beside what is committed."""
        disk = os.statvfs(self.generation)
        used, inodes = self.used() - self.shared, self.inodes() - self.shared_files
        return space.balance(disk, self.limits, used=used, inodes=inodes)

    def left(self, *, room: int = 0, short: bool = False) -> protocol.FillEnd:
        """What the pass leaves behind. ``room``, ``short``: as in ``FillEnd``."""
        files, size = self.index.left()
        return protocol.FillEnd(
            self.used(), files, size, self.shared, self.shared_files, self.inodes(), room, short
        )

    @property
    def copies_in_flight(self) -> bool:
        """While copies are in flight their space is over-estimated and briefly counted twice."""
        return bool(self.pool.assigned(*STORING) or self.batch.all())

    def used(self) -> int:
        """SSD bytes of this generation, its directories, index and what it shares included."""
        return self.usage.bytes(self.totals) + self.unplaced()

    def inodes(self) -> int:
        """Inodes of its files and directories."""
        return self.usage.inodes(self.totals)

    def list_again(self, number: int) -> None:
        """Forget the figures of a directory until it is listed; its space still counts."""
        self.usage.at_least(self.totals)
        shared, files = self.index.shared(number)
        self.shared = max(0, self.shared - shared)
        self.shared_files = max(0, self.shared_files - files)
        self.index.restart_listing(number)

    def found_shared(self, number: int, stored: protocol.Stored) -> None:
        """What the listing of a directory took over from the generation before."""
        if stored.shared_files:
            self.index.shares(number, stored.shared, stored.shared_files)
            self.shared += stored.shared
            self.shared_files += stored.shared_files

    def all_listed(self) -> None:
        """Every directory is listed: the totals of the index are complete again."""
        self.totals = self.index.totals()
        self.usage.all_listed()

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
            commits=self.commits, used=self.used(), shared=self.shared,
            syncing=bool(self.pool.assigned(Commit, Finish)),
        )  # fmt: skip
        self.agent.say(protocol.Report(progress=progress))

    def note(self, text: str) -> None:
        """Have the agent log this."""
        self.agent.say(protocol.Report(note=text))

    def note_once(self, text: str) -> None:
        """Each worker finds the same; the log has it once."""
        if text and text not in self._notes and len(self._notes) < MOST_NOTES:
            self._notes.add(text)
            self.note(text)


def failed_by(assignment: Assignment, failure: protocol.NotDone) -> Ended:
    """The end of a pass that cannot go on without this job."""
    if failure.errno in (errno.ENOSPC, errno.EDQUOT) and not isinstance(
        assignment.job, Commit | Finish
    ):
        return Ended("failed", "the disk is full")
    return Ended("failed", f"{type(assignment.job).__name__.lower()}: {failure.error}")


# --- the process


def serve(kind: type[TaskT], begin: Callable[[TaskT], tuple[Coordinator, Pass]]) -> None:
    """The life of a coordinator process: read the task, run its pass, report why it failed."""
    task = protocol.first_task(kind)
    if task is None:
        return
    try:
        coordinator, decides = begin(task)
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
