"""The coordinator: the process that runs one pass over a generation.

The agent must not block on a disk or a cluster, and a pass over millions of files must not grow its
memory. So each pass is a process of its own, with the index, a pool of workers and a pipe to the
agent. Its one thread does four things in turn: commit what is staged, give jobs to idle workers,
take their answers, report progress.

``Coordinator`` is what passes with workers share. What is particular to one kind (fill, verify) is
a ``Pass``: it says which job is next, takes the answers, and raises ``Ended`` when it is over.

Invariants: only the committing worker changes names in the tree; one coordinator has the lock of a
generation. It may be killed at any point: what is in the tree stays right, and the next pass goes
on from there.
"""

import errno
import os
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import msgspec

from cache.fill import control, protocol, worker, worker_pool
from cache.fill.agent import Ended
from cache.fill.opened import OpenGeneration
from cache.fill.protocol import Commit, Copy, Extents, Finish, Phase, Scan, Whole
from cache.fill.worker_pool import Assignment
from cache.store import index, manifest, tree
from cache.store.subset import NOTHING, Amount
from ceph.protocol import Access

# A worker that neither lists nor reads anything for this long hangs in its source: it is killed,
# and what it hung in is recorded. Less than half of what the agent gives a whole pass.
HANG_SECONDS = 25.0
HANGS = f"the source gave no answer within {HANG_SECONDS:g}s"
LOOK_SECONDS = 1.0  # between two looks for workers that hang

COPIES = (Copy, Extents, Whole)  # jobs after which something is to be committed
STORING = (Copy, Scan, protocol.Fetch)  # jobs whose ``Assignment`` says what they take at most

# What is copied and not committed yet, and when it is committed.

# A batch is committed when it has this much, or is this old. One syncfs costs 5-100 ms.
BATCH_FILES = 4096
BATCH_BYTES = 256 * 1024 * 1024
BATCH_SECONDS = 1.0


@dataclass
class Staged:
    """A folder of the staging directory: copied and not committed."""

    folder: str
    directory: int
    chunk: index.Chunk | None = None  # None: a replacement, which counts nowhere
    files: int = 0
    bytes: int = 0
    allocated: int = 0
    failed: list[protocol.Failure] = field(default_factory=list)
    links: list[protocol.Link] = field(default_factory=list)
    left: set[str] = field(default_factory=set)  # names of the chunk that were not copied
    kept: list[manifest.Item] = field(default_factory=list)  # what became of the entries
    silent: set[str] = field(default_factory=set)  # names that are copied after all others
    part: str = ""  # instead of a folder: a large file, by its key
    name: str = ""  # of that file


def kept_of(job: Copy, answer: protocol.Copied) -> list[manifest.Item]:
    """What the manifest keeps of a copy: what is left comes with another one."""
    left, failed = set(answer.left), {failure.name for failure in answer.failed}
    newer = {item.name: item for item in answer.newer}
    sums = (
        answer.sums[at : at + protocol.SUM].strip()
        for at in range(0, len(answer.sums), protocol.SUM)
    )
    return [
        manifest.Item(
            newer.get(item.name, item),
            manifest.State.AT_SOURCE if item.name in failed else manifest.State.STORED,
            checksum,
        )
        for item, checksum in zip(job.entries, sums, strict=True)
        if item.name not in left
    ]


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


class Pass(ABC):
    """What one kind of pass decides. Called by the coordinator only, in its one thread."""

    @property
    @abstractmethod
    def phase(self) -> Phase:
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
    def counts(self) -> manifest.Counts: ...

    @abstractmethod
    def end(self, ended: Ended) -> protocol.End:
        """The last report. Also saves what the next pass needs."""

    def placed(self, staged: list[Staged]) -> None:
        """These are in the tree (inside the transaction that counts them)."""
        return

    @property
    def begun(self) -> Amount:
        """What files will take that are copied by more than one job."""
        return NOTHING

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


class Coordinator(OpenGeneration):
    """Runs a pass: workers, commits, room on the SSD."""

    def __init__(self, task: protocol.Task, access: Access | None = None) -> None:
        """``access``: for native reads."""
        super().__init__(task)
        # Each native worker has many reads in flight; more workers would only contend.
        self._most_workers = (os.cpu_count() or 1) + 1 if access else control.MOST_WORKERS
        fill = task if isinstance(task, protocol.FillTask) else None
        setup = protocol.Setup(
            source=task.source, stamp=task.stamp, generation=task.generation,
            immutable=task.immutable, native=access,
            before=fill.before if fill else "", before_made_ns=fill.before_made_ns if fill else 0,
        )  # fmt: skip
        self.pool = worker_pool.WorkerPool(self.page, setup, worker.serve)
        self.batch = Batch()
        self._looked = 0.0
        self._gave_up = 0  # workers that were killed in a row, without progress in between
        self._moved: tuple[int, ...] = ()
        self._pass: Pass

    # --- the loop

    def run(self, decides: Pass) -> protocol.End:
        """To the end of the pass."""
        self.start(decides)
        self.pool.watch(0)
        try:
            while True:
                self.step()
        except Ended as ended:
            self._report()
            return decides.end(ended)
        except worker_pool.PoolError as error:
            raise Ended("failed", str(error)) from error
        finally:
            self.pool.stop()
            self.index.close()

    def start(self, decides: Pass) -> None:
        self._pass = decides
        self.unplaced = lambda: decides.unplaced
        self._set_limits()

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
                if self.agent.obey():
                    self._set_limits()
            elif event.answer is None:
                self._lost(event.member)
            else:
                self._answered(event.member, event.answer)
        self._replace_hanging()
        if self.agent.waits:
            self._report()

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
        seals = [] if self.page.cancelled else self._pass.seals()
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
            protocol.Listed(d.id, self.index.path(d.id), d.entries, d.attributes.mtime_ns)
            for d in map(known, seals)
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
            self.agent.commits += 1
        self.batch.committing = []
        self.totals = self.index.totals()
        stored = sum(each.allocated for each in kept), sum(each.files for each in kept)
        self.usage.add(Amount(*stored))

    # --- space

    def room(self, *, inodes: int) -> Amount:
        """What may still be stored, with ``inodes`` more about to be used."""
        jobs, staged = self.pool.assigned(*STORING), self.batch.all()
        in_staging = sum(each.allocated for each in staged if not each.part)
        # It may be counted already.
        pending = self._pass.begun + Amount(
            sum(each.allocated for each in jobs) + in_staging,
            sum(each.inodes for each in jobs) + sum(s.files for s in staged) + inodes,
        )
        return (self.balance() - pending).at_least(NOTHING)

    @property
    def copies_in_flight(self) -> bool:
        """While copies are in flight their space is over-estimated and briefly counted twice."""
        return bool(self.pool.assigned(*STORING) or self.batch.all())

    # --- the agent

    def _set_limits(self) -> None:
        limits = self.agent.limits
        self._workers = min(limits.workers, self._most_workers)
        share = max(1, self._workers)
        self.page.set_limits(limits.bytes_per_second / share, limits.files_per_second / share)
        self.pool.resize(self._workers)

    def _report(self) -> None:
        counts = self._pass.counts()  # may bring the totals up to date
        self.agent.phase = self._pass.phase
        self.agent.report(
            counts, self.used(), sealed=self.totals.sealed, shared=self.shared.bytes,
            syncing=bool(self.pool.assigned(Commit, Finish)),
        )  # fmt: skip


def failed_by(assignment: Assignment, failure: protocol.NotDone) -> Ended:
    """The end of a pass that cannot go on without this job."""
    if failure.errno in (errno.ENOSPC, errno.EDQUOT) and not isinstance(
        assignment.job, Commit | Finish
    ):
        return Ended("failed", "the disk is full")
    return Ended("failed", f"{type(assignment.job).__name__.lower()}: {failure.error}")
