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
import contextlib
import dataclasses
import errno
import json
import os
import time
from pathlib import Path
from typing import Any

import structlog

import kit.child
import kit.errors
import kit.files
from cache.settings import DatasetSettings, RbdSource, Source
from cache.sources import base, cephfs_mount
from cache.store import filesystem, identity, mixed
from ceph import image, monitors, secrets
from ceph.protocol import ImageAccess, SnapshotFacts
from linux import devmapper, krbd, mountinfo, mounts
from linux.rbd_sysfs import RbdImage

log = structlog.get_logger("source")

DETACH_SECONDS = 15.0
MAPPED = "mapped.json"
_UNMAP_LOOKS, _UNMAP_SECONDS = 20, 0.1
_NO_MAPPER = "no device mapper here: what is stored is read from the SSD when all of it is"
_FILES = ("keyring", "ceph.conf", cephfs_mount.CLAIM_KEY, MAPPED)
_CONF = "[global]\nmon host = {monitors}\nkeyring = {keyring}\nlog file =\nadmin socket =\n"
# Where signatures lie: the first of these bytes, and the last for what writes at the end.
_FIRST_BYTES, _LAST_BYTES = 2 * 2**20, 2**20


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
                **await kit.child.call(look, access, self._thing, deadline=deadline)
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
                mount_snapshot, str(self._folder), addresses, secret,
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


def look(access: dict[str, Any], thing: str) -> dict[str, Any]:
    """The snapshot's facts. In a child process. SourceError when it is not what can be served."""
    wanted = ImageAccess(**access)
    with image.opened(wanted) as snapshot:
        signatures = os.memfd_create("signatures")
        with kit.files.closing(signatures):
            os.ftruncate(signatures, snapshot.facts.size)
            _read_ends(snapshot, signatures, 0, snapshot.facts.size)
            shown = f"/proc/self/fd/{signatures}"
            if wanted.partition:
                _read_ends(
                    snapshot, signatures, *filesystem.part_of(shown, thing, wanted.partition)
                )
            filesystem.kind_of(shown, thing, wanted.partition)
        return dataclasses.asdict(snapshot.facts)


def _read_ends(snapshot: image.ImageSnapshot, target: int, start: int, size: int) -> None:
    """Put the parts that hold signatures into ``target``, at their places."""
    first = min(_FIRST_BYTES, size)
    last = max(first, size - _LAST_BYTES)
    wanted = ((start, first), (start + last, size - last))
    for offset, data in snapshot.read(filter(lambda each: each[1], wanted), _no):
        os.pwrite(target, data, offset)


def _no() -> None:
    """Nothing is to be done while data is awaited: the agent has the deadline."""


def mount_snapshot(
    folder: str, given: list[list[Any]], secret: str, access: dict[str, Any],
    facts: dict[str, Any], thing: str,
) -> str:  # fmt: skip
    """Map and mount; why the file system cannot be mounted from a snapshot, or ''. OSError.

    Another snapshot that is mounted there makes way; its readers keep its mapping.
    """
    wanted = ImageAccess(**access)
    named = RbdImage(wanted.pool, wanted.image, wanted.namespace, wanted.snapshot)
    _unmount(Path(folder))
    noted = _noted(Path(folder))
    number = _mapping(noted, named)
    if number is not None and not _shows(number, SnapshotFacts(**facts)):
        number = None
    if number is None:
        # Said before it is done: who is killed in between leaves no mapping that nobody knows.
        seen: dict[str, Any] = {
            "image": access, "others": krbd.mapped(named), "left": _unmap_left(noted),
        }  # fmt: skip
        kit.files.save(Path(folder) / MAPPED, json.dumps(seen).encode())
        protocol, hosts = monitors.one_protocol(monitors.Address(*each) for each in given)
        number = krbd.map_snapshot(hosts, wanted.user, secret, named, protocol)
        seen |= {"device": number, "diskseq": krbd.diskseq(number)}
        kit.files.save(Path(folder) / MAPPED, json.dumps(seen).encode())
    try:
        tree = _mounted(Path(folder), f"/dev/rbd{number}", thing, wanted.partition)
    except filesystem.JournalError:
        unmap_ours(folder)
        return (
            "its journal must be replayed, which a snapshot does not allow: the view comes "
            "with the complete copy, where it is replayed"
        )
    with kit.files.closing(tree):
        mounts.attach(tree, Path(folder) / "mount")
    return ""


def _mounted(folder: Path, device: str, thing: str, partition: int) -> int:
    """A detached mount, of a device that can show the copy too where the kernel has the means."""
    if devmapper.available():
        with contextlib.suppress(OSError):  # the mount of the image alone says what is wrong
            mixed.remove(folder)  # what a killed agent left
            return mixed.mounted(folder, device, thing, partition)
    return filesystem.mounted_part(device, thing, partition)


def _noted(folder: Path) -> dict[str, Any]:
    """What ``mapped.json`` says; {} when it is missing or damaged."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        found = json.loads((folder / MAPPED).read_bytes())
        return found if isinstance(found, dict) else {}
    return {}


def _shows(number: str, facts: SnapshotFacts) -> bool:
    status = os.stat(f"/dev/rbd{number}")
    return mixed.is_of(f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}", facts)


def _mapping(noted: dict[str, Any], wanted: RbdImage | None = None) -> str | None:
    """The device that we mapped, if it still is the same one and shows ``wanted``."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        access = ImageAccess(**noted["image"])
        image = RbdImage(access.pool, access.image, access.namespace, access.snapshot)
        mapped = [each for each in krbd.mapped(image) if each not in noted.get("others", ())]
        if "device" in noted:
            number = str(noted["device"])
            mapped = (
                [number] if number in mapped and krbd.diskseq(number) == noted["diskseq"] else []
            )
        if len(mapped) == 1 and wanted in (None, image):
            return mapped[0]
    return None


def unmap_ours(folder: str) -> None:
    """Unmount and unmap what is ours in ``folder``. In a child process. OSError: it is used."""
    _unmount(Path(folder))
    noted = _noted(Path(folder))
    used: OSError | None = None
    for each in (noted, *noted.get("left", ())):
        try:
            if (number := _mapping(each)) is not None:
                _unmap(number)
        except OSError as error:
            used = error
    if used is not None:
        raise used
    (Path(folder) / MAPPED).unlink(missing_ok=True)


def _unmount(folder: Path) -> None:
    target = folder / "mount"
    while mountinfo.top(target) is not None:
        mounts.unmount(target)
    mixed.remove(folder)


def _unmap_left(noted: dict[str, Any]) -> list[dict[str, Any]]:
    """Unmap earlier mappings of ours; the notes of those that somebody still uses."""
    kept = []
    for each in (*noted.get("left", ()), {**noted, "left": ()}):
        if (number := _mapping(each)) is not None:
            try:
                krbd.unmap(number)
            except OSError:
                kept.append(each)
    return kept


def _unmap(number: str) -> None:
    """OSError: EBUSY while a job holds a file of the snapshot open."""
    for left in reversed(range(_UNMAP_LOOKS)):
        try:
            krbd.unmap(number)
            break
        except OSError as error:
            if error.errno != errno.EBUSY or not left:
                raise
        time.sleep(_UNMAP_SECONDS)  # the kernel ends devices and mounts on it by and by


async def release(folder: Path) -> None:
    """Unmount and unmap what a source left in its folder, and delete its key.

    What is in use stays, to be released when this is called again: by a job that holds a file of
    the snapshot open, or (kernels before 6.5) by the view, below what serves it now.
    """
    try:
        await kit.child.call(unmap_ours, str(folder), deadline=DETACH_SECONDS)
    except (OSError, kit.child.DeadlineError) as error:
        log.info("mapped image stays for now", folder=str(folder), why=str(error))
        return
    cephfs_mount.delete(folder, _FILES)
