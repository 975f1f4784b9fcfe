"""The verify pass: reads the tree against its checksums and replaces bad files.

A replacement is copied from the source, staged, made durable and renamed over the bad file. The
name never disappears, so this is safe even under a bind mount of the store. A bad file that cannot
be replaced goes on the quarantine list; the agent publishes the overlay and has it withdrawn
(``cache.fill.withdraw``).
"""

import os
import time

from cache.fill import coordinator, messages
from cache.fill.coordinator import Ended, Staged
from cache.fill.messages import Copy
from cache.fill.worker_pool import Assignment
from cache.store import generations, index, tree
from cache.store.tree import Entry

AHEAD = 64
MOST_NOTES = 100  # bad files that the log names


class VerifyPass(coordinator.Pass):
    phase = "verifying"

    def __init__(self, run: coordinator.Coordinator, task: messages.VerifyTask) -> None:
        self.run = run
        self.index = run.index
        self.task = task
        self.after = 0  # the last directory that was given to a worker
        self.directories: list[int] = []
        self.bad: list[tuple[int, Entry]] = []  # to be replaced
        self.checked_files = 0
        self.checked_bytes = 0
        self.found = 0
        self.uncompared = 0  # good, but the source's file could not be read
        self.replaced = 0
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
        job = messages.Verify(
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

    def take(self, assignment: Assignment, answer: messages.Answer) -> None:
        match assignment.job, answer:
            case messages.Verify() as job, messages.Verified():
                self._verified(job, answer)
            case Copy() as job, messages.Copied():
                for name in [failure.name for failure in answer.failed] + answer.left:
                    self.unreplaced.append((job.path, name))
                self.replaced += answer.files
                staged = Staged(job.folder, assignment.directory, failed=answer.failed)
                self.run.batch.add(staged)
            case _:
                raise Ended("failed", f"unexpected answer {type(answer).__name__}")

    def _verified(self, job: messages.Verify, answer: messages.Verified) -> None:
        self.checked_files += answer.checked_files
        self.checked_bytes += answer.checked_bytes
        for name, why in answer.named[: max(0, MOST_NOTES - self.uncompared)]:
            self.run.note(f"not compared {'/'.join([*job.path, name])!r}: {why}")
        self.uncompared += answer.uncompared
        for item, fault in answer.bad:
            self.found += 1
            if self.found <= MOST_NOTES:
                self.run.note(f"bad file {'/'.join([*job.path, item.name])!r}: {fault}")
            if self.task.reachable:
                self.bad.append((job.directory, item))
            else:
                self.unreplaced.append((job.path, item.name))

    def failed(self, assignment: Assignment, failure: messages.NotDone) -> None:
        raise coordinator.failed_by(assignment, failure)

    def forget(self, assignment: Assignment) -> None:
        match assignment.job:
            case messages.Verify() as job:
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
        why = f"{self.uncompared} files could not be compared" if self.uncompared else ""
        raise Ended("bad" if self.unreplaced else "good", why)

    def counts(self) -> messages.Counts:
        return messages.Counts(
            files_total=self.run.totals.done_files,
            bytes_total=self.run.totals.done_bytes,
            files_done=self.checked_files,
            bytes_done=self.checked_bytes,
            failed=self.found,
        )

    def end(self, ended: Ended) -> messages.End:
        result = messages.VerifyEnd(
            checked_files=self.checked_files,
            checked_bytes=self.checked_bytes,
            bad=self.found,
            not_compared=self.uncompared,
            replaced=self.replaced,
            unreplaced=self.quarantine(),
        )
        return messages.End(ended.result, ended.why, verify=result)

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


def begin(task: messages.VerifyTask) -> tuple[coordinator.Coordinator, VerifyPass]:
    """A pass that is ready to run. OSError when the source or the index is not there."""
    os.close(tree.open_source(task.source, task.stamp))  # before any file is judged bad
    run = coordinator.Coordinator(task)
    if run.index.totals().directories == 0:
        raise OSError(2, "the index of this generation is lost; warm it again to rebuild it")
    return run, VerifyPass(run, task)


def main() -> None:
    coordinator.serve(messages.VerifyTask, begin)
