"""A CephFS directory that the agent mounts read-only, in a way that outlives the agent.

With ceph-fuse a dataset's mount point shows its part of a mount that it shares with other datasets
(``cache.sources.shared``); the kernel's client makes a mount of its own for each.

``shows.json`` beside the mount point tells which file system, path and user a mount was made for. A
mount that an agent with other settings left is detached, and nothing is read from it.
"""

import asyncio
import errno
import json
from pathlib import Path
from typing import Any

import structlog

import kit.child
import kit.errors
import kit.files
import kit.processes
from cache.fill.protocol import Manifest
from cache.settings import CephfsSource, DatasetSettings, Source
from cache.sources import base, cephfs_mount, roots, shared
from cache.store import identity, tree
from ceph import whereabouts
from ceph.protocol import Access
from linux import mountinfo

log = structlog.get_logger("source")


class Cephfs:
    """``folder``: mount point, ceph.conf and keyring; only root can read them."""

    replaceable = True
    place = note = ""
    block = False

    def __init__(self, dataset: DatasetSettings, source: CephfsSource, folder: Path) -> None:
        self._source = source
        self._folder = folder
        self._target = folder / cephfs_mount.POINT
        self._shown = folder / cephfs_mount.SHOWN
        self._thing = f"dataset {dataset.name}: CephFS {source.filesystem}:{source.path}"
        self.immutable = dataset.freshness != "frozen"
        # The ids behind a mount, and for which mount they were asked.
        self._ids: dict[str, str] = {}
        self._ids_of = ""
        self._answered: shared.Device | None = None  # the mount whose root could be read
        self._failed: shared.Device | None = None  # the one whose root could not, since then
        self._distrusted: shared.Device | None = None  # is not to be used any more
        self._shared = shared.of(folder.parent)
        self._shared.meant(source)

    def take(self, source: Source) -> None:
        """The next look mounts anew when the monitors have changed; a key is read at each mount."""
        assert isinstance(source, CephfsSource)
        self._source = source
        self._shared.meant(source)

    @property
    def identity(self) -> dict[str, Any]:
        source = self._source
        return {
            "kind": "cephfs",
            "filesystem": source.filesystem,
            "path": source.path,
            "snapshot": source.snapshot,
        }

    @property
    def _root(self) -> str:
        if self._source.snapshot is None:
            return str(self._target)
        return f"{self._target}/.snap/{self._source.snapshot}"

    @property
    def _shows(self) -> str:
        """What shows.json must contain for a mount with these settings."""
        source = self._source
        shows = {
            "filesystem": source.filesystem, "path": source.path, "user": source.user,
            "monitors": sorted(source.monitors),
        }  # fmt: skip
        return json.dumps(shows, sort_keys=True)

    def _is_ours(self) -> bool:
        try:
            return self._shown.read_text(encoding="ascii") == self._shows
        except (OSError, UnicodeDecodeError):
            return False

    async def _detach_another(self) -> None:
        """Detach a mount for other settings; the view keeps showing it. SourceError if it stays."""
        while mountinfo.top(self._target) is not None and not self._is_ours():
            log.warning(
                "source mount was made for other settings; mounting again", source=self._thing
            )
            if not await cephfs_mount.detach(self._target):
                why = f"an earlier mount at {self._target} cannot be detached"
                raise self._error(why, "see the kernel log")

    async def reach(self, deadline: float, *, serve: bool = True) -> base.Reached:
        await self._detach_another()
        if mountinfo.top(self._target) is None:
            await self._mount(deadline)
        try:
            root = roots.Root(**await kit.child.call(roots.look, self._root, deadline=deadline))
        except kit.child.DeadlineError as error:
            why = f"the cluster did not answer within {deadline:g}s"
            raise self._error(why, "see 'ceph status'") from error
        except OSError as error:
            await self._detach_dead(error)
            there = mountinfo.top(self._target) is not None
            if there and error.errno == errno.ENOENT and self._source.snapshot is not None:
                why = f"it has no snapshot {self._source.snapshot!r}"
                remedy = "make it, or set another one; it is tried again"
                raise base.GoneError(self._thing, why, remedy) from error
            raise base.explain(self._thing, error) from error
        mounted = mountinfo.top(self._target)
        kernel = mounted is not None and mounted.fstype == "ceph"
        device = ""
        if mounted is not None:
            device = f"{mounted.major}:{mounted.minor} {root.stamp} {self._root} {self._shows}"
        self._answered, self._failed = mounted.device if mounted is not None else None, None
        marks = dict(root.marks)
        # Inode numbers of a mount do not do: ceph-fuse shows some of its own.
        marks |= await self._ask_ids(device, deadline)
        return base.Reached(
            root=self._root,
            device=device,
            stamp=root.stamp,
            client="kernel" if kernel else "ceph-fuse",
            files=root.files,
            bytes=root.bytes,
            native=self._access() if self.immutable else None,
            marks=marks,
            manifest=self._manifest(marks),
        )

    def _manifest(self, marks: dict[str, str]) -> Manifest | None:
        """In the live tree of the mount, for a snapshot cannot hold its own manifest."""
        if self._source.manifest is None or self._source.snapshot is None:
            return None
        path = self._source.manifest.replace("{snapshot}", self._source.snapshot)
        folder = "/" if path.startswith("/") else str(self._target)
        return Manifest(folder, path.removeprefix("/").split("/"), marks)

    async def snapshots(self, deadline: float) -> dict[str, float]:
        """The snapshots of its path, and when each was made (Unix time). SourceError."""
        await self._detach_another()
        if mountinfo.top(self._target) is None:
            await self._mount(deadline)
        return await base.snapshots_of(str(self._target), self._thing, deadline, self._detach_dead)

    async def _detach_dead(self, error: OSError) -> None:
        """Detach the dataset's mount if it is dead; the next one is made of the shared mount.

        That is replaced too if it is dead for certain, or if its part was refused again after it
        was shown anew. One that is lost for all datasets is replaced once: the others find another
        device there.
        """
        mounted = mountinfo.top(self._target)
        if mounted is None:
            return
        lost = error.errno == errno.ENOENT and await self._has_lost_root()
        if not lost and not self._is_dead(error, mounted.device):
            return
        log.warning("source mount is dead; mounting again", source=self._thing, why=str(error))
        if error.errno in tree.SOURCE_GONE or self._failed == mounted.device:
            self._distrusted, self._answered = mounted.device, None
        self._failed = mounted.device
        await cephfs_mount.detach(self._target)

    async def _has_lost_root(self) -> bool:
        """The root of what is mounted does not exist.

        ceph-fuse answers so once the cluster has shut it out (16.2), or the directory was deleted.
        """
        try:
            await kit.child.call(
                roots.look, str(self._target), deadline=cephfs_mount.DETACH_SECONDS
            )
        except kit.child.DeadlineError:
            return False
        except OSError as error:
            return error.errno == errno.ENOENT
        return False

    def _is_dead(self, error: OSError, device: shared.Device) -> bool:
        """Its daemon died, or the cluster shut this client out.

        The kernel client answers EACCES or EIO then. For a root that could be read through the same
        mount before this is no matter of rights.
        """
        if error.errno in tree.SOURCE_GONE:
            return True
        refused = error.errno in (errno.EACCES, errno.EIO, errno.ESTALE)
        return refused and self._answered == device

    async def _ask_ids(self, device: str, deadline: float) -> dict[str, str]:
        """By libcephfs, once for each mount and snapshot. {} when they cannot be had."""
        if self._ids_of != device:
            source = self._source
            try:
                self._ids = await kit.child.call(
                    whereabouts.ids, str(self._folder / "ceph.conf"), source.user,
                    source.filesystem, source.path, source.snapshot or "", deadline=deadline,
                )  # fmt: skip
            except (kit.child.DeadlineError, OSError, RuntimeError) as error:
                log.info("ids of the source are not known", source=self._thing, why=str(error))
                self._ids, self._ids_of = {}, ""
                return {}
            self._ids_of = device
        return self._ids

    def _access(self) -> Access:
        return Access(
            conf=str(self._folder / "ceph.conf"),
            user=self._source.user,
            filesystem=self._source.filesystem,
            root=f"{self._source.path.rstrip('/')}/.snap/{self._source.snapshot}",
            top=self._source.path,
            snapshot=int(self._ids.get(identity.SNAPSHOT, "0")),
        )

    async def _mount(self, deadline: float) -> None:
        way = await cephfs_mount.way_to(self._source, self._thing)
        by_kernel = await cephfs_mount.uses_kernel(way)
        await asyncio.to_thread(cephfs_mount.configure, self._folder, way, deadline)
        # Written before the mount, so that a mount is known even if the agent is killed meanwhile.
        await asyncio.to_thread(kit.files.save, self._shown, self._shows.encode("ascii"))
        await asyncio.to_thread(self._target.mkdir, exist_ok=True, mode=0o700)
        if by_kernel:  # costs no process; that its mounts can be shared was not tried on a kernel
            await cephfs_mount.make(self._folder, way, self._source.path, deadline)
            return
        await self._shared.show(way, self._target, deadline, self._distrusted)
        self._distrusted = None

    def _error(self, cause: str, remedy: str) -> kit.errors.SourceError:
        return kit.errors.SourceError(self._thing, cause, f"{remedy}; it is tried again")

    async def release(self) -> None:
        await release(self._folder)


async def release(folder: Path) -> None:
    """Unmount what a source mounted in its folder, or a mount that datasets share; delete its key.

    InUseError while it is used: nothing is deleted then. A shared mount goes with the last of its
    datasets.
    """
    await cephfs_mount.release(folder)
    # Also when nothing was mounted any more: kernels before 6.5 keep a source below the copy in the
    # view, and so a part of the shared mount, until the view has gone.
    await shared.of(folder.parent).retire()
