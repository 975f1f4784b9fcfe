"""Holds in containerd: as leases, and for pins with a mark that tells the kubelet.

A hold is a containerd lease, and the lease's labels are its whole state:

id       nodeagent-pull-<h>, nodeagent-pin-<h>, nodeagent-note-<h> (base.hold_id)
labels   nodeagent/owner = preheat        what our listing filters by
         nodeagent/role, /ref, /by, /state, /keep, /created, /image-id
         nodeagent/target = JSON          media type, digest and size of the top descriptor
         nodeagent/name.<n>               image records to restore
         containerd.io/gc.expire          pulls only: nothing stays for ever when an agent dies

A lease's labels cannot change. So a hold that changes is renewed by way of a second lease with all
that the first one holds (``-renew``): at each moment one of them keeps the content. What a renewal
left that was interrupted is put right by ``finish_renewals``.

The mark is the label by which CRI tells the kubelet that an image is pinned. It is on the image-id
record, because each pull of a tag rewrites the tag's own record. Beside it stands a label of ours:
only a mark that has it is ours to clear. containerd and people set the same label on other records
of an image (the sandbox image); such an image is left as it is.
"""

import asyncio
import dataclasses
import datetime
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import structlog

from preheat.image import manifest
from preheat.runtimes import base, cri, cri_pb2
from preheat.runtimes import containerd_api as api
from preheat.runtimes import containerd_pb2 as pb
from preheat.runtimes.base import allowing

log = structlog.get_logger("preheat")

OWNER_FILTER = 'labels."nodeagent/owner"==preheat'
EXPIRE = "containerd.io/gc.expire"
MOST_NAMES = 16
FORMAT = 1  # of our leases' labels; leases without the label are of format 1
_P = "nodeagent/"


def lease_labels(hold: base.Hold) -> dict[str, str]:
    found = {
        _P + "owner": "preheat",
        _P + "format": str(FORMAT),
        _P + "role": hold.role,
        _P + "ref": hold.ref,
        _P + "by": hold.by,
        _P + "created": f"{hold.created:.0f}",
    }
    texts = {"state": hold.state, "keep": hold.keep, "image-id": hold.image_id}
    for key, value in texts.items():
        if value:
            found[_P + key] = value
    if hold.target is not None:
        found[_P + "target"] = json.dumps(dataclasses.asdict(hold.target), separators=(",", ":"))
    for position, name in enumerate(hold.names[:MOST_NAMES]):
        found[f"{_P}name.{position}"] = name
    if hold.expires is not None:
        when = datetime.datetime.fromtimestamp(hold.expires, datetime.UTC)
        found[EXPIRE] = when.strftime("%Y-%m-%dT%H:%M:%SZ")
    return found


def is_newer(lease: pb.Lease) -> bool:
    """Whether a newer agent made the lease."""
    found = lease.labels.get(_P + "format", "1")
    return not found.isdecimal() or int(found) > FORMAT


def hold_of(lease: pb.Lease) -> base.Hold | None:
    """The hold that a lease is; None when it is not ours, of a newer agent or makes no sense."""
    if is_newer(lease):
        return None
    found = dict(lease.labels)
    role, by = found.get(_P + "role", ""), found.get(_P + "by", "")
    ref = found.get(_P + "ref", "")
    if role not in ("pull", "pin", "note") or by not in ("operator", "policy", "retained"):
        return None
    try:
        target = _target(found.get(_P + "target"))
        created = float(found.get(_P + "created", "0"))
        expires = None
        if EXPIRE in found:
            expires = datetime.datetime.fromisoformat(found[EXPIRE]).timestamp()
    except (ValueError, TypeError, KeyError):
        return None
    if not ref or (role == "pin" and target is None):
        return None
    keys = (f"{_P}name.{position}" for position in range(MOST_NAMES))
    return base.Hold(
        id=lease.id,
        role=cast(base.Role, role),
        ref=ref,
        by=cast(base.By, by),
        target=target,
        image_id=found.get(_P + "image-id", ""),
        names=tuple(found[key] for key in keys if key in found),
        state=found.get(_P + "state", ""),
        keep=found.get(_P + "keep", ""),
        created=created,
        expires=expires,
    )


def _target(text: str | None) -> manifest.Target | None:
    if text is None:
        return None
    value = json.loads(text)
    target = manifest.Target(str(value["media_type"]), str(value["digest"]), int(value["size"]))
    if not manifest.is_digest(target.digest) or target.size <= 0 or not target.media_type:
        raise ValueError(text)
    return target


# A lease with less left than this share of its time is renewed when its pull starts again.
LEAST_LEFT = 0.5
RENEWAL = "-renew"


def content(digest: str) -> pb.LeaseResource:
    return pb.LeaseResource(id=digest, type="content")


class Leases:
    """Our leases in one containerd."""

    def __init__(self, connection: cri.Connection) -> None:
        self._connection = connection

    async def all(self) -> Sequence[pb.Lease]:
        request = pb.ListRequest(filters=[OWNER_FILTER])
        return (await self._connection.read(api.LIST_LEASES, request)).leases

    async def holds(self) -> list[base.Hold]:
        return [hold for each in await self.all() if (hold := hold_of(each)) is not None]

    async def begin(self, hold: base.Hold) -> base.Hold:
        """Make a hold, or return the equal one that exists."""
        created = hold.created or time.time()
        hold = dataclasses.replace(hold, id=base.hold_id(hold), created=created)
        with allowing("ALREADY_EXISTS"):
            await self._create(hold)
            return hold
        there = next((each for each in await self.holds() if each.id == hold.id), None)
        if there is None:  # it ended or expired just now
            await self._create(hold)
            return hold
        wanted = dataclasses.replace(hold, created=0, expires=None)
        least = LEAST_LEFT * ((hold.expires or 0.0) - time.time())
        if dataclasses.replace(there, created=0, expires=None) == wanted and (
            hold.expires is None or (there.expires or 0.0) - time.time() > least
        ):
            return there
        return await self.renew(there, hold)

    async def renew(self, old: base.Hold, new: base.Hold, *, empty: bool = False) -> base.Hold:
        """Replace a lease by way of a second one with all it holds. ``empty``: without that, and
        containerd collects garbage before it answers."""
        resources = () if empty else await self.resources(old.id)
        bridge = dataclasses.replace(new, id=old.id + RENEWAL)
        await self._create_with(bridge, resources)
        await self.delete(old.id, sync=empty)
        await self._create_with(new, resources)
        await self.delete(bridge.id)
        return new

    async def finish_renewals(self, holds: Iterable[base.Hold]) -> int:
        """Put interrupted renewals right: everything is in the lease itself; how many there were.

        A lease that exists keeps its labels: whoever wanted others asks again.
        """
        bridges = [hold for hold in holds if hold.id.endswith(RENEWAL)]
        for bridge in bridges:
            plain = dataclasses.replace(bridge, id=bridge.id.removesuffix(RENEWAL))
            await self._create_with(plain, await self.resources(bridge.id))
            await self.delete(bridge.id)
        return len(bridges)

    async def resources(self, lease: str) -> Sequence[pb.LeaseResource]:
        request = pb.ListResourcesRequest(id=lease)
        return (await self._connection.read(api.LIST_RESOURCES, request)).resources

    async def _create(self, hold: base.Hold) -> None:
        request = pb.CreateLeaseRequest(id=hold.id, labels=lease_labels(hold))
        method = api.CREATE_NOTE if hold.role == "note" else api.CREATE_LEASE
        await self._connection.change(method, request)

    async def _create_with(self, hold: base.Hold, resources: Iterable[pb.LeaseResource]) -> None:
        with allowing("ALREADY_EXISTS"):
            await self._create(hold)
        for resource in resources:
            await self.add(hold.id, resource)

    async def add(self, lease: str, resource: pb.LeaseResource) -> None:
        request = pb.AddResourceRequest(id=lease, resource=resource)
        await self._connection.change(api.ADD_RESOURCE, request)

    async def delete(self, lease: str, *, sync: bool = False) -> None:
        """``sync``: containerd collects garbage before it answers."""
        with allowing("NOT_FOUND"):
            request = pb.DeleteLeaseRequest(id=lease, sync=sync)
            await self._connection.change(api.DELETE_LEASE, request)


# --- marks ----------------------------------------------------------------------------------------

PINNED = "io.cri-containerd.pinned"
OWN = "nodeagent/pinned"
_VALUE = "pinned"
# How long a runtime that honours the label may take to show it (measured: 2 to 3 ms).
HONOUR_SECONDS = 0.5


def labels() -> dict[str, str]:
    return dict.fromkeys((PINNED, OWN), _VALUE)


def record_of(image: pb.Image, target: manifest.Target) -> base.Record:
    """The record with what its labels say of pins."""
    return base.Record(
        image.name,
        target,
        pinned=image.labels.get(PINNED, "") == _VALUE,
        ours=bool(image.labels.get(OWN, "")),
    )


class Marks:
    """Sets and clears the marks of one containerd. ``honoured``: None until the first one shows."""

    def __init__(self, connection: cri.Connection) -> None:
        self._connection = connection
        self.honoured: bool | None = None

    async def set(self, hold: base.Hold) -> None:
        """Mark a pinned image, unless the runtime is known not to tell the kubelet."""
        if self.honoured is False or not await self._write(hold, labels()):
            return
        if self.honoured is None:
            self.honoured = await self._shows(hold.image_id)
            log.info("tried the pinned label", honoured=self.honoured)
            if not self.honoured:
                await self.clear(hold)

    async def clear(self, hold: base.Hold) -> None:
        await self._write(hold, {})

    async def _write(self, hold: base.Hold, wanted: dict[str, str]) -> bool:
        """Give the image-id record the labels or none; False when there is nothing to write."""
        if not hold.image_id:
            return False
        records = await api.images(self._connection, hold.digest)
        record = next((each for each in records if each.name == hold.image_id), None)
        others = (each for each in records if each.name != hold.image_id)
        if record is None or any(each.labels.get(PINNED, "") == _VALUE for each in others):
            return False
        await self._update(record, wanted)
        return True

    async def clear_stray(self, records: Iterable[base.Record]) -> int:
        """Clear marks of ours that no pin stands behind; how many there were."""
        count = 0
        for each in records:
            for record in await api.images(self._connection, each.target.digest):
                if record.name == each.name and record.labels.get(OWN, ""):
                    await self._update(record, {})
                    count += 1
        return count

    async def _update(self, record: pb.Image, wanted: dict[str, str]) -> None:
        if all(record.labels.get(label, "") == wanted.get(label, "") for label in labels()):
            return
        record.labels.clear()  # the update reads the masked labels only
        record.labels.update(wanted)
        request = pb.UpdateImageRequest(image=record, update_mask=api.label_mask(*labels()))
        with allowing("NOT_FOUND"):
            method = api.UPDATE_IMAGE if wanted else api.CLEAR_MARK
            await self._connection.change(method, request)

    async def _shows(self, image_id: str) -> bool:
        deadline = time.monotonic() + HONOUR_SECONDS
        request = cri_pb2.ImageRequest(image=cri_pb2.ImageSpec(image=image_id))
        while time.monotonic() < deadline:
            answer = await self._connection.read(cri.IMAGE_STATUS, request)
            if answer.image.pinned:
                return True
            await asyncio.sleep(0.01)
        return False


# --- what to put right ----------------------------------------------------------------------------

# So that each pin is whole and nothing is left of one. Pure.

# A hold that expires is renewed when less than this share of its time is left.
RENEW_BELOW = 0.5
# One with so much more than its time was made before the setting was shortened.
SHORTENED_SECONDS = 60.0


@dataclass(frozen=True)
class Mends:
    """``unmarked``: pins whose record lost its mark. ``stray``: records whose mark of ours stands
    for no pin. ``renew``: holds whose expiry must change.
    """

    unmarked: tuple[base.Hold, ...] = ()
    stray: tuple[base.Record, ...] = ()
    renew: tuple[base.Hold, ...] = ()


def decide(
    inventory: base.ImageInventory, honoured: bool | None, release_after: float | None, now: float
) -> Mends:
    """``honoured``: whether the runtime tells the kubelet about marks; None while not known."""
    records = {each.name: each for each in inventory.records}
    # What somebody else pins is left to them. We mark the record of an image id, no tag's.
    tags = (each for each in inventory.records if not each.name.startswith("sha256:"))
    others = {each.target.digest for each in tags if each.pinned}
    pins = {hold.image_id: hold for hold in inventory.held("pin") if hold.image_id}
    unmarked = []
    for image_id, hold in pins.items():
        record = records.get(image_id)
        if honoured is False or record is None or record.target.digest in others:
            continue
        # Setting a mark also tells whether the runtime honours it.
        if honoured is None or not (record.pinned and record.ours):
            unmarked.append(hold)
    kept = pins.keys() if honoured is not False else set()
    stray = [each for each in inventory.records if each.ours and each.name not in kept]
    lasting = [hold for hold in inventory.holds if hold.role != "pull"]
    renew = [hold for hold in lasting if _is_due(hold, release_after, now)]
    return Mends(tuple(unmarked), tuple(stray), tuple(renew))


def _is_due(hold: base.Hold, release_after: float | None, now: float) -> bool:
    if release_after is None:
        return hold.expires is not None
    if hold.expires is None:
        return True
    left = hold.expires - now
    return not release_after * RENEW_BELOW <= left <= release_after + SHORTENED_SECONDS
