"""The withdraw pass: takes the bad files of the quarantine list out of the tree.

Two passes, because the agent publishes the overlay between them. The first removes the opaque marks
above each bad file, the second deletes the files. A file that is deleted below a mark, or below a
directory that readers looked up with its mark, would be ENOENT for them instead of the source's
file. Without a source, ENOENT is what they are to get: then one pass deletes the files, and both
others come when it answers.

The passes follow the list, not the index, and may be killed anywhere: done again they do what is
left.
"""

import os
from collections import deque

from cache.fill import coordinator, protocol, worker
from cache.fill.coordinator import Ended
from cache.fill.protocol import Prune, Unseal
from cache.fill.worker_pool import Assignment
from cache.store import generations, index, tree

BAD = "its copy in the store was bad and could not be replaced"


class WithdrawPass(coordinator.Pass):
    phase = "withdrawing"

    def __init__(self, run: coordinator.Coordinator, task: protocol.WithdrawTask) -> None:
        self.run = run
        self.index = run.index
        self.hides = task.part == "hide"
        self.deletes = self.hides or task.part == "files"
        self.withdrawn = 0
        listed = generations.read_quarantined(run.generation)
        self.waiting = deque(generations.by_directory(listed))

    def next_assignment(self) -> Assignment | None:
        if self.run.cancelled or not self.waiting or self.run.pool.assigned(Unseal, Prune):
            return None
        path, names = self.waiting.popleft()
        number = None if self.hides else self.index.find(path)
        if self.deletes:
            return Assignment(Prune(directory=number, path=path, names=names))
        if number is not None:
            with self.index.transaction():
                self.index.unseal(number)
                for name in names:  # the directory is incomplete even if this pass is killed
                    self.index.fail(number, name, BAD, lasting=True)
                self.index.count_failure(number)
        return Assignment(Unseal(path=path, names=names))

    def take(self, assignment: Assignment, answer: protocol.Answer) -> None:
        if isinstance(assignment.job, Prune):
            self.withdrawn += len(assignment.job.names)
            if assignment.job.directory is not None:
                with self.index.transaction():
                    self.index.restart_listing(assignment.job.directory)

    def failed(self, assignment: Assignment, failure: protocol.NotDone) -> None:
        raise coordinator.failed_by(assignment, failure)

    def forget(self, assignment: Assignment) -> None:
        if isinstance(assignment.job, Unseal | Prune):
            self.waiting.appendleft((assignment.job.path, assignment.job.names))

    def incomplete(self, directory: int) -> None:
        """Nothing is committed here."""

    def end_if_done(self) -> None:
        if self.run.cancelled:
            raise Ended("cancelled")
        if not self.waiting:
            if self.deletes and not self.hides:
                generations.write_quarantined(self.run.generation, [])
            raise Ended("withdrawn")

    def counts(self) -> index.Counts:
        total, done = self.withdrawn + len(self.waiting), self.withdrawn
        return index.Counts(total, done_files=done, skipped=self.run.totals.skipped)

    def end(self, ended: Ended) -> protocol.End:
        return protocol.End(ended.result, ended.why, withdrawn=self.withdrawn)


def begin(task: protocol.WithdrawTask) -> tuple[coordinator.Coordinator, WithdrawPass]:
    """A pass that is ready to run. OSError when the source is not there."""
    os.close(tree.open_source(task.source, task.stamp))
    run = coordinator.Coordinator(task, worker.serve)
    return run, WithdrawPass(run, task)


def main() -> None:
    coordinator.serve(protocol.WithdrawTask, begin)
