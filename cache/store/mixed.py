"""One block device that shows a block image from its local copy and from its source.

A linear table of the device mapper sends ranges that are stored and checked to a loop device over
the copy, the rest to the mapped snapshot. As more is stored, the table is changed under the readers
(``cache.store.ranges`` decides): they read what is filled from the SSD at once. When all is
stored, the table is one range and the mapping can go.

Devices are named nodeagent-FOLDER-SNAPSHOT-TOKEN: a digest of the source's folder, one of the ids
of the mapped snapshot, and chance. They end by themselves: the device with the last mount of it,
the loop device with the last table that names it.

Invariant: a table is only changed to show blocks of the snapshot in its device's name. A source
that is another one by the same name, or a later snapshot, gets devices of its own; who reads an
earlier one keeps it.

Everything here runs in a child process, in its main thread, unless it says that it is cheap.
"""

import contextlib
import errno
import hashlib
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import kit.errors
import kit.files
from cache.store import extents, filesystem, image_copy, ranges
from ceph.protocol import SnapshotFacts
from linux import devmapper, loop, mountinfo, mounts, rbd_sysfs
from linux.devmapper import SECTOR, Line

PREFIX = "nodeagent-"  # of names, which are the uuids too
# For reads that are under way; readers of the copy wait too while the source does not answer.
SWITCH_SECONDS = 5.0
_LOOP = "loop"
Ids = tuple[str, int, str, int]  # of the cluster, pool, image and snapshot


def at(path: str | Path) -> str:
    """The name of our device that is mounted at ``path``; '' for anything else. Cheap."""
    return of(mountinfo.top(path) if str(path) else None)


def of(mount: mountinfo.Mount | None) -> str:
    """The same, of a mount that was found already."""
    name = devmapper.uuid_of(mount.device) if mount is not None else ""
    return name if name.startswith(PREFIX) else ""


def shows(number: tuple[int, int]) -> tuple[bool, bool] | None:
    """Whether our device shows any of a copy, and any of a source; None: it is not ours. Cheap."""
    if not devmapper.uuid_of(number).startswith(PREFIX):
        return None
    below = devmapper.below(number)
    return (
        any(each.startswith(_LOOP) for each in below),
        any(not each.startswith(_LOOP) for each in below),
    )


def shows_another(mount: mountinfo.Mount, facts: SnapshotFacts) -> bool:
    """Whether ``mount`` shows a mapped snapshot that certainly is not this one. Cheap."""
    if name := of(mount):
        return name.split("-")[2] != _digest(_ids(facts))
    shown = snapshot_of(f"{mount.major}:{mount.minor}")
    return shown is not None and shown != _ids(facts)


def is_of(device: str, facts: SnapshotFacts) -> bool:
    """Whether ``device`` (major:minor) is a mapping of this snapshot. Cheap."""
    return snapshot_of(device) == _ids(facts)


def mounted(folder: Path, source: str, thing: str, partition: int) -> int:
    """A detached mount of a new device that shows all of ``source`` (/dev/rbdN); a descriptor.

    JournalError, SourceError (``filesystem.kind_of``) or OSError.
    """
    status = os.stat(source)
    number = f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
    start, size = filesystem.part_of(source, thing, partition)
    sectors = rbd_sysfs.integer(rbd_sysfs.text(f"/sys/dev/block/{number}/size"))
    line = Line(0, size // SECTOR or sectors, number, start // SECTOR)
    if (ids := snapshot_of(number)) is None:
        raise OSError(errno.ENXIO, "it is no mapped snapshot", source)
    return _mounted(f"{_key(folder)}{_digest(ids)}-", [line], thing)


def renewed(path: str) -> None:
    """Replace our mount at ``path`` by one of a new device, which has no old blocks in its caches.

    It shows the source only. OSError.
    """
    name = at(path)
    table = devmapper.table(name)
    source = next((line.device for line in table if not _is_loop(line.device)), "")
    if not source:
        raise OSError(errno.ENXIO, "it shows no source", path)
    line = Line(0, _sectors(table), source, _shift(table))
    with kit.files.closing(_mounted(_prefix_of(name), [line], path)) as tree:
        mounts.swap(tree, path)


def _mounted(prefix: str, table: list[Line], thing: str) -> int:
    with devmapper.created(f"{prefix}{secrets.token_hex(4)}", table) as node:
        return filesystem.mounted(node, thing)


def blend(name: str, copy: str) -> bool:
    """Show what is stored from ``copy``, where that is worth a change. Whether it was changed.

    The last of it is left to ``make_whole``: a device that shows no source is a complete one.
    OSError, HostError.
    """
    changed = False
    with _opened(name, copy) as own:
        states, source = own.states, own.source
        if not source:
            return False
        wanted = ranges.plan(states)
        if wanted == [ranges.Local(0, len(states))]:
            wanted = [ranges.Local(0, len(states) - 1)] if len(states) > 1 else []
        for each, table in own.tables.items():
            shown = ranges.shown_by(table, own.copy)
            stray = any(line.device not in (own.copy, source) for line in table)
            if stray or ranges.is_worth(states, shown, wanted):
                own.switch(each, wanted)
                changed = True
    return changed


def make_whole(name: str, copy: str) -> bool:
    """Show all from ``copy``; whether our device can. OSError, HostError."""
    with _opened(name, copy) as own:
        whole = [ranges.Local(0, len(own.states))]
        if ranges.plan(own.states) != whole:
            return False
        # The one that readers open now comes last: its source can go only with the others'.
        for each in sorted(own.tables, key=lambda other: other == name):
            if any(line.device != own.copy for line in own.tables[each]):
                with contextlib.suppress(OSError) if each != name else contextlib.nullcontext():
                    own.switch(each, whole)
    return True


def part(name: str) -> None:
    """Show nothing from a copy any more, on all devices of ``name``'s snapshot. OSError."""
    tables = _tables(_prefix_of(name))
    source = _source_of(tables)
    for each, table in tables.items():
        if source and any(_is_loop(line.device) for line in table):
            line = Line(0, _sectors(table), source, _shift(table))
            devmapper.switch(each, [line], SWITCH_SECONDS)


def remove(folder: Path) -> None:
    """Remove the devices of a source's folder; what is in use goes with its last user. OSError."""
    if not devmapper.is_loaded():
        return
    for name in devmapper.names(_key(folder)):
        with contextlib.suppress(OSError):  # it has gone by itself
            devmapper.remove(name)


@dataclass
class _Own:
    """The devices of one source, and the copy that they may show."""

    tables: dict[str, list[Line]]
    source: str  # major:minor; '' when none shows it any more
    copy: str  # major:minor of its loop device
    states: bytes

    def switch(self, name: str, wanted: list[ranges.Local]) -> None:
        table = self.tables[name]
        lines = ranges.lines(
            wanted, _sectors(table), _shift(table), self.copy, self.source or self.copy
        )
        devmapper.switch(name, lines, SWITCH_SECONDS)


@contextlib.contextmanager
def _opened(name: str, copy: str) -> Iterator[_Own]:
    """The loop device is there while the block runs; a table that names it keeps it."""
    tables = _tables(_prefix_of(name))
    source = _source_of(tables)
    path, folder = os.path.realpath(copy), Path(copy).parent
    with image_copy.existing_copy(folder) as chunks:
        if source and not is_of(source, chunks.facts):
            raise OSError(errno.ESTALE, "the copy is of another snapshot", copy)
        states = b"".join(raw[:: extents.RECORD_BYTES] for _, raw in chunks.records())
        loops = {
            line.device for table in tables.values() for line in table if _is_loop(line.device)
        }
        found = sorted(each for each in loops if _backing(each) == path)
        # A complete device of a copy that has gone is left alone: its readers have it open.
        known = {source, *found[:1]}
        tables = {
            each: table
            for each, table in tables.items()
            if any(line.device in known for line in table)
        }
        if name not in tables:
            raise OSError(errno.ESTALE, "it shows another copy", name)
        with contextlib.ExitStack() as kept:
            # A table of a device that has just gone names it no more, and it may have ended.
            minor = int(found[0].partition(":")[2]) if found else 0
            held = contextlib.nullcontext(False) if not found else loop.held(minor, path)
            if kept.enter_context(held):
                shown = found[0]
            else:
                number = os.stat(kept.enter_context(loop.attached(copy))).st_rdev
                shown = f"{os.major(number)}:{os.minor(number)}"
            yield _Own(tables, source, shown, states)


def _tables(prefix: str) -> dict[str, list[Line]]:
    found = {}
    for name in devmapper.names(prefix):
        with contextlib.suppress(OSError):  # just gone
            if table := devmapper.table(name):
                found[name] = table
    return found


def _source_of(tables: dict[str, list[Line]]) -> str:
    every = (line.device for table in tables.values() for line in table)
    return next((device for device in every if not _is_loop(device)), "")


def snapshot_of(device: str) -> Ids | None:
    """What ``device`` (major:minor) maps; None for none of RBD. Cheap."""
    name = _kernel_name(device)
    number = name.removeprefix("rbd")
    image, _ = rbd_sysfs.mapping(number, "/sys") if number != name else (None, None)
    if image is None:
        return None
    snap_id = rbd_sysfs.integer(rbd_sysfs.text(f"/sys/bus/rbd/devices/{number}/snap_id"))
    return image.fsid, image.pool_id, image.image_id, snap_id


def _ids(facts: SnapshotFacts) -> Ids:
    return facts.fsid, facts.pool_id, facts.image_id, facts.snap_id


def _digest(ids: Ids) -> str:
    return hashlib.sha256(repr(ids).encode()).hexdigest()[:12]


def _is_loop(device: str) -> bool:
    return _kernel_name(device).startswith(_LOOP)


def _backing(device: str) -> str:
    return rbd_sysfs.text(f"/sys/block/{_kernel_name(device)}/loop/backing_file")


def _kernel_name(device: str) -> str:
    return os.path.basename(os.path.realpath(f"/sys/dev/block/{device}"))


def _sectors(table: list[Line]) -> int:
    return sum(line.length for line in table)


def _shift(table: list[Line]) -> int:
    return table[0].offset - table[0].start


def _key(folder: Path) -> str:
    digest = hashlib.sha256(os.path.realpath(folder).encode()).hexdigest()
    return f"{PREFIX}{digest[:12]}-"


def _prefix_of(name: str) -> str:
    return name[: name.rindex("-") + 1]
