"""The passes over a block image: fill and verify its local copy, in one process.

A fill reads what was ever written to the image's snapshot, whole chunks, many at once, and makes
them durable in batches while more is read; what is durable is never read again, so a killed fill
loses the batch that grows and the one before it. A verify reads the stored chunks against their
checksums; a bad one is read anew from the source.

A file system is of no use without the rest of its blocks. So a part of an image is only filled
where jobs read the rest from the source (``BlockTask.partly``); elsewhere nothing is filled when
the budget does not hold all of it.
"""

import concurrent.futures.thread
import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import kit.errors
import kit.files
import kit.units
from cache.fill import agent, control, protocol, space
from cache.fill.agent import Ended
from cache.store import filesystem, image_copy, manifest, ranges, subset
from ceph import image
from ceph.protocol import SnapshotFacts

# Stores chunks behind their reading: two threads check and write them, one makes them durable.
#
# So a cluster that is read, a processor that sums, a disk that writes and a disk that syncs work at
# the same time, and not one after the other. All of it is bounded: ``QUEUED`` chunks in memory, one
# batch that is being made durable, one that grows.

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


# A batch is made durable while the next one is read: a killed fill loses two of them at most.
BATCH_CHUNKS = 32
BATCH_SECONDS = 1.0
LOCK_SECONDS = 10.0


class Pass:
    """What both kinds share: limits, cancel, batches, progress. Commands are obeyed in between."""

    def __init__(self, task: protocol.BlockTask, phase: protocol.Phase) -> None:
        self.task = task
        self.folder = Path(task.generation)
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        # The pass of an agent that was killed may need a moment to end.
        self._lock = kit.files.lock(self.folder / "lock", LOCK_SECONDS)
        self.agent = agent.AgentChannel(task.limits)
        self.phase = self.agent.phase = phase
        self.total_bytes = self.total_chunks = 0
        self.done_bytes = self.done_chunks = 0
        self._throttle = control.Throttle(self.agent.page, 0)
        self._used = 0
        self.proven = False  # what was read is of the snapshot
        self._committed = time.monotonic()
        self._set_limits()

    def _set_limits(self) -> None:
        self.agent.page.set_limits(self.agent.limits.bytes_per_second, 0)

    def pause(self, size: int = 0) -> None:
        """Between two chunks: keep to the limits, obey, report. Raises Ended."""
        try:
            self._throttle.step(bool(size), size)
        except control.Cancelled:
            raise Ended("cancelled") from None
        self.beat()

    def beat(self) -> None:
        """A sign of life; what the agent said meanwhile. Raises Ended."""
        due = self.agent.heed()
        self._set_limits()
        if due:
            self.report()

    def commit(self, held: image_copy.Chunks | Behind, *, force: bool = False) -> bool:
        """Make durable what waits, or begin to, when that is due; whether it was."""
        due = held.waiting >= BATCH_CHUNKS or time.monotonic() - self._committed > BATCH_SECONDS
        if not held.waiting or not (due or force):
            return False
        self.report(syncing=True)
        held.commit()
        self.agent.commits += 1
        self._committed, self._used = time.monotonic(), image_copy.used(self.folder)
        self.report()
        return True

    def room(self) -> subset.Amount:
        disk, used = os.statvfs(self.folder), image_copy.used(self.folder)
        return space.balance(disk, self.agent.limits, used=used, inodes=0)

    def tightest(self, lacks: int) -> str:
        disk, used = os.statvfs(self.folder), image_copy.used(self.folder)
        needed = subset.Amount(lacks, image_copy.INODES)
        return space.tightest(disk, self.agent.limits, used=used, inodes=0, lacks=needed)

    def fitting(self, wanted: list[int]) -> list[int]:
        """The chunks of ``wanted`` to store now; all of them, unless there is room for a part."""
        if not self.task.partly or not self.lacks(len(wanted)):
            return wanted
        left, used = self.room(), image_copy.used(self.folder)
        enough = left.inodes >= image_copy.INODES
        return list(ranges.fitting(wanted, used, left.bytes)) if enough else []

    def lacks(self, chunks: int, spare: int = 0) -> int:
        """Bytes that budget and reserve lack for so many chunks; 0 when they are enough.

        ``spare``: bytes that what grows beside the chunks may have taken.
        """
        needed, left = chunks * image_copy.CHUNK_BYTES, self.room()
        fits = needed <= left.bytes + spare and left.inodes >= image_copy.INODES
        return 0 if fits or not chunks else max(1, needed - left.bytes)

    def lacks_now(self, left: int) -> int:
        """After a commit: bytes that are lacking when the next batch does not fit any more.

        Others fill the disk, a threshold rises, a budget is lowered. ``left``: chunks to come.
        """
        if not self.lacks(min(left, BATCH_CHUNKS), space.HEADROOM_BYTES):
            return 0
        return self.lacks(left)

    @property
    def counts(self) -> manifest.Counts:
        return manifest.Counts(
            files=self.total_chunks,
            bytes=self.total_bytes,
            done_files=self.done_chunks,
            done_bytes=self.done_bytes,
        )

    def report(self, *, syncing: bool = False) -> None:
        self.agent.report(self.counts, self._used, syncing=syncing)

    def copy(
        self, snapshot: image.ImageSnapshot, held: image_copy.Chunks, wanted: list[int]
    ) -> int:
        """Read chunks from the source and store them, durable and proven.

        Bytes that it began to lack meanwhile; 0 when all is stored. Ended when what was read is
        not all of the snapshot.
        """
        lacking = 0
        # Closed before the image is, also after an error: librbd answers reads into its buffers.
        chunks = contextlib.closing(snapshot.read(map(held.span, wanted), self.beat))
        with chunks as read, Behind(held) as storing:
            for stored, (offset, data) in enumerate(read, 1):
                storing.put(offset // image_copy.CHUNK_BYTES, data)
                self.done_chunks += 1
                self.done_bytes += len(data)
                if self.commit(storing) and (lacking := self.lacks_now(len(wanted) - stored)):
                    break
                self.pause(len(data))
            self.commit(storing, force=True)
            if not lacking or self.task.partly:  # what is stored is shown
                self.prove(snapshot)  # while the disk syncs
        return lacking

    def prove(self, snapshot: image.ImageSnapshot) -> None:
        """The snapshot is still there, so all that was read is of it. Ended, SourceError otherwise.

        Reads of a snapshot that is being deleted give the image's later bytes, without an error; an
        open image does not hear of the deletion. Ids of snapshots are never used again.
        """
        if snapshot.facts_now() != snapshot.facts:
            raise Ended("failed", f"{snapshot.thing}: the snapshot was deleted while it was copied")
        self.proven = True


# What a new copy has in common with the copy of an earlier snapshot of the image.
#
# The cluster tells which objects differ between the two snapshots; all other chunks come from the
# earlier copy: shared on the disk where its file system can (reflink), else copied and compared
# with their checksums. So a new snapshot moves what was changed, and nothing else.


@dataclass(frozen=True)
class Common:
    """Chunks that need not be read from the source. ``shared``: they take no room of their own."""

    folder: Path
    chunks: tuple[int, ...]
    shared: bool


def _find(
    folder: Path, snapshot: image.ImageSnapshot, held: image_copy.Chunks, beat: Callable[[], None]
) -> Common | None:
    """What the latest usable copy beside ``folder`` has in common with ``held``; None: nothing.

    A copy whose journal was replayed is left out: its blocks are not those of its snapshot. So is
    one whose snapshot was deleted: nobody knows what was changed since. SourceError.
    """
    for earlier, facts in _copies(folder, snapshot.facts):
        name = snapshot.name_of(facts.snap_id)
        if name is None:
            continue
        changed = set(image_copy.chunks_of(snapshot.changes(name, beat)))
        with image_copy.existing_copy(earlier, facts) as old:
            known = {
                chunk for chunk, state in old.states() if state is not image_copy.State.UNKNOWN
            }
            common = tuple(
                chunk
                for chunk, state in held.states()
                if state is image_copy.State.UNKNOWN
                and chunk not in changed
                and chunk in known
                and old.span(chunk) == held.span(chunk)
            )
            if common:
                return Common(earlier, common, held.shares(old, common[0]))
    return None


def _taken(held: image_copy.Chunks, common: Common) -> Iterator[str]:
    """Have them in ``held``, one at each step; the text says what is wrong with one, or is ''.

    A chunk that is bad or cannot be read in the earlier copy stays unknown. OSError when the disk
    is full or ``held`` cannot be written.
    """
    with image_copy.existing_copy(common.folder) as old:
        for chunk in common.chunks:
            try:
                good = held.take_from(old, chunk, share=common.shared)
                yield "" if good else f"chunk {chunk} of the earlier copy is bad; it is read again"
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                yield f"chunk {chunk} of the earlier copy cannot be read; the source is asked"


def _copies(folder: Path, mine: SnapshotFacts) -> list[tuple[Path, SnapshotFacts]]:
    """Copies of earlier snapshots of the same image beside ``folder``, the latest first."""
    found = []
    with contextlib.suppress(OSError):
        for each in folder.parent.iterdir():
            try:
                facts = image_copy.facts_of(each)
            except kit.errors.HostError:
                continue  # of a newer agent
            if (
                facts is not None
                and (facts.fsid, facts.pool_id, facts.image_id)
                == (mine.fsid, mine.pool_id, mine.image_id)
                and facts.snap_id < mine.snap_id
                and not image_copy.replayed(each)
            ):
                found.append((each, facts))
    return sorted(found, key=lambda each: -each[1].snap_id)


def fill() -> None:
    """The life of a process that fills."""
    # Closed after the agent was told of the end, which need not wait for a client of the cluster to
    # end: it has only read.
    with contextlib.ExitStack() as source:
        agent.serve(protocol.BlockTask, lambda task: _fill_all(Pass(task, "filling"), source))


def verify() -> None:
    """The life of a process that verifies."""
    agent.serve(protocol.BlockTask, lambda task: _verify_all(Pass(task, "verifying")))


def _fill_all(done: Pass, source: contextlib.ExitStack) -> protocol.End:
    """``source``: what is closed after the end was told."""
    access = done.task.access
    assert access is not None
    left, result, why = 0, "complete", ""
    try:
        snapshot = source.enter_context(image.opened(access))
        with image_copy.opened(done.folder, snapshot.facts, access.partition) as held:
            try:
                left = _fill(done, snapshot, held)
                if not done.proven and done.task.partly:  # what is stored is shown
                    done.prove(snapshot)
            finally:
                done.commit(held, force=True)
            if not left:
                _replay(done, held)
    except Ended as ended:
        result, why = ended.result, ended.why
    done.report()
    if left:
        result, why = "partial", f"no room for {kit.units.format_size(left)}: {done.tightest(left)}"
        if done.task.partly:
            why += "; the rest of the image is read from its source"
        else:
            why += "; a block image is stored as a whole or not at all without the device mapper"
    return protocol.End(
        result, why, protocol.FillEnd(image_copy.used(done.folder), int(left > 0), left)
    )


def _fill(done: Pass, snapshot: image.ImageSnapshot, held: image_copy.Chunks) -> int:
    """Bytes that do not fit; 0 when all is stored."""
    common = _common(done, snapshot, held)
    if common is not None and (lacking := _take(done, held, common)):
        return lacking
    written = sorted(set(image_copy.chunks_of(snapshot.extents(done.beat))))
    wanted, present = [], 0
    written_ones = iter(written)
    next_written = next(written_ones, held.count)
    for chunk, state in held.states():
        has_data = chunk == next_written
        if has_data:
            next_written = next(written_ones, held.count)
        if state is image_copy.State.STORED:
            present += 1
        elif has_data and state is image_copy.State.UNKNOWN:
            wanted.append(chunk)
        elif state is image_copy.State.UNKNOWN:
            held.put_zeros(chunk)
    done.total_chunks = len(wanted) + present
    done.total_bytes = (len(wanted) + present) * image_copy.CHUNK_BYTES
    done.done_chunks, done.done_bytes = present, present * image_copy.CHUNK_BYTES
    now = done.fitting(wanted)
    if now is wanted:
        return done.lacks(len(wanted)) or done.copy(snapshot, held, wanted)
    left = (len(wanted) - len(now)) * image_copy.CHUNK_BYTES
    return left + done.copy(snapshot, held, now)


def _take(done: Pass, held: image_copy.Chunks, common: Common) -> int:
    """Have what an earlier copy gives; bytes that do not fit."""
    own = 0 if common.shared else len(common.chunks)
    if lacking := done.lacks(own):
        return 0 if done.task.partly else lacking  # then the first ones are read from the source
    for taken, wrong in enumerate(_taken(held, common), 1):
        if wrong:
            agent.note(wrong)
        if done.commit(held) and (lacking := done.lacks_now(max(0, own - taken))):
            return lacking
        done.beat()
    done.commit(held, force=True)
    return 0


def _common(done: Pass, snapshot: image.ImageSnapshot, held: image_copy.Chunks) -> Common | None:
    """What an earlier copy gives. A trouble with it is no trouble of the fill."""
    try:
        return _find(done.folder, snapshot, held, done.beat)
    except (kit.errors.AgentError, OSError) as error:
        agent.note(f"all of it is read from the source: {error}")
        return None


def _replay(done: Pass, held: image_copy.Chunks) -> None:
    """Replay the copy's journal when a mount needs that. Ended when a chunk is bad.

    What is marked begun and not done is done again: replaying a journal twice changes nothing. The
    checksums are those of the copy from then on, so a bad chunk cannot be read anew alone.
    """
    copy, state = str(done.folder / image_copy.IMAGE), image_copy.replayed(done.folder)
    thing = f"dataset of image {held.facts.image_id}"
    partition = image_copy.partition_of(done.folder)
    if state == "done" or (not state and filesystem.is_clean(copy, thing, partition)):
        return
    if not state:
        if _check(done, held, protocol.VerifyEnd()):
            raise Ended("failed", "the copy has bad chunks; they are read again")
        image_copy.set_replayed(done.folder, "begun")
    agent.note("the journal of the file system is replayed on the copy")
    filesystem.replay(copy, thing, partition)
    for chunk in range(held.count):
        held.take_over(chunk)
        done.beat()
        done.commit(held)
    done.commit(held, force=True)
    image_copy.set_replayed(done.folder, "done")


def _verify_all(done: Pass) -> protocol.End:
    found = protocol.VerifyEnd()
    try:
        with image_copy.opened(done.folder, image_copy.existing(done.folder)) as held:
            bad = _check(done, held, found)
            if bad:
                _replace(done, held, bad, found)
        result, why = "bad" if found.unreplaced else "good", ""
    except Ended as ended:
        result, why = ended.result, ended.why
    done.report()
    return protocol.End(result, why, verify=found)


def _check(done: Pass, held: image_copy.Chunks, found: protocol.VerifyEnd) -> list[int]:
    """The bad chunks."""
    stored = [chunk for chunk, state in held.states() if state is image_copy.State.STORED]
    done.total_chunks = len(stored)
    done.total_bytes = sum(held.span(chunk)[1] for chunk in stored)
    bad = []
    for chunk in stored:
        offset, length = held.span(chunk)
        try:
            good = held.is_good(chunk)
        except OSError:  # a bad sector is a bad chunk
            good = False
        if not good:
            bad.append(chunk)
            agent.note(f"chunk at {offset} is bad")
        found.checked_files += 1
        found.checked_bytes += length
        done.done_chunks += 1
        done.done_bytes += length
        done.pause(length)
    found.bad = len(bad)
    return bad


def _replace(
    done: Pass, held: image_copy.Chunks, bad: list[int], found: protocol.VerifyEnd
) -> None:
    """Read bad chunks anew. Their records are forgotten first, and made again when it is proven
    that what was read is of the snapshot: a kill before that leaves none to be trusted."""
    from cache.store import generations  # SQLite, which no good copy needs

    found.unreplaced = len(bad)
    # The agent takes them from the list when it has noted that the copy is not complete.
    generations.write_quarantined(done.folder, [([], str(chunk)) for chunk in bad])
    if image_copy.replayed(done.folder):
        # The source has the blocks from before the journal's replay.
        image_copy.discard(done.folder)
        return
    for chunk in bad:
        held.forget(chunk)
    held.commit()
    if done.task.access is None:
        return
    with image.opened(done.task.access) as snapshot:
        if snapshot.facts != held.facts:
            return  # another snapshot by this name now: its bytes are not ours
        with contextlib.closing(snapshot.read(map(held.span, bad), done.beat)) as read:
            for offset, data in read:
                held.put(offset // image_copy.CHUNK_BYTES, data)
                done.pause(len(data))
        try:
            done.prove(snapshot)
        except (Ended, kit.errors.SourceError):
            return
    done.commit(held, force=True)
    found.replaced, found.unreplaced = len(bad), 0
