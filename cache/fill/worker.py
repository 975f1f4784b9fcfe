"""A worker: lists directories, copies files, commits batches. One job at a time.

It is a process of its own because every call on the source may hang. It takes jobs on standard
input, answers on standard output, and ends when its coordinator closes them or dies.

It holds the roots of source and store open, so that something mounted over them later cannot be
taken for the dataset.

Invariants: a scan makes directories in the tree; files enter it by ``commit`` only, renamed whole
after one syncfs made them durable. So a name in the tree implies durable bytes, also after a power
cut.
"""

import contextlib
import errno
import functools
import os
import signal
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import kit.files
from cache.fill import commit, control, copy, fetch, large_copy, protocol, share, verify_worker
from cache.store import index, sample, tree
from cache.store.tree import Entry
from ceph import native, objects
from kit import child_main

# The parts in which the listing of a directory is answered, and what they count.


def count_part(
    item: Entry, status: os.stat_result, stored: protocol.Stored, *, shared: bool
) -> None:
    """``item`` is in the tree already, with this status."""
    stored.files += 1
    stored.bytes += item.size if item.is_file else 0
    stored.allocated += status.st_blocks * 512 + item.name_bytes
    if shared:
        stored.shared += status.st_blocks * 512
        stored.shared_files += 1


def count_link(directory: int, depth: int, name: str, found: protocol.Scanned) -> None:
    """Count a symbolic link if it leads out of the tree. The copy reports a link that cannot be
    read."""
    with contextlib.suppress(OSError):
        if tree.leads_out(depth, os.readlink(name, dir_fd=directory)):
            found.outside += 1
            found.leads_out = name


def part_size(part: protocol.ScanPart) -> int:
    return len(part.chunk) + len(part.stored) + len(part.folders) + len(part.failed)


def flush_part(part: protocol.ScanPart) -> None:
    """Answer it, and empty it."""
    protocol.answer(part)
    part.chunk, part.stored, part.folders, part.failed, part.unmade = [], [], [], [], []
    part.made = part.new = 0


# The rest of a chunk waits for another turn after this long: what is staged gets committed.
CHUNK_SECONDS = 2.0
UNREACHABLE = (
    f"its object gave no answer within {objects.OBJECT_SECONDS:g}s: its placement group is "
    "inactive, or its OSD hangs; see 'ceph health detail'"
)
MOST_OPENED = 1024
# For a source to say which one it is, before a commit.
CONFIRM_SECONDS = 60


class Worker:
    def __init__(self, number: int, page: int, setup: protocol.Setup) -> None:
        """``page``: descriptor of the control page. OSError when a root cannot be opened."""
        self._folder = setup.generation
        self.throttle = control.Throttle(control.Control(page), number)
        self.committer = commit.Committer(setup.generation, self.throttle)
        self.copier = copy.Copier(self.throttle, immutable=setup.immutable)
        self.large_copier = large_copy.LargeCopier(
            self.committer.generation, self.throttle, immutable=setup.immutable
        )
        self._origin = setup.source, setup.stamp
        with kit.files.closing(tree.open_source(*self._origin)) as source:
            self.source, self._keeps_mount = tree.apart(source)
        self._mount = tree.mount_of(self.source)
        self._may: set[tuple[int, int, int]] = set()  # owner, group, mode of files root may read
        self.access = setup.native
        self.shared: share.Shared | None = None
        if setup.before:
            with contextlib.suppress(OSError, sqlite3.Error):  # without it all is copied
                self.shared = share.Shared(setup.before, setup.before_made_ns)
        self.no_objects = setup.native is None  # the key does not allow object reads
        self.no_listing = setup.native is None  # the cluster refuses a listing past the mount
        self.note = ""  # for the log, with the next answer that carries one
        self._listing: native.Listing | None = None
        self._reader: objects.Reader | None = None

    def connect(self) -> None:
        """Connect to the cluster, for lists and for objects at once, before the first job needs it.

        Each takes some tenths of a second of waiting. What fails is said with the first answer.
        """
        reading = threading.Thread(target=self._objects, daemon=True)
        reading.start()
        self._lists()
        reading.join()

    def close(self) -> None:
        """Disconnect from the cluster. May hang; the coordinator waits only a limited time."""
        if self._listing is not None:
            self._listing.close()

    # --- scan

    def scan(self, job: protocol.Scan) -> protocol.Scanned:
        """Answers ScanPart for every few entries before."""
        part = protocol.ScanPart(directory=job.directory)
        found = protocol.Scanned(stored=protocol.Stored())
        self.throttle.directories = job.allowance
        with contextlib.ExitStack() as stack:
            target = stack.enter_context(tree.opened(self.committer.tree, job.path))
            mtime_ns = os.fstat(target).st_mtime_ns
            if job.again and tree.is_closed(target):
                commit.unmark(self.committer.tree, job.path)  # it may have other names now
            source: int | None = None
            links: int | None = None  # the directory at the source, to read links that are not here
            listed = fetch.held(self._folder, job.path, stack) if job.published else None
            if listed is not None:
                found.skipped, part.location = listed.skipped, listed.location(self.access)
            elif not self._lists():
                source = stack.enter_context(self._of_source(job.path))
                if tree.mount_of(source) != self._mount:
                    raise OSError(errno.EXDEV, "another file system is mounted when it is opened")
            shared = self.shared  # with the generation before, if there is one
            before = shared.directory(job.path, stack) if shared is not None else None
            located = bool(source or listed)  # it matters only for reads past the mount
            for item in listed.entries if listed else self._entries(job.path, source):
                if not isinstance(item, Entry):
                    name, error = item
                    tree.raise_if_gone(error)
                    found.entries += 1
                    part.failed.append(copy.failure(name, error, asked=True))
                elif item.name in job.mounted:
                    found.entries += 1
                    text = "another file system is mounted here; it is not part of the dataset"
                    part.failed.append(protocol.Failure(item.name, text, True))
                    part.unmade.append(item.name)
                elif item.is_directory:
                    found.entries += 1
                    if source is None and item.xattrs:
                        source = stack.enter_context(self._of_source(job.path))
                    found.stored.allocated += self._make_directory(target, item, source, part)
                elif item.is_file or item.is_link:
                    if not located and native.is_plain(item):
                        located = True
                        part.location = self._location(job.path, item)
                    found.entries += 1
                    found.files += 1
                    found.bytes += item.size if item.is_file else 0
                    here = True
                    if source is not None and not self._may_open(source, item, part):
                        pass  # it is among those that failed
                    elif job.again and self._has(target, item, found.stored, before):
                        part.stored.append((item, tree.checksum_of(target, item.name)))
                    elif before is not None and self._shares(target, item, before, found.stored):
                        part.stored.append((item, self.copier.checksum))
                    else:
                        part.chunk.append(item)
                        here = False
                    if item.is_link:
                        if not here and links is None:
                            links = -1  # which no call takes: a look ends nothing
                            with contextlib.suppress(OSError):
                                links = source or stack.enter_context(self._of_source(job.path))
                        at = target if here or links is None else links
                        count_link(at, len(job.path), item.name, found)
                else:
                    found.skipped += 1  # a socket, fifo or device
                self.throttle.beat()
                if part_size(part) >= index.CHUNK_ENTRIES:
                    flush_part(part)
                    self.throttle.check()
            if job.extras:
                self._drop_extras(target, job.path)
            os.utime(target, ns=(mtime_ns, mtime_ns))  # new subdirectories changed it
        if part_size(part):
            flush_part(part)
        found.note, self.note = self.note, ""
        return found

    def _of_source(self, path: Sequence[str]) -> AbstractContextManager[int]:
        """A directory of the source. OSError, RefusedError."""
        return kit.files.closing(tree.asked(tree.open_below, self.source, path))

    def _may_open(self, source: int, item: Entry, part: protocol.ScanPart) -> bool:
        """Whether the source lets root read a file that it does not let all read; else it failed.

        A server that takes root for nobody (NFS: root_squash) is known so before an overlay loses
        the file for its owner. One file of each owner and mode is asked for.
        """
        key = item.uid, item.gid, item.mode
        if not item.is_file or item.mode & stat.S_IROTH or key in self._may:
            return True
        try:
            os.close(copy.open_origin(source, item.name))
        except tree.SourceRefusedError as error:
            part.failed.append(copy.failure(item.name, error))
            return False
        except OSError:
            return True  # it is asked again when it is copied
        if len(self._may) < MOST_OPENED:
            self._may.add(key)
        return True

    def _entries(
        self, path: Sequence[str], source: int | None
    ) -> Iterator[Entry | tuple[str, OSError]]:
        if source is not None:
            return tree.listing(source)
        assert self._listing is not None
        return (Entry(*item) for item in self._listing.entries(path))

    def fetch(self, job: protocol.Fetch) -> protocol.Fetched:
        """Without object reads a manifest would cost more than listing."""
        self.throttle.begin(0)
        if self.access is not None and self._objects() is None:
            return protocol.Fetched(why=f"it is for reads past the mount; {self.note}")
        exact = self._lists()
        return fetch.fetch(job, self._folder, self._listed, self.throttle.idle, exact=exact)

    def _listed(self, path: Sequence[str]) -> Iterator[Entry | tuple[str, OSError]]:
        """A directory as the source has it, now."""
        if self._lists():
            yield from self._entries(path, None)
            return
        with tree.opened(self.source, path) as source:
            yield from tree.listing(source)

    def _lists(self) -> bool:
        """Whether directories are listed past the mount; connects for the first one.

        A cluster that refuses that (for lack of a right, say) has granted the mount: it is read.
        """
        if self._listing is None and self.access is not None and not self.no_listing:
            try:
                self._listing = native.Listing(self.access)
            except OSError as error:
                self.no_listing = True
                self.note = f"directories are listed through the mount: {error}"
        return self._listing is not None

    def _make_directory(
        self, target: int, item: Entry, source: int | None, part: protocol.ScanPart
    ) -> int:
        """The SSD bytes that it takes beyond the one block that every directory counts."""
        no_room = self.throttle.no_room
        if (no_room or not self.throttle.directories) and not tree.has(target, item.name):
            flush_part(part)  # the coordinator must count what was made
            if not no_room:
                raise control.Cancelled  # it is given again while there is room
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        try:
            new = tree.make_directory(target, item, source)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            part.failed.append(copy.failure(item.name, error))
            part.unmade.append(item.name)
            return 0
        part.folders.append(item)
        status = os.stat(item.name, dir_fd=target, follow_symlinks=False)
        beyond = max(0, status.st_blocks * 512 - 4096) + item.name_bytes
        if new:
            part.made += 4096 + beyond
            part.new += 1
            self.throttle.directories -= 1
        return beyond

    def _location(self, path: Sequence[str], item: Entry) -> tuple[str, int] | None:
        """Where the objects of this file are, and most likely those of its directory."""
        assert self._listing is not None
        try:
            return self._listing.location(path, item.name)
        except OSError:
            return None  # the files are read through the mount

    def _drop_extras(self, target: int, path: Sequence[str]) -> None:
        """Remove names from the tree that the source no longer has."""
        extras = []
        with tree.opened(self.source, path) as source, os.scandir(target) as found:
            for item in found:
                if not tree.has(source, item.name):
                    extras.append(item.name)
                self.throttle.beat()
        for name in extras:
            tree.remove(target, name)
            self.throttle.beat()

    def _shares(
        self, target: int, item: Entry, before: share.SharedDirectory, stored: protocol.Stored
    ) -> bool:
        """Take the file over from the generation before, if that has the same version of it."""
        taken = before.link(item, target)
        if taken is None:
            return False
        self.copier.checksum, status = taken
        count_part(item, status, stored, shared=True)
        return True

    def _has(
        self, target: int, item: Entry, stored: protocol.Stored,
        before: share.SharedDirectory | None,
    ) -> bool:  # fmt: skip
        """Whether the tree has this version already; if so it is counted in ``stored``."""
        status = tree.status(target, item.name)
        if status is None or not tree.same_content(item, status):
            return False
        shared = before is not None and before.is_shared(item.name, status)
        count_part(item, status, stored, shared=shared)
        return True

    # --- copy

    def copy(self, job: protocol.Copy) -> protocol.Copied:
        os.mkdir(job.folder, 0o700, dir_fd=self.committer.staging)
        self.throttle.begin(0)
        copied = protocol.Copied()
        tried: set[str] = set()
        sums: dict[str, str] = {}
        stopped = False
        deadline = time.monotonic() + CHUNK_SECONDS

        def add(item: Entry, allocated: int) -> None:
            tried.add(item.name)
            sums[item.name] = self.copier.checksum
            now = self.copier.read
            if now is not None and sample.difference(item, now):
                copied.newer.append(tree.entry_of(item.name, now))
            copied.files += 1
            copied.bytes += item.size if item.is_file else 0
            copied.allocated += allocated + item.name_bytes

        with contextlib.ExitStack() as stack:
            staging = stack.enter_context(tree.opened(self.committer.staging, [job.folder]))
            try:
                rest = job.entries
                if job.location and not self.no_objects:
                    rest = self._copy_objects(job, rest, staging, deadline, add, copied)
                    copied.objects = copied.files
                    tried |= {failure.name for failure in copied.failed}
                source = None
                where = {item.name: at for at, item in enumerate(job.entries)}
                for item in rest:
                    self.throttle.begin(where[item.name])
                    if source is None:
                        source = stack.enter_context(self._of_source(job.path))
                    if time.monotonic() >= deadline and (tried or copied.silent):
                        stopped = True
                        break
                    try:
                        add(item, self.copier.copy(source, item, staging))
                        if item.is_file and item.nlink > 1:
                            key = copy.link_key(item, self.copier.checksum)
                            copied.links.append(protocol.Link(item.name, key))
                    except OSError as error:
                        tree.raise_if_gone(error)
                        if error.errno in (errno.ENOSPC, errno.EDQUOT):
                            stopped = copied.full = True
                            break
                        copied.failed.append(copy.failure(item.name, error))
                        tried.add(item.name)
            except control.Cancelled:
                stopped = True
        if stopped or copied.silent:
            copied.left = [item.name for item in job.entries if item.name not in tried]
        copied.sums = "".join(sums.get(item.name, "").ljust(protocol.SUM) for item in job.entries)
        copied.note, self.note = self.note, ""
        return copied

    def _copy_objects(
        self,
        job: protocol.Copy,
        items: list[Entry],
        staging: int,
        deadline: float,
        add: Callable[[Entry, int], None],
        copied: protocol.Copied,
    ) -> list[Entry]:
        """Copy plain files by their objects; the entries that must be read through the mount."""
        plain = [item for item in items if native.is_plain(item)]
        if not plain:
            return items
        assert job.location is not None
        reader = self._objects()
        if reader is None:
            return items
        rest = [item for item in items if not native.is_plain(item)]

        def each(item: Entry, data: bytes | None) -> None:
            if data is None:
                rest.append(item)
                return
            self.throttle.step(1, item.size)
            add(item, self.copier.keep(item, data, staging))

        try:
            unread = reader.read(
                objects.Location(*job.location), plain, each, deadline,
                patient=job.patient, waiting=self.throttle.idle,
            )  # fmt: skip
        except PermissionError as error:
            self._no_objects(error)
            return items
        lost = [*unread.unreachable, *(unread.silent if job.patient else ())]
        copied.failed += [protocol.Failure(item.name, UNREACHABLE, True) for item in lost]
        if not job.patient:
            copied.silent = [item.name for item in unread.silent]
        return rest + list(unread.left)

    def _objects(self) -> objects.Reader | None:
        """Connects for the first object; None when objects cannot be read."""
        if self._reader is None and self.access is not None and not self.no_objects:
            try:
                self._reader = objects.Reader(self.access)
            except OSError as error:
                self._no_objects(error)
        return self._reader

    def extents(self, job: protocol.Extents) -> protocol.ExtentsCopied:
        self.throttle.begin(0)
        reader = self._objects()
        listing = self._listing if reader is not None and self._lists() else None
        with self._of_source(job.path) as source:
            answer = self.large_copier.copy(job, source, reader, listing)
        answer.note, self.note = self.note, ""
        return answer

    def whole(self, job: protocol.Whole) -> protocol.Completed:
        self.throttle.begin(0)
        with self._of_source(job.path) as source:
            return self.large_copier.whole(job, source)

    def _no_objects(self, error: OSError) -> None:
        self.no_objects = True
        self.note = f"files are read through the mount: {error}"

    # --- commit

    def _confirm(self) -> None:
        """Nothing enters the tree unless the source that was reached is still there, by its path.
        OSError ESHUTDOWN.

        CephFS answers reads in a deleted snapshot with later bytes, also through a directory that
        was opened before. What was read before this check, is of the right one: a snapshot that is
        deleted never comes back. A source that hangs here must not look like a disk that syncs:
        the alarm ends this process, and with it the pass.
        """
        signal.alarm(CONFIRM_SECONDS)
        try:
            os.close(tree.open_source(*self._origin))
        except FileNotFoundError as error:
            raise OSError(errno.ESHUTDOWN, "the source has gone") from error
        finally:
            signal.alarm(0)

    # --- the loop

    @functools.cached_property
    def _verifier(self) -> verify_worker.Verifier:
        return verify_worker.Verifier(self.committer, self.source, self.throttle)

    def do(self, job: protocol.Job) -> protocol.Answer:
        """OSError, Cancelled."""
        match job:
            case protocol.Scan():
                return self.scan(job)
            case protocol.Copy():
                return self.copy(job)
            case protocol.Extents():
                return self.extents(job)
            case protocol.Whole():
                return self.whole(job)
            case protocol.Fetch():
                return self.fetch(job)
            case protocol.Commit():
                if job.folders:
                    self._confirm()
                return self.committer.commit(job)
            case protocol.Recheck():
                return self.committer.recheck(job)
            case protocol.Finish():
                self._confirm()
                return self.committer.finish()
            case protocol.Verify():
                return self._verifier.verify(job)

    def run(self) -> None:
        """Do jobs until there are no more. The error of a job is its answer."""
        while (job := protocol.next_job()) is not None:
            answer: protocol.Answer
            try:
                answer = self.do(job)
            except control.Cancelled:
                answer = protocol.NotDone(cancelled=True)
            except OSError as error:
                refused = isinstance(error, tree.SourceRefusedError)
                why = copy.reason(error)
                answer = protocol.NotDone(error=why, errno=error.errno, refused=refused)
            except Exception as error:
                answer = protocol.NotDone(error=repr(error))
            protocol.answer(answer)


def serve(number: int, page: int) -> None:
    """A worker from its start to its end; ``page``: descriptor of the control page."""
    child_main.die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C on a terminal is for the agent
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    os.umask(0)
    setup = protocol.receive(protocol.JOBS, protocol.Setup)
    if setup is None:
        return
    try:
        worker = Worker(number, page, setup)
    except OSError as error:
        protocol.answer(protocol.NotDone(error=copy.reason(error), errno=error.errno))
        return
    protocol.answer(protocol.Done())
    if number > 0:  # the first one commits
        worker.connect()
    try:
        worker.run()
    except BrokenPipeError:
        pass  # the coordinator has ended
    worker.close()
