"""Entries: what they are said to take on the SSD."""

from hypothesis import given
from hypothesis import strategies as st

from cache.store.tree import Entry


@given(size=st.integers(0, 2**45), xattrs=st.booleans())
def test_entry_allocated_holds_its_bytes(size: int, xattrs: bool) -> None:
    item = Entry("a", 0o100644, 0, 0, size, 0, 1, 1, xattrs)
    assert item.allocated >= size
    assert (item.allocated - item.name_bytes) % 4096 == 0
