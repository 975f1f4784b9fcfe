"""The index: names of any bytes, damage, and what may be sealed."""

import contextlib
import json
import os
import sqlite3
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.store import index
from cache.store.tree import Entry

names = st.binary(min_size=1, max_size=255).filter(lambda b: b"\0" not in b and b"/" not in b)


def _chunk(of: index.Index, number: int) -> index.Chunk:
    found = of.chunk(number)
    assert found is not None
    return found


def item(name: str, size: int = 10, mode: int = 0o100644) -> Entry:
    return Entry(name, mode, 1, 2, size, 3, 4, 1, False)


def folder(name: str) -> Entry:
    return item(name, 0, 0o40755)


@pytest.fixture
def opened(tmp_path: Path) -> index.Index:
    made = index.Index.open(tmp_path / "index.sqlite")
    made.add_root(folder(""))
    return made


def listed(known: index.Index, number: int, entries: int, files: int = 0, size: int = 0) -> None:
    known.listed(number, entries=entries, files=files, size=size, stored=(0, 0, 0), skipped=0)


@given(st.lists(names, min_size=1, max_size=20, unique=True))
def test_index_keeps_names_of_any_bytes(raw: list[bytes]) -> None:
    known = index.Index(index.connect(Path(":memory:")))
    known.add_root(folder(""))
    texts = [os.fsdecode(name) for name in raw]
    known.add_directories(index.ROOT, [folder(name) for name in texts])
    known.add_chunk(index.ROOT, [item(name) for name in texts])
    for name in texts:
        number = known.find([name])
        assert number is not None
        assert known.path(number) == [name]
        known.fail(number, name, "reason", lasting=False)
    (chunk,) = known.next_chunks(10)
    assert [entry.name for entry in _chunk(known, chunk).entries] == texts
    assert {name for _, name, _ in known.failures(100)} == set(texts)
    known.add_directories(index.ROOT, [folder(name) for name in texts[1:]], listing=5)
    known.drop_vanished(index.ROOT, 5)
    assert known.find([texts[0]]) is None
    assert all(known.find([name]) is not None for name in texts[1:])
    known.close()


@given(st.lists(names, min_size=1, max_size=30, unique=True), st.integers(1, 7))
def test_failures_pages_hold_each_once(raw: list[bytes], limit: int) -> None:
    known = index.Index(index.connect(Path(":memory:")))
    known.add_root(folder(""))
    texts = [os.fsdecode(name) for name in raw]
    for name in texts:
        known.fail(index.ROOT, name, "why", lasting=True)
    found: list[str] = []
    after = (0, "")
    while page := known.failures(limit, after):
        found += [name for _, name, _ in page]
        after = page[-1][:2]
    assert sorted(found) == sorted(texts)
    known.close()


def test_sealable_needs_everything_below(opened: index.Index) -> None:
    opened.add_directories(index.ROOT, [folder("a")])
    opened.add_chunk(index.ROOT, [item("f")])
    listed(opened, index.ROOT, 2, 1, 10)
    below = opened.find(["a"])
    assert below is not None
    assert opened.sealable(10) == []
    listed(opened, below, 0)
    assert opened.sealable(10) == [below]
    opened.sealed(below)
    assert opened.sealable(10) == []
    chunk = _chunk(opened, opened.next_chunks(1)[0])
    opened.committed(chunk, 1, 10, 4096, 0, [])
    assert opened.sealable(10) == [index.ROOT]
    opened.sealed(index.ROOT)
    totals = opened.totals()
    assert (totals.files, totals.done_files, totals.sealed, totals.directories) == (1, 1, 2, 2)


def test_sealable_excludes_failures(opened: index.Index) -> None:
    opened.add_chunk(index.ROOT, [item("f")])
    listed(opened, index.ROOT, 1, 1, 10)
    chunk = _chunk(opened, opened.next_chunks(1)[0])
    opened.fail(index.ROOT, "f", "denied", lasting=True)
    opened.committed(chunk, 0, 0, 0, 1, [])
    assert opened.sealable(10) == []
    assert opened.totals().failed == 1


def test_unseal_reaches_the_root(opened: index.Index) -> None:
    parent, path = index.ROOT, []
    for name in ("a", "b", "c"):
        opened.add_directories(parent, [folder(name)])
        listed(opened, parent, 1)
        path.append(name)
        found = opened.find(path)
        assert found is not None
        parent = found
    listed(opened, parent, 0)
    while numbers := opened.sealable(10):
        for number in numbers:
            opened.sealed(number)
    assert opened.directory(index.ROOT).state == index.SEALED
    middle = opened.find(["a", "b"])
    assert middle is not None
    opened.unseal(middle)
    states = [opened.directory(opened.find(path[:depth]) or 0).state for depth in range(4)]
    assert states == [1, 1, 1, index.SEALED]
    assert opened.sealable(10) == [middle]


def test_open_after_a_killed_writer(tmp_path: Path, opened: index.Index) -> None:
    with opened.transaction():
        opened.add_chunk(index.ROOT, [item(f"f{n}") for n in range(100)])
    again = index.Index.open(tmp_path / "index.sqlite")
    assert again.left() == (100, 1000)
    again.close()


def test_failed_transaction_leaves_nothing(opened: index.Index) -> None:
    with pytest.raises(ZeroDivisionError), opened.transaction():
        opened.add_chunk(index.ROOT, [item("f")])
        raise ZeroDivisionError
    assert opened.left() == (0, 0)


@pytest.mark.parametrize("damage", ["noise", "empty", "cut", "directory of pages"])
def test_open_replaces_a_damaged_index(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "index.sqlite"
    known = index.Index.open(path)
    known.add_root(folder(""))
    for number in range(300):
        known.add_chunk(index.ROOT, [item(f"f{number}-{n}") for n in range(20)])
    known.close()
    data = path.read_bytes()
    if damage == "noise":
        path.write_bytes(os.urandom(len(data)))
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "cut":
        path.write_bytes(data[: len(data) // 2])
    else:
        path.write_bytes(data[:4096] + os.urandom(4096 * 8) + data[4096 * 9 :])
    again = index.Index.open(path)
    again.add_root(folder(""))
    assert again.totals().directories >= 1
    for chunk in again.next_chunks(10_000):
        _chunk(again, chunk)
    again.add_chunk(index.ROOT, [item("new")])
    assert again.left()[0] >= 1
    again.close()


def test_index_of_a_newer_agent_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "index.sqlite"
    index.Index.open(path).close()
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA user_version=2")
    before = path.read_bytes()
    for change in (index.Index.open, index.Index.discard):
        with pytest.raises(OSError, match=r"newer agent \(format 2, this agent knows 1\)"):
            change(path)
    assert path.read_bytes() == before


def test_committed_keeps_the_rest_of_a_chunk(opened: index.Index) -> None:
    opened.add_chunk(index.ROOT, [item(f"f{n}", size=n) for n in range(10)])
    listed(opened, index.ROOT, 10, 10, 45)
    chunk = _chunk(opened, opened.next_chunks(1)[0])
    opened.committed(chunk, 4, 6, 4 * 4096, 0, chunk.entries[4:])
    assert opened.left() == (6, 39)
    assert opened.sealable(1) == []
    rest = _chunk(opened, opened.next_chunks(1)[0])
    assert [entry.name for entry in rest.entries] == [f"f{n}" for n in range(4, 10)]
    opened.committed(rest, 6, 39, 6 * 4096, 0, [])
    assert opened.sealable(1) == [index.ROOT]


def test_listed_directories_include_listed_and_sealed(opened: index.Index) -> None:
    opened.add_directories(index.ROOT, [folder("a"), folder("b")])
    first, second = opened.find(["a"]), opened.find(["b"])
    assert first is not None
    assert second is not None
    listed(opened, first, 0)
    listed(opened, index.ROOT, 2)
    opened.sealed(first)
    assert opened.known_directories(0, 10, listed=True) == [index.ROOT, first]
    assert opened.known_directories(index.ROOT, 10, listed=True) == [first]


def test_chunk_keeps_holes_and_an_earlier_agent_reads_one_without(opened: index.Index) -> None:
    sparse, dense = item("sparse", size=2**40)._replace(holes=2**39), item("dense")
    opened.add_chunk(index.ROOT, [sparse, dense])
    (number,) = opened.next_chunks(10)
    assert _chunk(opened, number).entries == [sparse, dense]
    (kept,) = opened._row("SELECT entries FROM chunks")
    fields = [len(each) for each in json.loads(zlib.decompress(kept))]
    assert fields == [len(Entry._fields), len(Entry._fields) - 1]


def links_out(known: index.Index, number: int, links: int, name: str) -> None:
    known.listed(
        number, entries=0, files=0, size=0, stored=(0, 0, 0), skipped=0, outside=(links, name)
    )


def test_links_that_lead_out_are_counted_until_a_listing_finds_others(opened: index.Index) -> None:
    opened.add_directories(index.ROOT, [folder("a"), folder("b")], listing=1)
    first, second = opened.find(["a"]), opened.find(["b"])
    assert first is not None and second is not None
    assert index.outside(opened) == (0, "")
    links_out(opened, second, 3, "li\udcffnk")
    assert index.outside(opened) == (3, "b/li\\xffnk")
    links_out(opened, first, 2, "one")
    assert index.outside(opened) == (5, "a/one")
    opened.restart_listing(first)
    assert index.outside(opened)[0] == 3
    opened.add_directories(index.ROOT, [folder("a")], listing=2)
    opened.drop_vanished(index.ROOT, 2)
    assert index.outside(opened) == (0, "")


def test_index_of_an_earlier_agent_can_count_links(tmp_path: Path, opened: index.Index) -> None:
    opened._db.execute("DROP TABLE outside")
    opened.close()
    again = index.Index.open(tmp_path / "index.sqlite")
    assert again.find([]) == index.ROOT
    assert index.outside(again) == (0, "")
