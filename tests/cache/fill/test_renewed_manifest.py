"""What the manifest has of a file that a verify copied again."""

from pathlib import Path

import pytest

from cache.fill import verify
from cache.store import index, manifest
from cache.store.tree import Entry

LISTED = Entry("f", 0o100644, 1, 2, 10, 3, 4, 1, False, 5, 6, 7)
OF_A_STAT = LISTED._replace(xattrs=True, change=0, holes=0)
OF_THE_STORE = OF_A_STAT._replace(ino=40, nlink=2, ctime_ns=50)
ANOTHER = OF_A_STAT._replace(size=11, mtime_ns=30, ctime_ns=50)
NO_ENTRY = Entry("f", 0o100000, 0, 0, 0, 0, 0, 1, True)
OTHER = manifest.Item(LISTED._replace(name="g"), manifest.State.STORED, "3" * 32)
OLD, NEW = "1" * 32, "2" * 32


def filled(folder: Path, *states: manifest.State) -> index.Index:
    """A root with a part for each of ``states``."""
    made = index.Index.open(folder / "index.sqlite")
    made.add_root(LISTED._replace(name="", mode=0o40755))
    for state in states:
        checksum = OLD if state is manifest.State.STORED else ""
        made.keep(index.ROOT, [manifest.Item(LISTED, state, checksum), OTHER])
    return made


@pytest.mark.parametrize(
    ("seen", "immutable", "kept"),
    [
        (OF_A_STAT, True, LISTED),
        (OF_THE_STORE, True, LISTED),  # the source did not answer at first
        (NO_ENTRY, True, LISTED),
        (OF_A_STAT, False, LISTED),
        (ANOTHER, False, ANOTHER),
    ],
)
def test_replaced_file_keeps_what_its_listing_told(
    seen: Entry, immutable: bool, kept: Entry, tmp_path: Path
) -> None:
    made = filled(tmp_path, manifest.State.STORED)
    copied = [manifest.Item(seen, manifest.State.STORED, NEW)]
    verify.renew(made, index.ROOT, copied, immutable=immutable)
    assert list(made.kept(index.ROOT)) == [
        manifest.Item(kept, manifest.State.STORED, NEW), OTHER,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (manifest.State.STORED, manifest.State.AT_SOURCE),  # it could not be copied
        (manifest.State.AT_SOURCE, manifest.State.STORED),  # nobody had stored it
    ],
)
def test_what_was_not_replaced_stays_as_it_was(
    before: manifest.State, after: manifest.State, tmp_path: Path
) -> None:
    made = filled(tmp_path, before)
    known = list(made.kept(index.ROOT))
    verify.renew(made, index.ROOT, [manifest.Item(ANOTHER, after, NEW)], immutable=False)
    assert list(made.kept(index.ROOT)) == known


@pytest.mark.parametrize("part", [b"", b"\xff new", b"\x01\x03\x00\x00\x00abc"])
def test_part_that_cannot_be_read_is_left_alone(part: bytes, tmp_path: Path) -> None:
    made = filled(tmp_path, manifest.State.STORED, manifest.State.STORED)
    with made.transaction() as db:
        db.execute("UPDATE manifest SET entries = ? WHERE id = 1", (part,))
    copied = [manifest.Item(OF_A_STAT, manifest.State.STORED, NEW)]
    verify.renew(made, index.ROOT, copied, immutable=False)
    assert made.part(1) == (index.ROOT, part)
    renewed = made.part(2)
    assert renewed is not None
    assert manifest.unpack(renewed[1])[0].checksum == NEW
