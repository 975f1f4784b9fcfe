"""The manifest: what is kept of each entry for the life of a generation."""

import dataclasses
import os
from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from cache.fill import protocol
from cache.store import index, manifest, tree
from cache.store.tree import Entry
from tests.cache import passes
from tests.testbed import trees

names = st.binary(min_size=1, max_size=255).filter(lambda b: b"\0" not in b and b"/" not in b)
words, longs = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
moments = st.integers(-(2**40), 2**62)
entries = st.builds(
    Entry, names.map(os.fsdecode), words, words, words, longs, moments, longs,
    st.integers(0, 2**31), st.booleans(), moments, longs, st.sampled_from([0, 0, 2**40]),
)  # fmt: skip
items = st.builds(
    manifest.Item, entries, st.sampled_from(manifest.State),
    st.sampled_from(["", *(xxhash.xxh3_128_hexdigest(bytes([n])) for n in range(9))]),
)  # fmt: skip


@given(st.lists(items, max_size=40))
def test_part_keeps_everything(given_items: list[manifest.Item]) -> None:
    assert manifest.unpack(manifest.pack(given_items)) == given_items


@given(st.lists(items, min_size=1, max_size=3), st.integers(0, 400), st.integers(0, 255))
def test_damaged_part_is_an_error_or_another_part(
    given_items: list[manifest.Item], at: int, value: int
) -> None:
    part = bytearray(manifest.pack(given_items))
    part[at % len(part)] ^= value
    try:
        manifest.unpack(bytes(part))
    except ValueError:
        pass


def test_newer_part_is_left_alone() -> None:
    part = bytearray(manifest.pack([]))
    part[0] = manifest.SPARSE + 1
    with pytest.raises(ValueError, match="has format"):
        manifest.unpack(bytes(part))


def test_part_without_holes_is_read_by_an_earlier_agent() -> None:
    entry = Entry("file", 0o100644, 0, 0, 2**40, 0, 1, 1, True)
    dense, sparse = (
        manifest.Item(e, manifest.State.STORED) for e in (entry, entry._replace(holes=2**20))
    )
    assert manifest.pack([dense])[0] == manifest.FORMAT
    assert manifest.pack([dense, sparse])[0] == manifest.SPARSE


def test_entry_costs_at_most_70_bytes() -> None:
    def item(number: int) -> manifest.Item:
        noise = xxhash.xxh64_intdigest(str(number).encode())
        moment = 1_795_000_000_000_000_000 + noise % 10**12
        entry = Entry(
            f"image_{number:08}.jpeg", 0o100644, 1000, 1000, noise % 200_000, moment,
            0x10000000000 + number, 1, False, moment + noise % 10**9, noise % 7,
        )  # fmt: skip
        return manifest.Item(
            entry, manifest.State.STORED, xxhash.xxh3_128_hexdigest(str(number).encode())
        )

    part = manifest.pack([item(number) for number in range(index.CHUNK_ENTRIES)])
    assert len(part) < 70 * index.CHUNK_ENTRIES


# --- kept by a fill


def kept(made: passes.Generation) -> dict[str, manifest.Item]:
    """Path: item, of the whole generation."""
    known = index.Index.read_only(made.folder / index.NAME)
    found = {
        "/".join([*known.path(number), item.entry.name]): item
        for number in known.known_directories(0, 10_000, listed=True)
        for item in known.kept(number)
    }
    known.close()
    return found


def assert_as_stored(made: passes.Generation) -> None:
    found = kept(made)
    files = {
        str(path.relative_to(made.tree)): path
        for path in made.tree.rglob("*")
        if not path.is_dir() or path.is_symlink()
    }
    assert found.keys() == files.keys()
    for name, item in found.items():
        assert item.state is manifest.State.STORED
        if item.entry.is_file:
            assert item.checksum == os.getxattr(files[name], tree.CHECKSUM).decode()
            status = (made.source / name).stat()
            assert item.entry.ctime_ns == status.st_ctime_ns
            assert (item.entry.size, item.entry.ino) == (status.st_size, status.st_ino)


@pytest.fixture
def made(area: Path) -> passes.Generation:
    made = passes.Generation(area)
    trees.plain(made.source, 700, directories=2)
    os.symlink("f00000", made.source / "link")
    os.link(made.source / "link", made.source / "link too", follow_symlinks=False)
    made.folder.mkdir()
    return made


@pytest.mark.real
def test_manifest_stays_after_completion(made: passes.Generation) -> None:
    assert made.fill().result == "complete"
    assert_as_stored(made)


@pytest.mark.real
def test_lost_manifest_is_made_again_from_tree_and_xattrs(made: passes.Generation) -> None:
    assert made.fill().result == "complete"
    before = kept(made)
    index.Index.discard(made.folder / index.NAME)
    assert made.fill().result == "complete"
    assert_as_stored(made)
    assert kept(made) == before


@pytest.mark.real
def test_what_does_not_fit_is_kept_as_at_source(made: passes.Generation) -> None:
    trees.write(made.source / "d0/too large", os.urandom(32 * 2**20))
    limits = dataclasses.replace(passes.LIMITS, budget=16 * 2**20)
    task = protocol.FillTask(**made.common | {"limits": limits})
    assert passes.run("fill", task).result == "partial"
    found = kept(made)
    assert found.pop("d0/too large").state is manifest.State.AT_SOURCE
    assert len(found) == 702
    assert {item.state for item in found.values()} == {manifest.State.STORED}
