"""How much of each image on the node the preheated images share with it. Pure.

A layer is shared when the layers below it are the same too (same chain id): only then images share
its unpacked snapshot as well.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from preheat.image import manifest
from preheat.runtimes import base

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


def report(shapes: Mapping[str, manifest.Shape], bases: frozenset[str]) -> list[Reuse]:
    """For the first ``MOST_IMAGES`` images by name."""
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
    return found


def of_images(
    inventory: base.Inventory, shapes: Mapping[str, manifest.Shape], bases: frozenset[str]
) -> tuple[Reuse, ...]:
    """The report for all tagged images on the node; ``shapes`` by top digest."""
    tagged = {
        record.name: shapes[record.target.digest]
        for record in inventory.records
        if record.target.digest in shapes
        and not manifest.is_digest(record.name)
        and "@" not in record.name
    }
    return tuple(report(tagged, bases))
