"""Where the bytes of a file lie, against a walk over every byte."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ceph import objects

LAYOUTS = st.builds(
    lambda unit, count, units: objects.Layout("p", unit, count, unit * units),
    st.integers(1, 8), st.integers(1, 5), st.integers(1, 4),
)  # fmt: skip


def place(found: objects.Layout, byte: int) -> tuple[int, int]:
    """Object and offset of one byte, by laying out all bytes before it."""
    number = offset = 0
    fill = [0] * found.stripe_count  # of the objects of this set
    first = column = 0
    for _ in range(byte // found.stripe_unit):
        fill[column] += found.stripe_unit
        column = (column + 1) % found.stripe_count
        if column == 0 and fill[-1] == found.object_size:
            first, fill = first + found.stripe_count, [0] * found.stripe_count
    number, offset = first + column, fill[column] + byte % found.stripe_unit
    return number, offset


@given(LAYOUTS, st.integers(0, 200), st.integers(0, 200))
def test_pieces_hold_each_byte_once(found: objects.Layout, offset: int, size: int) -> None:
    laid = [
        (piece.at + i, (piece.number, piece.offset + i))
        for piece in objects.pieces(found, offset, size)
        for i in range(piece.size)
    ]
    assert laid == [(byte, place(found, byte)) for byte in range(offset, offset + size)]


def test_common_layout_is_one_piece_for_each_object() -> None:
    found = objects.parse_layout("stripe_unit=4194304 stripe_count=1 object_size=4194304 pool=data")
    pieces = list(objects.pieces(found, 0, 2**23))
    assert pieces == [objects.Piece(0, 0, 2**22, 0), objects.Piece(1, 0, 2**22, 2**22)]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "stripe_unit=4194304 stripe_count=1 object_size=4194304",
        "stripe_unit=0 stripe_count=1 object_size=4194304 pool=a",
        "stripe_unit=4096 stripe_count=1 object_size=5000 pool=a",
        "stripe_unit=4096 stripe_count=x object_size=4096 pool=a",
        "stripe_unit=4096 stripe_count=1 object_size=4096 pool=a parity=2",
    ],
)
def test_what_is_not_understood_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="layout|invalid literal"):
        objects.parse_layout(text)


def test_namespace_is_told() -> None:
    text = "stripe_unit=4096 stripe_count=1 object_size=4096 pool=a pool_namespace=b"
    assert objects.parse_layout(text).namespace == "b"
