"""Commits: how copied files become part of the stored tree.

A file is copied into ``staging/`` first. A commit makes a whole batch durable with one ``syncfs``
and only then renames each file into ``tree/``: a name in the tree implies bytes on the disk,
whatever is killed or cut off. A directory in which nothing is missing is then sealed: its opaque
mark keeps readers from the source, so it must not become durable before the names below it.
"""

import contextlib
import errno
import functools
import os
from collections.abc import Sequence

import kit.files
from cache.fill import control, protocol
from cache.store import large, tree
from linux import mountinfo, syscalls

# The new name of a link, in ``links/`` until it replaces the copy; keys begin with an inode number.
_SPARE = "spare"


class Committer:
    """The part of a worker that changes the stored tree. One worker of a pass commits."""

    def __init__(self, generation: str, throttle: control.Throttle) -> None:
        """``generation``: its folder. OSError when it cannot be opened."""
        self.throttle = throttle
        self.generation = tree.open_root(generation)
        self.tree = os.open("tree", os.O_RDONLY | os.O_DIRECTORY, dir_fd=self.generation)
        self.staging = os.open("staging", os.O_RDONLY | os.O_DIRECTORY, dir_fd=self.generation)
        self.links = os.open("links", os.O_RDONLY | os.O_DIRECTORY, dir_fd=self.generation)

    @functools.cached_property
    def ordered(self) -> bool:
        """The store's file system makes metadata changes durable in order."""
        return mountinfo.keeps_order(self.generation)

    # --- commit and seal

    def commit(self, job: protocol.Commit) -> protocol.Committed:
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
                if staged.folder:
                    tree.remove(self.staging, staged.folder)
                continue
            with kit.files.closing(target):
                if staged.part:
                    self._place_part(staged, target)
                else:
                    self._place_all(staged, target)
                    os.rmdir(staged.folder, dir_fd=self.staging)
        sealed: list[int] = []
        missing: list[int] = []
        for seal in job.seals:
            (sealed if self._seal(seal) else missing).append(seal.directory)
        return protocol.Committed(sealed=sealed, missing=missing, lost=lost)

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

    def _place_part(self, staged: protocol.StagedFolder, target: int) -> None:
        """A large file. Its records stay where they are; those of the version before go."""
        with tree.opened(self.generation, [large.PARTS]) as parts:
            for link in staged.links:
                self._share(parts, link)
            large.forget(self.generation, target, staged.name, but=staged.part)
            # A commit that was killed before the index noted it is done again.
            with contextlib.suppress(FileNotFoundError):
                self._place(parts, staged.part, target, staged.name)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(staged.part, dir_fd=parts)  # as in _place_all
        os.utime(target, ns=(staged.mtime_ns, staged.mtime_ns))

    def _place(self, staging: int, name: str, target: int, new: str = "") -> None:
        new = new or name
        try:
            os.rename(name, new, src_dir_fd=staging, dst_dir_fd=target)
        except IsADirectoryError:  # the source had a directory there before
            tree.remove(target, new)
            os.rename(name, new, src_dir_fd=staging, dst_dir_fd=target)

    def _share(self, staging: int, link: protocol.Link) -> None:
        """Make the name a link of the stored file with the same key, if there is one."""
        name, key = link
        try:
            os.link(name, key, src_dir_fd=staging, dst_dir_fd=self.links)
        except FileExistsError:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(_SPARE, dir_fd=self.links)  # of a commit that was killed
            try:
                os.link(key, _SPARE, src_dir_fd=self.links, dst_dir_fd=self.links)
            except OSError as error:
                if error.errno != errno.EMLINK:
                    raise
                # The file system allows no more names of one file: share this copy from now on.
                os.rename(name, key, src_dir_fd=staging, dst_dir_fd=self.links)
                os.link(key, name, src_dir_fd=self.links, dst_dir_fd=staging)
            else:
                os.rename(_SPARE, name, src_dir_fd=self.links, dst_dir_fd=staging)

    def _seal(self, seal: protocol.Listed) -> bool:
        """Mark the directory opaque; False when the tree lacks some of its entries.

        They are counted because the index may claim more than the disk has after a power cut.
        """
        try:
            directory = tree.open_below(self.tree, seal.path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        with kit.files.closing(directory):
            if tree.count(directory) != seal.entries:
                return False
            if seal.path:  # the root of a layer cannot be opaque
                # First the one goes: there may be room for one mark only.
                tree.remove_mark(directory, tree.CLOSED)
                os.setxattr(directory, tree.OPAQUE, b"y")  # it speaks for all below from now on
            os.utime(directory, ns=(seal.mtime_ns, seal.mtime_ns))
        return True

    def recheck(self, job: protocol.Recheck) -> protocol.Rechecked:
        missing = []
        for number, path, entries, _ in job.directories:
            self.throttle.beat()
            try:
                with tree.opened(self.tree, path) as directory:
                    if path:
                        os.getxattr(directory, tree.OPAQUE)
                    if tree.count(directory) == entries:
                        continue
            except OSError:
                pass  # it has no mark, or does not exist
            for depth in range(1, len(path) + 1):
                # Every mark above it would hide the source's entries from readers too.
                with contextlib.suppress(OSError), tree.opened(self.tree, path[:depth]) as above:
                    os.removexattr(above, tree.OPAQUE)
                    os.setxattr(above, tree.CLOSED, b"y")  # for an eviction: there was a mark
            missing.append(number)
        return protocol.Rechecked(missing=missing)

    def finish(self) -> protocol.Done:
        for name in os.listdir(self.links):
            os.unlink(name, dir_fd=self.links)
        large.discard_parts(self.generation)
        self._sync()
        return protocol.Done()


def unmark(root: int, path: Sequence[str]) -> None:
    """Have readers look into the source in a directory, and in all above it. OSError.

    ``root``: of the tree. From above: what has no mark below one that has needs a redirect
    (``cache.fill.closing``).
    """
    for length in range(1, len(path) + 1):
        with (
            contextlib.suppress(FileNotFoundError, NotADirectoryError),
            tree.opened(root, path[:length]) as directory,
        ):
            tree.remove_mark(directory, tree.OPAQUE)
