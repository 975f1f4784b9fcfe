"""What an image will cost: bytes to fetch, bytes on disk, and what is here already.

What has to be fetched is exact: a layer is fetched when neither its blob nor its unpacked snapshot
is here. What it takes unpacked is read from the last four bytes of a gzip layer (its length modulo
2^32) or the head of a zstd layer; where neither says, it is guessed, and ``exact`` is False.
"""

import struct
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass

from preheat import manifest
from preheat.runtimes import base

# A guess for layers that do not say: what framework images compress by, on the large side.
GUESSED_RATIO = 3
# Above it the length modulo 2^32 may have wrapped; below, a quarter of it is no layer we know of.
_WRAP = 1 << 32
MOST_KNOWN = 8192

Span = Callable[[str, int, int], Awaitable[bytes]]


@dataclass(frozen=True)
class Cost:
    """``parts``: everything the image keeps on disk once it is here, by key, so that shared layers
    count once in a union. All in bytes."""

    fetch: int
    unpack: int
    exact: bool
    total: int
    parts: Mapping[str, int]

    @property
    def need(self) -> int:
        """Most that the disk use grows by: a pull keeps the blobs until it is pinned."""
        return self.fetch + self.unpack


def content_key(digest: str) -> str:
    return f"c {digest}"


def snapshot_key(chain_id: str) -> str:
    return f"s {chain_id}"


def is_here(shape: manifest.Shape, inventory: base.Inventory) -> bool:
    """Whether every layer is unpacked and the documents that lead to it are in the store."""
    return all(layer.chain_id in inventory.snapshots for layer in shape.layers) and all(
        digest in inventory.content for digest, _ in shape.documents
    )


def missing(shape: manifest.Shape, inventory: base.Inventory) -> tuple[manifest.Layer, ...]:
    """Layers that have to be fetched, each blob once."""
    found: dict[str, manifest.Layer] = {}
    for layer in shape.layers:
        if layer.digest not in inventory.content and layer.chain_id not in inventory.snapshots:
            found[layer.digest] = layer
    return tuple(found.values())


def cost(
    shape: manifest.Shape, inventory: base.Inventory, unpacked: Mapping[str, tuple[int, bool]]
) -> Cost:
    """``unpacked``: bytes and exactness by chain id, for the layers whose snapshot is or will be.

    Bytes of half-fetched layers do not count as to be fetched: the pull goes on behind them.
    """
    fetch = sum(size for digest, size in shape.documents if digest not in inventory.content)
    parts = {content_key(digest): size for digest, size in shape.documents}
    for layer in missing(shape, inventory):
        begun = inventory.ingests.get(layer.digest, base.Ingest()).offset
        fetch += max(0, layer.size - begun)
        parts[content_key(layer.digest)] = layer.size
    unpack, exact = 0, True
    for layer in shape.layers:
        size, known = unpacked.get(layer.chain_id, (layer.size * GUESSED_RATIO, False))
        parts[snapshot_key(layer.chain_id)] = size
        if layer.digest in inventory.content:
            parts[content_key(layer.digest)] = layer.size
        if layer.chain_id not in inventory.snapshots:
            unpack += size
            exact = exact and known
    return Cost(fetch, unpack, exact, shape.bytes_total, parts)


def union(many: Iterable[Mapping[str, int]]) -> int:
    """Bytes that all of them keep together, shared parts once."""
    together: dict[str, int] = {}
    for parts in many:
        together |= parts
    return sum(together.values())


async def unpacked_size(layer: manifest.Layer, span: Span) -> tuple[int, bool]:
    """Bytes of the layer's tar and whether that is known; one small request at most."""
    if layer.media_type.endswith("tar"):
        return layer.size, True
    if layer.media_type.endswith("zstd"):
        head = await span(layer.digest, 0, min(17, layer.size - 1))
        size = zstd_content_size(head)
        return (layer.size * GUESSED_RATIO, False) if size is None else (size, True)
    if layer.size < 18:
        return layer.size * GUESSED_RATIO, False
    tail = await span(layer.digest, layer.size - 4, layer.size - 1)
    if len(tail) != 4:
        return layer.size * GUESSED_RATIO, False
    return gzip_size(struct.unpack("<I", tail)[0], layer.size)


def gzip_size(modulo: int, packed: int) -> tuple[int, bool]:
    """The unpacked size from its value modulo 2^32, and whether there is only one that fits.

    Deflate grows data by less than a thousandth, so a smaller value means either a wrapped length
    (a large layer) or a file of several gzip members, whose last length says nothing.
    """
    least = packed - packed // 500 - 64
    if packed < 1 << 30:
        return (modulo, True) if modulo >= least else (packed * GUESSED_RATIO, False)
    fitting = [modulo + k * _WRAP for k in range(packed * 8 // _WRAP + 2)]
    fitting = [size for size in fitting if size >= least]
    return min(fitting, key=lambda size: abs(size - 2 * packed)), False


def zstd_content_size(head: bytes) -> int | None:
    """Frame_Content_Size of a zstd frame (RFC 8878, 3.1.1.1); None when the frame has none."""
    if len(head) < 6 or head[:4] != b"\x28\xb5\x2f\xfd":
        return None
    descriptor = head[4]
    flag, single = descriptor >> 6, descriptor >> 5 & 1
    width = (1 if single else 0, 2, 4, 8)[flag]
    start = 5 + (0 if single else 1) + (0, 1, 2, 4)[descriptor & 3]
    if width == 0 or len(head) < start + width:
        return None
    size = int.from_bytes(head[start : start + width], "little")
    return size + 256 if width == 2 else size


@dataclass(frozen=True)
class Reuse:
    """How much of an image its preheated bases bring along (compressed bytes)."""

    ref: str
    total: int
    shared: int
    bases: tuple[str, ...]  # the bases it shares layers with


def reuse(shapes: Mapping[str, manifest.Shape], bases: frozenset[str]) -> list[Reuse]:
    """For each image the bytes of layers that it shares with the images in ``bases``.

    A layer is shared when it lies on the same layers (same chain id): only then is its unpacked
    snapshot shared as well.
    """
    report = []
    for ref, shape in sorted(shapes.items()):
        shared, with_bases = 0, set()
        for layer in shape.layers:
            found = {
                base
                for base in bases
                if base != ref
                and base in shapes
                and any(other.chain_id == layer.chain_id for other in shapes[base].layers)
            }
            if found:
                shared += layer.size
                with_bases |= found
        total = sum(layer.size for layer in shape.layers)
        report.append(Reuse(ref, total, shared, tuple(sorted(with_bases))))
    return report
