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
import time
from collections.abc import Callable, Iterator, Sequence

from cache.fill import control, copy, protocol
from cache.store import index, tree
from cache.store.tree import Entry
from ceph import native
from kit import child_main
from linux import fs_ordering, syscalls

# The rest of a chunk waits for another turn after this long: what is staged gets committed, and
# hints get a turn.
CHUNK_SECONDS = 2.0


class Worker:
    """Each job has a method of its name, in lower case."""

    def __init__(self, number: int, page: int, setup: protocol.Setup) -> None:
        """``page``: descriptor of the control page. OSError when a root cannot be opened."""
        self.number = number
        self.page = control.Control(page)
        self.throttle = control.Throttle(self.page, number)
        self.copier = copy.Copier(self.throttle, immutable=setup.immutable)
        self.source = tree.open_source(setup.source, setup.stamp)
        self.generation = tree.open_root(setup.generation)
        self.tree = os.open("tree", os.O_RDONLY | os.O_DIRECTORY, dir_fd=self.generation)
        self.staging = os.open("staging", os.O_RDONLY | os.O_DIRECTORY, dir_fd=self.generation)
        self.links = os.open("links", os.O_RDONLY | os.O_DIRECTORY, dir_fd=self.generation)
        self.access = setup.native
        self.no_objects = False  # the key does not allow object reads
        self._listing: native.Listing | None = None
        self._reader: native.Reader | None = None

    @functools.cached_property
    def ordered(self) -> bool:
        """The store's file system makes metadata changes durable in order."""
        return fs_ordering.keeps_order(self.generation)

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

    # --- commit and seal

    def commit(self, job: protocol.Commit) -> None:
        """One syncfs, then the renames, then the seals.

        The renames into a sealed directory were made by an earlier commit and must be durable
        before its mark is: a journal keeps that order, elsewhere this syncfs does.
        """
        if job.folders or not self.ordered:
            self._sync()
        lost: list[int] = []
        for staged in job.folders:
            try:
                target = tree.open_below(self.tree, staged.path)
            except OSError:
                lost.append(staged.directory)  # the index claimed more than the tree has
                tree.remove(self.staging, staged.folder)
                continue
            try:
                self._place_all(staged, target)
            finally:
                os.close(target)
            os.rmdir(staged.folder, dir_fd=self.staging)
        sealed: list[int] = []
        missing: list[int] = []
        for seal in job.seals:
            (sealed if self._seal(seal) else missing).append(seal.directory)
        protocol.answer(protocol.Committed(sealed=sealed, missing=missing, lost=lost))

    def _sync(self) -> None:
        syscalls.checked(syscalls.libc.syncfs(self.generation), "syncfs")

    def _place_all(self, staged: protocol.StagedFolder, target: int) -> None:
        with tree.opened(self.staging, [staged.folder]) as staging:
            for link in staged.links:
                self._share(staging, link)
            for name in os.listdir(staging):
                self._place(staging, name, target)
            for link in staged.links:
                # A commit that was killed before the index noted it is done again: rename(2) of one
                # link of a file over another does nothing and leaves the old name.
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(link.name, dir_fd=staging)
        os.utime(target, ns=(staged.mtime_ns, staged.mtime_ns))

    def _place(self, staging: int, name: str, target: int) -> None:
        try:
            os.rename(name, name, src_dir_fd=staging, dst_dir_fd=target)
        except IsADirectoryError:  # the source had a directory there before
            tree.remove(target, name)
            os.rename(name, name, src_dir_fd=staging, dst_dir_fd=target)

    def _share(self, staging: int, link: protocol.Link) -> None:
        """Make the name a link of the stored file with the same key, if there is one."""
        name, key = link
        try:
            os.link(name, key, src_dir_fd=staging, dst_dir_fd=self.links)
        except FileExistsError:
            spare = f"{name[:200]}.link"
            try:
                os.link(key, spare, src_dir_fd=self.links, dst_dir_fd=staging)
            except OSError as error:
                if error.errno != errno.EMLINK:
                    raise
                # The file system allows no more names of one file: share this copy from now on.
                os.rename(name, key, src_dir_fd=staging, dst_dir_fd=self.links)
                os.link(key, name, src_dir_fd=self.links, dst_dir_fd=staging)
            else:
                os.rename(spare, name, src_dir_fd=staging, dst_dir_fd=staging)

    def _seal(self, seal: protocol.Seal) -> bool:
        """Mark the directory opaque; False when the tree lacks some of its entries.

        They are counted because the index may claim more than the disk has after a power cut.
        """
        try:
            directory = tree.open_below(self.tree, seal.path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        try:
            if len(os.listdir(directory)) != seal.entries:
                return False
            if seal.path:  # the root of a layer cannot be opaque
                os.setxattr(directory, tree.OPAQUE, b"y")
            os.utime(directory, ns=(seal.mtime_ns, seal.mtime_ns))
        finally:
            os.close(directory)
        return True

    def recheck(self, job: protocol.Recheck) -> None:
        missing = []
        for number, path, entries in job.directories:
            self.throttle.beat()
            try:
                with tree.opened(self.tree, path) as directory:
                    if path:
                        os.getxattr(directory, tree.OPAQUE)
                    if len(os.listdir(directory)) == entries:
                        continue
            except OSError:
                pass  # it has no mark, or does not exist
            for depth in range(1, len(path) + 1):
                # Every mark above it would hide the source's entries from readers too.
                with contextlib.suppress(OSError), tree.opened(self.tree, path[:depth]) as above:
                    os.removexattr(above, tree.OPAQUE)
            missing.append(number)
        protocol.answer(protocol.Rechecked(missing=missing))

    def finish(self, _: protocol.Finish) -> None:
        for name in os.listdir(self.links):
            os.unlink(name, dir_fd=self.links)
        self._sync()
        protocol.answer(protocol.Done())

    # --- withdraw

    def unseal(self, job: protocol.Unseal) -> None:
        """Raises OSError when a mark stays: a file deleted below it would be ENOENT for readers."""
        for length in range(len(job.path), 0, -1):
            try:
                with tree.opened(self.tree, job.path[:length]) as directory:
                    os.removexattr(directory, tree.OPAQUE)
            except OSError as error:
                # The directory has no mark, or does not exist.
                if error.errno not in (errno.ENODATA, errno.ENOENT, errno.ENOTDIR):
                    raise
        protocol.answer(protocol.Done())

    def prune(self, job: protocol.Prune) -> None:
        with (
            contextlib.suppress(FileNotFoundError, NotADirectoryError),
            tree.opened(self.tree, job.path) as directory,
        ):
            mtime_ns = os.fstat(directory).st_mtime_ns
            for name in job.names:
                tree.remove(directory, name)
            os.utime(directory, ns=(mtime_ns, mtime_ns))
        protocol.answer(protocol.Done())

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
