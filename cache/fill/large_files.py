"""The large files that a fill pass copies, extent by extent, beside the small ones.

A large file has a chunk of its own in the index, with a priority that keeps it behind no small file
and no small file behind it: two are copied at once, and workers take turns between them and chunks
of small files. What of them is durable is counted as used, what is missing as pending.

A file whose extents do not answer costs itself: after a few it has failed, and its part stays for
the next pass.
"""

import contextlib
import os
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

from cache.fill import coordinator, protocol
from cache.fill.coordinator import Staged
from cache.fill.worker_pool import Assignment
from cache.store import extents, index, large, manifest, tree
from cache.store.subset import Amount
from cache.store.tree import Entry

MOST_OPEN = 2
MOST_ASIDE = 64  # files that are looked at for one that fits
EXTENTS_IN_A_JOB = 16
MOST_HUNG = 2  # extents of one file that a worker was killed for
UNREACHABLE = "its objects give no answer; see 'ceph health detail'"
MOST_SILENT = 64  # extents of one file whose objects do not answer


@dataclass(eq=False)
class LargeFile:
    """One file that is being copied."""

    chunk: index.Chunk
    item: Entry
    path: list[str]
    key: str
    left: int  # SSD bytes that it takes at most beyond what its part has
    todo: Generator[int]  # extents that were not given to a worker yet
    durable: int = 0  # SSD bytes that were copied in this pass
    again: list[int] = field(default_factory=list)  # given, and not copied
    silent: list[int] = field(default_factory=list)
    hung: int = 0
    jobs: int = 0  # under way
    failure: protocol.Failure | None = None
    changed: bool = False  # the source has another file now

    def next(self) -> list[int]:
        found = self.again[:EXTENTS_IN_A_JOB]
        del self.again[:EXTENTS_IN_A_JOB]
        while len(found) < EXTENTS_IN_A_JOB and (extent := next(self.todo, None)) is not None:
            found.append(extent)
        return found


class LargeFiles:
    """Those of one pass. Part of its one thread."""

    def __init__(
        self, run: coordinator.Coordinator, fits: Callable[[index.Chunk, int], int | None]
    ) -> None:
        """``fits``: given a chunk of one file, and the SSD bytes that its part has, those that it
        takes in all; None when there is no room."""
        self._run = run
        self._fits = fits
        self._index = run.index
        self._generation = tree.open_root(run.generation)
        self._open: dict[str, LargeFile] = {}
        self._ready: dict[str, LargeFile] = {}  # whole, and not committed yet
        # SSD bytes of parts and records when the pass began, those placed since taken off.
        self._before = large.used(self._generation)
        self.objects = 0  # extents that were read past the mount
        self.short = False  # there was no room for one

    # --- room

    @property
    def used(self) -> int:
        """SSD bytes that no directory of the index counts."""
        files = (*self._open.values(), *self._ready.values())
        return self._before + sum(file.durable for file in files)

    @property
    def pending(self) -> Amount:
        """What the files which were begun will take."""
        return Amount(sum(file.left for file in self._open.values()), len(self._open))

    @property
    def chunks(self) -> set[int]:
        """Chunks of the files that are being copied."""
        return {f.chunk.id for f in (*self._open.values(), *self._ready.values())}

    # --- begin

    def found(self, chunk: index.Chunk) -> None:
        """A chunk with large files: each gets one of its own, which is copied now or set aside."""
        with self._index.transaction():
            if len(chunk.entries) > 1:
                self._index.split(chunk, large.is_large)
            elif len(self._open) >= MOST_OPEN or not self._begin(chunk, waits=True):
                self._index.set_priority(chunk.id, index.LARGE)  # copied beside the others

    def _begin(self, chunk: index.Chunk, *, waits: bool) -> bool:
        """Copy its file from now on, if there is room for it; False when it waits for some.

        OSError of the store.
        """
        item, path = chunk.entries[0], self._index.path(chunk.directory)
        key = large.key_of(path, item)
        if key in self._open or key in self._ready:
            return False  # by a chunk from before its directory was listed again
        if self._is_stored(chunk, path, item, key):
            return True
        present = large.present(self._generation, key, item)
        cost = self._fits(chunk, present)
        if cost is None:
            if not waits:
                self._index.set_priority(chunk.id, index.NO_ROOM)
                self.short = True
            return not waits
        with large.part(self._generation, key, item):
            pass  # workers find it made
        left = max(0, cost - present)
        self._open[key] = LargeFile(chunk, item, path, key, left, self._unknown(key, item))
        return True

    def _is_stored(self, chunk: index.Chunk, path: Sequence[str], item: Entry, key: str) -> bool:
        """The tree has this version: a pass was killed when it had placed it."""
        with (
            contextlib.suppress(OSError),
            tree.opened(self._generation, ["tree", *path]) as folder,
        ):
            status = os.stat(item.name, dir_fd=folder, follow_symlinks=False)
            name = f"/proc/self/fd/{folder}/{item.name}"
            known = os.getxattr(name, large.KEY, follow_symlinks=False).decode("ascii", "replace")
            if known == key and tree.same_content(item, status):
                allocated = status.st_blocks * 512 + item.name_bytes
                checksum = tree.checksum_of(folder, item.name)
                self._index.committed(chunk, 1, item.size, allocated, 0, [])
                kept = manifest.Item(item, manifest.State.STORED, checksum)
                self._index.keep(chunk.directory, [kept])
                return True
        return False

    def _unknown(self, key: str, item: Entry) -> Generator[int]:
        """Extents that are not copied, as the records say when they are asked for them."""
        with large.part(self._generation, key, item) as part:
            for extent, state in part.states():
                if state is extents.State.UNKNOWN:
                    yield extent

    # --- jobs

    def assignment(self, busy: set[int], *, waits: bool) -> Assignment | None:
        """``busy``: chunks that are being copied already. ``waits``: there may be room later."""
        if len(self._open) < MOST_OPEN:
            self._begin_next(busy, waits=waits)
        for file in list(self._open.values()):
            if self._index.chunk(file.chunk.id) is None:  # its directory is listed again
                if not file.jobs:
                    self._drop(file)
                continue
            job = self._job(file)
            if job is not None:
                file.jobs += 1
                # The next job is another file's, if there are two.
                self._open[file.key] = self._open.pop(file.key)
                return Assignment(job, directory=file.chunk.directory)
        return None

    def _begin_next(self, busy: set[int], *, waits: bool) -> None:
        for number in self._index.large(MOST_ASIDE):
            chunk = None if number in busy else self._index.chunk(number)
            if chunk is not None:
                with self._index.transaction():
                    began = self._begin(chunk, waits=waits)
                if began:
                    return

    def _job(self, file: LargeFile) -> protocol.Extents | protocol.Whole | None:
        if file.failure is not None:
            return None
        wanted, patient = file.next(), False
        if not wanted and not file.jobs and not file.silent:
            return protocol.Whole(key=file.key, path=file.path, entry=file.item)
        if not wanted and not file.jobs:
            wanted, patient = file.silent[:EXTENTS_IN_A_JOB], True
            del file.silent[:EXTENTS_IN_A_JOB]
        if not wanted:
            return None
        return protocol.Extents(
            key=file.key, path=file.path, entry=file.item, extents=wanted, patient=patient
        )

    # --- answers

    def copied(self, job: protocol.Extents, answer: protocol.ExtentsCopied) -> None:
        file = self._open[job.key]
        file.jobs -= 1
        written = min(answer.written, file.left)
        file.durable += written
        file.left -= written
        self.objects += answer.objects
        silent = set(answer.silent)
        file.again += [each for each in answer.left if each not in silent]
        file.silent += answer.silent
        file.failure = file.failure or answer.failed
        file.changed |= answer.changed
        if silent and (job.patient or len(file.silent) >= MOST_SILENT):
            self._not_read(file, min(silent), UNREACHABLE)
        self._settle(file)

    def whole(self, job: protocol.Whole, answer: protocol.Completed) -> None:
        file = self._open[job.key]
        file.jobs -= 1
        if answer.failed is not None:
            file.failure, file.changed = answer.failed, answer.changed
            self._settle(file)
            return
        self._ready[job.key] = self._open.pop(job.key)
        file.todo.close()
        kept = manifest.Item(file.item, manifest.State.STORED, answer.checksum)
        staged = Staged(
            "", file.chunk.directory, file.chunk, files=1, bytes=file.item.size,
            allocated=answer.allocated + file.item.name_bytes, kept=[kept],
            links=[answer.link] if answer.link else [], part=job.key, name=file.item.name,
        )  # fmt: skip
        self._run.batch.add(staged)

    def committed(self, staged: Staged) -> None:
        """Its file is in the tree, and the index counts it."""
        if self._ready.pop(staged.part, None) is not None:
            # Counted anew: what was written is only the most that was taken.
            files = (*self._open.values(), *self._ready.values())
            counted = sum(file.durable for file in files)
            self._before = max(0, large.used(self._generation) - counted)

    def hung(self, job: protocol.Extents | protocol.Whole, at: int, why: str) -> None:
        """The worker was killed in the extent ``at`` of the job."""
        file = self._open[job.key]
        file.jobs -= 1
        file.hung += 1
        if isinstance(job, protocol.Whole):
            file.failure = protocol.Failure(file.item.name, why, True)
        else:
            hung = job.extents[min(at, len(job.extents) - 1)]
            file.again = [each for each in job.extents if each != hung] + file.again
            if file.hung >= MOST_HUNG:
                self._not_read(file, hung, why)
            else:
                file.silent.append(hung)  # once more, when everything else of it is there
        self._settle(file)

    def failed(self, job: protocol.Extents | protocol.Whole, why: str) -> None:
        file = self._open[job.key]
        file.jobs -= 1
        file.failure = protocol.Failure(file.item.name, why, False)
        self._settle(file)

    def forget(self, job: protocol.Extents | protocol.Whole) -> None:
        """Nothing is known of the job; what its worker made durable is only copied again."""
        file = self._open[job.key]
        file.jobs -= 1
        if isinstance(job, protocol.Extents):
            file.again = job.extents + file.again
        self._settle(file)

    def _not_read(self, file: LargeFile, extent: int, why: str) -> None:
        where = f"its bytes from {extent * extents.EXTENT_BYTES} on cannot be read: {why}"
        file.failure = protocol.Failure(file.item.name, where, True)

    def _settle(self, file: LargeFile) -> None:
        """Record the failure of a file, when no worker has a job of it any more.

        Its part stays for another pass, unless the source has another file now.
        """
        if file.failure is None or file.jobs:
            return
        self._drop(file)
        if file.changed:
            large.discard(self._generation, file.key)
        if self._index.chunk(file.chunk.id) is None:
            return
        directory = file.chunk.directory
        with self._index.transaction():
            self._index.fail(directory, *file.failure[:2], lasting=file.failure.lasting)
            self._index.committed(file.chunk, 0, 0, 0, 1, [])
            kept = manifest.Item(file.item, manifest.State.AT_SOURCE)
            self._index.keep(directory, [kept])

    def _drop(self, file: LargeFile) -> None:
        del self._open[file.key]
        file.todo.close()
        self._before += file.durable
