"""The facts, the mapping and the mount of an RBD snapshot as child processes find and make them
(``rbd``). Imports little: the process that calls fork from keeps what they load as long as the
agent runs.
"""

import contextlib
import dataclasses
import errno
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kit.files
from cache.store import filesystem, mixed
from ceph import image
from ceph.protocol import ImageAccess, SnapshotFacts
from linux import devmapper, krbd, mountinfo, mounts
from linux.rbd_sysfs import RbdImage

MAPPED = "mapped.json"
_UNMAP_LOOKS, _UNMAP_SECONDS = 20, 0.1
# Where signatures lie: the first of these bytes, and the last for what writes at the end.
_FIRST_BYTES, _LAST_BYTES = 2 * 2**20, 2**20


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
    folder: str, monitors: tuple[str, Sequence[str]], secret: str, access: dict[str, Any],
    facts: dict[str, Any], thing: str,
) -> str:  # fmt: skip
    """Map and mount; why the file system cannot be mounted from a snapshot, or ''. OSError.

    ``monitors``: their protocol and HOST:PORT of each.

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
        protocol, hosts = monitors
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
