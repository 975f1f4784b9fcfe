"""Each file that an agent leaves for the next one, damaged in each way: no error, the cautious
reading, and the file is kept for a person to look at."""

import asyncio
import errno
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

import kit.errors
import kit.formats
from cache.csi import records
from cache.dataset import kept
from cache.store import disk, generations, sample, soundness
from cache.views import users
from nodeagent import memory, rooms
from nodeagent.cluster import follow, intent, requests
from preheat.pulling import durability
from volumes.guard import record, rehearsal_rows
from volumes.ledger import store as ledger

WISH = intent.Wish("CachedDataset", "coco", "u", 1, "2026-01-01T00:00:00Z", {"a": 1})
VOLUME = records.DatasetVolume("v", "/k/pods/u/mount", "coco", "direct")
ENTRY = ledger.Entry("rbd:f/p/i", type="ext4", uuid="u")


@dataclass(frozen=True)
class Kept:
    """One file. ``save`` writes a good one below the folder, ``good`` and ``cautious`` say of the
    folder what its reader makes of it. ``stays``: it is kept aside when it is written anew."""

    name: str
    save: Callable[[Path], object]
    good: Callable[[Path], object]
    cautious: Callable[[Path], object]
    stays: bool = False
    refuses_newer: bool = True


def _save_troubles(folder: Path) -> None:
    path, fields = soundness.file_of(folder), asdict(soundness.Kept(3))
    kit.formats.save(str(path), fields, soundness.FORMAT)


def _sound(folder: Path) -> soundness.Soundness:
    made = soundness.Soundness(folder)
    made.start()
    return made


def _doubts(folder: Path) -> bool:
    """All that is stored, also before and after the numbers in the store are known."""
    made = _sound(folder)
    stored = generations.Generation(dataset="a", identity="{}", state="complete", verified=7)
    early = made.suspects(stored)
    made.number_from(7)
    return early and made.suspects(stored) and made.troubles == 8


def _write_generation(folder: Path) -> None:
    record = generations.Generation(dataset="a", identity="{}", state="complete")
    generations.save(str(folder), asdict(record))
    (folder / "tree").mkdir(exist_ok=True)


def _needs_a_store(folder: Path) -> bool:
    try:
        disk.check(str(folder / "store"), None, folder)
    except kit.errors.HostError as error:
        return "no store is there" in error.cause
    return False


def _mark(folder: Path) -> None:
    _write_generation(folder / "a" / "g")
    generations._check_format(folder, "former")


def _marked_anew(folder: Path) -> bool:
    generations._check_format(folder, "former")
    return disk.uuid_of(str(folder)) == "former"


def _refuses(folder: Path) -> bool:
    """A request that it may have had is not carried out again."""
    made = requests.Requests(folder)
    return made._lost and not made.asked


def _save_requests(folder: Path) -> None:
    made = requests.Requests(folder)
    made.asked = {("CachedDataset", "coco", "rescan"): requests.ObjectRequest("a", "done")}
    asyncio.run(made._save())


def _ledger(folder: Path) -> ledger.LedgerStore:
    made = ledger.LedgerStore(folder)
    made.load()
    return made


def _wanted(folder: Path) -> dict[str, Any]:
    return record.read(str(folder))


def _own_unknown(folder: Path) -> bool:
    """Another one would take the volumes of today for the node's own."""
    try:
        return record.read_own(str(folder)) is None
    except kit.errors.HostError as error:
        return "cannot be used" in error.cause


FILES = [
    Kept("cache-trust.json", _save_troubles,
         lambda f: _sound(f).troubles == 3, _doubts),
    Kept("datasets/a.json", lambda f: kit.formats.save(
        str(kept.file_of(f, "a")), {"removed": True}, kept.FORMAT),
         lambda f: isinstance(kept.load(kept.file_of(f, "a")), dict),
         lambda f: isinstance(kept.load(kept.file_of(f, "a")), kit.formats.Damage)),
    Kept("dataset-uses.json", lambda f: kit.formats.save(
        str(f / users.FILE), {"used": {"a": 7.0}}, users.FORMAT),
         lambda f: users.load(f / users.FILE) == {"a": 7.0},
         lambda f: isinstance(users.load(f / users.FILE), kit.formats.Damage)),
    Kept("cache-disk.json", lambda f: kit.formats.save(
             str(f / "cache-disk.json"), {"store": str(f / "store"), "disk": "/", "uuid": ""},
             disk.FORMAT),
         lambda f: not _needs_a_store(f), _needs_a_store),
    Kept("generation.json", _write_generation,
         lambda f: "lost" not in (generations.load(str(f)) or {"lost": ""}),
         lambda f: "filled anew" in (generations.load(str(f)) or {}).get("lost", "")),
    Kept(sample.NAME,
         lambda f: sample._save(str(f), sample.Seen()),
         lambda f: sample.load_all([str(f)]) != [{}], lambda f: sample.load_all([str(f)]) == [{}],
         refuses_newer=False),
    Kept("nodeagent.json", _mark, lambda f: disk.uuid_of(str(f)), _marked_anew),
    Kept("csi/" + records.file_of(Path(), VOLUME.target).name,
         lambda f: records.write(f / "csi", VOLUME),
         lambda f: records.load(f / "csi", {VOLUME.target}) == {VOLUME.target: VOLUME},
         lambda f: records.load(f / "csi", {VOLUME.target})[VOLUME.target].holds("any"),
         refuses_newer=False),
    Kept("cluster.json", lambda f: (f / follow.FILE).write_text(
             json.dumps(intent.to_json(intent.Known({}, {WISH.key: WISH})))),
         lambda f: follow._load(f / follow.FILE).wishes == {WISH.key: WISH},
         lambda f: follow._load(f / follow.FILE) == intent.Known()),
    Kept("requests.json", _save_requests, lambda f: requests.Requests(f).asked, _refuses),
    Kept("preheat-boot.json", lambda f: kit.formats.save(
        str(f / durability.STATE), {"boot": "now", "doubted": []}, durability.FORMAT),
         lambda f: durability.load(f / durability.STATE) == durability.Kept("now"),
         lambda f: durability.begun(durability.load(f / durability.STATE), "now",
                                    frozenset({"loose"})).doubted == {"loose"}),
    Kept("volumes/guard-wanted.json", lambda f: record.write_wanted(str(f), {"mode": "enforce"}),
         lambda f: _wanted(f)["wanted"] and not _wanted(f)["errors"],
         lambda f: "wanted" in _wanted(f)["errors"], stays=True),
    Kept("volumes/guard-override.json",
         lambda f: record.write_override(str(f), {"mode": "enforce"}),
         lambda f: _wanted(f)["override"] and not _wanted(f)["errors"],
         lambda f: "override" in _wanted(f)["errors"] and _wanted(f)["word"] == "enforce",
         stays=True),
    Kept("volumes/guard-rehearsal.json",
         lambda f: record.write_rehearsal(str(f), rehearsal_rows.Rows(7.0).as_json()),
         lambda f: rehearsal_rows.load(str(f)) == rehearsal_rows.Rows(7.0).as_json(),
         lambda f: rehearsal_rows.load(str(f)) is None),
    Kept("volumes/guard-own.json", lambda f: record.write_own(str(f), {"wwid:1": "swap"}),
         lambda f: record.read_own(str(f)) == {"wwid:1": "swap"}, _own_unknown, stays=True),
    Kept(ledger.LedgerStore(Path())._file(ENTRY.volume).name, lambda f: _ledger(f).put(ENTRY),
         lambda f: _ledger(f).knowledge(ENTRY.volume) is ledger.Knowledge.CONTENT,
         lambda f: _ledger(f).knowledge(ENTRY.volume) is ledger.Knowledge.UNKNOWN, stays=True),
]  # fmt: skip
WAYS = (
    *("empty", "half", "zeros", "garbage", "list", "number", "null", "text", "no-field"),
    *("wrong-type", "nested", "digits", "directory", "full-directory", "link", "dangling", "fifo"),
)


def damage(path: Path, way: str) -> None:
    content = path.read_bytes()
    path.unlink()
    match way:
        case "directory" | "full-directory":
            path.mkdir()
            if way != "directory":
                (path / "x").touch()
        case "link":  # to a good one: it is not followed
            other = path.with_name("elsewhere")
            other.write_bytes(content)
            path.symlink_to(other)
        case "dangling":
            path.symlink_to("nowhere")
        case "fifo":
            os.mkfifo(path)
        case _:
            texts: dict[str, Any] = {
                "empty": "", "half": content[: len(content) // 2], "zeros": bytes(len(content)),
                "garbage": bytes(range(255, 0, -1)), "list": "[7]", "number": "7", "null": "null",
                "text": '"x"', "no-field": "{}", "nested": "[" * 100_000, "digits": "7" * 100_000,
                "wrong-type": _mistyped(json.loads(content)),
            }  # fmt: skip
            made = texts[way]
            path.write_bytes(made if isinstance(made, bytes) else made.encode())


def _mistyped(fields: Any) -> str:
    """The same names, of this format, with values of a type that no agent writes."""
    if not isinstance(fields, dict):
        return '{"a": 1}'
    kept = ("format", "version")
    return json.dumps({key: each if key in kept else [[1]] for key, each in fields.items()})


@pytest.fixture(autouse=True)
def root_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(disk, "place", lambda _: "/")
    monkeypatch.setattr(disk, "fleeting", lambda *_: "")
    yield


# What such a file says is a guard's setting or a time of a look, and is judged by its reader.
ANY_FIELDS = {
    ("volumes/guard-wanted.json", "no-field"), ("volumes/guard-wanted.json", "wrong-type"),
    ("volumes/guard-override.json", "no-field"), ("volumes/guard-override.json", "wrong-type"),
    ("volumes/guard-own.json", "no-field"), ("volumes/guard-own.json", "wrong-type"),
    (sample.NAME, "no-field"), (sample.NAME, "wrong-type"),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("one", FILES, ids=lambda one: one.name)
def test_damaged_is_not_missing(tmp_path: Path, one: Kept, way: str) -> None:
    if (one.name, way) in ANY_FIELDS:
        return
    path, aside = tmp_path / one.name, tmp_path / f"{one.name}{kit.formats.SUFFIX}"
    one.save(tmp_path)
    assert one.good(tmp_path), "the control"
    damage(path, way)
    for _ in range(1 if one.name == disk.MARKER else 3):  # the next agent's reading is the same
        assert one.cautious(tmp_path)
    assert os.path.lexists(path if one.stays else aside)
    one.save(tmp_path)
    assert one.good(tmp_path)
    assert os.path.lexists(aside)
    if way == "link":
        assert path.with_name("elsewhere").exists(), "what it led to is left alone"


@pytest.mark.parametrize("one", FILES, ids=lambda one: one.name)
def test_a_newer_agents_file_is_left_alone(tmp_path: Path, one: Kept) -> None:
    one.save(tmp_path)
    path = tmp_path / one.name
    fields = json.loads(path.read_bytes())
    if not isinstance(fields, dict) or not {"format", "version"} & fields.keys():
        return  # it has no format yet
    fields["format" if "format" in fields else "version"] = 99
    text = json.dumps(fields)
    path.write_text(text)
    try:
        one.good(tmp_path)
    except kit.errors.HostError as error:
        assert one.refuses_newer
        assert "99" in error.cause
    assert path.read_text() == text
    assert not list(tmp_path.rglob(f"*{kit.formats.SUFFIX}"))


def test_a_file_that_cannot_be_read_now_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too many open files, an I/O error: its content may be well."""
    path = soundness.file_of(tmp_path)
    _save_troubles(tmp_path)

    def fails(*_: object, **__: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", fails)
        assert isinstance(soundness.load(path), kit.formats.Damage)
    assert soundness.load(path) == soundness.Kept(3)


def test_a_dataset_that_may_have_been_removed_stays_so_over_restarts(tmp_path: Path) -> None:
    file = kept.file_of(tmp_path, "a")
    fields = {"removed": False, "unsure": "it was damaged"}
    kit.formats.save(str(file), fields, kept.FORMAT)
    assert (kept.load(file) or {}) == {"format": 1, "removed": False, "unsure": "it was damaged"}


def test_a_second_damage_takes_the_place_of_the_first(tmp_path: Path) -> None:
    path, aside = tmp_path / "a.json", tmp_path / "a.json.damaged"
    for make in (path.touch, path.mkdir, path.touch, path.mkdir, path.mkdir):
        make()
        assert isinstance(kit.formats.read(path, 1, dict), kit.formats.Damage)
        assert not path.exists() and os.path.lexists(aside)
    assert os.listdir(tmp_path) == ["a.json.damaged"]
    kit.formats.forget(path)
    assert kit.formats.read(path, 1, dict) is None


# --- what is said of them


def test_each_damaged_file_is_a_finding_while_it_is_kept(tmp_path: Path) -> None:
    look = memory.Look(tmp_path, memory.tables(room.state_files for room in rooms.ROOMS))
    assert look.damaged() == {}
    for pattern in look.assumed:
        path = tmp_path / pattern.replace("*", "one")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        kit.formats.set_aside(path)
    wrong, told = memory.findings(look)
    assert wrong == []
    assert len({each.id for each in told}) == len(look.assumed)
    assert all(each.rule == "state-file-damaged" for each in told)
    (tmp_path / "cache-trust.json.damaged").unlink()
    assert "cache-trust.json" not in look.damaged()


def test_the_table_has_every_file_of_the_state_directory(tmp_path: Path) -> None:
    """A file that a room adds must say what its damage means."""
    look = memory.Look(tmp_path, memory.tables(room.state_files for room in rooms.ROOMS))
    ours = {one.name for one in FILES}
    in_store = {"generation.json", sample.NAME, disk.MARKER}
    ledgers = {ledger.LedgerStore(Path())._file(ENTRY.volume).name}
    for name in ours - in_store - ledgers - {"flags.json"}:
        assert any(Path(name).match(pattern) for pattern in look.assumed), name
