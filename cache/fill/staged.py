"""What is copied and not committed yet, and when it is committed."""

import time
from dataclasses import dataclass, field

from cache.fill import protocol
from cache.store import index, manifest

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

    def end_commit(self) -> None:
        self.committing = []


def kept(job: protocol.Copy, answer: protocol.Copied) -> list[manifest.Item]:
    """What the manifest keeps of a copy: what is left comes with another one."""
    left, failed = set(answer.left), {failure.name for failure in answer.failed}
    sums = (
        answer.sums[at : at + protocol.SUM].strip()
        for at in range(0, len(answer.sums), protocol.SUM)
    )
    return [
        manifest.Item(
            item,
            manifest.State.AT_SOURCE if item.name in failed else manifest.State.STORED,
            checksum,
        )
        for item, checksum in zip(job.entries, sums, strict=True)
        if item.name not in left
    ]
