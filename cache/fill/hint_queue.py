"""The queue of hints: what jobs opened, to be copied ahead of its chunk."""

import time
from collections.abc import Collection

from cache.fill import coordinator, protocol
from cache.fill.staged import Staged
from cache.fill.worker_pool import Assignment
from cache.store import index

IN_FLIGHT = 4
# SSD bytes for one hint. A larger file is not copied ahead: its directory is preferred instead.
HINT_BYTES = 64 * 1024 * 1024
# What waits in the queue of hints: directories (older hints say less), and names of one directory.
MOST_HINTS = 256
MOST_HINTED_NAMES = 64


class HintQueue:
    """Names that jobs opened, the latest first. Bounded: old hints say little."""

    def __init__(self) -> None:
        self._waiting: list[tuple[list[str], list[str]]] = []
        self.taken = False  # some files of chunks are in the tree already

    @property
    def waiting(self) -> bool:
        return bool(self._waiting)

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

    def assignment(
        self, run: coordinator.Coordinator, listing: Collection[int]
    ) -> Assignment | None:
        """The next hint, when there is room for it and its directory is not among ``listing``."""
        if len(run.pool.assigned(protocol.Hint)) >= IN_FLIGHT:
            return None
        hint = self.next(run.index)
        if hint is None:
            return None
        number, path, names = hint
        with run.index.transaction():
            run.index.prefer(number, index.HINTED)
        if number in listing:
            return None
        room = run.room(inodes=0)
        allowance = min(room.bytes, HINT_BYTES)
        if not allowance or not room.holds(allowance, len(names)):
            return None
        self.taken = True
        folder = f"h{time.monotonic_ns()}"
        job = protocol.Hint(folder=folder, path=path, names=names, allowance=allowance)
        return Assignment(job, directory=number, allocated=allowance, inodes=len(names))

    @staticmethod
    def answered(
        run: coordinator.Coordinator, assignment: Assignment, job: protocol.Hint,
        answer: protocol.Hinted,
    ) -> None:  # fmt: skip
        """What was copied is staged; the chunk of these files counts them."""
        taken, size = answer.taken, sum(answer.taken.values())
        run.batch.add(
            Staged(
                job.folder, assignment.directory, files=len(taken), bytes=size, allocated=size,
                ahead=taken,
            )
        )  # fmt: skip
