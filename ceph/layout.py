"""Where the bytes of a CephFS file lie: its layout, and the pieces of objects that hold a range.

A file is cut into stripe units, which go round a set of ``stripe_count`` objects until each of them
has ``object_size`` bytes; then the next set begins. The commonest layout has one object in a set.
Source: Striper::file_to_extents of Ceph, and "File layouts" of its documentation.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Layout:
    """As the vxattr ``ceph.file.layout`` tells it. Sizes in bytes."""

    pool: str
    stripe_unit: int
    stripe_count: int
    object_size: int
    namespace: str = ""


class Piece(NamedTuple):
    """A part of one object, and where in the file it belongs."""

    number: int  # of the object
    offset: int  # in the object
    size: int
    at: int  # in the file


def parse(text: str) -> Layout:
    """``stripe_unit=4194304 stripe_count=1 object_size=4194304 pool=name [pool_namespace=name]``.

    ValueError for what is not understood: then nobody may compute where bytes lie.
    """
    fields = dict(each.partition("=")[::2] for each in text.split())
    unknown = fields.keys() - {
        "stripe_unit", "stripe_count", "object_size", "pool", "pool_namespace",
    }  # fmt: skip
    try:
        found = Layout(
            fields["pool"], int(fields["stripe_unit"]), int(fields["stripe_count"]),
            int(fields["object_size"]), fields.get("pool_namespace", ""),
        )  # fmt: skip
    except KeyError as error:
        raise ValueError(f"layout without {error}: {text!r}") from error
    sizes = found.stripe_unit > 0 and found.stripe_count > 0 and found.object_size > 0
    if unknown or not sizes or found.object_size % found.stripe_unit:
        raise ValueError(f"unknown layout {text!r}")
    return found


def pieces(layout: Layout, offset: int, size: int) -> Iterator[Piece]:
    """Of ``size`` bytes of the file from ``offset``, in the file's order.

    What follows in the same object is one piece.
    """
    unit, width = layout.stripe_unit, layout.stripe_count
    in_object = layout.object_size // unit  # stripe units of an object
    end = offset + size
    waiting: Piece | None = None
    while offset < end:
        block, skipped = divmod(offset, unit)
        stripe, position = divmod(block, width)
        object_set, row = divmod(stripe, in_object)
        length = min(unit - skipped, end - offset)
        piece = Piece(object_set * width + position, row * unit + skipped, length, offset)
        if waiting is not None and (waiting.number, waiting.offset + waiting.size) == piece[:2]:
            waiting = waiting._replace(size=waiting.size + length)
        else:
            if waiting is not None:
                yield waiting
            waiting = piece
        offset += length
    if waiting is not None:
        yield waiting
