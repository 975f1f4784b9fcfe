"""The published manifest: its format, and fills that read it instead of listing directories."""

import contextlib
import errno
import io
import json
import os
import signal
import sqlite3
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kit.errors
from cache.fill import agent, coordinator, fetch, fill, protocol, worker, worker_pool
from cache.store import index, manifest, published, tree
from cache.store.tree import Entry
from tests.cache import passes
from tests.testbed import examples, trees

real = pytest.mark.real  # trusted xattrs

MARKS = {"cluster": "f51d", "filesystem": "1", "root": "1099511627776", "snapshot": "7"}
Tree = dict[tuple[str, ...], list[Entry]]


def folder_of(path: Path, tree_of: Tree) -> Path:
    """A generation whose index has these directories, each with its files and links."""
    path.mkdir(parents=True, exist_ok=True)
    (path / index.NAME).unlink(missing_ok=True)
    known = index.Index.open(path / index.NAME)
    known.add_root(Entry("", 0o40755, 0, 0, 0, 5, 1, 1, False))
    for where in sorted(tree_of, key=len):
        number = known.find(list(where))
        assert number is not None
        below = [way[-1] for way in tree_of if way[:-1] == where and way]
        known.add_directories(
            number, [Entry(name, 0o40750, 3, 4, 0, 6, 2, 1, False) for name in below]
        )
        items = [manifest.Item(entry, manifest.State.STORED) for entry in tree_of[where]]
        for at in range(0, len(items), 256):
            known.keep(number, items[at : at + 256])
        known.locate(number, ("pool", 7))
        known.listed(
            number, entries=len(items) + len(below), files=len(items), size=0, stored=(0, 0, 0),
            skipped=2,
        )  # fmt: skip
    known.close()
    return path


def stream(path: Path, tree_of: Tree) -> bytes:
    folder = folder_of(path / "generation", tree_of)
    published.write(str(path / "manifest"), str(folder), MARKS)
    return (path / "manifest").read_bytes()


def taken(data: bytes, area: Path) -> Tree:
    """What a reader takes from these bytes. ManifestError."""
    header, records = published.read(io.BytesIO(data))
    seen: list[list[str]] = []

    def each() -> Any:
        for record in records:
            seen.append([os.fsdecode(name) for name in record.path])
            yield record

    published.Held.make(area / published.HELD, header, each(), lambda: None, allowance=2**30)
    held = published.Held(area / published.HELD)
    try:
        return {tuple(path): list(held.directory(path).entries) for path in seen}
    finally:
        held.close()


names = (
    st.binary(min_size=1, max_size=40)
    .filter(lambda b: not {0, 47} & set(b) and b not in (b".", b".."))
    .map(os.fsdecode)
)
files = st.builds(
    Entry, names, st.sampled_from([0o100644, 0o104755, 0o120777]), st.just(1), st.just(2),
    st.integers(0, 2**50), st.integers(0, 2**62), st.integers(1, 2**60), st.integers(1, 9),
    st.booleans(), st.integers(0, 2**62), st.integers(0, 2**64 - 1), st.sampled_from([0, 2**40]),
)  # fmt: skip


@settings(max_examples=examples.number(10))
@given(st.dictionaries(names, st.lists(files, max_size=6, unique_by=lambda e: e.name), max_size=4))
def test_manifest_has_every_entry_of_the_generation(
    tmp_path_factory: pytest.TempPathFactory, below: dict[str, list[Entry]]
) -> None:
    area = tmp_path_factory.mktemp("published")
    given_tree: Tree = {(): []} | {(name,): entries for name, entries in below.items()}
    found = taken(stream(area, given_tree), area)
    assert found.keys() == given_tree.keys()
    assert {entry.name for entry in found[()]} == set(below)
    for name, entries in below.items():
        assert found[(name,)] == entries


def one(name: str = "a", **more: Any) -> Entry:
    return Entry(name, 0o100644, 1, 2, 300, 5, 77, 1, False, 6, 8)._replace(**more)


def test_directory_of_many_entries_takes_several_records(tmp_path: Path) -> None:
    entries = [one(f"f{n}") for n in range(700)]
    assert taken(stream(tmp_path, {(): entries}), tmp_path)[()] == entries
    held = published.Held(tmp_path / published.HELD)
    listed = held.directory([])
    assert (listed.skipped, listed.pool) == (2, "pool")
    with pytest.raises(published.ManifestError, match="lacks the directory"):
        held.directory(["other"])
    held.close()


def test_manifest_that_is_cut_anywhere_or_damaged_is_refused(tmp_path: Path) -> None:
    data = stream(tmp_path, {(): [one()], ("d",): [one("b")]})
    damaged = [data[:length] for length in range(len(data))] + [data + b"\0"]
    damaged += [
        data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :] for at in range(len(data))
    ]
    for each in damaged:
        with pytest.raises(published.ManifestError):
            list(published.read(io.BytesIO(each))[1])
    assert len(list(published.read(io.BytesIO(data))[1])) == 2


def rebuilt(records: Sequence[published.Record], **header: Any) -> bytes:
    """A stream with a right checksum, whatever it says."""
    file = io.BytesIO()
    total = {"format": published.FORMAT, "identity": MARKS, "directories": len(records)}
    line = json.dumps(total | {"entries": 0} | header).encode() + b"\n"
    published.seal(file, published.MAGIC + line, records)
    return file.getvalue()


@pytest.mark.parametrize("name", ["..", ".", "", "a/b", "x" * 256])
def test_names_that_lead_elsewhere_are_refused(tmp_path: Path, name: str) -> None:
    part = manifest.pack([manifest.Item(one(name), manifest.State.AT_SOURCE)])
    with pytest.raises(published.ManifestError, match="name"):
        taken(rebuilt([published.Record([], 1, 0, "", part)]), tmp_path)
    empty = manifest.pack([])
    root = published.Record([], 0, 0, "", empty)
    with pytest.raises(published.ManifestError, match="name"):
        taken(rebuilt([root, published.Record([os.fsencode(name)], 0, 0, "", empty)]), tmp_path)


def test_manifest_that_lacks_something_is_refused(tmp_path: Path) -> None:
    empty = manifest.pack([])
    root = published.Record([], 0, 0, "", empty)
    lacking: list[tuple[str, bytes]] = [
        ("lacks directories", rebuilt([root], directories=2)),
        ("lacks entries", rebuilt([published.Record([], 3, 0, "", empty)])),
        ("twice", rebuilt([root, published.Record([b"d"], 0, 0, "", empty), root])),
        ("format 2", rebuilt([root], format=2)),
    ]
    for why, data in lacking:
        with pytest.raises(published.ManifestError, match=why):
            taken(data, tmp_path)


def test_only_a_manifest_is_replaced(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "generation", {(): [one()]})
    other = tmp_path / "passwd"
    other.write_text("root:x:0:0")
    with pytest.raises(kit.errors.RefusedError, match="no manifest"):
        published.write(str(other), str(folder), MARKS)
    assert other.read_text() == "root:x:0:0"
    target = tmp_path / "m"
    for _ in range(2):
        assert published.write(str(target), str(folder), MARKS)["entries"] == 1
    with pytest.raises(kit.errors.RefusedError, match="shows no ids"):
        published.write(str(target), str(folder), {"cluster": "f51d"})
    assert sorted(each.name for each in tmp_path.iterdir()) == ["generation", "m", "passwd"]


def test_manifest_at_hand_takes_no_more_than_it_may(tmp_path: Path) -> None:
    """And so little that a place for twice its bytes is enough, whatever its records take."""
    held = tmp_path / published.HELD
    for size in (100, 1300, 3000):
        told = [published.Record([], 0, 0, "", b"")]
        told += [published.Record([b"d%d" % n], 0, 0, "", os.urandom(size)) for n in range(500)]
        data = rebuilt(told)
        for allowance in (2 * len(data), len(data) // 2):
            header, records = published.read(io.BytesIO(data))
            with contextlib.ExitStack() as stack:
                if allowance < len(data):
                    stack.enter_context(pytest.raises(sqlite3.Error, match="full"))
                published.Held.make(held, header, records, lambda: None, allowance=allowance)
            assert held.stat().st_size <= allowance


# --- what a worker fetches


class Shared:
    """A source, and the file that was published of it."""

    def __init__(self, area: Path) -> None:
        self.source = area / "source"
        trees.plain(self.source, 24, directories=6)
        os.symlink("d0", self.source / "link")
        self.file = area / "shared" / "m"
        self.file.parent.mkdir()
        self.store = area / "store"
        self.store.mkdir()
        self.tell({})

    def listing(self, path: Sequence[str]) -> Iterator[Entry | tuple[str, OSError]]:
        with tree.opened_root(self.source) as root, tree.opened(root, path) as directory:
            yield from tree.listing(directory)

    def tell(self, lies: dict[str, "Lie"]) -> None:
        """Publish what is there, and of the directories in ``lies`` something else."""
        told = []
        paths = [[], *([each.name] for each in self.source.iterdir() if each.name != "link")]
        for path in paths:
            entries = [each for each in self.listing(path) if isinstance(each, Entry)]
            entries = lies.get("/".join(path), list)(entries)
            part = manifest.pack([manifest.Item(e, manifest.State.AT_SOURCE) for e in entries])
            names = [os.fsencode(name) for name in path]
            told.append(published.Record(names, len(entries), 0, "", part))
        self.file.unlink(missing_ok=True)
        self.file.write_bytes(rebuilt(told))

    def job(self, **marks: str) -> protocol.Fetch:
        where = protocol.Manifest(str(self.file.parent), [self.file.name], MARKS | marks)
        return protocol.Fetch(manifest=where, allowance=2**20)

    def fetched(self, job: protocol.Fetch | None = None) -> protocol.Fetched:
        found = fetch.fetch(
            job or self.job(), str(self.store), self.listing, lambda: None, exact=False
        )
        assert (self.store / published.HELD).exists() == (not found.why)
        return found


Lie = Callable[[list[Entry]], list[Entry]]
LIES: dict[str, Lie] = {
    "size": lambda es: [es[0]._replace(size=es[0].size + 9), *es[1:]],
    "time": lambda es: [es[0]._replace(mtime_ns=1), *es[1:]],
    "mode": lambda es: [es[0]._replace(mode=0o104777), *es[1:]],
    "a file too many": lambda es: [*es, es[0]._replace(name="ghost")],
    "a file too few": lambda es: es[1:],
    "a directory too many": lambda es: [*es, es[0]._replace(name="ghost", mode=0o40755)],
}


@pytest.fixture
def shared(area: Path) -> Shared:
    return Shared(area)


def test_manifest_that_differs_from_the_source_is_refused(shared: Shared) -> None:
    """Of the few directories here all are compared."""
    assert shared.fetched().directories == 7
    for lie in LIES.values():
        shared.tell({"d3": lie})
        assert "the snapshot differs from it in d3" in shared.fetched().why


def _linked(file: Path) -> None:
    file.rename(file.with_name("n"))
    file.symlink_to("n")


def _fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def _socket(file: Path) -> None:
    """As a device without a driver, it cannot be opened at all."""
    file.unlink()
    os.mknod(file, stat.S_IFSOCK | 0o600)


REFUSED: dict[str, Callable[[Path], None]] = {
    "cannot be read (No such file": Path.unlink,
    "checksum": lambda file: os.truncate(file, file.stat().st_size - 1),
    "cut off": lambda file: os.truncate(file, 300),
    "others than root may write it": lambda file: file.chmod(0o664),
    "others than root": lambda file: os.chown(file, 1234, 0),
    "cannot be read (no regular file": _linked,
    "(no regular file": _fifo,
    "no regular file": _socket,
}


@pytest.mark.parametrize("why", REFUSED)
def test_file_that_cannot_be_trusted_is_refused(shared: Shared, why: str) -> None:
    REFUSED[why](shared.file)
    found = shared.fetched()
    assert why in found.why and found.remedy


def test_manifest_of_another_snapshot_is_refused(shared: Shared) -> None:
    for mark in MARKS:
        assert f"it is of another {mark}" in shared.fetched(shared.job(**{mark: "other"})).why
        assert "shows no ids" in shared.fetched(shared.job(**{mark: ""})).why
    job = shared.job()
    for allowance in (100, shared.file.stat().st_size + 1):  # less than the file, than its index
        job.allowance = allowance
        assert "do not fit" in shared.fetched(job).why


def test_source_that_has_gone_is_no_fault_of_the_manifest(shared: Shared) -> None:
    def gone(_: Sequence[str]) -> Iterator[Entry | tuple[str, OSError]]:
        raise OSError(errno.ENOTCONN, "gone")

    with pytest.raises(OSError, match="gone"):
        fetch.fetch(shared.job(), str(shared.store), gone, lambda: None, exact=False)


# --- fills


Step = Callable[[coordinator.Coordinator], None]


def ended(
    task: protocol.FillTask, notes: list[str], then: Step = lambda _: None
) -> tuple[str, protocol.FillEnd]:
    """How the fill ends. Its workers are forked from this process; ``then`` follows each step."""
    kept, (reading, writing) = os.dup(0), os.pipe()
    os.dup2(reading, 0)  # no command comes from an agent
    try:
        run, decides = fill.begin(task)
        run.note = notes.append  # type: ignore[method-assign, assignment]
        run.start(decides)
        try:
            while True:
                run.step()
                then(run)
        except agent.Ended as end:
            left = decides.end(end).fill
            assert left is not None
            return end.result, left
        finally:
            run.pool.stop()
            run.index.close()
            os.close(run._lock)
    finally:
        os.dup2(kept, 0)
        for each in (kept, reading, writing):
            os.close(each)


def task(shared: Shared, folder: Path, **more: Any) -> protocol.FillTask:
    """A fill of this folder that reads the manifest."""
    common = passes.common(folder, shared.source) | {"immutable": True}
    return protocol.FillTask(**common | {"manifest": shared.job().manifest} | more)


def filled(shared: Shared) -> list[str]:
    """What the log of a fill has, which ends with all that the source has."""
    notes: list[str] = []
    assert ended(task(shared, shared.store), notes)[0] == "complete"
    trees.assert_equal(shared.source, shared.store / "tree")
    assert not (shared.store / published.HELD).exists()
    return notes


def told(file: Path) -> dict[tuple[bytes, ...], list[Entry]]:
    """What a manifest says, sorted by name."""
    records = published.read(io.BytesIO(file.read_bytes()))[1]
    return {tuple(each.path): sorted(published.entries_of(each)) for each in records}


@real
def test_fill_lists_nothing_that_the_manifest_has(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what it filled can be published again, which gives the same entries."""
    shared.source.joinpath("d0", "deep").mkdir()
    trees.plain(shared.source / "d0" / "deep" / "er", 3, directories=1)
    notes: list[str] = []
    first = shared.store.with_name("first")
    first.mkdir()
    assert ended(task(shared, first, manifest=None), notes)[0] == "complete"
    shared.file.unlink()
    published.write(str(shared.file), str(first), MARKS)
    monkeypatch.setattr(published, "SAMPLE", 1)  # the root
    monkeypatch.setattr(worker.Worker, "_entries", None)  # a scan that lists fails
    assert [note.split()[:4] for note in filled(shared)] == [["10", "directories", "are", "taken"]]
    published.write(f"{shared.file}2", str(shared.store), MARKS)
    assert told(Path(f"{shared.file}2")) == told(shared.file)


@real
def test_what_the_sample_does_not_see_is_as_harmless_as_a_changed_file(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = ("size", "time", "mode", "a file too many", "a directory too many")
    shared.tell({f"d{number}": LIES[kind] for number, kind in enumerate(kinds)})
    monkeypatch.setattr(published, "SAMPLE", 1)  # the root
    notes = filled(shared)
    assert "are taken from" in notes[0]
    assert "is not as it says" in notes[1] and "directories are listed instead" in notes[1]


@real
def test_manifest_that_is_missing_costs_nothing_but_a_line(shared: Shared) -> None:
    shared.file.unlink()
    (note,) = filled(shared)
    for text in (str(shared.file), "No such file", "directories are listed instead", "Remedy: "):
        assert text in note


@real
def test_manifest_that_hangs_is_given_up_and_the_fill_goes_on(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its worker is killed, once, and the log has one line of it; half of the room waits for it."""
    hanging = worker_pool.WorkerPool.hanging

    def at_once(
        pool: worker_pool.WorkerPool, kinds: tuple[type, ...], seconds: float
    ) -> list[worker_pool.Member]:
        assert seconds == coordinator.HANG_SECONDS
        return hanging(pool, tuple({*kinds} & {protocol.Fetch}), 0.0)

    monkeypatch.setattr(worker.Worker, "fetch", lambda *_: signal.pause())
    monkeypatch.setattr(worker_pool.WorkerPool, "hanging", at_once)
    notes: list[str] = []
    shares: set[float] = set()

    def look(run: coordinator.Coordinator) -> None:
        if run.pool.assigned(protocol.Fetch):
            shares.add(round(run.room(inodes=0).bytes / run.balance().bytes, 1))

    assert ended(task(shared, shared.store), notes, look)[0] == "complete"
    trees.assert_equal(shared.source, shared.store / "tree")
    (note,) = notes
    assert str(shared.file) in note and coordinator.HANGS in note
    assert shares == {0.5}  # of the room, meanwhile


@real
def test_manifest_takes_nothing_of_the_budget_when_the_fill_has_ended(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor when it was stopped, twice: what it took then is not handed to the next pass."""
    real_fetch, much = fetch.fetch, 2**29  # of a budget of 2**30; the index takes some 2**16

    def large(*args: Any, **more: Any) -> protocol.Fetched:
        answer = real_fetch(*args, **more)
        answer.bytes = much
        return answer

    def stop(run: coordinator.Coordinator) -> None:
        if any("are taken from" in note for note in notes):
            assert run.used() > much
            raise agent.Ended("cancelled")

    monkeypatch.setattr(fetch, "fetch", large)
    without = shared.store.with_name("without")
    without.mkdir()
    notes: list[str] = []
    wanted = ended(task(shared, without, manifest=None), notes)[1].used
    used = 0
    for how, then in ("cancelled", stop), ("cancelled", stop), ("complete", lambda _: None):
        notes.clear()
        result, left = ended(task(shared, shared.store, used=used), notes, then)
        assert result == how
        used = left.used
        assert used < wanted + much / 2
