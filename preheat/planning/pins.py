"""The pins that exist, as the plan sees them, and those of dropped images that use keeps on."""

import contextlib
import dataclasses
import time
from collections.abc import Mapping

import structlog

from preheat import settings
from preheat.image import manifest
from preheat.planning import desired, plan
from preheat.planning.desired import Request
from preheat.registry import estimate
from preheat.runtimes import base, containerd

# When images were last used, kept in the runtime so that it outlives the agent.

NOTED_EVERY_SECONDS = 600.0


class ImageUses:
    """``used_bytes``: of images pinned by us that containers then used, since the agent's start."""

    def __init__(self, runtime: containerd.Containerd) -> None:
        self._runtime = runtime
        self._before: set[str] | None = None  # top digests in use at the last cycle
        self.used_bytes = 0

    async def note(
        self, inventory: base.ImageInventory, shapes: Mapping[str, manifest.Shape]
    ) -> base.ImageInventory:
        """Store uses in the runtime: at first sight, now and then, and when the last one ends.

        Returns the inventory with them: what is in use, or was a cycle ago, was last used now.
        """
        now = time.time()
        using = {d for d, shape in shapes.items() if shape.image_id in inventory.in_use}
        # What an earlier agent noted was counted by it.
        before = set(inventory.last_used) & using if self._before is None else self._before
        ours = {hold.target.digest for hold in inventory.held("pin") if hold.target}
        self.used_bytes += sum(shapes[digest].bytes_total for digest in (using - before) & ours)
        noted = (using | before) & set(shapes)
        for digest in noted:
            ended = digest not in using
            if ended or now - inventory.last_used.get(digest, 0.0) > NOTED_EVERY_SECONDS:
                with contextlib.suppress(base.RuntimeCallError):
                    await self._runtime.note_use(digest, now)
        self._before = using
        last_used = dict(inventory.last_used) | dict.fromkeys(noted, now)
        return dataclasses.replace(inventory, last_used=last_used)


log = structlog.get_logger("preheat")


class Pins:
    """Turns the pins of an inventory into what the plan decides about."""

    def __init__(self, runtime: containerd.Containerd, local: estimate.LocalImages) -> None:
        self._runtime = runtime
        self._local = local

    async def pinned(
        self,
        section: settings.PreheatSettings,
        inventory: base.ImageInventory,
        shapes: Mapping[str, manifest.Shape],
        requests: Mapping[str, Request],
        now: float,
    ) -> list[plan.Pinned]:
        found = []
        for hold in inventory.held("pin"):
            if hold.target is None:
                continue
            shape = shapes.get(hold.target.digest)
            request = requests.get(hold.ref)
            source = request or Request(hold.ref, hold.by, hold.keep)
            used = max(inventory.last_used.get(hold.target.digest, 0.0), hold.created)
            keep = desired.keep_seconds(source.keep)
            in_use = hold.image_id in inventory.in_use
            found.append(
                plan.Pinned(
                    hold=hold.id,
                    ref=hold.ref,
                    digest=hold.target.digest,
                    rank=dataclasses.replace(source, last_used=used).rank,
                    parts={} if shape is None else await self._local.parts(shape, inventory),
                    in_use=in_use,
                    expires=None if keep is None else used + keep,
                    requested=request is not None
                    and request.keep != "never"
                    and not request.released,
                    dropped_until=source.dropped_until,
                    retains=_retains(section, shape, in_use, used, now),
                )
            )
        return found

    async def end_lost(self, inventory: base.ImageInventory) -> bool:
        """End pins whose content the runtime lost: nothing can be healed, only pulled again."""
        lost = False
        for hold in inventory.held("pin"):
            if hold.target is None or hold.target.digest in inventory.content:
                continue
            try:  # pinned since the inventory, perhaps
                await self._runtime.read(hold.target.digest)
            except base.RuntimeCallError as error:
                if error.code != "NOT_FOUND":
                    raise
            else:
                continue
            log.error("the runtime lost a pinned image", image=hold.ref, digest=hold.target.digest)
            if hold.by == "operator":  # the request stays
                expires = time.time() + desired.REQUEST_SECONDS
                request = base.Hold(
                    *("", "pull", hold.ref, hold.by), keep=hold.keep, expires=expires
                )
                await self._runtime.begin(request)
            await self._runtime.unpin(hold)
            lost = True
        return lost


def _retains(
    section: settings.PreheatSettings,
    shape: manifest.Shape | None,
    in_use: bool,
    used: float,
    now: float,
) -> bool:
    """Whether ``retain`` keeps this image for its use."""
    rule = section.retain
    if rule is None or shape is None or shape.bytes_total < rule.at_least:
        return False
    return in_use or used + rule.duration > now


def as_retained(section: settings.PreheatSettings, hold: base.Hold) -> base.Hold:
    """The hold of a dropped image as one that its use keeps."""
    assert section.retain is not None
    return dataclasses.replace(hold, by="retained", keep=f"for:{section.retain.duration:.0f}")
