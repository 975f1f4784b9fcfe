"""What is copied and waits to be committed."""

import time
from dataclasses import dataclass, field
from typing import Any

from cache.fill import index

# A batch is committed when it has this much, or is this old. One syncfs costs 5-100 ms.
BATCH_FILES = 4096
BATCH_BYTES = 256 * 1024 * 1024
BATCH_SECONDS = 1.0


@dataclass
class Staged:
    """One folder of the staging directory, copied and not yet committed."""

    chunk: index.Chunk | None  # None: a hint, or a repair, which counts nowhere
    folder: str
    directory: int
    files: int = 0
    bytes: int = 0
    allocated: int = 0
    failed: list[list[Any]] = field(default_factory=list)
    links: list[list[str]] = field(default_factory=list)
    left: set[str] = field(default_factory=set)  # names of the chunk that were not copied
    ahead: dict[str, int] = field(default_factory=dict)  # of a hint: names, bytes of the SSD


class Batch:
    """Staged folders: those that wait, and those whose commit is under way."""

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

    def end_commit(self) -> None:
        self.committing = []
