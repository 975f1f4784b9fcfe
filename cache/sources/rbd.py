"""A read-only snapshot of an RBD image that holds a file system.

Where the kernel has an RBD client the snapshot is mapped and mounted, so that jobs read it while
the local copy fills; the mapping outlives the agent. Where it has the device mapper too, what is
mounted is a device that can show blocks of the copy as well (``cache.store.mixed``). Elsewhere the
view comes with the complete copy. Neither a watcher nor a lock is left on the image.

``mapped.json`` beside the mount point tells which device is ours, so that release unmaps no other;
before there is one, which are not. When the source is another snapshot by now, that one is mapped
beside the earlier one, which jobs may still read: it is noted there as ``left``, and unmapped when
they have gone.
"""

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import structlog

import kit.child
import kit.errors
import kit.files
from cache.settings import DatasetSettings, RbdSource, Source
from cache.sources import base, cephfs_mount, rbd_child
from cache.store import identity, mixed
from ceph import monitors, secrets
from ceph.protocol import ImageAccess, SnapshotFacts
from linux import devmapper, krbd, mountinfo

log = structlog.get_logger("source")

DETACH_SECONDS = 15.0
_NO_MAPPER = "no device mapper here: what is stored is read from the SSD when all of it is"
_FILES = ("keyring", "ceph.conf", cephfs_mount.CLAIM_KEY, rbd_child.MAPPED)
_CONF = "[global]\nmon host = {monitors}\nkeyring = {keyring}\nlog file =\nadmin socket =\n"


class Rbd:
    """``folder``: mount point, ceph.conf and keyring; only root can read them."""

    immutable = replaceable = block = True
    place = note = ""

    def __init__(self, dataset: DatasetSettings, source: RbdSource, folder: Path) -> None:
        self._source = source
        self._folder = folder
        self._target = folder / "mount"
        self.access = ImageAccess(
            conf=str(folder / "ceph.conf"),
            user=source.user,
            pool=source.pool,
            namespace=source.namespace,
            image=source.image,
            snapshot=source.snapshot,
            partition=source.partition,
        )
        self._thing = f"dataset {dataset.name}: RBD image {self.access.spec}"

    def take(self, source: Source) -> None:
        """Other monitors, key or client, of the same user: they count from the next reach."""
        assert isinstance(source, RbdSource)
        self._source = source

    @property
    def identity(self) -> dict[str, Any]:
        source = self._source
        return {
            "kind": "rbd",
            "pool": source.pool,
            "namespace": source.namespace,
            "image": source.image,
            "snapshot": source.snapshot,
            **({"partition": source.partition} if source.partition else {}),
        }

    async def snapshots(self, deadline: float) -> dict[str, float]:
        return {}  # 'follow' is for directories

    async def reach(self, deadline: float, *, serve: bool = True) -> base.Reached:
        source = self._source
        secret = await secrets.fetch(source.secret_file, source.user, self._thing)
        addresses = await monitors.resolve(source.monitors)
        if not addresses:
            why = f"no monitor of {', '.join(source.monitors)} answers"
            raise self._error(why, "check the addresses and the network")
        await asyncio.to_thread(self._configure, secret, addresses)
        access = dataclasses.asdict(self.access)
        try:
            facts = SnapshotFacts(
                **await kit.child.call(rbd_child.look, access, self._thing, deadline=deadline)
            )
        except kit.child.DeadlineError as error:
            why = f"the cluster did not answer within {deadline:g}s"
            raise self._error(why, "see 'ceph status'") from error
        root, note = "", ""
        if serve and source.client == "none":
            note = "nothing maps it: the view comes with the complete copy"
        elif serve:
            root, note = await self._mounted(addresses, secret, facts, deadline)
        mount = mountinfo.top(self._target)
        mixes = bool(root) and bool(mixed.of(mount))
        if root and not mixes and not devmapper.is_loaded():
            note = note or _NO_MAPPER
        client = "krbd with device mapper" if mixes else "krbd"
        device = f"{mount.major}:{mount.minor}" if mount is not None else ""
        return base.Reached(
            root=root,
            device=f"{facts.fsid} {facts.image_id} {facts.snap_id} {device}",
            stamp="",
            client=client if root else "librbd",
            bytes=facts.size,
            image=self.access,
            mixes=mixes,
            note=note,
            marks={
                identity.CLUSTER: facts.fsid,
                identity.POOL: str(facts.pool_id),
                identity.IMAGE: facts.image_id,
                identity.SNAPSHOT: str(facts.snap_id),
            },
        )

    def _configure(self, secret: str, addresses: list[monitors.Address]) -> None:
        """Write keyring and ceph.conf. Beside the loop: it syncs. What is right already stays."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        keyring = self._folder / "keyring"
        wanted = {
            keyring: f"[client.{self._source.user}]\nkey = {secret}\n",
            self._folder / "ceph.conf": _CONF.format(
                monitors=" ".join(map(str, addresses)), keyring=keyring
            ),
        }
        for path, text in wanted.items():
            if not path.exists() or path.read_bytes() != text.encode():
                kit.files.save(path, text.encode())

    async def _mounted(
        self, addresses: list[monitors.Address], secret: str, facts: SnapshotFacts, deadline: float
    ) -> tuple[str, str]:
        """Where the mapped snapshot is mounted, '' when it cannot be; and a note of why."""
        there = mountinfo.top(self._target)
        if there is not None and not mixed.shows_another(there, facts):
            return str(self._target), ""
        if not await asyncio.to_thread(krbd.available):
            lacking = await asyncio.to_thread(krbd.lacking)
            if self._source.client == "krbd":
                raise self._error(lacking, "load the rbd module, or set client: auto")
            return "", f"{lacking}: the view comes with the complete copy"
        await asyncio.to_thread(self._target.mkdir, exist_ok=True, mode=0o700)
        try:
            refused = await kit.child.call(
                rbd_child.mount_snapshot, str(self._folder),
                monitors.one_protocol(addresses), secret,
                dataclasses.asdict(self.access), dataclasses.asdict(facts), self._thing,
                deadline=deadline,
            )  # fmt: skip
        except kit.child.DeadlineError as error:
            raise self._error(
                f"mapping it took longer than {deadline:g}s", "see the kernel log"
            ) from error
        except OSError as error:
            raise self._error(
                f"the kernel cannot map it ({error.strerror or error})",
                "see the kernel log; old kernels lack image features ('rbd feature disable')",
            ) from error
        return ("", str(refused)) if refused else (str(self._target), "")

    def _error(self, cause: str, remedy: str) -> kit.errors.SourceError:
        return kit.errors.SourceError(self._thing, cause, f"{remedy}; it is tried again")

    async def release(self) -> None:
        await release(self._folder)


async def release(folder: Path) -> None:
    """Unmount and unmap what a source left in its folder, and delete its key.

    What is in use stays, to be released when this is called again: by a job that holds a file of
    the snapshot open, or (kernels before 6.5) by the view, below what serves it now.
    """
    try:
        await kit.child.call(rbd_child.unmap_ours, str(folder), deadline=DETACH_SECONDS)
    except (OSError, kit.child.DeadlineError) as error:
        log.info("mapped image stays for now", folder=str(folder), why=str(error))
        return
    cephfs_mount.delete(folder, _FILES)
