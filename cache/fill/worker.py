"""A worker of a pass: lists directories, copies chunks, commits batches, verifies.

A process of its own, because every call on the source may hang. It gets jobs on standard input and
answers on standard output; it ends when the pass closes them or dies. Nothing that it does touches
the tree except ``commit`` and ``seal``, which only ever rename whole, durable files into place.
"""

import contextlib
import errno
import functools
import os
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Any

from cache.fill import checks, control, copying, entry, index, messages, native, tree
from cache.fill.entry import Entry
from kit import child_main
from linux import fs_ordering, syscalls

# A chunk is left for another time after so long: what is staged gets committed, hints get a turn.
CHUNK_SECONDS = 2.0


def is_lasting(error: OSError) -> bool:
    """Whether trying again soon is pointless."""
    return error.errno in (errno.EPERM, errno.EACCES, errno.ENAMETOOLONG, errno.E2BIG)


class Worker:
    """Holds the roots open: what is mounted over them later cannot be taken for the dataset."""

    def __init__(self, number: int, page: int, setup: dict[str, Any]) -> None:
        self.number = number
        self.page = control.Control(page)
        self.throttle = control.Throttle(self.page, number)
        self.immutable = bool(setup["immutable"])
        self.copier = copying.Copier(self.throttle, immutable=self.immutable)
        self.source = tree.open_source(setup["source"], setup["stamp"])
        self.generation = tree.open_root(setup["generation"])
        self.tree = os.open("tree", os.O_RDONLY | os.O_DIRECTORY, dir_fd=self.generation)
        self.staging = os.open("staging", os.O_RDONLY | os.O_DIRECTORY, dir_fd=self.generation)
        self.links = os.open("links", os.O_RDONLY | os.O_DIRECTORY, dir_fd=self.generation)
        self.access = native.Access(**setup["native"]) if setup["native"] else None
        self.no_objects = False
        self._listing: native.Listing | None = None
        self._reader: native.Reader | None = None
        self.checks = checks.Checks(self.source, self.tree, self.throttle)

    @functools.cached_property
    def ordered(self) -> bool:
        """Asked by the one that commits."""
        return fs_ordering.keeps_order(self.generation)

    def close(self) -> None:
        """Let go of the cluster; may hang with it, the pass waits for so long and no longer."""
        if self._listing is not None:
            self._listing.close()

    def scan(self, job: dict[str, Any]) -> None:
        """List a directory: make its subdirectories, answer what is to copy in chunks."""
        path: list[str] = job["path"]
        mounted: set[str] = set(job["mounted"])
        number = job["directory"]
        answer: dict[str, Any] = {"did": "entries", "directory": number}
        counts = {"entries": 0, "files": 0, "bytes": 0, "skipped": 0}
        stored = [0, 0, 0]
        batch: list[Entry] = []
        folders: list[Entry] = []
        failed: list[list[Any]] = []
        names: list[str] = []
        made = 0  # bytes of the SSD that new directories of this part take

        def flush() -> None:
            nonlocal made
            part = {"chunk": batch, "folders": folders, "failed": failed, "made": made}
            messages.answer(answer | part)
            made = 0
            batch.clear()
            folders.clear()
            failed.clear()

        with contextlib.ExitStack() as stack:
            target = stack.enter_context(tree.opened(self.tree, path))
            dressed = os.fstat(target).st_mtime_ns
            source: int | None = None
            if self.access is None:
                source = stack.enter_context(tree.opened(self.source, path))
            for item in self._entries(path, source):
                if not isinstance(item, Entry):
                    name, error = item
                    if error.errno in tree.SOURCE_GONE:
                        raise error
                    counts["entries"] += 1
                    failed.append([name, copying.reason(error), is_lasting(error)])
                elif item.is_directory:
                    counts["entries"] += 1
                    names.append(item.name)
                    if item.name in mounted:
                        text = "another file system is mounted here; it is not part of the dataset"
                        failed.append([item.name, text, True])
                    else:
                        if source is None and item.xattrs:
                            source = stack.enter_context(tree.opened(self.source, path))
                        if self.page.cramped and not tree.has(target, item.name):
                            flush()  # what was made is known, and counted
                            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                        try:
                            new = tree.make_directory(target, item, source)
                        except OSError as error:
                            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                                raise
                            failed.append([item.name, copying.reason(error), is_lasting(error)])
                        else:
                            folders.append(item)
                            # Beyond the block that every directory is reckoned with.
                            status = os.stat(item.name, dir_fd=target, follow_symlinks=False)
                            beyond = max(0, status.st_blocks * 512 - 4096) + item.name_bytes
                            stored[2] += beyond
                            if new:
                                made += 4096 + beyond
                elif item.is_file or item.is_link:
                    if source is None and "location" not in answer:
                        self._locate(path, item, answer)
                    counts["entries"] += 1
                    counts["files"] += 1
                    counts["bytes"] += item.size if item.is_file else 0
                    if not (job["again"] and self._has(target, item, stored)):
                        batch.append(item)
                else:
                    counts["skipped"] += 1  # a socket, fifo or device
                self.page.beat(self.number)
                if len(batch) + len(folders) + len(failed) >= index.CHUNK_ENTRIES:
                    flush()
                    self.throttle.check()
            if job["extras"]:
                self._drop_extras(target, path)
            os.utime(target, ns=(dressed, dressed))  # making directories in it changed it
        if batch or folders or failed:
            flush()
        done = {"did": "scan", "directory": number, "stored": stored, "names": names, **counts}
        messages.answer(done)

    def _locate(self, path: Sequence[str], item: Entry, answer: dict[str, Any]) -> None:
        """Say where the objects of this directory's files are, as soon as one shows it."""
        if native.is_plain(item) and self._listing is not None:
            try:
                answer["location"] = self._listing.location(path, item.name)
            except OSError:
                answer["location"] = None  # only an acceleration: the mount serves as well

    def _drop_extras(self, target: int, path: Sequence[str]) -> None:
        """Remove names from the tree that the source no longer has."""
        with tree.opened(self.source, path) as source:
            for name in os.listdir(target):
                try:
                    os.stat(name, dir_fd=source, follow_symlinks=False)
                except FileNotFoundError:
                    tree.remove(target, name)
                self.page.beat(self.number)

    def _entries(
        self, path: Sequence[str], source: int | None
    ) -> Iterator[Entry | tuple[str, OSError]]:
        if source is not None:
            return tree.listing(source)
        assert self.access is not None
        if self._listing is None:
            self._listing = native.Listing(self.access)
        return self._listing.entries(path)

    def _has(self, target: int, item: Entry, stored: list[int]) -> bool:
        """Whether the tree has this version already; counted then."""
        try:
            status = os.stat(item.name, dir_fd=target, follow_symlinks=False)
        except FileNotFoundError:
            return False
        if not entry.same_content(item, status):
            return False
        stored[0] += 1
        stored[1] += item.size if item.is_file else 0
        stored[2] += status.st_blocks * 512 + item.name_bytes
        return True

    def copy(self, job: dict[str, Any]) -> None:
        """Copy a chunk into staging/<chunk>; answer what is staged and what failed."""
        items = [Entry(*fields) for fields in job["entries"]]
        folder = str(job["chunk"])
        os.mkdir(folder, 0o700, dir_fd=self.staging)
        failed: list[list[Any]] = []
        staged = [0, 0, 0]
        finished: set[str] = set()
        links: list[list[str]] = []
        stopped = ""
        deadline = time.monotonic() + CHUNK_SECONDS

        def took(item: Entry, allocated: int) -> None:
            finished.add(item.name)
            staged[0] += 1
            staged[1] += item.size if item.is_file else 0
            staged[2] += allocated + item.name_bytes

        with contextlib.ExitStack() as stack:
            staging = stack.enter_context(tree.opened(self.staging, [folder]))
            try:
                rest = self._not_stored(job, items, took)
                if job["location"] and not self.no_objects:
                    rest = self._copy_objects(job, rest, staging, deadline, took)
                if rest:
                    source = stack.enter_context(tree.opened(self.source, job["path"]))
                    for item in rest:
                        if time.monotonic() >= deadline and finished:
                            stopped = "time"
                            break
                        try:
                            took(item, self.copier.copy(source, item, staging))
                            if item.is_file and item.nlink > 1:
                                links.append([item.name, self._link_key(staging, item)])
                        except OSError as error:
                            if error.errno in tree.SOURCE_GONE:
                                raise
                            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                                stopped = "full"
                                break
                            failed.append([item.name, copying.reason(error), is_lasting(error)])
                            finished.add(item.name)
            except control.Cancelled:
                stopped = "cancelled"
        left = [item.name for item in items if item.name not in finished] if stopped else []
        told = {"staged": staged, "failed": failed, "links": links}
        answer = {"did": "copy", "chunk": job["chunk"], "left": left, "stopped": stopped}
        messages.answer(answer | told)

    def _not_stored(self, job: dict[str, Any], items: list[Entry], took: Any) -> list[Entry]:
        """Those that a hint has not brought into the tree before their chunk came."""
        if not job["hinted"]:
            return items
        rest = []
        with tree.opened(self.tree, job["path"]) as target:
            for item in items:
                stored = [0, 0, 0]
                if self._has(target, item, stored):
                    took(item, stored[2] - item.name_bytes)
                else:
                    rest.append(item)
        return rest

    def hint(self, job: dict[str, Any]) -> None:
        """Copy single names that a reader opened, ahead of their chunk.

        ``allowance``: bytes of the SSD that they may take; what does not fit waits for its chunk.
        """
        folder = str(job["chunk"])
        left: int = job["allowance"]
        taken: dict[str, int] = {}
        os.mkdir(folder, 0o700, dir_fd=self.staging)
        with (
            tree.opened(self.staging, [folder]) as staging,
            tree.opened(self.source, job["path"]) as source,
            tree.opened(self.tree, job["path"]) as target,
        ):
            for name in job["names"]:
                try:
                    item = entry.of(name, os.stat(name, dir_fd=source, follow_symlinks=False))
                    fits = item.is_file and item.nlink == 1 and item.allocated <= left
                    if fits and not self._has(target, item, [0, 0, 0]):
                        taken[name] = self.copier.copy(source, item, staging) + item.name_bytes
                        left -= max(item.allocated, taken[name])
                except (OSError, control.Cancelled):
                    pass  # only a hint: the chunk itself will say what is wrong
        messages.answer({"did": "hint", "chunk": folder, "staged": taken})

    def _copy_objects(
        self, job: dict[str, Any], items: list[Entry], staging: int, deadline: float, took: Any
    ) -> list[Entry]:
        """Copy what is plain by its object; what is left must go through the mount, or wait."""
        plain = [item for item in items if native.is_plain(item)]
        if not plain:
            return items
        assert self.access is not None
        if self._reader is None:
            try:
                self._reader = native.Reader(self.access)
            except OSError:
                self.no_objects = True  # the key may not do so: the mount serves as well
                return items
        rest = [item for item in items if not native.is_plain(item)]

        def each(item: Entry, data: bytes | None) -> None:
            if data is None:
                rest.append(item)
                return
            self.throttle.step(1, item.size)
            took(item, self.copier.keep(item, data, staging))

        try:
            location = native.Location(*job["location"])
            rest += self._reader.read(location, plain, each, deadline)
        except PermissionError:
            self.no_objects = True
            return items
        return rest

    def _link_key(self, staging: int, item: Entry) -> str:
        """Equal for two names only if they are links of one file with the same bytes."""
        checksum = os.getxattr(f"/proc/self/fd/{staging}/{item.name}", tree.CHECKSUM).decode()
        return f"{item.ino:x}-{checksum}-{item.mode:o}-{item.uid}-{item.gid}-{item.mtime_ns}"

    def commit(self, job: dict[str, Any]) -> None:
        """Make everything staged durable with one syncfs, then rename it into the tree.

        Invariant: a name in the tree implies durable bytes. Also seals the directories of the job,
        whose renames an earlier commit made: they must be durable before the mark, which a journal
        sees to by its order, and else this syncfs.
        """
        if job["chunks"] or not self.ordered:
            syscalls.checked(syscalls.libc.syncfs(self.generation), "syncfs")
        lost: list[int] = []
        for chunk in job["chunks"]:
            folder = str(chunk["chunk"])
            try:
                target = tree.open_below(self.tree, chunk["path"])
            except OSError:
                lost.append(chunk["directory"])  # the index was ahead of the tree
                tree.remove(self.staging, folder)
                continue
            try:
                self._place_all(folder, chunk, target)
            finally:
                os.close(target)
            os.rmdir(folder, dir_fd=self.staging)
        sealed: list[int] = []
        missing: list[int] = []
        for directory in job["seal"]:
            done = self._seal(directory["path"], directory["entries"], Entry(*directory["as"]))
            (sealed if done else missing).append(directory["directory"])
        messages.answer({"did": "commit", "sealed": sealed, "missing": missing, "lost": lost})

    def _place_all(self, folder: str, chunk: dict[str, Any], target: int) -> None:
        with tree.opened(self.staging, [folder]) as staging:
            for name, key in chunk["links"]:
                self._share(staging, name, key)
            for name in os.listdir(staging):
                self._place(staging, name, target)
            for name, _ in chunk["links"]:
                # A pass killed before it noted its commit comes here again: to rename one
                # link of a file over another does nothing.
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=staging)
        os.utime(target, ns=(chunk["mtime_ns"], chunk["mtime_ns"]))

    def _place(self, staging: int, name: str, target: int) -> None:
        try:
            os.rename(name, name, src_dir_fd=staging, dst_dir_fd=target)
        except IsADirectoryError:  # the source had a directory there before
            tree.remove(target, name)
            os.rename(name, name, src_dir_fd=staging, dst_dir_fd=target)

    def _share(self, staging: int, name: str, key: str) -> None:
        """Make ``name`` a link of the stored file with the same key, if there is one."""
        try:
            os.link(name, key, src_dir_fd=staging, dst_dir_fd=self.links)
        except FileExistsError:
            spare = f"{name[:200]}.link"
            try:
                os.link(key, spare, src_dir_fd=self.links, dst_dir_fd=staging)
            except OSError as error:
                if error.errno != errno.EMLINK:
                    raise
                # The file system takes no more names for one file: this copy is the next to share.
                os.rename(name, key, src_dir_fd=staging, dst_dir_fd=self.links)
                os.link(key, name, src_dir_fd=self.links, dst_dir_fd=staging)
            else:
                os.rename(spare, name, src_dir_fd=staging, dst_dir_fd=staging)

    def _seal(self, path: list[str], entries: int, attributes: Entry) -> bool:
        """Mark a directory opaque if the tree has all its entries; whether it has.

        The index could be ahead of the tree after a power cut; counting makes sure.
        """
        try:
            directory = tree.open_below(self.tree, path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        try:
            if len(os.listdir(directory)) != entries:
                return False
            if path:  # the root of a layer cannot be opaque
                os.setxattr(directory, tree.OPAQUE, b"y")
            os.utime(directory, ns=(attributes.mtime_ns, attributes.mtime_ns))
        finally:
            os.close(directory)
        return True

    def unseal(self, job: dict[str, Any]) -> None:
        """Take the mark from directories, so that the source shows below them again.

        OSError when a mark stays: what is unlinked below it then would be gone for readers.
        """
        for path in job["paths"]:
            try:
                with tree.opened(self.tree, path) as directory:
                    os.removexattr(directory, tree.OPAQUE)
            except OSError as error:
                # Without a mark, or not there at all.
                if error.errno not in (errno.ENODATA, errno.ENOENT, errno.ENOTDIR):
                    raise
        messages.answer({"did": "unseal"})

    def finish(self, job: dict[str, Any]) -> None:
        """The last words of a complete generation: drop the spare links, make all durable."""
        for name in os.listdir(self.links):
            os.unlink(name, dir_fd=self.links)
        syscalls.checked(syscalls.libc.syncfs(self.generation), "syncfs")
        messages.answer({"did": "finish"})

    def prune(self, job: dict[str, Any]) -> None:
        """Remove names of the tree; done already where their directory is not there."""
        with (
            contextlib.suppress(FileNotFoundError, NotADirectoryError),
            tree.opened(self.tree, job["path"]) as directory,
        ):
            dressed = os.fstat(directory).st_mtime_ns
            for name in job["names"]:
                tree.remove(directory, name)
            os.utime(directory, ns=(dressed, dressed))
        messages.answer({"did": "prune", "directory": job["directory"]})

    def run(self) -> None:
        """Do jobs until there are none. An error of a job is answered, the worker lives on."""
        jobs = {
            name: getattr(self, name)
            for name in ("scan", "copy", "hint", "commit", "unseal", "finish", "prune")
        }
        jobs |= {"verify": self.checks.verify, "recheck": self.checks.recheck}
        while (job := messages.receive(messages.JOBS)) is not None:
            try:
                jobs[job["do"]](job)
            except control.Cancelled:
                messages.answer({"did": "nothing", "job": job["do"], "cancelled": True})
            except Exception as error:
                text = copying.reason(error) if isinstance(error, OSError) else repr(error)
                number = error.errno if isinstance(error, OSError) else None
                messages.answer(
                    {"did": "nothing", "job": job["do"], "error": text, "errno": number},
                )


def serve(number: int, page: int) -> None:
    """A worker from its start to its end; ``page``: descriptor of the control page."""
    child_main.die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the agent's to handle
    os.umask(0)
    setup = messages.receive(messages.JOBS)
    if setup is None:
        return
    try:
        worker = Worker(number, page, setup)
    except OSError as error:
        answer = {"error": copying.reason(error), "errno": error.errno}
        messages.answer({"did": "nothing", "job": "start"} | answer)
        return
    messages.answer({"did": "start"})
    try:
        worker.run()
    except BrokenPipeError:
        pass  # the pass has gone
    worker.close()
