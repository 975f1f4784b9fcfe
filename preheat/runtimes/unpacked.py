"""Unpacked layers: the label that says a layer is durable, and unpacking one again.

The label is on the layer's snapshot, so images that share the layer share it, and it goes with the
snapshot.
"""

from collections.abc import Callable, Collection, Iterable, Sequence

from preheat.image import manifest
from preheat.runtimes import base, cri
from preheat.runtimes import containerd_api as api
from preheat.runtimes import containerd_pb2 as pb
from preheat.runtimes.base import allowing

DURABLE = "nodeagent/durable"
_LOWER, _UPPER = "lowerdir=", "upperdir="

Request = Callable[[str], pb.SnapshotRequest]  # of a chain id


def in_place(mounts: Sequence[pb.Mount]) -> pb.Mount | None:
    """Where the topmost layer below ``mounts`` lies, as a place to unpack it to; None if the
    snapshotter is not one that stacks a directory for each layer."""
    if len(mounts) != 1 or mounts[0].type != "overlay":
        return None
    lower = [each.removeprefix(_LOWER) for each in mounts[0].options if each.startswith(_LOWER)]
    own, *below = lower[0].split(":") if lower else [""]
    if not own.startswith("/"):
        return None
    if not below:
        return pb.Mount(type="bind", source=own, options=["rw", "rbind"])
    # So containerd writes to ``own`` itself, with deletions in the form that overlayfs knows.
    options = [f"{_UPPER}{own}", f"{_LOWER}{':'.join(below)}"]
    return pb.Mount(type="overlay", source="overlay", options=options)


class Unpacked:
    """The layers of one containerd; ``request`` knows which snapshotter has a layer."""

    def __init__(self, connection: cri.Connection, request: Request) -> None:
        self._connection = connection
        self._request = request

    async def note(self, chain_ids: Iterable[str], *, durable: bool) -> None:
        """Set or clear the label; a layer that is gone is passed over."""
        for chain_id in chain_ids:
            where = self._request(chain_id)
            info = pb.SnapshotInfo(name=chain_id, labels={DURABLE: "yes" if durable else ""})
            request = pb.UpdateSnapshotRequest(
                snapshotter=where.snapshotter, info=info, update_mask=api.label_mask(DURABLE)
            )
            with allowing("NOT_FOUND"):
                await self._connection.change(api.UPDATE_SNAPSHOT, request)

    async def again(
        self, layers: Sequence[manifest.Layer], which: Collection[str], deadline: float
    ) -> None:
        """Unpack the layers ``which`` (chain ids) of an image again, in place, containers or not.

        Where that cannot be, for want of their blobs or with another snapshotter, they are removed
        with those on top of them. RuntimeCallError when neither works. ``deadline``: seconds for
        one layer.
        """
        below = ""
        for layer in layers:
            if layer.chain_id in which and not await self._in_place(layer, below, deadline):
                await self._remove(layers[layers.index(layer) :])
                return
            below = layer.chain_id

    async def _in_place(self, layer: manifest.Layer, below: str, deadline: float) -> bool:
        place = await self._place(layer.chain_id)
        if place is None:
            return False
        diff = pb.Descriptor(media_type=layer.media_type, digest=layer.digest, size=layer.size)
        apply = pb.ApplyRequest(diff=diff, mounts=[place])
        with allowing("NOT_FOUND"):
            answer = await self._connection.change(
                api.APPLY, apply, deadline=deadline, takes_slot=False
            )
            found = answer.applied.digest
            if (manifest.chain_on(below, found) if below else found) != layer.chain_id:
                raise base.RuntimeCallError(
                    layer.digest, "its blob is damaged", "remove it: 'ctr -n k8s.io content rm'"
                )
            return True
        return False  # its blob is not kept (discard_unpacked_layers)

    async def _place(self, chain_id: str) -> pb.Mount | None:
        """None too when the layer is gone. Only a snapshot on top of it tells where it lies."""
        where = self._request(chain_id)
        top = pb.SnapshotRequest(snapshotter=where.snapshotter, key=f"{base.OWN_PREFIX}{chain_id}")
        prepare = pb.PrepareSnapshotRequest(
            snapshotter=where.snapshotter, key=top.key, parent=chain_id
        )
        await self._drop(api.REMOVE, top)  # of an attempt that was interrupted
        with allowing("NOT_FOUND"):
            try:
                return in_place((await self._connection.change(api.PREPARE, prepare)).mounts)
            finally:
                await self._drop(api.REMOVE, top)
        return None

    async def _remove(self, layers: Sequence[manifest.Layer]) -> None:
        for layer in reversed(layers):
            await self._drop(api.REMOVE_LAYER, self._request(layer.chain_id))

    async def _drop(
        self, method: cri.Method[pb.SnapshotRequest, cri.Empty], request: pb.SnapshotRequest
    ) -> None:
        with allowing("NOT_FOUND"):
            await self._connection.change(method, request)
