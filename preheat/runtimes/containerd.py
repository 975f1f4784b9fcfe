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
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import structlog

from preheat.image import manifest
from preheat.runtimes import base, cri, holds, store
from preheat.runtimes import containerd_api as api
from preheat.runtimes import containerd_pb2 as pb
from preheat.runtimes.base import allowing

log = structlog.get_logger("preheat")

MANAGED = "io.cri-containerd.image"
_SNAPSHOTTER_PATH = "io.containerd.snapshotter.v1."
_UNPACKED_BY = "containerd.io/gc.ref.snapshot."  # on an image's config, with the top chain id
MOST_SNAPSHOTTERS = 8
_CHANGES: Mapping[str, Literal["made", "moved", "removed"]] = {
    "ImageCreate": "made",
    "ImageUpdate": "moved",
    "ImageDelete": "removed",
}


class Containerd:
    """One containerd with its CRI plugin. Coroutines raise RuntimeCallError or a subclass."""

    def __init__(self, socket: Path) -> None:
        self.connection = cri.Connection(socket)
        self.cri = cri.Cri(self.connection)
        self.marks = holds.Marks(self.connection)
        self._leases = holds.Leases(self.connection)
        self.content = store.Content(self.connection, self._leases)
        self.layers = store.Layers(self.connection)
        # Seconds after which containerd itself ends pins and notes that no agent renews.
        self.release_after: float | None = None
        self._checked = False  # whether what an interrupted agent left was put right
        self._images_path = ""
        self._version = ""

    @property
    def honours_pins(self) -> bool | None:
        """Whether it tells the kubelet which images are pinned; None while not known.

        Found by trying at the first pin. Pins that expire have no label, which never would."""
        return False if self.release_after is not None else self.marks.honoured

    async def connect(self) -> str:
        answer = await self.connection.read(api.VERSION, cri.Empty(), deadline=cri.PROBE_SECONDS)
        if answer.version != self._version:
            self.marks.honoured = None  # another version may honour what the last one did not
        self._checked = False
        self._version = answer.version
        paths = await self.cri.image_paths(deadline=cri.PROBE_SECONDS)
        self._images_path = paths[-1] if paths else self._images_path
        name = self._images_path.rpartition(_SNAPSHOTTER_PATH)[2]
        if name != self._images_path and "/" not in name:
            self.layers.snapshotter = name
        return f"containerd {answer.version}"

    async def close(self) -> None:
        await self.connection.close()

    # --- what it has ------------------------------------------------------------------------------

    async def inventory(self) -> base.ImageInventory:
        asked = time.monotonic()
        content: dict[str, int] = {}
        last_used: dict[str, float] = {}
        names = {self.layers.snapshotter: None}  # in this order
        async for part in self.connection.stream(api.LIST_CONTENT, pb.ListRequest()):
            await asyncio.sleep(0)  # a part has some hundred blobs: let others run in between
            for info in part.info:
                content[info.digest] = info.size
                for label, value in info.labels.items():
                    if label == store.LAST_USED:
                        with contextlib.suppress(ValueError):
                            last_used[info.digest] = float(value)
                    elif label.startswith(_UNPACKED_BY) and len(names) < MOST_SNAPSHOTTERS:
                        # A newer containerd may write more behind the name.
                        names[label.removeprefix(_UNPACKED_BY).partition("/")[0]] = None
        snapshots = await self.layers.labels(names)
        found_leases = await self._leases.all()
        records = tuple(
            holds.record_of(each, _target(each.target))
            for each in await api.images(self.connection)
        )
        return base.ImageInventory(
            in_use=await self.cri.images_in_use(records),
            records=records,
            content=content,
            snapshots=frozenset(snapshots),
            remote=frozenset(d for d, labels in snapshots.items() if store.is_remote(labels)),
            durable=frozenset(d for d, labels in snapshots.items() if labels.get(store.DURABLE)),
            listed=await self.cri.listed(),
            ingests=await self.content.ingests(),
            holds=tuple(
                hold for lease in found_leases if (hold := holds.hold_of(lease)) is not None
            ),
            newer_holds=sum(holds.is_newer(lease) for lease in found_leases),
            unknown_holds=tuple(lease.id for lease in found_leases if holds.hold_of(lease) is None),
            last_used=last_used,
            images_path=self._images_path,
            asked=asked,
        )

    async def progress(self, layers: Sequence[manifest.Layer]) -> dict[str, base.LayerState]:
        """Asks at most one question for each layer that is neither fetched now nor unpacked."""
        ingests = await self.content.ingests()
        found: dict[str, base.LayerState] = {}
        below = True  # containerd unpacks layers from the lowest up
        for layer in layers:
            below = below and await self.layers.has(layer.chain_id)
            ingest = ingests.get(layer.digest)
            if below:
                remote = not self.layers.unpacks and not await self.content.has(layer.digest)
                state = base.LayerState(layer.size, unpacked=True, remote=remote)
            elif ingest is not None:
                # Somebody else may have completed the layer while we write it.
                done = ingest.ours is not None and await self.content.has(layer.digest)
                theirs = layer.size if done else ingest.theirs
                state = base.LayerState(ingest.offset, unpacked=False, theirs=theirs)
            else:
                here = layer.size if await self.content.has(layer.digest) else 0
                state = base.LayerState(here, unpacked=False)
            found[layer.digest] = state
        return found

    # --- holds ------------------------------------------------------------------------------------

    async def begin(self, hold: base.Hold) -> base.Hold:
        """Make a hold, or return the equal one that exists."""
        if self.release_after is not None and hold.role != "pull":
            hold = dataclasses.replace(hold, expires=time.time() + self.release_after)
        return await self._leases.begin(hold)

    async def end(self, hold: base.Hold) -> None:
        """Remove a hold and what only it kept; nothing if it is gone already.

        After a pull's hold containerd collects garbage at once: its bytes are free at return."""
        await self._leases.delete(hold.id, sync=hold.role == "pull")

    async def empty(self, hold: base.Hold) -> None:
        """Remove what only this hold kept; the hold itself stays."""
        await self._leases.renew(hold, hold, empty=True)

    async def unpacked(self, hold: base.Hold) -> frozenset[str]:
        """What was unpacked below a hold, and what is being unpacked: names of snapshots."""
        held = await self._leases.resources(hold.id)
        return frozenset(each.id for each in held if each.type.startswith("snapshots/"))

    # --- pin and heal -----------------------------------------------------------------------------

    async def pin(self, hold: base.Hold) -> base.Hold:
        """Keep ``hold.target``; the hold, completed with its record names and image id."""
        names = [each.name for each in await api.images(self.connection, hold.digest)]
        # The tag may have moved since its pull: an id of another image must not name this one.
        ids = [name for name in names if manifest.is_digest(name)]
        image_id = hold.image_id if hold.image_id in ids or not ids else ids[0]
        # The image-id record first: healed before the others, it brings the mark with it. The lease
        # holds a limited number of names, so those that matter least come last.
        names.sort(key=lambda name: (not manifest.is_digest(name), name != hold.ref, name))
        hold = dataclasses.replace(hold, image_id=image_id, names=tuple(names[: holds.MOST_NAMES]))
        hold = await self.begin(hold)
        await self._leases.add(hold.id, holds.content(hold.digest))
        if self.release_after is None:
            await self.marks.set(hold)
        return hold

    async def unpin(self, hold: base.Hold) -> None:
        """Remove a pin and its marks on records. Garbage collection may take the image again."""
        shared = any(
            each.role == "pin" and each.image_id == hold.image_id and each.id != hold.id
            for each in await self._leases.holds()
        )
        if not shared:
            await self.marks.clear(hold)
        await self._leases.delete(hold.id)

    async def tend(self, inventory: base.ImageInventory) -> bool:
        """Put right what an interrupted or removed agent left: pins without their content or mark,
        marks without a pin, holds that expire too soon. Whether holds or records changed.
        """
        changes = 0
        if not self._checked:
            changes = await self._leases.finish_renewals(inventory.holds)
            changes += await self._complete_pins(inventory)
            self._checked = True
            if changes:  # the rest with what is there now
                return True
        mends = holds.decide(inventory, self.honours_pins, self.release_after, time.time())
        for hold in mends.unmarked:
            await self.marks.set(hold)
        for hold in mends.renew:
            expires = None if self.release_after is None else time.time() + self.release_after
            await self._leases.renew(hold, dataclasses.replace(hold, expires=expires))
        if mends.stray:
            # A pin that was made since the inventory has its lease now: look again.
            held = {hold.image_id for hold in await self._leases.holds() if hold.role == "pin"}
            gone = self.honours_pins is False
            stray = [each for each in mends.stray if gone or each.name not in held]
            changes += await self.marks.clear_stray(stray)
        return bool(changes)

    async def _complete_pins(self, inventory: base.ImageInventory) -> int:
        """Give a pin its content when whoever made the lease was interrupted before that."""
        count = 0
        for hold in inventory.held("pin"):
            if hold.id.endswith(holds.RENEWAL):
                continue
            wanted = holds.content(hold.digest)
            held = await self._leases.resources(hold.id)
            if wanted not in held and await self.content.has(wanted.id):
                await self._leases.add(hold.id, wanted)
                count += 1
        return count

    async def heal(self, hold: base.Hold) -> int:
        """Restore missing records of a pinned image; how many were missing."""
        assert hold.target is not None
        healed = 0
        target = pb.Descriptor(**dataclasses.asdict(hold.target))
        for name in hold.names:
            labels = {MANAGED: "managed"}
            if name == hold.image_id and self.honours_pins is not False:
                labels |= holds.labels()
            record = pb.Image(name=name, labels=labels, target=target)
            with allowing("ALREADY_EXISTS"):
                await self.connection.change(api.CREATE_IMAGE, pb.CreateImageRequest(image=record))
                healed += 1
        return healed

    async def target_of(self, name: str) -> manifest.Target | None:
        """What an image record names now; None without one."""
        with allowing("NOT_FOUND"):
            answer = await self.connection.read(api.GET_IMAGE, pb.GetImageRequest(name=name))
            return _target(answer.image.target)
        return None

    async def changes(self) -> AsyncIterator[base.Change]:
        """Image records as they are made, changed and removed, until the connection ends."""
        topics = ("/images/create", "/images/update", "/images/delete")
        filters = [f'topic=="{topic}",namespace=="{cri.NAMESPACE}"' for topic in topics]
        request = pb.ListRequest(filters=filters)
        async for envelope in self.connection.stream(api.SUBSCRIBE, request, deadline=None):
            how = _CHANGES.get(envelope.event.type_url.rpartition(".")[2])
            if how is not None:
                # The name is the same field of all three.
                event = cri.decode(pb.ImageDelete, envelope.event.value, "an event of an image")
                yield base.Change(event.name, how)


@contextlib.asynccontextmanager
async def connected(socket: Path) -> AsyncIterator[tuple[Containerd, str]]:
    """The containerd at a socket while the block runs, and what it says it is."""
    made = Containerd(socket)
    try:
        yield made, await made.connect()
    finally:
        await made.close()


def _target(found: pb.Descriptor) -> manifest.Target:
    return manifest.Target(found.media_type, found.digest, found.size)
