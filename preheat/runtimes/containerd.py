"""containerd behind the runtime port: pulls under leases, pins, heals, events.

Invariants:
* bytes are only ever fetched under one of our leases, so a cancelled, killed or interrupted pull
  keeps what it has, and a lease with an expiry keeps a dead agent's bytes from staying for ever;
* a pin's lease is there before the pull's lease goes: no moment without one of them;
* ``unpin`` takes the mark off the record and the lease away; the image itself is left to the
  kubelet's garbage collection.
"""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import structlog

from preheat import manifest
from preheat.runtimes import base, cri, leases, wire
from preheat.runtimes import messages as m

log = structlog.get_logger("preheat")

MANAGED = "io.cri-containerd.image"
PINNED = "io.cri-containerd.pinned"
LAST_USED = "nodeagent/last-used"
SNAPSHOTTER = "overlayfs"
LARGEST_DOCUMENT = 8 * 1024**2
WRITE_CHUNK = 1024**2
# How long a runtime that honours the pinned label may take to say so (measured: 2-3 ms).
HONOUR_SECONDS = 0.5
_GONE = ("NOT_FOUND",)


class Containerd:
    """One containerd, its CRI plugin included."""

    def __init__(self, socket: Path, snapshotter: str = SNAPSHOTTER) -> None:
        self.calls = cri.Calls(socket)
        self._snapshotter = snapshotter
        self._honours_label: bool | None = None  # found by trying, after each connect
        self._images_path = ""
        self._version = ""

    @property
    def abilities(self) -> base.Abilities:
        return base.Abilities(
            "containerd", resumes=True, watches=True, ingests=True, estimates=True
        )

    @property
    def honours_label(self) -> bool | None:
        """Whether this runtime tells the kubelet about pins; None until the first pin tried."""
        return self._honours_label

    @property
    def breaker(self) -> cri.Breaker:
        return self.calls.breaker

    async def connect(self) -> str:
        answer = await self.calls.read(cri.VERSION, m.Empty(), deadline=3.0)
        if answer.version != self._version:
            self._honours_label = None  # another version may honour what the last one did not
        self._version = answer.version
        info = await self.calls.read(cri.CRI_FS, m.Empty(), deadline=3.0)
        for each in info.image_filesystems:
            if each.fs_id is not None:
                self._images_path = each.fs_id.mountpoint
        return f"containerd {answer.version}"

    async def close(self) -> None:
        await self.calls.close()

    # --- what is there ----------------------------------------------------------------------------

    async def _records(self, *filters: str) -> list[m.Image]:
        answer = await self.calls.read(cri.LIST_IMAGES, m.ListRequest(filters=filters))
        return [each for each in answer.images if each.target is not None]

    async def inventory(self) -> base.Inventory:
        content: dict[str, int] = {}
        last_used: dict[str, float] = {}
        async for part in self.calls.stream(cri.LIST_CONTENT, m.ListRequest()):
            for info in part.info:
                content[info.digest] = info.size
                with contextlib.suppress(ValueError, KeyError):
                    last_used[info.digest] = float(info.labels[LAST_USED])
        snapshots: set[str] = set()
        listing = m.ListSnapshotsRequest(snapshotter=self._snapshotter)
        async for found in self.calls.stream(cri.LIST_SNAPSHOTS, listing):
            snapshots.update(each.name for each in found.info if each.kind == 3)
        containers = await self.calls.read(cri.CRI_CONTAINERS, m.Empty())
        return base.Inventory(
            records=tuple(
                base.Record(each.name, _target(each), each.labels.get(PINNED) == "pinned")
                for each in await self._records()
            ),
            content=content,
            snapshots=frozenset(snapshots),
            ingests=await self.ingests(),
            holds=tuple(await self._holds()),
            in_use=frozenset(each.image_ref for each in containers.containers),
            last_used=last_used,
            images_path=self._images_path,
        )

    async def ingests(self) -> dict[str, base.Ingest]:
        """Half-fetched blobs by digest, whoever fetches them."""
        found: dict[str, base.Ingest] = {}
        answer = await self.calls.read(cri.STATUSES, m.ListRequest())
        for each in answer.statuses:
            kind, dash, digest = each.ref.partition("-")
            if not dash or not manifest.is_digest(digest):
                continue
            known = found.get(digest, base.Ingest(total=each.total))
            side = "ours" if kind == "nodeagent" else "theirs"
            found[digest] = dataclasses.replace(known, **{side: each.offset})
        return found

    async def progress(self, layers: Sequence[manifest.Layer]) -> dict[str, base.LayerState]:
        """At most one question per layer that is neither being fetched nor known as unpacked."""
        ingests = await self.ingests()
        found: dict[str, base.LayerState] = {}
        below = True  # layers are unpacked from the lowest up
        for layer in layers:
            below = below and await self._is_unpacked(layer.chain_id)
            ingest = ingests.get(layer.digest)
            if below:
                state = base.LayerState(layer.size, unpacked=True)
            elif ingest is not None and ingest.ours is not None:
                # Somebody else may have completed the layer while we write it.
                done = await self._has_content(layer.digest)
                theirs = layer.size if done else ingest.theirs
                state = base.LayerState(ingest.offset, unpacked=False, theirs=theirs)
            elif ingest is not None:
                state = base.LayerState(ingest.offset, unpacked=False, theirs=ingest.theirs)
            else:
                here = layer.size if await self._has_content(layer.digest) else 0
                state = base.LayerState(here, unpacked=False)
            found[layer.digest] = state
        return found

    async def _is_unpacked(self, chain_id: str) -> bool:
        request = m.UsageRequest(snapshotter=self._snapshotter, key=chain_id)
        return await self._exists(cri.STAT_SNAPSHOT, request)

    async def _has_content(self, digest: str) -> bool:
        return await self._exists(cri.CONTENT_INFO, m.Digest(digest=digest))

    async def _exists(self, method: cri.Method[Any, Any], request: wire.Message) -> bool:
        try:
            await self.calls.read(method, request)
            return True
        except base.RuntimeCallError as error:
            if error.code not in _GONE:
                raise
            return False

    async def _holds(self) -> list[base.Hold]:
        answer = await self.calls.read(
            cri.LIST_LEASES, m.ListRequest(filters=(leases.OWNER_FILTER,))
        )
        return [hold for lease in answer.leases if (hold := leases.read(lease)) is not None]

    async def read(self, digest: str) -> bytes:
        data = bytearray()
        request = m.ReadRequest(digest=digest)
        async for part in self.calls.stream(cri.READ_CONTENT, request):
            data += part.data
            if len(data) > LARGEST_DOCUMENT:
                raise base.RuntimeCallError(
                    digest, f"larger than {LARGEST_DOCUMENT} bytes", "it is no manifest"
                )
        return bytes(data)

    async def usage(self, chain_id: str) -> int:
        request = m.UsageRequest(snapshotter=self._snapshotter, key=chain_id)
        return (await self.calls.read(cri.USAGE, request)).size

    async def note_use(self, digest: str, when: float) -> None:
        info = m.ContentInfo(digest=digest, labels={LAST_USED: f"{when:.0f}"})
        mask = m.FieldMask(paths=(f"labels.{LAST_USED}",))
        await self.calls.change(
            cri.UPDATE_CONTENT, m.UpdateContentRequest(info=info, update_mask=mask)
        )

    # --- holds ------------------------------------------------------------------------------------

    async def begin(self, hold: base.Hold) -> base.Hold:
        digest = hold.target.digest if hold.role == "pin" and hold.target is not None else ""
        hold = dataclasses.replace(
            hold,
            id=leases.lease_id(hold.role, hold.ref, digest),
            created=hold.created or time.time(),
        )
        request = m.CreateLeaseRequest(id=hold.id, labels=leases.labels(hold))
        try:
            await self.calls.change(cri.CREATE_LEASE, request)
            return hold
        except base.RuntimeCallError as error:
            if error.code != "ALREADY_EXISTS":
                raise
        there = next((each for each in await self._holds() if each.id == hold.id), None)
        if there is None:  # ended or expired just now
            await self.calls.change(cri.CREATE_LEASE, request)
            return hold
        wanted = dataclasses.replace(hold, created=0, expires=None)
        if dataclasses.replace(there, created=0, expires=None) == wanted and (
            hold.expires is None or (there.expires or 0) > time.time() + 3600
        ):
            return there
        return await self._renew(there, hold)

    async def _renew(self, old: base.Hold, new: base.Hold) -> base.Hold:
        """A lease's labels cannot be changed: a second one takes over, then the name is moved."""
        resources = await self.calls.read(cri.LIST_RESOURCES, m.LeaseId(id=old.id))
        bridge = dataclasses.replace(new, id=old.id + "-renew")
        await self._create_with(bridge, resources.resources)
        await self._delete(old.id)
        await self._create_with(new, resources.resources)
        await self._delete(bridge.id)
        return new

    async def _create_with(self, hold: base.Hold, resources: Sequence[m.Resource]) -> None:
        try:
            await self.calls.change(
                cri.CREATE_LEASE, m.CreateLeaseRequest(id=hold.id, labels=leases.labels(hold))
            )
        except base.RuntimeCallError as error:
            if error.code != "ALREADY_EXISTS":
                raise
        for resource in resources:
            await self._add(hold.id, resource)

    async def _add(self, lease: str, resource: m.Resource) -> None:
        request = m.LeaseResourceRequest(id=lease, resource=resource)
        await self.calls.change(cri.ADD_RESOURCE, request)

    async def _delete(self, lease: str, *, sync: bool = False) -> None:
        try:
            await self.calls.change(cri.DELETE_LEASE, m.DeleteLeaseRequest(id=lease, sync=sync))
        except base.RuntimeCallError as error:
            if error.code not in _GONE:
                raise

    async def end(self, hold: base.Hold) -> None:
        """With a synchronous collection: the bytes that only this hold kept are free at return."""
        await self._delete(hold.id, sync=hold.role == "pull")

    # --- pull -------------------------------------------------------------------------------------

    async def pull(
        self, ref: str, login: base.Login | None, hold: base.Hold, deadline: float
    ) -> str:
        request = cri.pull_request(ref, login)
        answer = await self.calls.long_change(
            cri.CRI_PULL, request, lease=hold.id, deadline=deadline
        )
        return answer.image_ref

    async def write(
        self,
        digest: str,
        size: int,
        source: manifest.Blobs,
        hold: base.Hold,
        origin: tuple[str, str],
    ) -> None:
        ref = f"nodeagent-{digest}"
        writer = self.calls.writer(hold.id)
        try:
            start = m.WriteRequest(action=m.STAT, ref=ref, total=size, expected=digest)
            try:
                offset = (await writer.send(start)).offset
            except base.RuntimeCallError as error:
                if error.code == "ALREADY_EXISTS":
                    return
                raise
            if offset < size:
                async for chunk in source(offset):
                    for begin in range(0, len(chunk), WRITE_CHUNK):
                        data = chunk[begin : begin + WRITE_CHUNK]
                        await writer.send(
                            m.WriteRequest(
                                action=m.WRITE, ref=ref, total=size, offset=offset, data=data
                            )
                        )
                        offset += len(data)
            commit = m.WriteRequest(
                action=m.COMMIT,
                ref=ref,
                total=size,
                expected=digest,
                offset=offset,
                labels={f"containerd.io/distribution.source.{origin[0]}": origin[1]},
            )
            try:
                await writer.send(commit)
            except base.RuntimeCallError as error:
                if error.code != "ALREADY_EXISTS":
                    raise
        finally:
            writer.close()
        # The store's own copy may have been there before, kept by nobody of ours.
        await self._add(hold.id, m.Resource(id=digest, type="content"))

    async def drop_partials(self, digests: frozenset[str], *, ours_only: bool = False) -> None:
        kinds = ("nodeagent",) if ours_only else ("layer", "nodeagent")
        answer = await self.calls.read(cri.STATUSES, m.ListRequest())
        for each in answer.statuses:
            kind, _, digest = each.ref.partition("-")
            if digest in digests and kind in kinds:
                with contextlib.suppress(base.RuntimeCallError):
                    await self.calls.change(cri.ABORT, m.AbortRequest(ref=each.ref))

    # --- pin and heal -----------------------------------------------------------------------------

    async def pin(self, hold: base.Hold) -> base.Hold:
        assert hold.target is not None
        digest = hold.target.digest
        records = await self._records(f"target.digest=={digest}")
        names = [each.name for each in records]
        image_id = hold.image_id or next((n for n in names if manifest.is_digest(n)), "")
        # The image-id record first: healed before the others, it brings the mark with it. The list
        # in the lease is bounded, so the names that matter least come last.
        names.sort(key=lambda name: (not manifest.is_digest(name), name != hold.ref, name))
        hold = dataclasses.replace(hold, image_id=image_id, names=tuple(names[: leases.MOST_NAMES]))
        hold = await self.begin(hold)
        await self._add(hold.id, m.Resource(id=digest, type="content"))
        await self._mark(hold, "pinned")
        return hold

    async def _mark(self, hold: base.Hold, value: str) -> None:
        """Set or clear the label by which CRI tells the kubelet, on the image-id record.

        That record, because every pull of a tag rewrites the tag's own record and its labels.
        """
        if not hold.image_id or (value and self._honours_label is False):
            return
        try:
            answer = await self.calls.read(cri.GET_IMAGE, m.Name(name=hold.image_id))
            record = answer.image
            if record is None or (record.labels.get(PINNED, "") == value):
                return
            await self.calls.change(
                cri.UPDATE_IMAGE,
                m.UpdateImageRequest(
                    image=dataclasses.replace(record, labels={PINNED: value} if value else {}),
                    update_mask=m.FieldMask(paths=(f"labels.{PINNED}",)),
                ),
            )
        except base.RuntimeCallError as error:
            if error.code not in _GONE:
                raise
            return
        if value and self._honours_label is None:
            self._honours_label = await self._says_pinned(hold.image_id)
            log.info("tried the pinned label", honoured=self._honours_label)
            if not self._honours_label:
                await self._mark(hold, "")

    async def _says_pinned(self, image_id: str) -> bool:
        deadline = time.monotonic() + HONOUR_SECONDS
        request = m.ImageSpecRequest(image=m.ImageSpec(image=image_id))
        while time.monotonic() < deadline:
            answer = await self.calls.read(cri.CRI_STATUS, request)
            if answer.image is not None and answer.image.pinned:
                return True
            await asyncio.sleep(0.01)
        return False

    async def unpin(self, hold: base.Hold) -> None:
        others = [
            each
            for each in await self._holds()
            if each.role == "pin" and each.image_id == hold.image_id and each.id != hold.id
        ]
        if not others:
            await self._mark(hold, "")
        await self._delete(hold.id)

    async def heal(self, hold: base.Hold) -> int:
        assert hold.target is not None
        healed = 0
        target = m.Descriptor(
            media_type=hold.target.media_type, digest=hold.target.digest, size=hold.target.size
        )
        for name in hold.names:
            labels = {MANAGED: "managed"}
            if name == hold.image_id and self._honours_label is not False:
                labels[PINNED] = "pinned"
            record = m.Image(name=name, labels=labels, target=target)
            try:
                await self.calls.change(cri.CREATE_IMAGE, m.ImageRequest(image=record))
                healed += 1
            except base.RuntimeCallError as error:
                if error.code != "ALREADY_EXISTS":
                    raise
        return healed

    async def removals(self) -> AsyncIterator[str]:
        wanted = f'topic=="/images/delete",namespace=="{cri.NAMESPACE}"'
        request = m.ListRequest(filters=(wanted,))
        async for envelope in self.calls.stream(cri.SUBSCRIBE, request, deadline=None):
            if envelope.event is not None:
                yield m.Name.decode(envelope.event.value).name


def _target(record: m.Image) -> manifest.Target:
    found = record.target
    assert found is not None
    return manifest.Target(found.media_type, found.digest, found.size)
