"""The folders of the store: one per generation, inside one per dataset.

<store>/nodeagent.json                      format of the store
<store>/<dataset>/<generation>/tree/        the layer: same names, modes, owners and times
                               staging/     copied files that are not in the tree yet
                               links/       spare names of hard-linked files during a fill
                               index.sqlite directories and what is left to copy (rebuildable)
                               unreplaced.jsonl  bad files that are to be withdrawn
                               generation.json
<store>/.trash/                             discarded generations until they are deleted

unreplaced.jsonl is the quarantine list: the bad files that a verify found and could not replace.
Each line is [path of the directory, name]. It is not in the index, because an index may be lost and
a bad file has the size and times of a good one, so no scan would find it again.
Invariant: nothing is filled while the list exists (``cache.work.jobs`` withdraws its files first).

A damaged generation.json has lost what its files are of and whether they are suspect: nothing of
that generation is used again. A damaged nodeagent.json is made anew where generations are.

The functions that take a path run in a child process: the disk may hang.
"""

import contextlib
import errno
import json
import os
import sqlite3
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

import kit.errors
import kit.files
import kit.formats
import kit.units
from cache.store import disk, image_copy, index, large, manifest, subset, tree

GENERATION_FORMAT = 1  # of generation.json
TRASH = ".trash"
NAME = "generation.json"
State = Literal["new", "filling", "partial", "complete", "stale"]  # stale: of another source
_STORED = ("tree", image_copy.IMAGE, image_copy.CHUNKS)  # of a generation that has begun
_PROBE = ".probe"
READ_ONLY, CANNOT_WRITE = "it is read-only", "it cannot be written"
QUARANTINE = "unreplaced.jsonl"
MOST_DAMAGED = 50  # files that are told
LOCK_SECONDS = 2.0  # for the coordinator of a killed agent to end
_NAMES_AT_ONCE = 1000  # names of up to 255 bytes each in one message


@dataclass(frozen=True, kw_only=True)
class Generation(manifest.Counts):
    """generation.json. ``complete`` is written only when everything in the tree is durable."""

    dataset: str
    identity: str  # JSON of what the settings name
    marks: dict[str, str] = field(default_factory=dict)  # what it is filled from (store.identity)
    state: State = "new"
    skeleton: bool = False  # every directory of the source is in the tree
    wanted: bool = False  # an operator asked to warm it
    paused: Literal["", "paused", "cancelled", "evicted"] = ""  # not filled until an operator asks
    why: str = ""  # why it is partial, or why the last fill failed
    created: float = 0.0  # Unix time
    completed: float = 0.0
    used: int = 0  # SSD bytes
    inodes: int = 0
    kept_share: int = subset.ALL  # of the files (store.subset)
    evicting: bool = False  # what the share takes out may still be in the tree
    left_files: int = 0  # what did not fit
    left_bytes: int = 0
    replaced: str = ""  # why the generation before it was discarded
    snapshot: str = ""  # its name, '' of a source without one
    served: float = 0.0  # Unix time from which it was the current one; 0: it never was
    before: str = ""  # id of the generation whose unchanged files it shares
    shared: int = 0  # those of its SSD bytes that ``before`` has too
    shared_files: int = 0
    verified: int = 0  # number of the last trouble of the disk after which all was verified
    scrubbed: float = 0.0  # Unix time when its last whole scrub ended
    crashes: int = 0  # of the node before that scrub began (``store.trust``)
    # No overlay may be shown (``standing.unfit``): what the source refuses root to open, and where
    # it mounts another file system when that is opened.
    refused: str = ""
    crossed: str = ""
    damaged: int = 0  # files that are on its list of bad files
    outside: int = 0  # symbolic links that lead out of the tree
    leads_out: str = ""  # one of them, for people


def new(dataset: str, identity: str) -> Generation:
    return Generation(dataset=dataset, identity=identity, created=time.time())


def prepare(path: str, former: str = "") -> None:
    """Make the store if it does not exist and check it. HostError, and then nothing is left.

    ``former``: UUID of the store that was there, which keeps it when its marker is lost.
    """
    store = Path(path)
    made = []
    missing = store
    while not missing.exists():
        made.append(missing)
        missing = missing.parent
    try:
        store.mkdir(parents=True, exist_ok=True, mode=0o700)
        _check_abilities(store)
        _check_format(store, former)
    except BaseException:
        for directory in made:
            with contextlib.suppress(OSError):
                directory.rmdir()
        raise
    store.chmod(0o700)  # jobs read through views only
    (store / TRASH).mkdir(mode=0o700, exist_ok=True)


def is_disk_trouble(error: kit.errors.AgentError) -> bool:
    """Whether ``prepare`` failed because of the disk: what is stored on it may be damaged."""
    return error.cause == READ_ONLY or error.cause.startswith(CANNOT_WRITE)


def _unusable(store: Path, cause: str, remedy: str) -> kit.errors.HostError:
    return kit.errors.HostError(f"cache.store {store}", cause, remedy)


def _check_abilities(store: Path) -> None:
    remedy = "put cache.store on an ext4 or XFS file system of the SSD"
    probe = store / _PROBE
    try:
        probe.mkdir(exist_ok=True)
        os.setxattr(probe, tree.OPAQUE, b"y")
        os.setxattr(probe, tree.CHECKSUM, b"0" * 32)
        if os.getxattr(probe, tree.OPAQUE) != b"y":
            raise OSError(errno.EOPNOTSUPP, "xattrs are not returned as they were set")
    except OSError as error:
        cause = f"it cannot hold trusted xattrs ({error.strerror})"
        if error.errno == errno.EROFS:
            cause = READ_ONLY
        elif error.errno == errno.ENOSPC:
            cause, remedy = "it is full", "free some space there"
        elif error.errno not in (errno.EOPNOTSUPP, errno.EPERM, errno.EINVAL):
            cause = f"{CANNOT_WRITE} ({error.strerror})"
        raise _unusable(store, cause, remedy) from error
    finally:
        with contextlib.suppress(OSError):
            probe.rmdir()


def _check_format(store: Path, former: str) -> None:
    marker = store / disk.MARKER
    kept = disk.marker_of(store)
    if isinstance(kept, dict):
        if kept["format"] != disk.STORE_FORMAT:
            remedy = "run the agent version that made it, or set cache.store to an empty directory"
            why = f"its format is {kept['format']}, this agent reads format {disk.STORE_FORMAT}"
            raise _unusable(store, why, remedy)
        return
    if kept is not None and kept.unread:
        raise OSError(errno.EIO, kept.why, str(marker))
    if not disk.has_generations(store):
        former = ""
        # An agent that was killed during its first start leaves these, and 'rm -rf STORE/*'.
        ours = ("lost+found", f".{disk.MARKER}.new", _PROBE, TRASH)
        remedy = "set cache.store to an empty directory"
        if kept is not None:
            remedy += ", or empty this one: it is only a cache"
            raise _unusable(store, f"its {disk.MARKER} is damaged ({kept.why})", remedy)
        strangers = [entry.name for entry in store.iterdir() if entry.name not in ours]
        if strangers:
            why = f"it is not empty and not a store (it contains {strangers[0]!r})"
            raise _unusable(store, why, remedy)
    if kept is not None:
        kit.formats.set_aside(marker)
    fields = {"format": disk.STORE_FORMAT, "uuid": former or str(uuid.uuid4())}
    kit.files.save(marker, json.dumps(fields).encode())


def load(folder: str) -> dict[str, Any] | None:
    """The fields of generation.json; None when nothing was stored yet.

    ``lost``: why the others are not known. A damaged file is kept aside, and one that is missing
    beside a tree is damaged, too.
    """
    path = Path(folder) / NAME
    try:
        found = kit.formats.read(path, GENERATION_FORMAT, _checked)
    except kit.errors.HostError:  # a newer agent's: ``generation_of`` says so
        newer = kit.formats.look(path, None, _as_newer)
        return newer if isinstance(newer, dict) else None
    if isinstance(found, kit.formats.Damage):
        return {"lost": f"{found}: {path.parent.name} is filled anew"}
    if found is None and any(os.path.lexists(path.with_name(name)) for name in _STORED):
        return {"lost": f"{path} is missing: {path.parent.name} is filled anew"}
    return found


def _checked(value: Any) -> dict[str, Any]:
    """ValueError, TypeError for what no agent wrote."""
    fields = dict(value)
    fields["state"]  # KeyError: each agent wrote it, although Generation has a default
    msgspec.convert(fields, type=Generation)
    return fields


def _as_newer(value: Any) -> dict[str, Any]:
    """Of another agent's fields, those that mean here what they say."""
    try:
        return _checked(value)
    except (ValueError, TypeError, LookupError):
        return {kit.formats.KEY: value[kit.formats.KEY]}


def damaged(store: str) -> dict[str, str]:
    """Files that were kept aside, by their former names below the store, and what was wrong."""
    root, suffix = Path(store), kit.formats.SUFFIX
    found = (*root.glob(f"*{suffix}"), *root.glob(f"*/*/*{suffix}"))
    names = {str(path.relative_to(store)).removesuffix(suffix): path for path in found}
    told = [name for name in sorted(names) if not name.startswith(".")][:MOST_DAMAGED]
    return {name: kit.formats.what_was_wrong(names[name]) for name in told}


def highest_verified(store: str) -> int:
    """Number of the last trouble of the disk after which anything that lies there was verified."""
    found = (load(str(path.parent)) or {} for path in Path(store).glob(f"*/*/{NAME}"))
    return max((int(each.get("verified", 0)) for each in found), default=0)


def adopt_all(store: str, datasets: list[str]) -> list[dict[str, dict[str, Any] | None]]:
    """``load`` every generation of each dataset, by its folder, after deleting what a killed
    coordinator left in its staging folder.

    ``tree`` is added: the inode number of the tree or image, 0 when there is none. ``damaged`` is
    as the list of bad files has it.
    """
    found = []
    for name in datasets:
        try:
            folders = sorted(str(each) for each in (Path(store) / name).iterdir() if each.is_dir())
        except OSError:
            folders = []
        found.append({folder: _adopt(folder) for folder in folders})
    return found


def _adopt(folder: str) -> dict[str, Any] | None:
    fields = load(folder)
    if fields is not None and "lost" not in fields:
        try:
            os.close(kit.files.lock(Path(folder) / "lock", LOCK_SECONDS))
            with tree.opened_root(folder) as directory:
                tree.remove(directory, "staging")
        except OSError:
            pass  # the next fill deletes it too, and reports what is wrong
        # Found by a verify that was cut short, or could not withdraw them.
        try:
            listed = len(read_quarantined(Path(folder))) or int(has_quarantined(folder))
        except OSError:
            listed = 1  # which ones is not known: nothing of it is good before that is read
        if listed:
            fields["damaged"] = listed
    if fields is not None:
        fields["tree"] = 0
        for name in ("tree", image_copy.IMAGE):
            with contextlib.suppress(OSError):
                fields["tree"] = (Path(folder) / name).stat().st_ino
    return _with_figures(fields, folder)


def _with_figures(fields: dict[str, Any] | None, folder: str) -> dict[str, Any] | None:
    """``fields``, with the figures of the index when a killed fill could not write its own.

    While directories are listed again the index knows less of what is used, so the higher figure
    counts.
    """
    unknown = fields is not None and (fields.get("evicting") or "lost" in fields)
    if fields is not None and (fields.get("state") == "filling" or unknown):
        with contextlib.suppress(OSError):
            allocated = image_copy.used(Path(folder))
            fields["used"] = max(int(fields.get("used", 0)), allocated)
        path = Path(folder) / index.NAME
        with (
            contextlib.suppress(OSError, sqlite3.Error),  # no index that can be read
            contextlib.closing(index.Index.read_only(path)) as opened,
        ):
            found, size = opened.totals(), path.stat().st_size
            with tree.opened_root(folder) as directory:
                size += large.used(directory)  # what is not in the tree yet
            used = max(int(fields.get("used", 0)), found.used + size)
            inodes = max(int(fields.get("inodes", 0)), found.inodes)
            fields |= {**found.counts(), "used": used, "inodes": inodes}
    return fields


def failures_page(folder: str, limit: int, after: list[Any]) -> dict[str, Any]:
    """Entries that could not be copied or do not fit, those after ``after``, as JSON.

    ``after``: directory and name of a failure, or minus the chunk and name of what does not fit,
    which come second. Names that are not UTF-8 are shown with \\xNN escapes. ``next`` is in hex,
    because a name may have bytes that no URL carries.
    """
    try:
        opened = index.Index.read_only(Path(folder) / index.NAME)
    except OSError:
        return {"failures": [], "next": None}  # nothing was scanned yet
    with contextlib.closing(opened):
        number, name = int(after[0]), str(after[1])
        rows = opened.failures(limit, (number, name)) if number >= 0 else []
        failures = [
            {"path": tree.shown([*opened.path(each), name]), "reason": reason}
            for each, name, reason in rows
        ]
        last = rows[-1][:2] if rows else None
        chunks = opened.lacking_room(limit - len(rows), (max(0, -number), name))
        for chunk, entry in chunks:
            path = tree.shown([*opened.path(chunk.directory), entry.name])
            why = f"no room for its {kit.units.format_size(entry.allocated)} on the SSD"
            failures.append({"path": path, "reason": why})
            last = -chunk.id, entry.name
    more = f"{last[0]}/{os.fsencode(last[1]).hex()}" if last and len(failures) == limit else None
    return {"failures": failures, "next": more}


def save(folder: str, fields: dict[str, Any]) -> None:
    """Write generation.json durably; makes the folder."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    text = json.dumps({kit.formats.KEY: GENERATION_FORMAT, **fields}, indent=1)
    kit.files.save(path / NAME, text.encode())


def generation_of(fields: dict[str, Any]) -> Generation:
    """From loaded fields; unknown ones are ignored. HostError when a newer agent wrote them."""
    where = f"generation.json of dataset {fields.get('dataset')}"
    kit.formats.check(where, fields, GENERATION_FORMAT)
    known = Generation.__dataclass_fields__
    return Generation(**{key: value for key, value in fields.items() if key in known})


def inventory(path: str) -> dict[str, int]:
    """The folder of every generation in the store, with the SSD bytes that it takes."""
    found: dict[str, int] = {}
    for dataset in sorted(Path(path).iterdir()):
        if dataset.is_dir() and not dataset.name.startswith(".") and dataset.name != "lost+found":
            found |= {str(folder): _used(folder) for folder in sorted(dataset.iterdir())}
    return found


def _used(folder: Path) -> int:
    fields = _with_figures(load(str(folder)), str(folder))
    return 0 if fields is None else int(fields.get("used", 0))


def discard(store: str, folder: str) -> None:
    """Move a generation to the trash; ``empty_trash`` frees its bytes."""
    target = Path(store) / TRASH / f"{Path(folder).parent.name}-{time.time_ns()}"
    try:
        Path(folder).rename(target)
    except FileNotFoundError:
        return
    with contextlib.suppress(OSError):
        Path(folder).parent.rmdir()  # the last generation of its dataset


def trash_bytes(store: str) -> int:
    """SSD bytes of the discarded generations that are not deleted yet."""
    return sum(_used(folder) for folder in (Path(store) / TRASH).iterdir())


def empty_trash(store: str) -> None:
    """Delete discarded generations; takes minutes for millions of files.

    The tree is deleted before the rest, so that ``trash_bytes`` counts it until it is gone.
    """
    with tree.opened_root(Path(store) / TRASH) as trash:
        for name in os.listdir(trash):
            with (
                contextlib.suppress(OSError),  # the next remove reports it
                tree.opened(trash, [name]) as folder,
            ):
                tree.remove(folder, "tree")
            tree.remove(trash, name)


# --- the quarantine list


def has_quarantined(folder: str) -> bool:
    """OSError."""
    try:
        return (Path(folder) / QUARANTINE).stat().st_size > 0
    except FileNotFoundError:
        return False


def write_quarantined(folder: str | Path, files: Sequence[tuple[list[str], str]]) -> None:
    """Replace the list durably; an empty one is deleted. OSError."""
    if not files:
        Path(folder, QUARANTINE).unlink(missing_ok=True)
        return
    text = "".join(f"{json.dumps(file)}\n" for file in files)
    kit.files.save(Path(folder, QUARANTINE), text.encode("ascii"))


def add_quarantined(folder: Path, files: Sequence[tuple[list[str], str]]) -> None:
    """Have ``files`` on the list, too. Nothing where the generation has gone. OSError."""
    if (folder / NAME).exists():
        known = read_quarantined(folder)
        seen = {(tuple(path), name) for path, name in known}
        new = [each for each in files if (tuple(each[0]), each[1]) not in seen]
        write_quarantined(folder, [*known, *new])


def read_quarantined(folder: Path) -> list[tuple[list[str], str]]:
    """(path of the directory, name) of each file, each once. OSError."""
    try:
        lines = (folder / QUARANTINE).read_text(encoding="ascii").splitlines()
    except FileNotFoundError:
        return []
    files = []
    for line in dict.fromkeys(lines):
        with contextlib.suppress(ValueError):  # of a damaged disk: the scrub finds that file again
            path, name = json.loads(line)
            files.append((path, name))
    return files


def grouped(files: Sequence[tuple[list[str], str]]) -> dict[tuple[str, ...], list[str]]:
    """The names by the path of their directory."""
    found: dict[tuple[str, ...], list[str]] = {}
    for path, name in files:
        found.setdefault(tuple(path), []).append(name)
    return found


def by_directory(files: Sequence[tuple[list[str], str]]) -> Iterator[tuple[list[str], list[str]]]:
    """(path, names) with a bounded number of names at once."""
    for key, names in grouped(files).items():
        for at in range(0, len(names), _NAMES_AT_ONCE):
            yield list(key), names[at : at + _NAMES_AT_ONCE]
