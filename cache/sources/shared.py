"""Mounts of a CephFS that datasets share: one for each cluster, file system, user and key file.

A client of CephFS costs a process or a mount of its own, an inode cache, and a session at the MDS;
a thousand datasets of one user need one of each. So the directory that holds all of them is mounted
once, and a dataset's own mount point (``Cephfs``) shows its part of that: a bind mount, which costs
nothing. Views, readers and checks know only the dataset's own mount point.

Which directory is mounted follows from the paths of the settings and the rights of the key: the
longest one that all paths of the user have in common, if the key may mount it, else the next one
towards the path, at last the path itself.

The folder of a shared mount is named after what it was made for, so that the next agent finds it.
The mount table is the only count of its users: while any other mount shows a part of it, it stays.
The kernel keeps it alive for readers that no table shows.

Invariant: whoever mounts, replaces, binds or unmounts a shared mount holds the lock of its folder.
"""

import asyncio
import contextlib
import errno
import functools
import hashlib
import json
import os
import weakref
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import structlog

import kit.child
import kit.errors
import kit.files
from cache.settings import CephfsSource
from cache.sources import base, cephfs_mount, roots
from cache.sources.cephfs_mount import MayNotError, Way
from linux import mountinfo

log = structlog.get_logger("source")

PREFIX = "@"  # no name of a dataset begins like this
# What a mount answers whose daemon died or whose client was shut out. On a mount that was made a
# moment ago the last two are a matter of rights.
_DEAD = (errno.ENOTCONN, errno.ESHUTDOWN, errno.ESTALE, errno.EIO, errno.EACCES, errno.EPERM)
_NO_RIGHT = (errno.EACCES, errno.EPERM)
_NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
MOST_REFUSED = 10_000  # directories; beyond that all are tried again

Device = tuple[int, int]


@functools.cache
def of(sources: Path) -> "SharedMounts":
    """Those below the folder of all sources; the same object for every dataset."""
    return SharedMounts(sources)


class SharedMounts:
    def __init__(self, sources: Path) -> None:
        self._sources = sources
        self._common: dict[str, str] = {}  # by group: the directory that holds all paths
        self._refused: set[Path] = set()  # what a key may not mount that may mount what is below
        # Each is there for as long as somebody holds it or waits for it.
        self._locks = weakref.WeakValueDictionary[Path, asyncio.Lock]()

    def meant(self, source: CephfsSource) -> None:
        """A dataset has this source: what is mounted next is to serve it, too."""
        group = _digest(source, "")
        known = self._common.get(group, source.path)
        self._common[group] = os.path.commonpath([known, source.path])

    def folder(self, source: CephfsSource, root: str) -> Path:
        """Of the mount of ``root`` that serves ``source``."""
        return self._sources / f"{PREFIX}{_digest(source, root)}"

    def roots(self, source: CephfsSource, mounted: Iterable[str]) -> list[str]:
        """What to mount to show a source, the best first. ``mounted``: all mount points.

        A mount that is there is better than another one. Nothing wider is tried where the key was
        refused it; the path itself is always tried.
        """
        there = set(mounted)
        every = above(source.path)
        wanted = every[every.index(self._common.get(_digest(source, ""), source.path)) :]
        free = [r for r in every if self.folder(source, r) not in self._refused]
        mounted_ones = [
            r for r in free if str(self.folder(source, r) / cephfs_mount.POINT) in there
        ]
        found = [*mounted_ones[:1], *(r for r in wanted if r in free), source.path]
        return list(dict.fromkeys(found))

    async def show(
        self, way: Way, target: Path, deadline: float, distrusted: Device | None = None
    ) -> None:
        """Mount ``way.source.path`` at ``target``. SourceError.

        ``distrusted``: a mount of this device is replaced first.
        """
        refused: list[Path] = []
        try:
            for root in self.roots(way.source, (each.target for each in mountinfo.read())):
                folder = self.folder(way.source, root)
                try:
                    async with self._held(folder, way, deadline):
                        await self._show(way, root, target, deadline, distrusted)
                except kit.errors.SourceError as error:
                    # Whatever is wrong with a wider mount, the dataset's own may do.
                    if root == way.source.path:
                        raise
                    refused += [folder] if isinstance(error, MayNotError) else []
                    continue
                # The key is right, so what was refused is beyond its rights.
                if len(self._refused) > MOST_REFUSED:
                    self._refused.clear()
                self._refused.update(refused)
                return
        finally:
            await self.retire()

    async def _show(
        self, way: Way, root: str, target: Path, deadline: float, distrusted: Device | None
    ) -> None:
        """The same by a mount of ``root``. MayNotError when the key may not have that."""
        main = self.folder(way.source, root) / cephfs_mount.POINT
        now = mountinfo.top(main)
        fresh = now is None or now.device == distrusted
        while True:
            if fresh:
                await self._mount(way, root, deadline)
            try:
                await kit.child.call(
                    roots.show_part, str(main), os.path.relpath(way.source.path, root), str(target),
                    deadline=deadline,
                )  # fmt: skip
                return
            except kit.child.DeadlineError as error:
                why = f"the cluster did not answer within {deadline:g}s"
                raise way.error(why, "see 'ceph status'") from error
            except OSError as error:
                if error.errno in _DEAD and not fresh:
                    log.warning("shared source mount is dead; mounting again", why=str(error))
                    fresh = True
                    continue
                if error.errno in _NO_RIGHT:
                    raise way.explain(str(errno.EACCES)) from error
                if error.errno in _NOT_THERE:
                    raise way.explain(str(errno.ENOENT)) from error
                raise base.explain(way.thing, error) from error

    async def _mount(self, way: Way, root: str, deadline: float) -> None:
        """Mount ``root`` anew. What shows parts of an earlier mount keeps them."""
        folder = self.folder(way.source, root)
        main = folder / cephfs_mount.POINT
        if mountinfo.top(main) is not None and not await cephfs_mount.detach(main):
            why = f"an earlier mount at {main} cannot be detached"
            raise way.error(why, "see the kernel log")
        shown = json.dumps(_fields(way.source, root), sort_keys=True).encode()
        await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True, mode=0o700)
        await asyncio.to_thread(kit.files.save, folder / cephfs_mount.SHOWN, shown)
        await cephfs_mount.make(folder, way, root, deadline)

    @contextlib.asynccontextmanager
    async def _held(self, folder: Path, way: Way, deadline: float) -> AsyncIterator[None]:
        lock = self._locks.setdefault(folder, asyncio.Lock())
        try:
            async with asyncio.timeout(deadline):
                await lock.acquire()
        except TimeoutError:
            why = f"another dataset waits for the same mount since {deadline:g}s"
            raise way.error(why, "see 'ceph status'") from None
        try:
            yield
        finally:
            lock.release()

    async def retire(self) -> None:
        """Unmount the shared mounts of which nothing else is shown. What fails is tried again."""
        for folder in self._unused():
            lock = self._locks.setdefault(folder, asyncio.Lock())
            if lock.locked():
                continue  # somebody is about to use it
            async with lock:
                if folder not in self._unused():
                    continue
                with contextlib.suppress(kit.errors.InUseError, kit.child.DeadlineError):
                    await cephfs_mount.release(folder)

    def _unused(self) -> list[Path]:
        with contextlib.suppress(FileNotFoundError):
            if folders := sorted(self._sources.glob(f"{PREFIX}*")):
                return unused(folders, mountinfo.read())
        return []


def _fields(source: CephfsSource, root: str) -> dict[str, object]:
    """What two datasets must have in common to share a mount of ``root``.

    The key file, not what it holds: who names another file must prove to have the key.
    """
    return {
        "client": source.client, "filesystem": source.filesystem, "root": root,
        "monitors": sorted(source.monitors), "secret_file": str(source.secret_file),
        "user": source.user,
    }  # fmt: skip


def _digest(source: CephfsSource, root: str) -> str:
    text = json.dumps(_fields(source, root), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def above(path: str) -> list[str]:
    """``path`` and every directory above it, '/' first."""
    return [*(str(each) for each in reversed(Path(path).parents)), path]


def unused(folders: Iterable[Path], table: Iterable[mountinfo.Mount]) -> list[Path]:
    """Folders whose mount no other mount shows a part of, or that have none."""
    shown: dict[Device, set[str]] = {}
    tops: dict[str, Device] = {}  # the last line of a target lies on top
    for mount in table:
        shown.setdefault(mount.device, set()).add(mount.target)
        tops[mount.target] = mount.device
    found = []
    for folder in folders:
        target = str(folder / cephfs_mount.POINT)
        if target not in tops or shown[tops[target]] == {target}:
            found.append(folder)
    return found
