"""The fill pass: copies a source into the tree, as far as it goes.

It works in three steps that overlap. *Scan*: list each directory and make its subdirectories; when
all are made the skeleton is complete, and the agent can publish an overlay. *Copy*: the files of
listed directories, in chunks; a hint of a reader is copied ahead of its chunk. *Seal*: mark a
directory opaque when everything in and below it is stored. The pass ends complete when the root is
sealed, or partial with the reason.

A fill that continues an earlier one (``look_in_tree``) scans again what is not listed and counts
what the tree has already, so that no file is copied twice. Before such a generation is called
complete, every seal is checked in the tree, because after a power cut the index may claim more than
the disk has.
"""

import dataclasses
import errno
import os
import time

import kit.files
from cache.fill import coordinator, protocol, worker
from cache.fill.coordinator import Ended, Staged
from cache.fill.protocol import Copy, Hint, Scan
from cache.fill.worker_pool import Assignment
from cache.store import generations, index, tree
from cache.store.tree import Entry
from ceph import native

SEALS_IN_A_BATCH = 2048
RECHECKS_IN_A_JOB = 256
MOST_RESCANS = 2
RESCAN_SECONDS = 1.0
HINTS_IN_FLIGHT = 4
# SSD bytes for one hint. A larger file is not copied ahead: its directory is preferred instead.
HINT_BYTES = 64 * 1024 * 1024
# What waits in the queue of hints: directories (older hints say less), and names of one directory.
MOST_HINTS = 256
MOST_HINTED_NAMES = 64


class FillPass(coordinator.Pass):
    def __init__(self, run: coordinator.Coordinator, task: protocol.FillTask) -> None:
        self.run = run
        self.index = run.index
        self.pool = run.pool
        self.immutable = task.immutable
        self.mounted: dict[tuple[str, ...], list[str]] = {}
        for path in task.mounted:
            parts = tuple(path.split("/"))
            self.mounted.setdefault(parts[:-1], []).append(parts[-1])
        self.look_in_tree = not run.tree_was_empty  # scans count what the tree has already
        self.scanning: set[int] = set()
        self.copying: set[int] = set()
        self.chunks: list[int] = []  # chunks to copy next
        self.full = False  # no room for more files
        self.cramped = False  # no room for directories either
        self.skeleton = False  # every directory is in the tree
        self.hints = HintQueue()
        self.hinted = self.index.any_ahead()
        self._no_rescan_before = 0.0
        # The last directory whose seal was checked; None when nothing is to be checked.
        self._rechecked_to = 0 if self.look_in_tree else None
        if self.look_in_tree:
            # The index may be new, or an earlier pass was killed while it listed again.
            run.count_at_least(task.used)
        with self.index.transaction():
            # A new pass tries again what failed in the last one.
            self.index.reset_rescans()
            for number in self.index.failing():
                run.list_again(number)

    @property
    def phase(self) -> str:
        return "filling" if self.skeleton else "scanning"

    def next_assignment(self) -> Assignment | None:
        if self.run.cancelled:
            return None
        return self.hint_assignment() or self._scan_assignment() or self.copy_assignment()

    # --- scan

    def _scan_assignment(self) -> Assignment | None:
        if self.skeleton or self.cramped:
            return None
        # A directory that is listed again waits until its chunks and hints are committed: what the
        # tree has is counted by the listing or by them, not by both.
        taken = self.scanning | {each.directory for each in self.pool.assigned(Copy, Hint)}
        taken |= {staged.directory for staged in self.run.batch.all()}
        waiting = [n for n in self.index.found(len(taken) + 1) if n not in taken]
        if not waiting:
            if not self.scanning and not self.index.found(1):
                self._skeleton_complete()
            return None
        room = self.run.room(inodes=1).holds(4096, 1)
        if not room:
            if self.run.copies_in_flight:
                return None
            if not self.look_in_tree:
                self.cramped = True
                return None
        # Without room a directory can still be listed again: it has its subdirectories.
        self.run.page.set_cramped(not room)
        number = waiting[0]
        path = self.index.path(number)
        with self.index.transaction():
            self.run.list_again(number)
        self.chunks = []
        self.scanning.add(number)
        rescanned = self.index.directory(number).rescans > 0
        job = Scan(
            directory=number, path=path, mounted=self.mounted.get(tuple(path), []),
            again=self.look_in_tree,
            extras=self.look_in_tree and (not self.immutable or rescanned),
        )  # fmt: skip
        return Assignment(job, directory=number)

    def _skeleton_complete(self) -> None:
        self.skeleton = True
        self.run.all_listed()
        self.run.agent.say(protocol.Report(skeleton=True))

    def _scanned_part(self, part: protocol.ScanPart) -> None:
        number = part.directory
        with self.index.transaction():
            if part.location:
                self.index.locate(number, part.location)
            if part.folders:
                self.index.add_directories(number, part.folders)
            if part.chunk:
                self.index.add_chunk(number, part.chunk)
            for name, reason, lasting in part.failed:
                self.index.fail(number, name, reason, lasting=lasting)
        if part.made:
            self.run.count_added(part.made)
            if not self.run.room(inodes=1).holds(4096, 1):
                self.run.page.set_cramped(True)

    def _scanned(self, job: Scan, answer: protocol.Scanned) -> None:
        self.scanning.discard(job.directory)
        with self.index.transaction():
            if self.look_in_tree:
                self.index.drop_vanished(job.directory, set(answer.folders))
            if job.again:
                self.index.none_ahead(job.directory)
            self.index.listed(
                job.directory, entries=answer.entries, files=answer.files, size=answer.bytes,
                stored=dataclasses.astuple(answer.stored), skipped=answer.skipped,
            )  # fmt: skip

    # --- copy

    def copy_assignment(self) -> Assignment | None:
        if self.full:
            return None
        if not self.chunks:
            taken = self.copying | {s.chunk.id for s in self.run.batch.all() if s.chunk}
            ahead = self.index.next_chunks(len(taken) + 64)
            self.chunks = [number for number in ahead if number not in taken]
        if not self.chunks:
            return None
        chunk = self.index.chunk(self.chunks[0])
        if chunk is None:  # its directory is listed again
            self.chunks = []
            return None
        costs = self._costs(chunk)
        items = self._that_fit(chunk, costs)
        # While directories are listed, too, the space used may be over-estimated.
        listing = not self.skeleton and not self.cramped
        if len(items) < len(chunk.entries) and (listing or self.run.copies_in_flight):
            return None
        self.chunks.pop(0)
        if not items:
            self.full = True
            return None
        self.copying.add(chunk.id)
        job = Copy(
            folder=str(chunk.id), path=self.index.path(chunk.directory), entries=items,
            location=self.index.location(chunk.directory), hinted=self.hinted,
        )  # fmt: skip
        return Assignment(
            job, directory=chunk.directory, allocated=sum(costs[: len(items)]), inodes=len(items),
            chunk=chunk,
        )  # fmt: skip

    def _costs(self, chunk: index.Chunk) -> list[int]:
        """The most SSD bytes that each entry takes beyond what is counted already."""
        ahead = self.index.ahead(chunk.directory) if self.hinted else {}
        return [max(0, item.allocated - ahead.get(item.name, 0)) for item in chunk.entries]

    def _that_fit(self, chunk: index.Chunk, costs: list[int]) -> list[Entry]:
        """The first entries of the chunk, as many as there is room for."""
        room = self.run.room(inodes=len(chunk.entries))
        if room.holds(sum(costs), len(chunk.entries)):
            return chunk.entries
        taken: list[Entry] = []
        size = 0
        for item, cost in zip(chunk.entries, costs, strict=True):
            if not room.holds(size + cost, len(taken) + 1):
                break
            size += cost
            taken.append(item)
        return taken

    def _copied(self, assignment: Assignment, job: Copy, answer: protocol.Copied) -> None:
        chunk = assignment.chunk
        assert chunk is not None
        self.copying.discard(chunk.id)
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
                left={item.name for item in chunk.entries} - given | set(answer.left),
            )
        )

    # --- hints

    def hint(self, paths: list[str]) -> None:
        self.hints.add(paths)

    def hint_assignment(self) -> Assignment | None:
        if self.full or len(self.pool.assigned(Hint)) >= HINTS_IN_FLIGHT:
            return None
        hint = self.hints.next(self.index)
        if hint is None:
            return None
        number, path, names = hint
        with self.index.transaction():
            self.index.prefer(number, 1)
        self.chunks = []
        if number in self.scanning and self.look_in_tree:
            return None  # see _scan_assignment; the rest of the directory is preferred at least
        room = self.run.room(inodes=0)
        allowance = min(room.bytes, HINT_BYTES)
        if not allowance or not room.holds(allowance, len(names)):
            return None
        self.hinted = True
        job = Hint(folder=f"h{time.monotonic_ns()}", path=path, names=names, allowance=allowance)
        return Assignment(job, directory=number, allocated=allowance, inodes=len(names))

    def _hinted(self, assignment: Assignment, job: Hint, taken: dict[str, int]) -> None:
        size = sum(taken.values())
        self.run.batch.add(
            Staged(
                job.folder,
                assignment.directory,
                files=len(taken),
                bytes=size,
                allocated=size,
                ahead=taken,
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
            case Hint() as job, protocol.Hinted():
                self._hinted(assignment, job, answer.taken)
            case protocol.Recheck() as job, protocol.Rechecked():
                self._rechecked(job, answer)
            case protocol.Finish(), protocol.Done():
                self.run.totals = self.index.totals()
                raise Ended("complete")
            case _:
                raise Ended("failed", f"unexpected answer {type(answer).__name__}")

    def failed(self, assignment: Assignment, failure: protocol.NotDone) -> None:
        job = assignment.job
        self.forget(assignment)
        if failure.errno in (errno.ENOSPC, errno.EDQUOT):
            if isinstance(job, Scan):
                # The page told it to stop. Once the copies in flight are counted there may be room.
                self.cramped = not (self.run.page.cramped and self.run.copies_in_flight)
            else:
                self.full = True
        elif isinstance(job, Scan):
            self._scan_failed(job.directory, failure.error)
        elif isinstance(job, Copy):  # its directory cannot be opened any more
            with self.index.transaction():
                self.incomplete(assignment.directory)
        # A failed hint has no effect: the chunk of its files follows.

    def _scan_failed(self, number: int, why: str) -> None:
        with self.index.transaction():
            self.run.list_again(number)
            self.index.fail(number, ".", f"cannot be listed: {why}", lasting=False)
            self.index.listed(number, entries=0, files=0, size=0, stored=(0, 0, 0), skipped=0)
            directory = self.index.directory(number)
            parent = directory.parent
            may_rescan = directory.rescans < MOST_RESCANS
            if parent is not None and parent not in self.scanning and may_rescan:
                self.run.list_again(parent)  # the directory may be gone from it
                self.skeleton = False
        if number == index.ROOT:
            raise Ended("failed", f"the root of the source cannot be listed: {why}")

    def forget(self, assignment: Assignment) -> None:
        job = assignment.job
        if isinstance(job, Copy | Hint):
            self.run.discard_staged(job.folder)
        if isinstance(job, Scan):
            self.scanning.discard(job.directory)
            self.look_in_tree = True
            self.chunks = []  # the next scan makes other chunks
        if assignment.chunk is not None:
            self.copying.discard(assignment.chunk.id)

    # --- seal, check again, end

    def seals(self) -> list[int]:
        return self.index.sealable(SEALS_IN_A_BATCH)

    def end_if_done(self) -> None:
        if self.run.cancelled:
            raise Ended("cancelled")
        if not self.skeleton and not self.cramped:
            return
        if not self.full and not self.cramped:
            if self.index.next_chunks(1) or self.index.sealable(1):
                return
            if self.index.directory(index.ROOT).state == index.SEALED:
                self._recheck() if self._rechecked_to is not None else self._finish()
                return
            if self._retry_what_failed():
                return
        self.run.totals = self.index.totals()
        if self.full or self.cramped:
            files, size = self.index.left()
            raise Ended("partial", f"no room for {files} files, {size} bytes")
        raise Ended("partial", f"{self.run.totals.failed} entries could not be copied")

    def _retry_what_failed(self) -> bool:
        """Whether something is left to try again, after a short wait."""
        again = self.index.retriable(MOST_RESCANS)
        if not again:
            return False
        if self._no_rescan_before == 0.0:
            self._no_rescan_before = time.monotonic() + RESCAN_SECONDS
        elif time.monotonic() >= self._no_rescan_before:
            self._no_rescan_before = 0.0
            with self.index.transaction():
                for number in again:
                    self.incomplete(number)
        return True

    def incomplete(self, number: int) -> None:
        """List a directory and its parent again: what failed may have changed or gone.

        After ``MOST_RESCANS`` in one pass the directory is a failure instead.
        """
        directory = self.index.directory(number)
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

    def _recheck(self) -> None:
        assert self._rechecked_to is not None
        committer = self.pool.committer
        if committer is None:
            return
        numbers = self.index.listed_directories(self._rechecked_to, RECHECKS_IN_A_JOB)
        if not numbers:
            self._rechecked_to = None
            return
        found = [self.index.directory(number) for number in numbers]
        listed = [protocol.Listed(d.id, self.index.path(d.id), d.entries) for d in found]
        self.pool.give(committer, Assignment(protocol.Recheck(directories=listed)))

    def _rechecked(self, job: protocol.Recheck, answer: protocol.Rechecked) -> None:
        self._rechecked_to = job.directories[-1].directory
        with self.index.transaction():
            for number in answer.missing:
                self.index.unseal(number)
                self.incomplete(number)

    def _finish(self) -> None:
        committer = self.pool.committer
        if committer is not None:
            self.pool.give(committer, Assignment(protocol.Finish()))

    # --- reports

    def counts(self) -> index.Counts:
        if not self.skeleton:
            self.run.totals = self.index.totals()
        return self.run.totals

    def end(self, ended: Ended) -> protocol.End:
        files, size = self.index.left()
        figures = protocol.FillEnd(used=self.run.used(), left_files=files, left_bytes=size)
        return protocol.End(ended.result, ended.why, fill=figures)


class HintQueue:
    """Names that jobs opened, the latest first. Bounded: old hints say little."""

    def __init__(self) -> None:
        self._waiting: list[tuple[list[str], list[str]]] = []

    def add(self, paths: list[str]) -> None:
        """Paths relative to the root of the dataset."""
        by_directory: dict[str, list[str]] = {}
        for path in paths:
            directory, _, name = path.rpartition("/")
            by_directory.setdefault(directory, []).append(name)
        for directory, names in by_directory.items():
            parts = directory.split("/") if directory else []
            self._waiting.append((parts, names[:MOST_HINTED_NAMES]))
        del self._waiting[:-MOST_HINTS]

    def next(self, known: index.Index) -> tuple[int, list[str], list[str]] | None:
        """Directory, its path, and names in it; sealed directories are left out."""
        while self._waiting:
            path, names = self._waiting.pop()
            number = known.find(path)
            if number is not None and known.directory(number).state != index.SEALED:
                return number, path, names
        return None


def begin(task: protocol.FillTask) -> tuple[coordinator.Coordinator, FillPass]:
    """A pass that is ready to run, the root of its tree with the attributes of the source's root.

    OSError when there is no source, ESHUTDOWN when it is another one, EBUSY while bad files are in
    the tree: the fill would take them for good ones and seal them.
    """
    if generations.has_quarantined(task.generation):
        raise OSError(errno.EBUSY, "bad files that a verify found must be withdrawn first")
    with kit.files.closing(tree.open_source(task.source, task.stamp)) as source:
        root = tree.entry_of("", os.fstat(source))
        access = task.native if native.available() else None
        run = coordinator.Coordinator(task, worker.serve, access)
        decides = FillPass(run, task)
        run.index.add_root(root)
        with tree.opened_root(run.generation / "tree") as top:
            tree.set_attributes(top, root, source)
    return run, decides


def main() -> None:
    coordinator.serve(protocol.FillTask, begin)
