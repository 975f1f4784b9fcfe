"""The fill pass: copies a source into the tree, as far as it goes.

It works in three steps that overlap. *Scan*: list each directory and make its subdirectories; when
all are made the skeleton is complete, and the agent can publish an overlay. *Copy*: the files of
listed directories, in chunks; a large file in extents beside them (``cache.fill.large_files``).
*Seal*: mark a directory opaque when everything in and below it is stored. The pass ends complete
when the root is sealed, or partial with the reason.

A fill that continues an earlier one (``look_in_tree``) scans again what is not listed and counts
what the tree has already, so that no file is copied twice. Before such a generation is called
complete, every seal is checked in the tree, because after a power cut the index may claim more than
the disk has.
"""

import errno
import os
import time

import kit.files
import kit.units
from cache.fill import agent, closing, coordinator, large_files, opened, protocol
from cache.fill.agent import Ended
from cache.fill.coordinator import COPIES, HANGS, Coordinator, Pass, Staged
from cache.fill.protocol import Copy, Extents, Scan, Whole
from cache.fill.worker_pool import Assignment
from cache.store import generations, index, large, manifest, published, subset, tree
from cache.store.subset import Amount
from cache.store.tree import Entry
from ceph import native

# What a fill does again: directories in which something failed, and seals of an earlier pass.
#
# After a power cut the index may claim more than the disk has, so a generation that an earlier pass
# filled is called complete only when every seal was found in the tree.

RECHECKS_IN_A_JOB = 256
MOST_RESCANS = 2
RESCAN_SECONDS = 1.0


class Retries:
    """Those of one pass. Part of its one thread."""

    def __init__(self, run: Coordinator, decides: Pass) -> None:
        self._index = run.index
        self._pool = run.pool
        self._pass = decides
        self._not_before = 0.0
        self._rechecked_to: int | None = None  # the last directory whose seal was checked

    def check_seals(self) -> None:
        """Seals were made before this pass."""
        self._rechecked_to = 0

    def failures(self) -> bool:
        """Whether something is left to try again, after a short wait."""
        again = self._index.retriable(MOST_RESCANS)
        if not again:
            return False
        if self._not_before == 0.0:
            self._not_before = time.monotonic() + RESCAN_SECONDS
        elif time.monotonic() >= self._not_before:
            self._not_before = 0.0
            with self._index.transaction():
                for number in again:
                    self._pass.incomplete(number)
        return True

    def end(self) -> None:
        """Everything is sealed: check the seals, then finish, each when the committer is idle."""
        committer = self._pool.committer
        if committer is None:
            return
        numbers = self._next_seals()
        if not numbers:
            self._pool.give(committer, Assignment(protocol.Finish()))
            return
        found = [self._index.directory(number) for number in numbers]
        listed = [protocol.Listed(d.id, self._index.path(d.id), d.entries) for d in found]
        self._pool.give(committer, Assignment(protocol.Recheck(directories=listed)))

    def _next_seals(self) -> list[int]:
        if self._rechecked_to is None:
            return []
        numbers = self._index.known_directories(self._rechecked_to, RECHECKS_IN_A_JOB, listed=True)
        if not numbers:
            self._rechecked_to = None
        return numbers

    def rechecked(self, job: protocol.Recheck, answer: protocol.Rechecked) -> None:
        self._rechecked_to = job.directories[-1].directory
        with self._index.transaction():
            for number in answer.missing:
                self._index.unseal(number)
                self._pass.incomplete(number)


# When a pass stops to ask a source that gives nothing any more.
#
# One silent object costs only itself: it is put off, waited for at the end, and recorded. But when
# no object answers at all, waiting for each of them would hold up other datasets for days.

# Entries in a row that were silent, with no file copied in between.
MOST_SILENT = 1024
# A chunk that was waited for patiently counts as this many.
_PATIENT = 100


class Silence:
    """What was heard of objects since the last one that answered."""

    def __init__(self) -> None:
        self._row = 0

    def heard(self, answer: protocol.Copied, *, patient: bool) -> None:
        """The answer to a copy."""
        if answer.files:
            self._row = 0
        elif patient and answer.failed:
            self._row += _PATIENT
        else:
            self._row += len(answer.silent)

    @property
    def lasts(self) -> bool:
        """Nothing more is asked for in this pass."""
        return self._row >= MOST_SILENT


# A published manifest (``cache.store.published``) tells what directories have.
#
# A worker reads the file first; then directories are taken from it instead of being listed at the
# source. Whatever is wrong with it is said once, and directories are listed from then on. So is a
# directory in which something failed: what the manifest said of it was not so.

MOST_TRIES = 2  # workers that may die of it


class Published:
    """Of one pass. Part of its one thread."""

    def __init__(self, run: Coordinator, task: protocol.FillTask) -> None:
        self._run = run
        self._manifest = task.manifest
        self._tries = 0
        self.waits = False  # it is being read: no directory is listed meanwhile
        self.ready = False
        self.used: int  # SSD bytes that it takes until the pass ends
        self.end()
        if task.native is not None and not native.available():
            self.refuse("this host lacks Ceph's bindings", "install python3-rados, libcephfs2")

    def assignment(self) -> Assignment | None:
        """To read the file, before the first directory is listed."""
        if self._manifest is None or self.ready or self.waits or self._tries >= MOST_TRIES:
            return None
        self._tries += 1
        self.waits = True
        # The other half is for what is copied meanwhile.
        allowance = self._run.room(inodes=1).bytes // 2
        job = protocol.Fetch(manifest=self._manifest, allowance=allowance)
        return Assignment(job, allocated=allowance, inodes=1)

    def fetched(self, answer: protocol.Fetched) -> None:
        self.waits = False
        if answer.why:
            self.refuse(answer.why, answer.remedy)
            return
        self.ready, self.used = True, answer.bytes
        self._run.note(f"{answer.directories} directories are taken from {self._manifest}")

    def forget(self, job: protocol.Job) -> None:
        """The job was cancelled or its worker died."""
        if isinstance(job, protocol.Fetch):
            self.waits = False

    def gave_up(self, job: protocol.Job) -> None:
        """The worker of the job hung and was killed."""
        if isinstance(job, protocol.Fetch):
            self.refuse(HANGS, "see 'ceph health detail'")

    def refuse(self, why: str, remedy: str = "publish it again") -> None:
        """It is not used any more."""
        if self._manifest is not None:
            text = f"the manifest {self._manifest} is not used: {why}"
            self._run.note(f"{text}; directories are listed instead. Remedy: {remedy}")
        self._manifest, self.waits, self.ready = None, False, False

    def doubt(self, directory: int) -> None:
        """Something of what is listed there could not be copied, or the directory itself is not so.

        Whether that is the manifest's fault is not known, so it tells nothing more.
        """
        if self.ready:
            where = "/".join(self._run.index.path(directory)) or "its root"
            self.refuse(f"something in {where!r} is not as it says, or cannot be read")

    def concerns(self, job: protocol.Job, failure: protocol.NotDone) -> bool:
        """Whether a failed job was about it; then it is not used any more."""
        broken = isinstance(job, protocol.Scan) and job.published and failure.errno == errno.EBADMSG
        if broken or isinstance(job, protocol.Fetch):
            self.refuse(failure.error)
        return broken or isinstance(job, protocol.Fetch)

    def end(self) -> None:
        self.used = 0
        (self._run.generation / published.HELD).unlink(missing_ok=True)


# Which files are copied: all, or those of the dataset's share (``cache.store.subset``).


class Kept:
    """Positions follow from the sum of all sizes, so a share counts when all is listed."""

    def __init__(self, run: Coordinator, share: int) -> None:
        self._run = run
        self._share = share
        self._positions: subset.Positions | None = None
        self.short = False  # something that is to be kept did not fit

    @property
    def partly(self) -> bool:
        """Not all files are kept."""
        return self._share < subset.ALL

    def of(self, chunk: index.Chunk) -> list[Entry]:
        """The entries of a chunk that are copied."""
        if not self.partly:
            return chunk.entries
        if self._positions is None:
            self._positions = self._run.positions()
        path = self._run.index.path(chunk.directory)
        inside = self._run.index.directory(chunk.directory).inside
        at = self._positions.of(path, inside, chunk.entries)
        pairs = zip(chunk.entries, at, strict=True)
        return [entry for entry, position in pairs if position < self._share]


SEALS_IN_A_BATCH = 2048
# SSD bytes. With less room than this the pass does not look for files that still fit.
SMALLEST = 4096
DIRECTORY = 4096 + 512  # SSD bytes of a new one, with its name in the one above
LEAST_ALLOWANCE = 4096  # directories that one listing may make, while there is so much room
MOST_SHOWN = 200  # characters of a path
PASSING_SECONDS = 0.2  # to pass over chunks before answers are looked at again


class FillPass(Pass):
    may_hang = (Scan, Copy, Extents, Whole, protocol.Fetch)

    def __init__(self, run: Coordinator, task: protocol.FillTask) -> None:
        self.run = run
        self.index = run.index
        self.pool = run.pool
        self.immutable = task.immutable
        self.kept = Kept(run, task.share)
        self.mounted: dict[tuple[str, ...], list[str]] = {}
        for path in task.mounted:
            parts = tuple(path.split("/"))
            self.mounted.setdefault(parts[:-1], []).append(parts[-1])
        self.look_in_tree = not run.tree_was_empty  # scans count what the tree has already
        # The listing of each directory, a number never used before.
        self.scanning: dict[int, int] = {}
        self.copying: set[int] = set()
        self.chunks: list[int] = []  # chunks to copy next
        self.full = False  # no room for more files
        self.no_room = False  # no room for directories either
        self.skeleton = False  # every directory is in the tree
        self.silence = Silence()
        self.large = large_files.LargeFiles(run, self._large_fits)
        self.objects = 0  # files that were read past the mount
        self._large_was_last = False
        self._closing: closing.Closing | None = None
        self.retries = Retries(run, self)
        self.published = Published(run, task)
        if self.look_in_tree:
            self.retries.check_seals()
            # The index may be new, or an earlier pass was killed while it listed again.
            run.usage.at_least(run.totals, Amount(task.used - self.large.used, task.inodes))
        with self.index.transaction():
            for number in self.index.try_again():
                run.list_again(number)

    @property
    def phase(self) -> protocol.Phase:
        return "filling" if self.skeleton else "scanning"

    @property
    def busy(self) -> set[int]:
        staged = {s.chunk.id for s in self.run.batch.all() if s.chunk}
        return self.copying | staged | self.large.chunks

    @property
    def begun(self) -> Amount:
        return self.large.pending

    @property
    def unplaced(self) -> int:
        return self.large.used + self.published.used

    def placed(self, staged: list[Staged]) -> None:
        for each in staged:
            self.large.committed(each)

    def next_assignment(self) -> Assignment | None:
        if self.run.page.cancelled:
            return None
        return self._scan_assignment() or self._copying_assignment()

    def _copying_assignment(self) -> Assignment | None:
        """Large files and chunks of small ones have half of the workers each, if there are both."""
        large_ones = len(self.pool.assigned(Extents, Whole))
        small_ones = len(self.pool.assigned(Copy))
        self._large_was_last = large_ones > small_ones or (
            large_ones == small_ones and not self._large_was_last
        )
        if self._large_was_last:
            return self.copy_assignment() or self._large_assignment()
        return self._large_assignment() or self.copy_assignment()

    def _large_assignment(self) -> Assignment | None:
        if self._takes_no_more:
            return None
        return self.large.assignment(self.busy, waits=self._may_have_room)

    @property
    def _may_have_room(self) -> bool:
        """There may be more room than it seems: what is listed or copied is over-estimated."""
        return self.run.copies_in_flight or not (self.skeleton or self.no_room)

    # --- scan

    def _scan_assignment(self) -> Assignment | None:
        if self.skeleton or self.no_room:
            return None
        # A directory that is listed again waits until its chunks are committed: what the
        # tree has is counted by the listing or by them, not by both.
        taken = self.scanning.keys() | {each.directory for each in self.pool.assigned(*COPIES)}
        taken |= {staged.directory for staged in self.run.batch.all()}
        waiting = [n for n in self.index.found(len(taken) + 1) if n not in taken]
        if not waiting:
            if not self.scanning and not self.index.found(1):
                self.skeleton = True
                self.run.all_listed()
                agent.say(protocol.Report(skeleton=True))
            return None
        if (reading := self.published.assignment()) or self.published.waits:
            return reading
        left = self.run.room(inodes=0)
        room = min(left.bytes // DIRECTORY, left.inodes)
        if not room:
            if self.run.copies_in_flight:  # listings, too: what they may make is counted as made
                return None
            if not self.look_in_tree:
                self.no_room = True
                return None
        # Without room a directory can still be listed again: it has its subdirectories.
        self.run.page.set_no_room(not room)
        allowance = min(room, max(LEAST_ALLOWANCE, room // 8))
        number = waiting[0]
        path = self.index.path(number)
        with self.index.transaction():
            self.run.list_again(number)
        self.chunks = []
        self.scanning[number] = time.time_ns()
        rescanned = self.index.directory(number).rescans > 0
        job = Scan(
            directory=number, path=path, mounted=self.mounted.get(tuple(path), []),
            again=self.look_in_tree,
            extras=self.look_in_tree and (not self.immutable or rescanned),
            published=self.published.ready and not rescanned, allowance=allowance,
        )  # fmt: skip
        size = allowance * DIRECTORY
        return Assignment(job, directory=number, allocated=size, inodes=allowance)

    def _scanned_part(self, part: protocol.ScanPart) -> None:
        number = part.directory
        listing = self.scanning[number]
        with self.index.transaction():
            if part.location:
                self.index.locate(number, part.location)
            if part.folders:
                self.index.add_directories(number, part.folders, listing)
            if part.unmade:
                self.index.saw(number, part.unmade, listing)
            if part.chunk:
                self.index.add_chunk(number, part.chunk)
            self.index.keep(
                number, [manifest.Item(e, manifest.State.STORED, s) for e, s in part.stored]
            )
            for name, reason, lasting, _ in part.failed:
                self.index.fail(number, name, reason, lasting=lasting)
        self._end_if_refused(number, part.failed)
        if part.made:
            self.run.usage.add(Amount(part.made, part.new))
            if not self.run.balance().holds(4096, 1):  # others fill the disk, or a budget fell
                self.run.page.set_no_room(True)

    def _scanned(self, job: Scan, answer: protocol.Scanned) -> None:
        listing = self.scanning.pop(job.directory)
        self.run.note_once(answer.note)
        with self.index.transaction():
            if self.look_in_tree:
                self.index.drop_vanished(job.directory, listing)
            had = answer.stored
            self.index.listed(
                job.directory, entries=answer.entries, files=answer.files, size=answer.bytes,
                stored=(had.files, had.bytes, had.allocated), skipped=answer.skipped,
                outside=(answer.outside, answer.leads_out),
            )  # fmt: skip
            self.run.found_shared(job.directory, had)

    # --- copy

    @property
    def _takes_no_more(self) -> bool:
        """No more files are copied in this pass."""
        return self.full or self.silence.lasts

    def copy_assignment(self) -> Assignment | None:
        until = time.monotonic() + PASSING_SECONDS
        passed = True
        while passed and not self._takes_no_more and time.monotonic() < until:
            assignment, passed = self._next_copy()
            if assignment is not None:
                return assignment
        return None

    def _next_copy(self) -> tuple[Assignment | None, bool]:
        """Chunks to copy now, if any; whether a chunk was passed over and the next may fit."""
        if not self.chunks:
            taken = self.busy
            ahead = self.index.next_chunks(len(taken) + 64)
            self.chunks = [number for number in ahead if number not in taken]
        if not self.chunks:
            return None, False
        chunk = self.index.chunk(self.chunks[0])
        if chunk is None:  # its directory is listed again
            self.chunks = []
            return None, False
        if self.kept.partly and not (self.skeleton or self.no_room):
            return None, False  # positions follow from what all files have together
        wanted = self.kept.of(chunk)
        if any(map(large.is_large, wanted)):
            self.chunks = []
            self.large.found(chunk)
            return None, True
        items, size = self.run.room(inodes=0).fitting(wanted, [item.allocated for item in wanted])
        if len(items) < len(wanted) and self._may_have_room:
            return None, False
        self.chunks.pop(0)
        self.kept.short |= len(items) < len(wanted)
        if not items:
            self._pass_over(chunk, wanted)
            return None, True
        self.copying.add(chunk.id)
        job = Copy(
            folder=str(chunk.id), path=self.index.path(chunk.directory), entries=items,
            location=self.index.directory(chunk.directory).location,
            patient=chunk.priority == index.SILENT,
        )  # fmt: skip
        return Assignment(
            job, directory=chunk.directory, allocated=size, inodes=len(items), chunk=chunk,
        ), False  # fmt: skip

    def _end_if_refused(self, directory: int, failed: list[protocol.Failure]) -> None:
        """One file that root may not open is enough to know: jobs would lose it to an overlay,
        which opens files of the source as root."""
        for name, reason, _, refused in failed:
            if refused:
                with self.index.transaction():
                    self.index.fail(directory, name, reason, lasting=True)
                self._end_for_source("refused", [*self.index.path(directory), name], reason)

    def _end_for_source(self, result: str, path: list[str], reason: str = "") -> None:
        self.run.totals = self.index.totals()
        why = repr("/".join(path) or ".")
        raise Ended(result, f"{why} ({reason})" if reason else why)

    def _large_fits(self, chunk: index.Chunk, present: int) -> int | None:
        cost = chunk.entries[0].allocated
        room = self.run.room(inodes=0)
        return cost if room.fitting(chunk.entries, [max(0, cost - present)])[0] else None

    def _pass_over(self, chunk: index.Chunk, wanted: list[Entry]) -> None:
        """Nothing of it fits. Smaller files of other chunks may, unless hardly any room is left."""
        if not wanted or self.run.room(inodes=0).holds(SMALLEST, 1):
            with self.index.transaction():
                self.index.set_priority(chunk.id, index.NO_ROOM)
        else:
            self.full = True

    def _copied(self, assignment: Assignment, job: Copy, answer: protocol.Copied) -> None:
        chunk = assignment.chunk
        assert chunk is not None
        self.copying.discard(chunk.id)
        self.run.note_once(answer.note)
        self.objects += answer.objects
        silent = set(answer.silent)
        self.silence.heard(answer, patient=job.patient)
        self._end_if_refused(chunk.directory, answer.failed)
        given = {item.name for item in job.entries}
        if answer.full:
            self.full = True
        self.run.batch.add(
            Staged(
                job.folder,
                chunk.directory,
                chunk,
                files=answer.files,
                bytes=answer.bytes,
                allocated=answer.allocated,
                failed=answer.failed,
                links=answer.links,
                left={item.name for item in chunk.entries} - given | set(answer.left) - silent,
                kept=coordinator.kept_of(job, answer),
                silent=silent,
            )
        )

    # --- answers

    def take(self, assignment: Assignment, answer: protocol.Answer) -> None:
        match assignment.job, answer:
            case _, protocol.ScanPart():
                self._scanned_part(answer)
            case Scan() as job, protocol.Scanned():
                self._scanned(job, answer)
            case Copy() as job, protocol.Copied():
                self._copied(assignment, job, answer)
            case Extents() as job, protocol.ExtentsCopied():
                self.run.note_once(answer.note)
                if answer.failed is not None:
                    self._end_if_refused(self.index.find(job.path) or index.ROOT, [answer.failed])
                self.full |= answer.full
                self.large.copied(job, answer)
            case Whole() as job, protocol.Completed():
                self.large.whole(job, answer)
            case _, protocol.Fetched():
                self.published.fetched(answer)
            case protocol.Recheck() as job, protocol.Rechecked():
                self.retries.rechecked(job, answer)
            case protocol.Finish(), protocol.Done():
                self.run.totals = self.index.totals()
                raise Ended("complete")
            case _:
                raise Ended("failed", f"unexpected answer {type(answer).__name__}")

    def failed(self, assignment: Assignment, failure: protocol.NotDone) -> None:
        job = assignment.job
        if isinstance(job, Scan | Copy | Extents | Whole):
            if failure.refused:
                self._end_for_source("refused", job.path, failure.error)
            if failure.errno == errno.EXDEV:
                self._end_for_source("crossed", job.path)
        if isinstance(job, Extents | Whole):
            self.large.failed(job, failure.error)
            return
        self.forget(assignment)
        if self.published.concerns(job, failure):
            return  # directories are listed from here on
        if failure.errno in (errno.ENOSPC, errno.EDQUOT):
            if isinstance(job, Scan):
                # The page told it to stop. Once the copies in flight are counted there may be room.
                self.no_room = not (self.run.page.no_room and self.run.copies_in_flight)
            else:
                self.full = True
        elif isinstance(job, Scan):
            self._scan_failed(job.directory, failure.error)
        elif isinstance(job, Copy):  # its directory cannot be opened any more
            with self.index.transaction():
                self.incomplete(assignment.directory)

    def gave_up(self, assignment: Assignment, at: int) -> None:
        job = assignment.job
        if isinstance(job, Extents | Whole):
            self.large.hung(job, at, HANGS)
            return
        self.forget(assignment)
        self.published.gave_up(job)
        if isinstance(job, Scan):
            self._scan_failed(job.directory, HANGS, lasting=True)
        elif isinstance(job, Copy) and assignment.chunk is not None:
            chunk, hangs = assignment.chunk, job.entries[min(at, len(job.entries) - 1)]
            left = [item for item in chunk.entries if item.name != hangs.name]
            with self.index.transaction():
                self.index.fail(chunk.directory, hangs.name, HANGS, lasting=True)
                self.index.committed(chunk, 0, 0, 0, 1, left)
                self.index.keep(chunk.directory, [manifest.Item(hangs, manifest.State.AT_SOURCE)])
            self.chunks = []

    def _scan_failed(self, number: int, why: str, *, lasting: bool = False) -> None:
        self.published.doubt(number)
        with self.index.transaction():
            self.run.list_again(number)
            self.index.fail(number, ".", f"cannot be listed: {why}", lasting=lasting)
            self.index.listed(number, entries=0, files=0, size=0, stored=(0, 0, 0), skipped=0)
            directory = self.index.directory(number)
            parent = directory.parent
            may_rescan = directory.rescans < MOST_RESCANS and not lasting
            if parent is not None and parent not in self.scanning and may_rescan:
                self.run.list_again(parent)  # the directory may be gone from it
                self.skeleton = False
        if number == index.ROOT:
            raise Ended("failed", f"the root of the source cannot be listed: {why}")

    def forget(self, assignment: Assignment) -> None:
        job = assignment.job
        if isinstance(job, Extents | Whole):
            self.large.forget(job)
        self.published.forget(job)
        if isinstance(job, Copy):
            self.run.discard_staged(job.folder)
        if isinstance(job, Scan):
            self.scanning.pop(job.directory, None)
            self.look_in_tree = True
            self.chunks = []  # the next scan makes other chunks
        if assignment.chunk is not None:
            self.copying.discard(assignment.chunk.id)

    # --- seal, check again, end

    def seals(self) -> list[int]:
        # Below a mark nothing could be evicted without a new overlay.
        return [] if self.kept.partly else self.index.sealable(SEALS_IN_A_BATCH)

    def end_if_done(self) -> None:
        if self.run.page.cancelled:
            raise Ended("cancelled")
        if not self.skeleton and not self.no_room:
            return
        if not self._takes_no_more and not self.no_room:
            if self.index.next_chunks(1) or self.index.large(1) or self.seals():
                return
            if self.index.directory(index.ROOT).state == index.SEALED:
                self.retries.end()
                return
            if self.retries.failures():
                return
        # What lacks room is chosen anew, and then files go for which marks would have to go again.
        if not self._short and not self._closed():
            return
        self.run.totals = self.index.totals()
        files, size = self.index.left()
        if self.silence.lasts and files:
            raise Ended("partial", f"{files} files are left: objects of the source do not answer")
        if self.full or self.no_room or files:
            what = f"{files} files, {kit.units.format_size(size)}" if files or self.skeleton else ""
            if not self.skeleton:
                what += f"{' and ' if what else ''}directories that are not listed yet"
            why = self.run.tightest(Amount(max(size, SMALLEST), max(files, 1)))
            raise Ended("partial", f"no room for {what}: {why}")
        raise Ended("partial", _failed(self.run))

    def _closed(self) -> bool:
        """Close what is whole by itself; whether all is done."""
        self._closing = self._closing or closing.Closing(self.run)
        return self._closing.step()

    @property
    def _short(self) -> bool:
        """Something that is to be kept did not fit."""
        return self.kept.short or self.large.short or self.full or self.no_room

    def incomplete(self, number: int) -> None:
        """List a directory and its parent again: what failed may have changed or gone.

        After ``retries.MOST_RESCANS`` in one pass the directory is a failure instead.
        """
        directory = self.index.directory(number)
        self.published.doubt(number)
        self.chunks = []
        if directory.rescans >= MOST_RESCANS:
            self.index.fail(
                number, ".", "it differs from the source after several tries", lasting=True
            )
            self.index.count_failure(number)
            return
        self.index.count_rescan(number)
        for each in (number, directory.parent):
            if each is not None and each not in self.scanning:
                self.run.list_again(each)
        self.skeleton = False
        self.look_in_tree = True

    # --- reports

    def counts(self) -> manifest.Counts:
        if not self.skeleton:
            self.run.totals = self.index.totals()
        return self.run.totals

    def end(self, ended: Ended) -> protocol.End:
        for count, what in (self.objects, "files"), (self.large.objects, "extents of large files"):
            self.run.note_once(f"{count} {what} were read past the mount" if count else "")
        self.published.end()
        short = self._short
        room = 0 if short else self.run.room(inodes=1).bytes
        return protocol.End(ended.result, ended.why, fill=self.run.left(room=room, short=short))


def _failed(run: Coordinator) -> str:
    """How many entries could not be copied, and one of them."""
    count = run.totals.failed
    text = f"{count} {'entry' if count == 1 else 'entries'} could not be copied"
    for number, name, reason in run.index.failures(1):
        path = tree.shown([*run.index.path(number), name])
        text += f"{', as' if count > 1 else ':'} {path[:MOST_SHOWN]} ({reason})"
    return text


def begin(task: protocol.FillTask) -> tuple[Coordinator, FillPass]:
    """A pass that is ready to run, the root of its tree with the attributes of the source's root.

    OSError when there is no source, ESHUTDOWN when it is another one, EBUSY while bad files are in
    the tree: the fill would take them for good ones and seal them.
    """
    if generations.has_quarantined(task.generation):
        raise OSError(errno.EBUSY, "bad files that a verify found must be withdrawn first")
    with kit.files.closing(tree.open_source(task.source, task.stamp)) as source:
        root = tree.entry_of("", os.fstat(source))
        access = task.native if native.available() else None
        run = Coordinator(task, access)
        decides = FillPass(run, task)
        run.index.add_root(root)
        with tree.opened_root(run.generation / "tree") as top:
            tree.set_attributes(top, root, source)
        return run, decides


def main() -> None:
    opened.serve(protocol.FillTask, lambda task: Coordinator.run(*begin(task)))
