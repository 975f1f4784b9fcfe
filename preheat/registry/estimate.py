"""What an image costs: bytes to fetch, bytes on disk, and what of it the node has already.

A layer must be fetched when the node has neither its blob nor its unpacked snapshot; that is exact.
What a layer takes unpacked is known when it is unpacked here, else what the layer says of itself in
its last bytes, else guessed from its packed size.

``parts`` of an image are everything that it keeps on disk, by key, in bytes. Images that share a
layer share its key, so a union of parts counts the layer once.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import structlog
from cachetools import LRUCache

from preheat.image import manifest
from preheat.runtimes import base, containerd

# How much of each image on the node the preheated images share with it. Pure.
#
# A layer is shared when the layers below it are the same too (same chain id): only then images
# share its unpacked snapshot as well.

# Bounds the work and the answer: a base image that everything stands on has hundreds of bases.
MOST_IMAGES = 200
MOST_BASES = 10


@dataclass(frozen=True)
class Reuse:
    """How much of an image its preheated bases already hold (compressed bytes)."""

    ref: str
    total: int
    shared: int
    bases: tuple[str, ...]  # bases it shares layers with, at most ``MOST_BASES``


def shared(inventory: base.ImageInventory, bases: frozenset[str]) -> tuple[Reuse, ...]:
    """For the first ``MOST_IMAGES`` tagged images on the node by name."""
    shapes = {
        record.name: inventory.shapes[record.target.digest]
        for record in inventory.records
        if record.target.digest in inventory.shapes
        and not manifest.is_digest(record.name)
        and "@" not in record.name
    }
    having: dict[str, list[str]] = {}  # chain id -> bases that have it, one more than are shown
    for name in sorted(bases & shapes.keys()):
        for layer in shapes[name].layers:
            known = having.setdefault(layer.chain_id, [])
            if len(known) <= MOST_BASES:
                known.append(name)
    found = []
    for ref in sorted(shapes)[:MOST_IMAGES]:
        total = shared = 0
        others: set[str] = set()
        for layer in shapes[ref].layers:
            total += layer.size
            known = [name for name in having.get(layer.chain_id, ()) if name != ref]
            if known:
                shared += layer.size
                others.update(known)
        found.append(Reuse(ref, total, shared, tuple(sorted(others)[:MOST_BASES])))
    return tuple(found)


log = structlog.get_logger("preheat")

# A guess for layers that are not unpacked here: how framework images compress, on the large side.
GUESSED_RATIO = 3
# gzip counts to 4 GiB and begins anew: beyond that a smaller layer would have grown tenfold.
COUNTED_RIGHT = 400 * 1024**2
MOST_SHAPES = 1024
MOST_USAGES = 16384


@dataclass(frozen=True)
class Cost:
    """In bytes. A pull needs ``fetch`` and ``unpack``: it keeps the blobs until it is pinned."""

    fetch: int
    unpack: int
    parts: Mapping[str, int]


def _content_key(digest: str) -> str:
    return f"c {digest}"


def _snapshot_key(chain_id: str) -> str:
    return f"s {chain_id}"


def unpacked_bytes(parts: Mapping[str, int]) -> int:
    """What the unpacked layers among ``parts`` take."""
    return sum(size for key, size in parts.items() if key.startswith("s "))


def union(many: Iterable[Mapping[str, int]]) -> int:
    """Bytes of all parts together, shared ones once."""
    together: dict[str, int] = {}
    for parts in many:
        together |= parts
    return sum(together.values())


def is_here(shape: manifest.Shape, inventory: base.ImageInventory) -> bool:
    """Whether the node has every layer and the documents that lead to them.

    A layer that is not unpacked but whose blob is there is unpacked when a container starts.
    """
    return not missing(shape, inventory) and all(
        digest in inventory.content for digest, _ in shape.documents
    )


def remote_bytes(shape: manifest.Shape, inventory: base.ImageInventory) -> int:
    """Packed bytes of the layers that are mounted from the registry, not fetched."""
    layers = {each.digest: each for each in shape.layers if each.chain_id in inventory.remote}
    return sum(layer.size for layer in layers.values())


def missing(shape: manifest.Shape, inventory: base.ImageInventory) -> tuple[manifest.Layer, ...]:
    """Layers that must be fetched, each blob once."""
    found: dict[str, manifest.Layer] = {}
    for layer in shape.layers:
        if layer.digest not in inventory.content and layer.chain_id not in inventory.snapshots:
            found[layer.digest] = layer
    return tuple(found.values())


def _unpacked(layer: manifest.Layer) -> int:
    """gzip says the size of its last member alone."""
    guess = layer.size * (1 if layer.media_type.endswith(".tar") else GUESSED_RATIO)
    if layer.unpacked < layer.size or layer.size >= COUNTED_RIGHT:
        return max(guess, layer.unpacked)
    return layer.unpacked


def cost(
    shape: manifest.Shape, inventory: base.ImageInventory, unpacked: Mapping[str, int]
) -> Cost:
    """``unpacked``: bytes by chain id, for layers of which that is known.

    Bytes of half-fetched layers need not be fetched: the pull continues behind them.
    """
    fetch = sum(size for digest, size in shape.documents if digest not in inventory.content)
    parts = {_content_key(digest): size for digest, size in shape.documents}
    for layer in missing(shape, inventory):
        begun = inventory.ingests.get(layer.digest, base.Ingest()).offset
        fetch += max(0, layer.size - begun)
        parts[_content_key(layer.digest)] = layer.size
    unpack = 0
    for layer in shape.layers:
        size = unpacked.get(layer.chain_id, _unpacked(layer))
        parts[_snapshot_key(layer.chain_id)] = size
        if layer.digest in inventory.content:
            parts[_content_key(layer.digest)] = layer.size
        if layer.chain_id not in inventory.snapshots:
            unpack += size
    return Cost(fetch, unpack, parts)


# --- what the node has ----------------------------------------------------------------------------


class _MissingError(Exception):
    """The store lacks a document: it may arrive later."""


class LocalImages:
    """What the images on the node consist of and take, read from the runtime's store.

    The shape of a digest and the size of a snapshot never change, so each is read once.
    """

    def __init__(self, runtime: containerd.Containerd) -> None:
        self._runtime = runtime
        self._shapes: LRUCache[tuple[str, str], manifest.Shape] = LRUCache(MOST_SHAPES)
        self._usages: LRUCache[str, int] = LRUCache(MOST_USAGES)
        self._bad: LRUCache[tuple[str, str], bool] = LRUCache(MOST_SHAPES)  # not images

    async def shape(
        self, target: manifest.Target, inventory: base.ImageInventory, platform: str
    ) -> manifest.Shape | None:
        """None when the store lacks one of its documents, or it is not a container image.

        Anybody's image may be on the node, so what is wrong with one must not stop the others: only
        a runtime that is gone or too slow raises.
        """
        key = target.digest, platform
        known = self._shapes.get(key)
        if known is not None:
            return known
        if target.digest not in inventory.content or key in self._bad:
            return None

        async def read(digest: str) -> bytes:
            size = inventory.content.get(digest)
            if size is None:
                raise _MissingError(digest)
            if size > manifest.LARGEST_DOCUMENT:
                raise manifest.BadImageError(f"{digest} has {size} bytes: no document is so large")
            return await self._runtime.content.read(digest)

        try:
            found = await manifest.shape(target, read, platform)
        except _MissingError:
            return None
        except manifest.BadImageError as error:
            self._bad[key] = True
            log.warning("image is left alone", digest=target.digest, why=str(error))
            return None
        except (base.RuntimeGoneError, base.RuntimeSlowError):
            raise
        except base.RuntimeCallError as error:
            if error.code != "NOT_FOUND":
                log.warning("image cannot be read", digest=target.digest, error=str(error))
            return None
        self._shapes[key] = found
        return found

    async def with_shapes(
        self, inventory: base.ImageInventory, platform: str
    ) -> base.ImageInventory:
        """The inventory with the shapes of all images and pins."""
        found: dict[str, manifest.Shape] = {}
        targets = [record.target for record in inventory.records]
        targets += [hold.target for hold in inventory.holds if hold.target is not None]
        for target in targets:
            if target.digest not in found:
                shape = await self.shape(target, inventory, platform)
                if shape is not None:
                    found[target.digest] = shape
        return dataclasses.replace(inventory, shapes=found)

    async def usages(self, shape: manifest.Shape, inventory: base.ImageInventory) -> dict[str, int]:
        """Bytes on disk of the snapshots that exist, by chain id."""
        found = {}
        for layer in shape.layers:
            if layer.chain_id not in inventory.snapshots:
                continue
            with base.allowing("NOT_FOUND"):
                if layer.chain_id not in self._usages:
                    usage = await self._runtime.layers.usage(layer.chain_id)
                    self._usages[layer.chain_id] = usage.bytes
                found[layer.chain_id] = self._usages[layer.chain_id]
        return found

    async def parts(self, shape: manifest.Shape, inventory: base.ImageInventory) -> dict[str, int]:
        """What the image keeps on disk now."""
        digests = [digest for digest, _ in shape.documents]
        digests += [layer.digest for layer in shape.layers]
        parts = {
            _content_key(digest): inventory.content[digest]
            for digest in digests
            if digest in inventory.content
        }
        for chain_id, size in (await self.usages(shape, inventory)).items():
            parts[_snapshot_key(chain_id)] = size
        return parts

    async def freeable(
        self, inventory: base.ImageInventory, pinned: list[Mapping[str, int]]
    ) -> int:
        """Bytes that garbage collection may take: of images neither pinned nor in use."""
        shapes = inventory.shapes.values()
        every = [await self.parts(shape, inventory) for shape in shapes]
        used = [shape for shape in shapes if shape.image_id in inventory.in_use]
        kept = [*pinned, *[await self.parts(shape, inventory) for shape in used]]
        return max(0, union(every) - union(kept))
