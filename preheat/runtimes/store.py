"""What containerd stores: blobs, and unpacked layers.

The label that says a layer is durable is on the layer's snapshot, so images that share the layer
share it, and it goes with the snapshot.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Collection, Iterable, Mapping, Sequence

import structlog

from preheat.image import manifest
from preheat.runtimes import base, cri, holds
from preheat.runtimes import containerd_api as api
from preheat.runtimes import containerd_pb2 as pb
from preheat.runtimes.base import allowing

log = structlog.get_logger("preheat")

LAST_USED = "nodeagent/last-used"
# Until the runtime names one: containerd's default.
SNAPSHOTTER = "overlayfs"
# Those that unpack a layer's blob. Others may mount the layer, and then want no blob.
_UNPACKING = frozenset({"overlayfs", "native", "btrfs", "zfs", "devmapper", "blockfile", "erofs"})
# On snapshots whose files are fetched when they are read: of stargz and soci, of nydus. Not others
# that begin alike: soci has /remote/... on layers that it unpacked, too, and containerd fetches and
# unpacks the layer that nydus marks as its bootstrap.
_REMOTE = frozenset({"containerd.io/snapshot/remote", "containerd.io/snapshot/nydus-blob"})
_ORIGIN = "containerd.io/distribution.source."
WRITE_CHUNK = 2 * 1024**2
# How fast a busy disk reads or syncs a layer: what is there when a write resumes is hashed anew.
SLOW_DISK = 10_000_000  # bytes per second
DURABLE = "nodeagent/durable"
_LOWER, _UPPER = "lowerdir=", "upperdir="


class Content:
    """Blobs, by digest."""

    def __init__(self, connection: cri.Connection, leases: holds.Leases) -> None:
        self._connection = connection
        self._leases = leases

    async def has(self, digest: str) -> bool:
        with allowing("NOT_FOUND"):
            await self._connection.read(api.CONTENT_INFO, pb.ContentInfoRequest(digest=digest))
            return True
        return False

    async def read(self, digest: str) -> bytes:
        """A manifest or config from the store."""
        request = pb.ReadContentRequest(digest=digest)
        parts = self._connection.stream(api.READ_CONTENT, request)
        return b"".join([part.data async for part in parts])

    async def ingests(self) -> dict[str, base.Ingest]:
        """Half-fetched blobs by digest, whoever fetches them."""
        found: dict[str, base.Ingest] = {}
        answer = await self._connection.read(api.LIST_STATUSES, pb.ListRequest())
        for each in answer.statuses:
            kind, dash, digest = each.ref.partition("-")
            if dash and manifest.is_digest(digest):
                side = "ours" if kind == "nodeagent" else "theirs"
                known = found.get(digest, base.Ingest())
                found[digest] = dataclasses.replace(known, **{side: each.offset})
        return found

    async def write(
        self,
        digest: str,
        size: int,
        source: manifest.Blobs,
        hold: base.Hold,
        origin: manifest.Reference,
    ) -> None:
        """Write a blob into the store under ``hold``, from where an earlier attempt stopped.

        ``origin``: its registry and repository have the blob, too.
        """
        request = functools.partial(
            pb.WriteContentRequest, ref=f"{base.OWN_PREFIX}{digest}", total=size
        )
        labels = {f"{_ORIGIN}{origin.host}": origin.path}
        deadline = cri.CHANGE_SECONDS + size // SLOW_DISK
        writer = cri.Exchange(self._connection, api.WRITE, hold.id)
        try:
            with allowing("ALREADY_EXISTS"):
                stat = request(action=pb.STAT, expected=digest)
                offset = (await writer.send(stat, deadline)).offset
                if offset < size:
                    async for chunk in source(offset):
                        for begin in range(0, len(chunk), WRITE_CHUNK):
                            # No copy of a chunk that is small enough.
                            data = chunk[begin : begin + WRITE_CHUNK]
                            await writer.send(request(action=pb.WRITE, offset=offset, data=data))
                            offset += len(data)
                await writer.send(
                    request(action=pb.COMMIT, expected=digest, offset=offset, labels=labels),
                    deadline,
                )
        finally:
            writer.close()
        # The store may have had the blob before, with no lease of ours on it.
        await self._leases.add(hold.id, holds.content(digest))

    async def abort(self, write: str) -> None:
        """Delete a half-fetched blob, if it is there."""
        with contextlib.suppress(base.RuntimeCallError):
            await self._connection.change(api.ABORT, pb.AbortRequest(ref=write))

    async def note_use(self, digest: str, when: float | None) -> None:
        """Store when the image was last used (Unix time)."""
        labels = {LAST_USED: "" if when is None else f"{when:.0f}"}
        info = pb.ContentInfo(digest=digest, labels=labels)
        request = pb.UpdateContentRequest(info=info, update_mask=api.label_mask(LAST_USED))
        # Forgetting may come after the image has gone.
        with allowing("NOT_FOUND") if when is None else contextlib.nullcontext():
            await self._connection.change(api.UPDATE_CONTENT, request)


def is_remote(labels: Mapping[str, str]) -> bool:
    """Whether the files of a snapshot come from the registry when they are read."""
    return not _REMOTE.isdisjoint(labels)


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


class Layers:
    """Unpacked layers, by chain id."""

    def __init__(self, connection: cri.Connection) -> None:
        self._connection = connection
        self.snapshotter = SNAPSHOTTER  # the one that CRI unpacks into
        self._elsewhere: dict[str, str] = {}  # chain id -> its snapshotter, where it is another

    @property
    def unpacks(self) -> bool:
        """Whether it unpacks the blobs that we write, so that we can limit the rate."""
        return self.snapshotter in _UNPACKING

    async def labels(self, names: Iterable[str]) -> dict[str, Mapping[str, str]]:
        """The labels of unpacked layers by chain id, whichever of these snapshotters has them."""
        found: dict[str, Mapping[str, str]] = {}
        elsewhere: dict[str, str] = {}
        for name in names:
            listing = pb.ListSnapshotsRequest(snapshotter=name)
            try:
                async for part in self._connection.stream(api.LIST_SNAPSHOTS, listing):
                    for each in part.info:
                        if each.kind == pb.COMMITTED and each.name not in found:
                            found[each.name] = dict(each.labels)
                            if name != self.snapshotter:
                                elsewhere[each.name] = name
            except (base.RuntimeGoneError, base.RuntimeSlowError):
                raise
            except base.RuntimeCallError as error:  # it was taken out of containerd's settings
                log.debug("snapshotter does not answer", name=name, error=str(error))
        self._elsewhere = elsewhere
        return found

    def _request(self, chain_id: str) -> pb.SnapshotRequest:
        name = self._elsewhere.get(chain_id, self.snapshotter)
        return pb.SnapshotRequest(snapshotter=name, key=chain_id)

    async def has(self, chain_id: str) -> bool:
        with allowing("NOT_FOUND"):
            await self._connection.read(api.STAT_SNAPSHOT, self._request(chain_id))
            return True
        return False

    async def usage(self, chain_id: str) -> base.DiskUse:
        """Of one unpacked layer."""
        found = await self._connection.read(api.USAGE, self._request(chain_id))
        return base.DiskUse(found.size, found.inodes)

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
