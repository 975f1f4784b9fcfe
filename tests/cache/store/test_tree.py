"""Entries: what they are said to take on the SSD."""

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.store import extents, tree
from cache.store.tree import Entry

KIB, GIB = 2**10, 2**30


@given(size=st.integers(0, 2**45), xattrs=st.booleans())
def test_entry_allocated_holds_its_bytes(size: int, xattrs: bool) -> None:
    item = Entry("a", 0o100644, 0, 0, size, 0, 1, 1, xattrs)
    assert item.allocated >= size
    assert (item.allocated - item.name_bytes) % 4096 == 0


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ERANGE, errno.E2BIG])
def test_xattrs_of_a_directory_that_are_too_large_are_no_full_disk(
    there: bool, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, store = tmp_path / "source", tmp_path / "store"
    (source / "d").mkdir(parents=True, mode=0o755)
    store.mkdir()
    if there:
        (store / "d").mkdir(mode=0o750)
    found = tree.xattrs_of

    def large(directory: int) -> dict[str, bytes]:
        of_source = os.readlink(f"/proc/self/fd/{directory}").startswith(str(source))
        return {"user.x": bytes(6000)} if of_source else found(directory)

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(tree, "xattrs_of", large)
    monkeypatch.setattr(os, "setxattr", refuse)
    item = Entry("d", 0o040755, os.getuid(), os.getgid(), 0, 0, 1, 1, True)
    with (
        tree.opened_root(store) as parent,
        tree.opened_root(source) as origin,
        pytest.raises(OSError, match="xattrs are larger") as error,
    ):
        tree.make_directory(parent, item, origin)
    assert error.value.errno == errno.E2BIG
    left = [(each.name, each.stat().st_mode & 0o777) for each in store.iterdir()]
    assert left == ([("d", 0o750)] if there else []), "jobs find the source's own directory"


@pytest.mark.parametrize(
    ("blocks", "files", "inodes", "number"),
    [
        (63, 1000, 10, errno.ENOSPC),
        (64, 1000, 10, errno.E2BIG),
        (2**20, 1000, 0, errno.ENOSPC),
        (2**20, 0, 0, errno.E2BIG),  # a file system that counts no inodes
    ],
)
def test_xattrs_for_which_a_full_disk_has_no_room_are_not_too_large(
    blocks: int, files: int, inodes: int, number: int, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tree, "xattrs_of", lambda _: {"user.x": b"y"})
    monkeypatch.setattr(os, "setxattr", refuse)
    left = (4096, 4096, 2**21, blocks, blocks, files, inodes, inodes, 0, 255)
    monkeypatch.setattr(os, "fstatvfs", lambda _: os.statvfs_result(left))
    with tree.opened_root(tmp_path) as target, pytest.raises(OSError) as error:
        tree.copy_xattrs(target, target)
    assert error.value.errno == number


@pytest.mark.parametrize(
    ("size", "data", "most"),
    [
        (64 * GIB, [(32 * GIB, 8 * KIB)], 64 * KIB),
        (64 * GIB, [(0, 8 * KIB), (64 * GIB - 8 * KIB, 8 * KIB)], 128 * KIB),
        (64 * GIB, [(64 * KIB - 4 * KIB, 8 * KIB)], 128 * KIB),  # of two pieces
        (64 * GIB + 1, [], 4 * KIB),  # what is shorter than a piece is written
        (2048 * KIB, [(0, 2048 * KIB)], 2048 * KIB),
        (512 * KIB, [], 512 * KIB),  # too small to be asked
        (0, [], 0),
    ],
)
def test_a_sparse_file_takes_what_it_has(
    tmp_path: Path, size: int, data: list[tuple[int, int]], most: int
) -> None:
    with (tmp_path / "file").open("wb") as stream:
        for at, length in data:
            stream.seek(at)
            stream.write(b"x" * length)
        stream.truncate(size)
    with tree.opened_root(tmp_path) as folder:
        (item,) = tree.listing(folder)
    assert isinstance(item, Entry)
    assert (item.size, item.allocated - item.name_bytes - 4 * KIB) == (size, most)


def test_a_file_of_very_many_runs_is_not_looked_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "file").open("wb") as stream:
        for at in range(8):
            stream.seek(at * 2**20)
            stream.write(b"x")
        stream.truncate(GIB)
    monkeypatch.setattr(extents, "MOST_RUNS", 3)
    with (tmp_path / "file").open("rb") as stream:
        assert extents.holes(stream.fileno(), GIB) == 2 * (2**20 - 64 * KIB)


def test_a_file_that_root_may_not_open_counts_as_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "file").open("wb") as stream:
        stream.truncate(GIB)
    with tree.opened_root(tmp_path) as folder:
        monkeypatch.setattr(os, "open", _refused)
        (item,) = tree.listing(folder)
    assert isinstance(item, Entry)
    assert item.holes == 0


@pytest.mark.parametrize(
    ("depth", "target", "out"),
    [
        (0, "file", False),
        (0, "../blobs/x", True),
        (1, "../blobs/x", False),
        (2, "../../blobs/x", False),
        (2, "../../../blobs/x", True),
        (2, "../../../tree/blobs/x", True),  # in again, by a name that the view has not
        (1, "a/../../b", False),
        (1, "./a//../../..", True),
        (5, "/mnt/data/x", True),
        (0, "", False),
    ],
)
def test_links_that_lead_out_of_the_tree(depth: int, target: str, out: bool) -> None:
    assert tree.leads_out(depth, target) is out


def _refused(*_: object, **named: object) -> int:
    raise PermissionError(13, "Permission denied")
