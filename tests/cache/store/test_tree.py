"""Entries: what they are said to take on the SSD."""

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.store import tree
from cache.store.tree import Entry


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
