"""What the images on the node consist of, read from the runtime's own store and remembered."""

from collections import OrderedDict

from preheat import estimate, manifest
from preheat.runtimes import base

MOST_SHAPES = 1024
MOST_USAGES = 16384


class Local:
    """Shapes by top digest and disk use by snapshot: both never change, so they are read once."""

    def __init__(self, box: base.Runtime) -> None:
        self._box = box
        self._shapes: OrderedDict[str, manifest.Shape] = OrderedDict()
        self._usages: OrderedDict[str, int] = OrderedDict()

    async def shape(
        self, target: manifest.Target, inventory: base.Inventory, platform: str
    ) -> manifest.Shape | None:
        """None when the store has not all of its documents (or it is no container image)."""
        known = self._shapes.get(target.digest)
        if known is not None:
            self._shapes.move_to_end(target.digest)
            return known
        if target.digest not in inventory.content:
            return None

        async def read(digest: str) -> bytes:
            if digest not in inventory.content:
                raise manifest.BadImageError(f"{digest} is not in the store")
            return await self._box.read(digest)

        try:
            found = await manifest.shape(target, read, platform)
        except manifest.BadImageError:
            return None
        except base.RuntimeCallError as error:
            if error.code != "NOT_FOUND":
                raise
            return None
        self._shapes[target.digest] = found
        while len(self._shapes) > MOST_SHAPES:
            self._shapes.popitem(last=False)
        return found

    async def usages(
        self, shape: manifest.Shape, inventory: base.Inventory
    ) -> dict[str, tuple[int, bool]]:
        """Bytes on disk of the snapshots that are here, by chain id."""
        found = {}
        for layer in shape.layers:
            if layer.chain_id not in inventory.snapshots:
                continue
            if layer.chain_id not in self._usages:
                try:
                    self._usages[layer.chain_id] = await self._box.usage(layer.chain_id)
                except base.RuntimeCallError as error:
                    if error.code != "NOT_FOUND":
                        raise
                    continue
                while len(self._usages) > MOST_USAGES:
                    self._usages.popitem(last=False)
            found[layer.chain_id] = (self._usages[layer.chain_id], True)
        return found

    async def parts(self, shape: manifest.Shape, inventory: base.Inventory) -> dict[str, int]:
        """What the image keeps on disk now, by part."""
        parts = {
            estimate.content_key(digest): inventory.content[digest]
            for digest, _ in shape.documents
            if digest in inventory.content
        }
        for layer in shape.layers:
            if layer.digest in inventory.content:
                parts[estimate.content_key(layer.digest)] = inventory.content[layer.digest]
        for chain_id, (size, _) in (await self.usages(shape, inventory)).items():
            parts[estimate.snapshot_key(chain_id)] = size
        return parts
