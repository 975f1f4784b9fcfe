"""The verify pass: reads the tree against its checksums and replaces bad files.

A replacement is copied from the source, staged, made durable and renamed over the bad file. The
name never disappears, so this is safe even under a bind mount of the store. A bad file that cannot
be replaced goes on the quarantine list; the agent publishes the overlay and has it withdrawn
(``cache.fill.withdraw``).

``VerifyPass`` is the coordinator's part, ``VerifyWorker`` what its workers do more than others.
"""

import contextlib
import errno
import functools
import os
import stat
import time

import kit.files
from cache.fill import control, coordinator, copy, protocol, worker
from cache.fill.coordinator import Ended, Staged
from cache.fill.protocol import Copy
from cache.fill.worker_pool import Assignment
from cache.store import generations, index, tree
from cache.store.tree import Entry

AHEAD = 64
MOST_NAMED = 20  # uncompared files of one directory that are named; all are counted
MOST_NOTES = 100  # bad files that the log names
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC


class VerifyPass(coordinator.Pass):
    phase = "verifying"

    def __init__(self, run: coordinator.Coordinator, task: protocol.VerifyTask) -> None:
        self.run = run
        self.index = run.index
        self.task = task
        self.after = 0  # the last directory that was given to a worker
        self.directories: list[int] = []
        self.bad: list[tuple[int, Entry]] = []  # to be replaced
        self.found = protocol.VerifyEnd()
        self.unreplaced: list[tuple[list[str], str]] = []
        self.whole = False  # every directory was read

    def next_assignment(self) -> Assignment | None:
        if self.run.cancelled:
            return None
        return self._replace() or self._verify()

    def _verify(self) -> Assignment | None:
        if not self.directories:
            self.directories = self.index.listed_directories(self.after, AHEAD)
            if not self.directories:
                return None
        number = self.directories.pop(0)
        self.after = max(self.after, number)
        directory = self.index.directory(number)
        job = protocol.Verify(
            directory=number,
            path=self.index.path(number),
            entries=directory.entries if directory.state == index.SEALED else None,
            against_source=self.task.against_source,
        )
        return Assignment(job, directory=number)

    def _replace(self) -> Assignment | None:
        if not self.bad:
            return None
        number, item = self.bad.pop()
        job = Copy(folder=f"b{time.monotonic_ns()}", path=self.index.path(number), entries=[item])
        return Assignment(job, directory=number, allocated=item.allocated, inodes=1)

    def take(self, assignment: Assignment, answer: protocol.Answer) -> None:
        match assignment.job, answer:
            case protocol.Verify() as job, protocol.Verified():
                self._verified(job, answer)
            case Copy() as job, protocol.Copied():
                for name in [failure.name for failure in answer.failed] + answer.left:
                    self.unreplaced.append((job.path, name))
                self.found.replaced += answer.files
                staged = Staged(job.folder, assignment.directory, failed=answer.failed)
                self.run.batch.add(staged)
            case _:
                raise Ended("failed", f"unexpected answer {type(answer).__name__}")

    def _verified(self, job: protocol.Verify, answer: protocol.Verified) -> None:
        found = self.found
        found.checked_files += answer.checked_files
        found.checked_bytes += answer.checked_bytes
        for name, why in answer.named[: max(0, MOST_NOTES - found.not_compared)]:
            self.run.note(f"not compared {'/'.join([*job.path, name])!r}: {why}")
        found.not_compared += answer.uncompared
        for item, fault in answer.bad:
            found.bad += 1
            if found.bad <= MOST_NOTES:
                self.run.note(f"bad file {'/'.join([*job.path, item.name])!r}: {fault}")
            if self.task.reachable:
                self.bad.append((job.directory, item))
            else:
                self.unreplaced.append((job.path, item.name))

    def failed(self, assignment: Assignment, failure: protocol.NotDone) -> None:
        raise coordinator.failed_by(assignment, failure)

    def forget(self, assignment: Assignment) -> None:
        match assignment.job:
            case protocol.Verify() as job:
                self.directories.insert(0, job.directory)
            case Copy() as job:
                self.bad += [(assignment.directory, item) for item in job.entries]
                self.run.discard_staged(job.folder)

    def incomplete(self, directory: int) -> None:
        path = self.index.path(directory)
        if path:  # the whole directory is missing in the tree
            self.unreplaced.append((path[:-1], path[-1]))

    def end_if_done(self) -> None:
        if self.run.cancelled:
            raise Ended("cancelled")
        if self.bad or self.directories or self.index.listed_directories(self.after, 1):
            return
        self.whole = True
        left = self.found.not_compared
        why = f"{left} files could not be compared" if left else ""
        raise Ended("bad" if self.unreplaced else "good", why)

    def counts(self) -> index.Counts:
        total, found = self.run.totals, self.found
        return index.Counts(
            *(total.done_files, total.done_bytes, found.checked_files, found.checked_bytes),
            *(found.bad, total.skipped),
        )

    def end(self, ended: Ended) -> protocol.End:
        self.found.unreplaced = self.quarantine()
        return protocol.End(ended.result, ended.why, verify=self.found)

    def quarantine(self) -> int:
        """Save the list of bad files, which may be millions; how many there are."""
        if not self.whole:  # earlier entries that were not read again are still bad
            known = {(tuple(path), name) for path, name in self.unreplaced}
            self.unreplaced += [
                (path, name)
                for path, name in generations.read_quarantined(self.run.generation)
                if (tuple(path), name) not in known
            ]
        generations.write_quarantined(self.run.generation, self.unreplaced)
        return len(self.unreplaced)


class NotComparedError(Exception):
    """The source's file cannot be read; the stored one agrees with its checksum.

    ``size``: bytes of the stored file.
    """

    def __init__(self, error: OSError, size: int) -> None:
        super().__init__(f"cannot be read in the source: {copy.reason(error)}")
        self.size = size


class VerifyWorker(worker.Worker):
    def __init__(self, number: int, page: int, setup: protocol.Setup) -> None:
        super().__init__(number, page, setup)
        self._buffer = memoryview(bytearray(copy.BLOCK))

    def verify(self, job: protocol.Verify) -> None:
        found = protocol.Verified()
        with contextlib.ExitStack() as stack:
            directory = stack.enter_context(tree.opened(self.tree, job.path))
            source: int | OSError | None = None
            if job.against_source:
                try:
                    source = stack.enter_context(tree.opened(self.source, job.path))
                except OSError as error:
                    if error.errno in (errno.ENOENT, *tree.SOURCE_GONE):
                        raise
                    source = error
            names = os.listdir(directory)
            if job.entries is not None and len(names) != job.entries:
                lost = tree.entries_beside(self.source, job.path, set(names))
                found.bad += [(item, "is missing in the store") for item in lost]
            with contextlib.suppress(control.Cancelled):
                for name in names:
                    if stat.S_ISREG(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
                        try:
                            fault, size = self._verify_file(directory, name, source)
                        except NotComparedError as error:
                            fault, size = "", error.size
                            found.uncompared += 1
                            if found.uncompared <= MOST_NAMED:
                                found.named.append((name, str(error)))
                        found.checked_files += 1
                        found.checked_bytes += size
                        if fault:
                            found.bad.append((self._entry_of(name, job.path, directory), fault))
        protocol.answer(found)

    def _entry_of(self, name: str, path: list[str], directory: int) -> Entry:
        """As the source has it now, else as the store has it."""
        try:
            with tree.opened(self.source, path) as source:
                return tree.entry_of(name, os.stat(name, dir_fd=source, follow_symlinks=False))
        except OSError:
            return tree.entry_of(name, os.stat(name, dir_fd=directory, follow_symlinks=False))

    def _verify_file(
        self, directory: int, name: str, source: int | OSError | None
    ) -> tuple[str, int]:
        """What is wrong with a stored file ('' for a good one), and its size.

        ``source``: the source's directory to compare with, or why it cannot be opened.
        NotComparedError when the file is good and the source's cannot be read.
        """
        try:
            stored = os.open(name, _FLAGS, dir_fd=directory)
        except OSError as error:
            return f"cannot be opened in the store: {copy.reason(error)}", 0
        with kit.files.closing(stored):
            size = os.fstat(stored).st_size
            try:
                kept = os.getxattr(stored, tree.CHECKSUM).decode()
            except OSError:
                return "has no checksum in the store", size
            try:
                if copy.checksum(stored, self.throttle, self._buffer) != kept:
                    return "its bytes are not those that were stored", size
            except OSError as error:
                return f"cannot be read in the store: {copy.reason(error)}", size
            if source is not None:
                return self._compare(stored, kept, name, source), size
            return "", size

    def _compare(self, stored: int, kept: str, name: str, source: int | OSError) -> str:
        """How a stored file differs from the source's, '' when it does not.

        An unreadable source file is not a difference: a good copy would be withdrawn for it.
        """
        here = os.fstat(stored)
        try:
            xattrs = tree.xattrs_of(stored)
        except OSError as error:
            return f"its xattrs cannot be read in the store: {copy.reason(error)}"
        try:
            if isinstance(source, OSError):
                raise source
            return self._difference(here, xattrs, kept, name, source)
        except FileNotFoundError:
            return "is not in the source"
        except OSError as error:
            if error.errno == errno.ELOOP:
                return "is a symbolic link in the source"
            if error.errno in tree.SOURCE_GONE:
                raise
            raise NotComparedError(error, here.st_size) from error

    def _difference(
        self, here: os.stat_result, xattrs: dict[str, bytes], kept: str, name: str, source: int
    ) -> str:
        """OSError of the source's file only."""
        with kit.files.closing(os.open(name, _FLAGS, dir_fd=source)) as origin:
            there = os.fstat(origin)
            for what in ("st_size", "st_mode", "st_uid", "st_gid", "st_mtime_ns"):
                if getattr(here, what) != getattr(there, what):
                    return f"differs from the source in {what.removeprefix('st_')}"
            if xattrs != tree.xattrs_of(origin):
                return "differs from the source in its xattrs"
            if copy.checksum(origin, self.throttle, self._buffer) != kept:
                return "differs from the source in its bytes"
        return ""


serve = functools.partial(worker.serve, kind=VerifyWorker)


def begin(task: protocol.VerifyTask) -> tuple[coordinator.Coordinator, VerifyPass]:
    """A pass that is ready to run. OSError when the source or the index is not there."""
    os.close(tree.open_source(task.source, task.stamp))  # before any file is judged bad
    run = coordinator.Coordinator(task, serve)
    if run.index.totals().directories == 0:
        raise OSError(2, "the index of this generation is lost; warm it again to rebuild it")
    return run, VerifyPass(run, task)


def main() -> None:
    coordinator.serve(protocol.VerifyTask, begin)
