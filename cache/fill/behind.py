"""Stores chunks behind their reading: two threads check and write them, one makes them durable.

So a cluster that is read, a processor that sums, a disk that writes and a disk that syncs work at
the same time, and not one after the other. All of it is bounded: ``QUEUED`` chunks in memory, one
batch that is being made durable, one that grows.
"""

import concurrent.futures.thread  # or the process that fills would load it anew each time
from types import TracebackType

from cache.store import image_copy

WRITERS = 2
QUEUED = 4  # chunks that wait for a writer or are being written


class Behind:
    """As ``image_copy.Chunks`` for who only puts and commits. It ends with the block.

    An error of a thread, OSError, is raised by the next call or by the end. Nothing is being
    written when the end is over, whatever happened.
    """

    def __init__(self, held: image_copy.Chunks) -> None:
        self._held = held
        self._writers = concurrent.futures.ThreadPoolExecutor(WRITERS, "write")
        self._syncer = concurrent.futures.ThreadPoolExecutor(1, "sync")
        self._writing: set[concurrent.futures.Future[int]] = set()
        self._sync: concurrent.futures.Future[None] | None = None
        self.waiting = 0  # chunks that the next commit makes durable

    def __enter__(self) -> "Behind":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._writers.shutdown()
        self._syncer.shutdown()
        if kind is None:
            self._written(0)
            self._durable()

    def put(self, chunk: int, data: bytes) -> None:
        """Have it stored; waits while there are too many."""
        self._written(QUEUED - 1)
        self._writing.add(self._writers.submit(self._held.put, chunk, data))
        self.waiting += 1

    def commit(self) -> None:
        """Begin to make durable what was put; waits for the batch before it."""
        self._durable()
        self._written(0)  # so the batch is what was put, and the disk's room is known
        self.waiting = 0
        self._sync = self._syncer.submit(self._held.commit)

    def _written(self, most: int) -> None:
        """Wait until no more than ``most`` are being written."""
        while len(self._writing) > most:
            done, self._writing = concurrent.futures.wait(
                self._writing, return_when=concurrent.futures.FIRST_COMPLETED
            )
            for each in done:
                each.result()

    def _durable(self) -> None:
        sync, self._sync = self._sync, None
        if sync is not None:
            sync.result()
