"""The label by which CRI tells the kubelet that an image is pinned.

It is on the image-id record, because each pull of a tag rewrites the tag's own record. Beside it
stands a label of ours: only a mark that has it is ours to clear. containerd and people set the same
label on other records of an image (the sandbox image); such an image is left as it is.
"""

import asyncio
import time
from collections.abc import Iterable

import structlog
from google.protobuf import field_mask_pb2

from preheat.image import manifest
from preheat.runtimes import base, cri, cri_pb2
from preheat.runtimes import containerd_api as api
from preheat.runtimes import containerd_pb2 as pb
from preheat.runtimes.base import allowing

log = structlog.get_logger("preheat")

PINNED = "io.cri-containerd.pinned"
OWN = "nodeagent/pinned"
_VALUE = "pinned"
# How long a runtime that honours the label may take to show it (measured: 2 to 3 ms).
HONOUR_SECONDS = 0.5


def label_mask(*labels: str) -> field_mask_pb2.FieldMask:
    return field_mask_pb2.FieldMask(paths=[f"labels.{label}" for label in labels])


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
        request = pb.UpdateImageRequest(image=record, update_mask=label_mask(*labels()))
        with allowing("NOT_FOUND"):
            await self._connection.change(api.UPDATE_IMAGE, request)

    async def _shows(self, image_id: str) -> bool:
        deadline = time.monotonic() + HONOUR_SECONDS
        request = cri_pb2.ImageRequest(image=cri_pb2.ImageSpec(image=image_id))
        while time.monotonic() < deadline:
            answer = await self._connection.read(cri.IMAGE_STATUS, request)
            if answer.image.pinned:
                return True
            await asyncio.sleep(0.01)
        return False
