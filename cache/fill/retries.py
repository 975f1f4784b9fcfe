"""What a fill does again: directories in which something failed, and seals of an earlier pass.

After a power cut the index may claim more than the disk has, so a generation that an earlier pass
filled is called complete only when every seal was found in the tree.
"""

import time

from cache.fill import coordinator, protocol
from cache.fill.worker_pool import Assignment

RECHECKS_IN_A_JOB = 256
MOST_RESCANS = 2
RESCAN_SECONDS = 1.0


class Retries:
    """Those of one pass. Part of its one thread."""

    def __init__(self, run: coordinator.Coordinator, decides: coordinator.Pass) -> None:
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
        numbers = self._index.listed_directories(self._rechecked_to, RECHECKS_IN_A_JOB)
        if not numbers:
            self._rechecked_to = None
        return numbers

    def rechecked(self, job: protocol.Recheck, answer: protocol.Rechecked) -> None:
        self._rechecked_to = job.directories[-1].directory
        with self._index.transaction():
            for number in answer.missing:
                self._index.unseal(number)
                self._pass.incomplete(number)
