"""Makes an image of content that is in containerd's store: as ``ctr images import`` does.

Everything is under one of our leases: content, unpacked layers, and layers that are being unpacked.
The labels on documents are containerd's own; they keep the layers when the lease has ended. CRI
hears of a new image record and adds the image id and its own labels.
"""

import asyncio
from collections.abc import Mapping
from weakref import WeakValueDictionary

from google.protobuf import field_mask_pb2

from preheat import manifest
from preheat.runtimes import base, cri, leases, marks
from preheat.runtimes import containerd_api as api
from preheat.runtimes import containerd_pb2 as pb

_CONTENT = "containerd.io/gc.ref.content."
_SNAPSHOT = "containerd.io/gc.ref.snapshot."


# By chain id, for all imports into one containerd.
Locks = WeakValueDictionary[str, asyncio.Lock]


class Adoption:
    def __init__(
        self,
        connection: cri.Connection,
        held: leases.Leases,
        snapshotter: str,
        hold: base.Hold,
        locks: Locks,
    ) -> None:
        self._connection = connection
        self._leases = held
        self._snapshotter = snapshotter
        self._hold = hold
        self._locks = locks

    def labels(self, shape: manifest.Shape) -> Mapping[str, Mapping[str, str]]:
        """What each document keeps from garbage collection, by digest."""
        *index, image, config = (digest for digest, _ in shape.documents)
        found = {
            image: {f"{_CONTENT}config": config},
            config: {f"{_SNAPSHOT}{self._snapshotter}": shape.layers[-1].chain_id},
        }
        for number, layer in enumerate(shape.layers):
            found[image][f"{_CONTENT}l.{number}"] = layer.digest
        for each in index:
            found[each] = {f"{_CONTENT}m.0": image}
        return found

    async def label(self, digest: str, wanted: Mapping[str, str]) -> None:
        """Labels of a document that the store may have had before."""
        for key, value in wanted.items():
            info = pb.ContentInfo(digest=digest, labels={key: value})
            request = pb.UpdateContentRequest(info=info, update_mask=marks.label_mask(key))
            await self._connection.change(api.UPDATE_CONTENT, request, lease=self._hold.id)

    async def unpack(self, shape: manifest.Shape, deadline: float) -> None:
        """Unpack the layers that are not there, from the lowest up."""
        parent = ""
        for layer in shape.layers:
            # One at a time for each layer: images share them.
            async with self._locks.setdefault(layer.chain_id, asyncio.Lock()):
                try:
                    if not await self._has(layer.chain_id):
                        await self._unpack(layer, parent, deadline)
                except base.RuntimeCallError as error:
                    if error.code != "NOT_FOUND":
                        raise
                    # Not an image that is missing: garbage collection was faster than our lease.
                    text = f"its layer {layer.digest}, or the one below, went meanwhile"
                    raise base.RuntimeCallError("the import", text, "", "ABORTED") from error
                resource = pb.LeaseResource(
                    id=layer.chain_id, type=f"snapshots/{self._snapshotter}"
                )
                await self._leases.add(self._hold.id, resource)
            parent = layer.chain_id

    async def _has(self, chain_id: str) -> bool:
        with leases.allowing("NOT_FOUND"):
            await self._connection.read(api.STAT_SNAPSHOT, self._request(chain_id))
            return True
        return False

    def _request(self, key: str) -> pb.SnapshotRequest:
        return pb.SnapshotRequest(snapshotter=self._snapshotter, key=key)

    async def _unpack(self, layer: manifest.Layer, parent: str, deadline: float) -> None:
        key = f"{base.OWN_PREFIX}{layer.chain_id}"
        await self._remove(key)  # of an attempt that was interrupted
        prepare = pb.PrepareSnapshotRequest(snapshotter=self._snapshotter, key=key, parent=parent)
        place = await self._change(api.PREPARE, prepare)
        try:
            diff = pb.Descriptor(media_type=layer.media_type, digest=layer.digest, size=layer.size)
            apply = pb.ApplyRequest(diff=diff, mounts=place.mounts)
            answer = await self._connection.change(
                *(api.APPLY, apply), lease=self._hold.id, deadline=deadline, takes_slot=False
            )
            found = answer.applied.digest
            chain_id = manifest.chain_on(parent, found) if parent else found
            if chain_id != layer.chain_id:
                raise base.RuntimeCallError(
                    layer.digest, "wrong diff id: its config says another one", ""
                )
            name = layer.chain_id
            commit = pb.CommitSnapshotRequest(snapshotter=self._snapshotter, name=name, key=key)
            with leases.allowing("ALREADY_EXISTS"):  # somebody pulled an image with it meanwhile
                await self._change(api.COMMIT, commit)
                return
        except base.RuntimeCallError:
            await self._remove(key)
            raise
        await self._remove(key)

    async def _remove(self, key: str) -> None:
        with leases.allowing("NOT_FOUND"):
            await self._change(api.REMOVE, self._request(key))

    async def _change(
        self,
        method: cri.Method[cri.RequestT, cri.ResponseT],
        request: cri.RequestT,
    ) -> cri.ResponseT:
        return await self._connection.change(method, request, lease=self._hold.id)

    async def record(self, name: str, target: manifest.Target) -> None:
        """Let ``name`` name the image, whatever it named before."""
        wanted = pb.Descriptor(media_type=target.media_type, digest=target.digest, size=target.size)
        image = pb.Image(name=name, target=wanted)
        with leases.allowing("ALREADY_EXISTS"):
            await self._change(api.CREATE_IMAGE, pb.CreateImageRequest(image=image))
            return
        mask = field_mask_pb2.FieldMask(paths=["target"])
        await self._change(api.UPDATE_IMAGE, pb.UpdateImageRequest(image=image, update_mask=mask))
