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
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence

from cache.fill import commit, control, copy, protocol
from cache.store import index, tree
from cache.store.tree import Entry
from ceph import native
from kit import child_main

# The rest of a chunk waits for another turn after this long: what is staged gets committed, and
# hints get a turn.
CHUNK_SECONDS = 2.0


class Worker(commit.Committer):
    """Each job has a method of its name, in lower case."""

    def __init__(self, number: int, page: int, setup: protocol.Setup) -> None:
        """``page``: descriptor of the control page. OSError when a root cannot be opened."""
        self.number = number
        self.page = control.Control(page)
        super().__init__(setup.generation, control.Throttle(self.page, number))
        self.copier = copy.Copier(self.throttle, immutable=setup.immutable)
        self.source = tree.open_source(setup.source, setup.stamp)
        self.access = setup.native
        self.no_objects = False  # the key does not allow object reads
        self._listing: native.Listing | None = None
        self._reader: native.Reader | None = None

    def close(self) -> None:
        """Disconnect from the cluster. May hang; the coordinator waits only a limited time."""
        if self._listing is not None:
            self._listing.close()

    # --- scan

    def scan(self, job: protocol.Scan) -> None:
        """Answers ScanPart for every few entries, then Scanned."""
        part = protocol.ScanPart(directory=job.directory)
        found = protocol.Scanned(stored=protocol.Stored())
        with contextlib.ExitStack() as stack:
            target = stack.enter_context(tree.opened(self.tree, job.path))
            mtime_ns = os.fstat(target).st_mtime_ns
            source: int | None = None
            if self.access is None:
                source = stack.enter_context(tree.opened(self.source, job.path))
            located = source is not None  # it matters only for reads past the mount
            for item in self._entries(job.path, source):
                if not isinstance(item, Entry):
                    name, error = item
                    if error.errno in tree.SOURCE_GONE:
                        raise error
                    found.entries += 1
                    part.failed.append(copy.failure(name, error))
                elif item.is_directory:
                    found.entries += 1
                    found.folders.append(item.name)
                    if item.name in job.mounted:
                        text = "another file system is mounted here; it is not part of the dataset"
                        part.failed.append(protocol.Failure(item.name, text, True))
                    else:
                        if source is None and item.xattrs:
                            source = stack.enter_context(tree.opened(self.source, job.path))
                        found.stored.allocated += self._make_directory(target, item, source, part)
                elif item.is_file or item.is_link:
                    if not located and native.is_plain(item):
                        located = True
                        part.location = self._location(job.path, item)
                    found.entries += 1
                    found.files += 1
                    found.bytes += item.size if item.is_file else 0
                    if not (job.again and self._has(target, item, found.stored)):
                        part.chunk.append(item)
                else:
                    found.skipped += 1  # a socket, fifo or device
                self.page.beat(self.number)
                if _size(part) >= index.CHUNK_ENTRIES:
                    _flush(part)
                    self.throttle.check()
            if job.extras:
                self._drop_extras(target, job.path)
            os.utime(target, ns=(mtime_ns, mtime_ns))  # new subdirectories changed it
        if _size(part):
            _flush(part)
        protocol.answer(found)

    def _entries(
        self, path: Sequence[str], source: int | None
    ) -> Iterator[Entry | tuple[str, OSError]]:
        if source is not None:
            return tree.listing(source)
        assert self.access is not None
        if self._listing is None:
            self._listing = native.Listing(self.access)
        return (Entry(*item) for item in self._listing.entries(path))

    def _make_directory(
        self, target: int, item: Entry, source: int | None, part: protocol.ScanPart
    ) -> int:
        """The SSD bytes that it takes beyond the one block that every directory counts."""
        if self.page.cramped and not tree.has(target, item.name):
            _flush(part)  # the coordinator must count what was made
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        try:
            new = tree.make_directory(target, item, source)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            part.failed.append(copy.failure(item.name, error))
            return 0
        part.folders.append(item)
        status = os.stat(item.name, dir_fd=target, follow_symlinks=False)
        beyond = max(0, status.st_blocks * 512 - 4096) + item.name_bytes
        if new:
            part.made += 4096 + beyond
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
        with tree.opened(self.source, path) as source:
            for name in os.listdir(target):
                try:
                    os.stat(name, dir_fd=source, follow_symlinks=False)
                except FileNotFoundError:
                    tree.remove(target, name)
                self.page.beat(self.number)

    def _has(self, target: int, item: Entry, stored: protocol.Stored) -> bool:
        """Whether the tree has this version already; if so it is counted in ``stored``."""
        try:
            status = os.stat(item.name, dir_fd=target, follow_symlinks=False)
        except FileNotFoundError:
            return False
        if not tree.same_content(item, status):
            return False
        stored.files += 1
        stored.bytes += item.size if item.is_file else 0
        stored.allocated += status.st_blocks * 512 + item.name_bytes
        return True

    # --- copy

    def copy(self, job: protocol.Copy) -> None:
        os.mkdir(job.folder, 0o700, dir_fd=self.staging)
        copied = protocol.Copied()
        tried: set[str] = set()
        stopped = False
        deadline = time.monotonic() + CHUNK_SECONDS

        def add(item: Entry, allocated: int) -> None:
            tried.add(item.name)
            copied.files += 1
            copied.bytes += item.size if item.is_file else 0
            copied.allocated += allocated + item.name_bytes

        with contextlib.ExitStack() as stack:
            staging = stack.enter_context(tree.opened(self.staging, [job.folder]))
            try:
                rest = self._not_stored(job, add) if job.hinted else job.entries
                if job.location and not self.no_objects:
                    rest = self._copy_objects(job.location, rest, staging, deadline, add)
                source = None
                for item in rest:
                    if source is None:
                        source = stack.enter_context(tree.opened(self.source, job.path))
                    if time.monotonic() >= deadline and tried:
                        stopped = True
                        break
                    try:
                        add(item, self.copier.copy(source, item, staging))
                        if item.is_file and item.nlink > 1:
                            key = self._link_key(staging, item)
                            copied.links.append(protocol.Link(item.name, key))
                    except OSError as error:
                        if error.errno in tree.SOURCE_GONE:
                            raise
                        if error.errno in (errno.ENOSPC, errno.EDQUOT):
                            stopped = copied.full = True
                            break
                        copied.failed.append(copy.failure(item.name, error))
                        tried.add(item.name)
            except control.Cancelled:
                stopped = True
        if stopped:
            copied.left = [item.name for item in job.entries if item.name not in tried]
        protocol.answer(copied)

    def _not_stored(self, job: protocol.Copy, add: Callable[[Entry, int], None]) -> list[Entry]:
        """Entries that no hint has brought into the tree; the others are done."""
        rest = []
        with tree.opened(self.tree, job.path) as target:
            for item in job.entries:
                stored = protocol.Stored()
                if self._has(target, item, stored):
                    add(item, stored.allocated - item.name_bytes)
                else:
                    rest.append(item)
        return rest

    def _copy_objects(
        self,
        location: tuple[str, int],
        items: list[Entry],
        staging: int,
        deadline: float,
        add: Callable[[Entry, int], None],
    ) -> list[Entry]:
        """Copy plain files by their objects; the entries that must be read through the mount."""
        plain = [item for item in items if native.is_plain(item)]
        if not plain:
            return items
        assert self.access is not None
        if self._reader is None:
            try:
                self._reader = native.Reader(self.access)
            except OSError:
                self.no_objects = True
                return items
        rest = [item for item in items if not native.is_plain(item)]

        def each(item: Entry, data: bytes | None) -> None:
            if data is None:
                rest.append(item)
                return
            self.throttle.step(1, item.size)
            add(item, self.copier.keep(item, data, staging))

        try:
            rest += self._reader.read(native.Location(*location), plain, each, deadline)
        except PermissionError:
            self.no_objects = True
            return items
        return rest

    def _link_key(self, staging: int, item: Entry) -> str:
        """Equal for two names only when they are links of one file with the same bytes."""
        checksum = os.getxattr(f"/proc/self/fd/{staging}/{item.name}", tree.CHECKSUM).decode()
        return f"{item.ino:x}-{checksum}-{item.mode:o}-{item.uid}-{item.gid}-{item.mtime_ns}"

    def hint(self, job: protocol.Hint) -> None:
        """Errors do not matter: the chunk of these files follows and reports them."""
        left = job.allowance
        taken: dict[str, int] = {}
        os.mkdir(job.folder, 0o700, dir_fd=self.staging)
        with (
            tree.opened(self.staging, [job.folder]) as staging,
            tree.opened(self.source, job.path) as source,
            tree.opened(self.tree, job.path) as target,
        ):
            for name in job.names:
                try:
                    status = os.stat(name, dir_fd=source, follow_symlinks=False)
                    item = tree.entry_of(name, status)
                    fits = item.is_file and item.nlink == 1 and item.allocated <= left
                    if fits and not self._has(target, item, protocol.Stored()):
                        taken[name] = self.copier.copy(source, item, staging) + item.name_bytes
                        left -= max(item.allocated, taken[name])
                except (OSError, control.Cancelled):
                    pass
        protocol.answer(protocol.Hinted(taken=taken))

    # --- the loop

    def run(self) -> None:
        """Do jobs until there are no more. The error of a job is its answer."""
        while (job := protocol.next_job()) is not None:
            try:
                getattr(self, type(job).__name__.lower())(job)
            except control.Cancelled:
                protocol.answer(protocol.NotDone(cancelled=True))
            except OSError as error:
                protocol.answer(protocol.NotDone(error=copy.reason(error), errno=error.errno))
            except Exception as error:
                protocol.answer(protocol.NotDone(error=repr(error)))


def _size(part: protocol.ScanPart) -> int:
    return len(part.chunk) + len(part.folders) + len(part.failed)


def _flush(part: protocol.ScanPart) -> None:
    protocol.answer(part)
    part.chunk, part.folders, part.failed, part.made = [], [], [], 0


def serve(number: int, page: int, kind: type[Worker] = Worker) -> None:
    """A worker from its start to its end; ``page``: descriptor of the control page."""
    child_main.die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C on a terminal is for the agent
    os.umask(0)
    setup = protocol.receive(protocol.JOBS, protocol.Setup)
    if setup is None:
        return
    try:
        worker = kind(number, page, setup)
    except OSError as error:
        protocol.answer(protocol.NotDone(error=copy.reason(error), errno=error.errno))
        return
    protocol.answer(protocol.Done())
    try:
        worker.run()
    except BrokenPipeError:
        pass  # the coordinator has ended
    worker.close()
