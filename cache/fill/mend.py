"""The mend pass: puts right what is on the list of bad files of an earlier generation.

Jobs read its tree itself, by its id, so a file is replaced under its name: by a link of the same
file of another generation, else by a copy from its own source. Either has the bytes that were
stored, by the checksum that the manifest keeps: nothing else enters the tree, whatever the source
shows now. What cannot be put right stays on the list; where nothing else can keep readers from its
wrong bytes it is taken out of the tree.

A killed pass is done again: what is good by then leaves the list.
"""

import contextlib
import os
import sqlite3
import time
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import kit.files
from cache.fill import control, coordinator, copy, direct, protocol, space, verify_large, worker
from cache.store import generations, index, large, manifest, tree
from cache.store.tree import Entry

PROGRESS_SECONDS = 0.5
MOST_NOTES = 100  # files that the log names
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_DIRECTORY = "its directory cannot be read in the store"
OTHER_VERSION = "its source has another version of it"
NO_ROOM = "it is large, and the SSD has no room for another copy of it"


@dataclass(frozen=True, kw_only=True)
class MendTask(protocol.Task):
    """``source``: the tree itself unless ``reachable``."""

    reachable: bool
    takes_out: bool  # what stays bad
    others: list[str] = field(default_factory=list)  # folders of generations that may have the same


class _Pace(control.Throttle):
    """Hears the agent, and tells it how far the pass is, while one file is read."""

    def __init__(self, page: control.Control, obey: Callable[[], None]) -> None:
        super().__init__(page, 0)
        self._obey = obey

    def step(self, files: int, size: int) -> None:
        super().step(files, size)
        self._obey()

    def beat(self) -> None:
        super().beat()
        self._obey()


class _Other(NamedTuple):
    """The same directory of another generation."""

    directory: int
    versions: dict[str, tuple[int, ...]]  # of its files, as its source had them; some of them


class Mend:
    def __init__(self, task: MendTask) -> None:
        self._task = task
        self._run = coordinator.Coordinator(task, worker.serve)
        self._run.set_limits(task.limits)
        self._top = tree.open_root(self._run.generation)
        self._throttle = _Pace(self._run.page, self._obey)
        self._copier = copy.Copier(self._throttle, immutable=task.immutable)
        self._reader = direct.Reader(self._throttle)
        self._done = protocol.VerifyEnd()
        self._left: dict[tuple[tuple[str, ...], str], str] = {}  # what stays bad, and why
        self._reported = 0.0

    def run(self) -> protocol.End:
        folder = self._run.generation
        listed = generations.read_quarantined(folder)
        try:
            for path, names in generations.grouped(listed).items():
                self._mend_in(path, names)
            left = [(list(path), name) for path, name in self._left]
            generations.write_quarantined(folder, left)
        except control.Cancelled:
            return protocol.End("cancelled", verify=self._done)
        finally:
            self._run.index.close()
            os.close(self._top)
        texts = [f"{'/'.join([*path, name])!r}: {why}" for (path, name), why in self._left.items()]
        if sorted(left) != sorted(listed):  # the same ones, every ten minutes, fill the log
            for text in texts[:MOST_NOTES]:
                self._run.note(f"bad file {text}")
        self._done.unreplaced = len(left)
        return protocol.End("bad" if left else "good", texts[0] if texts else "", verify=self._done)

    def _mend_in(self, path: tuple[str, ...], names: list[str]) -> None:
        """What is bad in a directory: the ``names`` of it, and what it lacks."""
        with contextlib.ExitStack() as stack:
            try:
                root = stack.enter_context(tree.opened(self._top, ["tree", *path]))
            except OSError:
                for name in names:
                    self._settle(path, name, _DIRECTORY)
                return
            mtime_ns = os.fstat(root).st_mtime_ns
            known: dict[str, manifest.Item] = {}
            folders: set[str] = set()
            with contextlib.suppress(ValueError, sqlite3.Error):
                number = self._run.index.find(list(path))
                # An index that was lost, and is empty, does not even have the root.
                if number is not None and self._run.index.known_directories(number - 1, 1):
                    mtime_ns = self._run.index.directory(number).attributes.mtime_ns
                    known, folders = self._known(number, root, set(names))
            wanted = {*names, *known, *folders} - {""}
            others = list(self._opened(path, known, stack))
            # Whatever ends this: a reader must not see that files came and went.
            stack.callback(os.utime, root, ns=(mtime_ns, mtime_ns))
            for name in sorted(wanted):
                self._throttle.beat()
                try:
                    if name in folders:
                        os.close(tree.open_below(root, [name]))
                        why = ""
                    else:
                        why = self._mend(list(path), root, name, known.get(name), others)
                except OSError as error:
                    why = copy.reason(error)
                self._settle(path, name, why)

    def _settle(self, path: tuple[str, ...], name: str, why: str) -> None:
        if why:
            self._left[path, name] = why
        else:
            self._done.replaced += 1

    def _known(
        self, number: int, root: int, names: set[str]
    ) -> tuple[dict[str, manifest.Item], set[str]]:
        """Of ``names``, and of what is lost beside them: files of the manifest; subdirectories."""

        def is_wanted(name: str) -> bool:
            self._throttle.beat()  # there may be millions
            try:
                return name in names or not tree.has(root, name)
            except OSError:
                return True

        stored = (i for i in self._run.index.kept(number) if i.state is manifest.State.STORED)
        known = {item.entry.name: item for item in stored if is_wanted(item.entry.name)}
        below = (each.name for each in self._run.index.subdirectories(number))
        return known, {name for name in below if is_wanted(name)}

    def _opened(
        self, path: tuple[str, ...], names: Container[str], stack: contextlib.ExitStack
    ) -> Iterator[_Other]:
        for folder in self._task.others:
            with contextlib.suppress(OSError):
                root = stack.enter_context(tree.opened_root(f"{folder}/tree"))
                directory = stack.enter_context(tree.opened(root, path))
                yield _Other(directory, self._versions(folder, list(path), names))

    def _versions(
        self, folder: str, path: list[str], names: Container[str]
    ) -> dict[str, tuple[int, ...]]:
        """Of files of another generation; none where its index cannot tell."""
        found: dict[str, tuple[int, ...]] = {}
        with (
            contextlib.suppress(OSError, ValueError, sqlite3.Error),
            contextlib.closing(index.Index.read_only(Path(folder) / index.NAME)) as known,
        ):
            number = known.find(path)
            for item in known.kept(number) if number is not None else ():
                self._throttle.beat()
                if item.state is manifest.State.STORED and item.entry.name in names:
                    found[item.entry.name] = _version(item.entry)
        return found

    def _mend(
        self, path: list[str], directory: int, name: str, item: manifest.Item | None,
        others: list[_Other],
    ) -> str:  # fmt: skip
        """Why it is bad, '' when it is good now."""
        if item is None:
            item = _of_tree(directory, name)
        if item is None:
            return "the index does not know it"
        if self._is_good(directory, item):
            return ""
        try:
            if any(self._link(other, directory, item) for other in others):
                return ""
            why = self._copy(path, directory, item)
        except OSError as error:
            why = copy.reason(error)
        if why and self._task.takes_out:
            self._take_out(directory, name)
        return why

    def _take_out(self, directory: int, name: str) -> None:
        large.forget(self._top, directory, name)  # while the file tells which records it has
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=directory)

    def _is_good(self, directory: int, item: manifest.Item) -> bool:
        """Whether a stored file has the bytes, and what jobs see of it, of ``item``."""
        entry = item.entry
        try:
            status = os.stat(entry.name, dir_fd=directory, follow_symlinks=False)
            if not _looks_the_same(entry, status):
                return False
            if not entry.is_file:
                return True
            with kit.files.closing(os.open(entry.name, _FLAGS, dir_fd=directory)) as stored:
                if not item.checksum or tree.checksum_of(directory, entry.name) != item.checksum:
                    return False
                os.posix_fadvise(stored, 0, 0, os.POSIX_FADV_DONTNEED)
                if large.is_stored_so(stored):
                    summed = copy.checksum(stored, self._throttle, memoryview(b""), by_extents=True)
                    return summed == item.checksum
                return self._reader.checksum(stored) == item.checksum
        except OSError:
            return False

    def _link(self, other: _Other, directory: int, item: manifest.Item) -> bool:
        """Make it a link of the same file of another generation, when that one is good."""
        name = item.entry.name
        if not _same_xattrs(other, directory, item) or not self._is_good(other.directory, item):
            return False
        with tree.opened(self._top, ["staging"]) as staging:
            try:
                os.link(
                    name, name, src_dir_fd=other.directory, dst_dir_fd=staging,
                    follow_symlinks=False,
                )  # fmt: skip
            except OSError:
                return False  # it has gone, or has too many names
            self._place(staging, directory, name)
        return True

    def _copy(self, path: list[str], directory: int, item: manifest.Item) -> str:
        """Copy it from the source; why not, '' when it is done."""
        if not self._task.reachable:
            return "its source cannot be read"
        name = item.entry.name
        with contextlib.ExitStack() as stack:
            root = stack.enter_context(
                kit.files.closing(tree.open_source(self._task.source, self._task.stamp))
            )
            origin = stack.enter_context(tree.opened(root, path))
            status = os.stat(name, dir_fd=origin, follow_symlinks=False)
            if not _looks_the_same(item.entry, status):
                return OTHER_VERSION
            staging = stack.enter_context(tree.opened(self._top, ["staging"]))
            if large.is_large(item.entry):
                return self._copy_large(path, directory, item, origin, staging)
            self._copier.copy(origin, tree.entry_of(name, status), staging)
            if item.entry.is_file and self._copier.checksum != item.checksum:
                os.unlink(name, dir_fd=staging)
                return OTHER_VERSION
            self._place(staging, directory, name, is_file=item.entry.is_file)
        return ""

    def _copy_large(
        self, path: list[str], directory: int, item: manifest.Item, origin: int, staging: int
    ) -> str:
        """Fetch its bad extents again, in place; all of it where that is not enough."""
        name = item.entry.name
        try:
            found = verify_large.check(
                self._top, directory, name, item.checksum, self._throttle, origin
            )
        except OSError as error:  # it has gone, or is no file that can be read
            if error.errno in tree.SOURCE_GONE:
                raise
        else:
            if found.no_help:
                return OTHER_VERSION
            if not found.fault and self._is_good(directory, item):
                return ""
        # What is bad may go first where it is taken out anyway: two copies need twice the room.
        if self._task.takes_out:
            self._take_out(directory, name)
        if not self._has_room(item.entry.size):
            return NO_ROOM
        try:
            key = large.key_of(path, item.entry)
            if not verify_large.fetch(
                self._top, item.entry, key, item.checksum, self._throttle, origin, staging
            ):
                return OTHER_VERSION
            large.forget(self._top, directory, name, but=key)
            self._place(staging, directory, name, is_file=True)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=staging)
        return ""

    def _has_room(self, size: int) -> bool:
        """Whether the reserve stays free beside a file of ``size`` bytes."""
        disk, limits = os.statvfs(self._run.generation), self._run.limits
        whole, free = (n * disk.f_frsize for n in (disk.f_blocks, disk.f_bavail))
        return size <= free - space.floors(whole, 0, limits.reserve, limits.least).bytes

    def _place(self, staging: int, directory: int, name: str, *, is_file: bool = False) -> None:
        """``is_file``: a copy, whose bytes must be durable before they have a name in the tree."""
        self._report(syncing=True)
        if is_file:
            with kit.files.closing(os.open(name, _FLAGS, dir_fd=staging)) as staged:
                os.fsync(staged)
        os.rename(name, name, src_dir_fd=staging, dst_dir_fd=directory)
        with contextlib.suppress(FileNotFoundError):  # a link of the same file is renamed to none
            os.unlink(name, dir_fd=staging)
        os.fsync(directory)

    def _obey(self) -> None:
        """Commands and progress, now and then. Raises Cancelled."""
        if time.monotonic() - self._reported < PROGRESS_SECONDS:
            return
        commands = self._run.agent.commands()
        if commands is None or any(each.cancel for each in commands):
            raise control.Cancelled
        for each in commands:
            if each.limits is not None:
                self._run.set_limits(each.limits)
        self._report()

    def _report(self, *, syncing: bool = False) -> None:
        self._reported = time.monotonic()
        files, size = self._run.page.counted()
        progress = protocol.Progress(
            phase="mending", counts=self._run.totals, sealed=self._run.totals.sealed,
            copied_files=files, copied_bytes=size, beats=self._run.page.beats(), commits=0,
            used=self._run.used(), syncing=syncing, shared=self._run.shared,
        )  # fmt: skip
        try:
            self._run.agent.say(protocol.Report(progress=progress))
        except BrokenPipeError as error:  # no error of a file: nothing may be taken out for it
            raise control.Cancelled from error


def _of_tree(directory: int, name: str) -> manifest.Item | None:
    """What the tree itself says of a file that the manifest does not have."""
    try:
        status = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except OSError:
        return None
    checksum = tree.checksum_of(directory, name)
    return manifest.Item(tree.entry_of(name, status), manifest.State.STORED, checksum)


def _looks_the_same(entry: Entry, status: os.stat_result) -> bool:
    owner = entry.mode, entry.uid, entry.gid
    return tree.same_content(entry, status) and owner == (
        status.st_mode, status.st_uid, status.st_gid
    )  # fmt: skip


def _version(entry: Entry) -> tuple[int, ...]:
    """Of a file in its source: a change of its xattrs is another one, too."""
    return entry.ino, entry.ctime_ns, entry.mtime_ns, entry.size


def _same_xattrs(other: _Other, directory: int, item: manifest.Item) -> bool:
    """Whether a link would have the xattrs and ACLs that were stored."""
    name = item.entry.name
    if not item.entry.is_file:  # no link of a source has any that are stored
        return True
    if item.entry.ctime_ns and other.versions.get(name) == _version(item.entry):
        return True
    theirs, own = _xattrs(other.directory, name), _xattrs(directory, name)
    if own is None:  # it has gone
        return theirs == {} and not item.entry.xattrs
    return own == theirs


def _xattrs(directory: int, name: str) -> dict[str, bytes] | None:
    """None when they cannot be read."""
    try:
        with kit.files.closing(os.open(name, _FLAGS, dir_fd=directory)) as found:
            return tree.xattrs_of(found)
    except OSError:
        return None


def main() -> None:
    protocol.serve_alone(MendTask, lambda task: Mend(task).run())
