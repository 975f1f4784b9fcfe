"""containerd: pulls under leases, pins, heals, events.

Invariants:
* Bytes are only ever fetched under one of our containerd leases. A cancelled, killed or interrupted
  pull so keeps what it has, and the lease's expiry frees the bytes if no agent comes back.
* A pin's lease exists before the pull's lease ends: there is no moment without one of them.
* ``unpin`` clears the mark on the record and deletes the lease. The image itself is left to the
  kubelet's garbage collection.
"""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from pathlib import Path

import structlog
from google.protobuf import field_mask_pb2

from preheat import manifest
from preheat.runtimes import base, cri, cri_pb2
from preheat.runtimes import containerd_api as api
from preheat.runtimes import containerd_pb2 as pb

log = structlog.get_logger("preheat")

MANAGED = "io.cri-containerd.image"
PINNED = "io.cri-containerd.pinned"
LAST_USED = "nodeagent/last-used"
SNAPSHOTTER = "overlayfs"
WRITE_CHUNK = 1024**2
# A lease with less left than this is renewed when its pull starts again.
LEAST_LEFT_SECONDS = 3600.0
# How long a runtime that honours the pinned label may take to show it (measured: 2 to 3 ms).
HONOUR_SECONDS = 0.5


@contextlib.contextmanager
def _allowing(code: str) -> Iterator[None]:
    """Pass over an answer with this gRPC status."""
    try:
        yield
    except base.RuntimeCallError as error:
        if error.code != code:
            raise


def _label_mask(label: str) -> field_mask_pb2.FieldMask:
    return field_mask_pb2.FieldMask(paths=[f"labels.{label}"])


class Containerd(cri.CriRuntime):
    """One containerd with its CRI plugin."""

    abilities = base.Abilities(watches=True, ingests=True, estimates=True)

    def __init__(self, socket: Path, snapshotter: str = SNAPSHOTTER) -> None:
        super().__init__(socket)
        self._snapshotter = snapshotter
        self.honours_pins: bool | None = None  # found by trying at the first pin
        self._images_path = ""
        self._version = ""

    async def connect(self) -> str:
        answer = await self.connection.read(api.VERSION, cri.Empty(), deadline=cri.PROBE_SECONDS)
        if answer.version != self._version:
            self.honours_pins = None  # another version may honour what the last one did not
        self._version = answer.version
        paths = await self._image_paths(deadline=cri.PROBE_SECONDS)
        self._images_path = paths[-1] if paths else self._images_path
        return f"containerd {answer.version}"

    # --- what it has ------------------------------------------------------------------------------

    async def _records(self, *filters: str) -> list[pb.Image]:
        answer = await self.connection.read(api.LIST_IMAGES, pb.ListRequest(filters=filters))
        return [each for each in answer.images if each.HasField("target")]

    async def inventory(self) -> base.Inventory:
        content: dict[str, int] = {}
        last_used: dict[str, float] = {}
        async for part in self.connection.stream(api.LIST_CONTENT, pb.ListRequest()):
            for info in part.info:
                content[info.digest] = info.size
                if LAST_USED in info.labels:
                    with contextlib.suppress(ValueError):
                        last_used[info.digest] = float(info.labels[LAST_USED])
        snapshots: set[str] = set()
        listing = pb.ListSnapshotsRequest(snapshotter=self._snapshotter)
        async for found in self.connection.stream(api.LIST_SNAPSHOTS, listing):
            snapshots.update(each.name for each in found.info if each.kind == pb.COMMITTED)
        leases = await self._leases()
        return base.Inventory(
            in_use=frozenset(await self._images_in_use()),
            records=tuple(
                base.Record(each.name, _target(each.target)) for each in await self._records()
            ),
            content=content,
            snapshots=frozenset(snapshots),
            ingests=await self.ingests(),
            holds=tuple(hold for lease in leases if (hold := api.hold_of(lease)) is not None),
            newer_holds=sum(api.is_newer(lease) for lease in leases),
            last_used=last_used,
            images_path=self._images_path,
        )

    async def ingests(self) -> dict[str, base.Ingest]:
        """Half-fetched blobs by digest, whoever fetches them."""
        found: dict[str, base.Ingest] = {}
        answer = await self.connection.read(api.LIST_STATUSES, pb.ListRequest())
        for each in answer.statuses:
            kind, dash, digest = each.ref.partition("-")
            if dash and manifest.is_digest(digest):
                side = "ours" if kind == "nodeagent" else "theirs"
                known = found.get(digest, base.Ingest())
                found[digest] = dataclasses.replace(known, **{side: each.offset})
        return found

    async def progress(self, layers: Sequence[manifest.Layer]) -> dict[str, base.LayerState]:
        """Asks at most one question for each layer that is neither fetched now nor unpacked."""
        ingests = await self.ingests()
        found: dict[str, base.LayerState] = {}
        below = True  # containerd unpacks layers from the lowest up
        for layer in layers:
            below = below and await self._is_unpacked(layer.chain_id)
            ingest = ingests.get(layer.digest)
            if below:
                state = base.LayerState(layer.size, unpacked=True)
            elif ingest is not None:
                # Somebody else may have completed the layer while we write it.
                done = ingest.ours is not None and await self._has_content(layer.digest)
                theirs = layer.size if done else ingest.theirs
                state = base.LayerState(ingest.offset, unpacked=False, theirs=theirs)
            else:
                here = layer.size if await self._has_content(layer.digest) else 0
                state = base.LayerState(here, unpacked=False)
            found[layer.digest] = state
        return found

    async def _is_unpacked(self, chain_id: str) -> bool:
        with _allowing("NOT_FOUND"):
            await self.connection.read(api.STAT_SNAPSHOT, self._snapshot(chain_id))
            return True
        return False

    async def _has_content(self, digest: str) -> bool:
        with _allowing("NOT_FOUND"):
            await self.connection.read(api.CONTENT_INFO, pb.ContentInfoRequest(digest=digest))
            return True
        return False

    def _snapshot(self, chain_id: str) -> pb.SnapshotRequest:
        return pb.SnapshotRequest(snapshotter=self._snapshotter, key=chain_id)

    async def read(self, digest: str) -> bytes:
        data = bytearray()
        request = pb.ReadContentRequest(digest=digest)
        async for part in self.connection.stream(api.READ_CONTENT, request):
            data += part.data
            if len(data) > manifest.LARGEST_DOCUMENT:
                raise base.RuntimeCallError(
                    digest,
                    f"it has more than {manifest.LARGEST_DOCUMENT} bytes",
                    "no manifest is so large",
                )
        return bytes(data)

    async def usage(self, chain_id: str) -> int:
        return (await self.connection.read(api.USAGE, self._snapshot(chain_id))).size

    async def note_use(self, digest: str, when: float | None) -> None:
        labels = {LAST_USED: "" if when is None else f"{when:.0f}"}
        info = pb.ContentInfo(digest=digest, labels=labels)
        request = pb.UpdateContentRequest(info=info, update_mask=_label_mask(LAST_USED))
        await self.connection.change(api.UPDATE_CONTENT, request)

    # --- holds ------------------------------------------------------------------------------------

    async def _leases(self) -> Sequence[pb.Lease]:
        request = pb.ListRequest(filters=[api.OWNER_FILTER])
        return (await self.connection.read(api.LIST_LEASES, request)).leases

    async def _holds(self) -> list[base.Hold]:
        return [hold for each in await self._leases() if (hold := api.hold_of(each)) is not None]

    async def begin(self, hold: base.Hold) -> base.Hold:
        created = hold.created or time.time()
        hold = dataclasses.replace(hold, id=base.hold_id(hold), created=created)
        with _allowing("ALREADY_EXISTS"):
            await self._create(hold)
            return hold
        there = next((each for each in await self._holds() if each.id == hold.id), None)
        if there is None:  # it ended or expired just now
            await self._create(hold)
            return hold
        wanted = dataclasses.replace(hold, created=0, expires=None)
        if dataclasses.replace(there, created=0, expires=None) == wanted and (
            hold.expires is None or (there.expires or 0) > time.time() + LEAST_LEFT_SECONDS
        ):
            return there
        return await self._renew(there, hold)

    async def _renew(self, old: base.Hold, new: base.Hold) -> base.Hold:
        """Replace a lease, whose labels cannot change, by way of a second one with all it holds."""
        request = pb.ListResourcesRequest(id=old.id)
        resources = (await self.connection.read(api.LIST_RESOURCES, request)).resources
        bridge = dataclasses.replace(new, id=old.id + "-renew")
        await self._create_with(bridge, resources)
        await self._delete(old.id)
        await self._create_with(new, resources)
        await self._delete(bridge.id)
        return new

    async def _create(self, hold: base.Hold) -> None:
        request = pb.CreateLeaseRequest(id=hold.id, labels=api.lease_labels(hold))
        await self.connection.change(api.CREATE_LEASE, request)

    async def _create_with(self, hold: base.Hold, resources: Iterable[pb.LeaseResource]) -> None:
        with _allowing("ALREADY_EXISTS"):
            await self._create(hold)
        for resource in resources:
            await self._add(hold.id, resource)

    async def _add(self, lease: str, resource: pb.LeaseResource) -> None:
        request = pb.AddResourceRequest(id=lease, resource=resource)
        await self.connection.change(api.ADD_RESOURCE, request)

    async def _delete(self, lease: str, *, sync: bool = False) -> None:
        with _allowing("NOT_FOUND"):
            request = pb.DeleteLeaseRequest(id=lease, sync=sync)
            await self.connection.change(api.DELETE_LEASE, request)

    async def end(self, hold: base.Hold) -> None:
        """After a pull's hold containerd collects garbage at once: its bytes are free at return."""
        await self._delete(hold.id, sync=hold.role == "pull")

    # --- pull -------------------------------------------------------------------------------------

    async def pull(
        self, ref: str, login: base.Login | None, hold: base.Hold, deadline: float
    ) -> str:
        return await self._pull_image(ref, login, hold.id, deadline)

    async def write(
        self,
        digest: str,
        size: int,
        source: manifest.Blobs,
        hold: base.Hold,
        origin: tuple[str, str],
    ) -> None:
        ref = f"{base.OWN_PREFIX}{digest}"
        writer = cri.Exchange(self.connection, api.WRITE, hold.id)
        try:
            with _allowing("ALREADY_EXISTS"):
                start = pb.WriteContentRequest(action=pb.STAT, ref=ref, total=size, expected=digest)
                offset = (await writer.send(start)).offset
                if offset < size:
                    offset = await self._send(writer, ref, size, offset, source)
                label = f"containerd.io/distribution.source.{origin[0]}"
                commit = pb.WriteContentRequest(
                    action=pb.COMMIT,
                    ref=ref,
                    total=size,
                    expected=digest,
                    offset=offset,
                    labels={label: origin[1]},
                )
                await writer.send(commit)
        finally:
            writer.close()
        # The store may have had the blob before, with no lease of ours on it.
        await self._add(hold.id, pb.LeaseResource(id=digest, type="content"))

    @staticmethod
    async def _send(
        writer: cri.Exchange[pb.WriteContentRequest, pb.WriteContentResponse],
        ref: str,
        size: int,
        offset: int,
        source: manifest.Blobs,
    ) -> int:
        """Send the blob from ``offset`` on; where it ends."""
        async for chunk in source(offset):
            for begin in range(0, len(chunk), WRITE_CHUNK):
                data = chunk[begin : begin + WRITE_CHUNK]
                await writer.send(
                    pb.WriteContentRequest(
                        action=pb.WRITE, ref=ref, total=size, offset=offset, data=data
                    )
                )
                offset += len(data)
        return offset

    async def drop_partials(self, digests: frozenset[str], *, ours_only: bool = False) -> None:
        kinds = ("nodeagent",) if ours_only else ("layer", "nodeagent")
        answer = await self.connection.read(api.LIST_STATUSES, pb.ListRequest())
        for each in answer.statuses:
            kind, _, digest = each.ref.partition("-")
            if digest in digests and kind in kinds:
                with contextlib.suppress(base.RuntimeCallError):
                    await self.connection.change(api.ABORT, pb.AbortRequest(ref=each.ref))

    # --- pin and heal -----------------------------------------------------------------------------

    async def pin(self, hold: base.Hold) -> base.Hold:
        assert hold.target is not None
        digest = hold.target.digest
        names = [each.name for each in await self._records(f"target.digest=={digest}")]
        image_id = hold.image_id or next((n for n in names if manifest.is_digest(n)), "")
        # The image-id record first: healed before the others, it brings the mark with it. The lease
        # holds a limited number of names, so those that matter least come last.
        names.sort(key=lambda name: (not manifest.is_digest(name), name != hold.ref, name))
        hold = dataclasses.replace(hold, image_id=image_id, names=tuple(names[: api.MOST_NAMES]))
        hold = await self.begin(hold)
        await self._add(hold.id, pb.LeaseResource(id=digest, type="content"))
        await self._mark(hold, "pinned")
        return hold

    async def _mark(self, hold: base.Hold, value: str) -> None:
        """Set or clear the label by which CRI tells the kubelet that an image is pinned.

        It is on the image-id record, because each pull of a tag rewrites the tag's own record.
        """
        if not hold.image_id or (value and self.honours_pins is False):
            return
        with _allowing("NOT_FOUND"):
            request = pb.GetImageRequest(name=hold.image_id)
            record = (await self.connection.read(api.GET_IMAGE, request)).image
            if not record.name or record.labels.get(PINNED, "") == value:
                return
            record.labels.clear()  # the update reads the masked label only
            if value:
                record.labels[PINNED] = value
            update = pb.UpdateImageRequest(image=record, update_mask=_label_mask(PINNED))
            await self.connection.change(api.UPDATE_IMAGE, update)
            if value and self.honours_pins is None:
                self.honours_pins = await self._shows_pinned(hold.image_id)
                log.info("tried the pinned label", honoured=self.honours_pins)
                if not self.honours_pins:
                    await self._mark(hold, "")

    async def _shows_pinned(self, image_id: str) -> bool:
        deadline = time.monotonic() + HONOUR_SECONDS
        request = cri_pb2.ImageRequest(image=cri_pb2.ImageSpec(image=image_id))
        while time.monotonic() < deadline:
            answer = await self.connection.read(cri.IMAGE_STATUS, request)
            if answer.image.pinned:
                return True
            await asyncio.sleep(0.01)
        return False

    async def unpin(self, hold: base.Hold) -> None:
        shared = any(
            each.role == "pin" and each.image_id == hold.image_id and each.id != hold.id
            for each in await self._holds()
        )
        if not shared:
            await self._mark(hold, "")
        await self._delete(hold.id)

    async def heal(self, hold: base.Hold) -> int:
        assert hold.target is not None
        healed = 0
        target = pb.Descriptor(**dataclasses.asdict(hold.target))
        for name in hold.names:
            labels = {MANAGED: "managed"}
            if name == hold.image_id and self.honours_pins is not False:
                labels[PINNED] = "pinned"
            record = pb.Image(name=name, labels=labels, target=target)
            with _allowing("ALREADY_EXISTS"):
                await self.connection.change(api.CREATE_IMAGE, pb.CreateImageRequest(image=record))
                healed += 1
        return healed

    async def removals(self) -> AsyncIterator[str]:
        wanted = f'topic=="/images/delete",namespace=="{cri.NAMESPACE}"'
        request = pb.ListRequest(filters=[wanted])
        async for envelope in self.connection.stream(api.SUBSCRIBE, request, deadline=None):
            if envelope.HasField("event"):
                yield cri.decode(pb.ImageDelete, envelope.event.value, "a removal event").name


def _target(found: pb.Descriptor) -> manifest.Target:
    return manifest.Target(found.media_type, found.digest, found.size)
