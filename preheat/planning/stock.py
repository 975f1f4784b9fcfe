"""What the node has, as the plan sees it: its disk, its pins, and when images were last used."""

import contextlib
import dataclasses
import math
import os
import time
from collections.abc import Mapping

import structlog

import kit.errors
from kube import kubelet
from kube.settings import KubeletSettings
from preheat import settings
from preheat.image import manifest
from preheat.planning import desired, plan
from preheat.planning.desired import Request
from preheat.registry import estimate
from preheat.runtimes import base, containerd

log = structlog.get_logger("preheat")

NOTED_EVERY_SECONDS = 600.0


def node(
    images_path: str,
    section: settings.PreheatSettings,
    freeable: int = 0,
) -> plan.Node:
    """The disk that images are on. Blocking. Raises HostError, SettingsError."""
    limits = kubelet.thresholds(section.this_node.kubelet)
    path = _folder(images_path or "/")
    try:
        found = os.statvfs(path)
    except OSError as error:
        raise kit.errors.HostError(
            f"the container runtime's image directory {path}",
            f"cannot be read ({error.strerror})",
            "mount the host's directory at the same path in the agent's pod (read-only)",
        ) from error
    if _is_shared(path, section.this_node.kubelet):
        free, inodes = limits.free + limits.nodefs_free, limits.inodes + limits.nodefs_inodes
    else:
        free, inodes = limits.free, limits.inodes
    capacity = found.f_blocks * found.f_frsize
    eviction = max((each.of(capacity) for each in free), default=0.0)
    gc_low = min(limits.gc_low, limits.gc_high)
    return plan.Node(
        capacity=capacity,
        # Blocks reserved for root count as used, as the kubelet counts them.
        free=found.f_bavail * found.f_frsize,
        gc_high=limits.gc_high,
        gc_low=gc_low,
        eviction_free=eviction,
        # More could never be kept: the kubelet deletes down to gc_low, and evicts.
        pin_budget=min(section.pin_budget, int(min(gc_low, 1 - eviction) * capacity)),
        freeable=freeable,
        # A file system without a table of inodes (btrfs) never runs out of them.
        inodes=found.f_files,
        inodes_free=found.f_favail / found.f_files if found.f_files else 1.0,
        eviction_inodes=max((each.of(found.f_files) for each in inodes), default=0.0),
        thresholds_assumed=limits.assumed,
        thresholds=limits.origin,
    )


def _is_shared(path: str, section: KubeletSettings) -> bool:
    """Whether the kubelet's own directory (its nodefs) is on the same file system."""
    try:
        return os.stat(path).st_dev == os.stat(section.root_dir).st_dev
    except OSError:
        return False  # it is not to be seen from here; imagefs signals count in any case


def _folder(images_path: str) -> str:
    """CRI names a directory for each snapshotter; remote ones keep theirs elsewhere."""
    parent, _, name = images_path.rpartition("/")
    remote = name.startswith("io.containerd.snapshotter.") and not os.path.isdir(images_path)
    return parent if remote and os.path.isdir(parent) else images_path


class ImageUses:
    """When images were last used, kept in the runtime so that it outlives the agent.

    ``used_bytes``: of images pinned by us that containers then used, since the agent's start."""

    def __init__(self, runtime: containerd.Containerd) -> None:
        self._runtime = runtime
        self._before: set[str] | None = None  # top digests in use at the last cycle
        self._began = math.floor(time.time())  # as a hold has its time
        self._looked = time.monotonic()
        self._made: dict[str, float] = {}  # monotonic times at which holds of this run were made
        self.used_bytes = 0

    async def note(self, inventory: base.ImageInventory) -> base.ImageInventory:
        """Store uses in the runtime: at first sight, now and then, and when the last one ends.

        Returns the inventory with them: what is in use, or was a cycle ago, was last used now.
        """
        now, shapes = time.time(), inventory.shapes
        using = {d for d, shape in shapes.items() if shape.image_id in inventory.in_use}
        # What an earlier agent noted was counted by it.
        before = set(inventory.last_used) & using if self._before is None else self._before
        ours = {hold.digest for hold in inventory.held("pin")}
        self.used_bytes += sum(shapes[digest].bytes_total for digest in (using - before) & ours)
        noted = (using | before) & set(shapes)
        for digest in noted:
            ended = digest not in using
            if ended or now - inventory.last_used.get(digest, 0.0) > NOTED_EVERY_SECONDS:
                with contextlib.suppress(base.RuntimeCallError):
                    await self._runtime.content.note_use(digest, now)
        self._before = using
        last_used = dict(inventory.last_used) | dict.fromkeys(noted, now)
        last_used = {digest: min(at, now) for digest, at in last_used.items()}
        return dataclasses.replace(inventory, last_used=last_used, holds=self._aged(inventory, now))

    def _aged(self, inventory: base.ImageInventory, now: float) -> tuple[base.Hold, ...]:
        """The holds, those of this run as old as the time that passed, whatever the clock was set
        to meanwhile. So are those that a clock made that was ahead."""
        at = time.monotonic()
        made: dict[str, float] = {}
        found = []
        for hold in inventory.holds:
            created = hold.created
            if created >= min(self._began, now):
                # A new one was made since the last look.
                age = max(0.0, min(now - created, at - self._looked))
                made[hold.id] = self._made.get(hold.id, at - age)
                since = now - (at - made[hold.id])
                created = since if created > now else max(created, since)
            ahead = hold.state == "expired" and hold.created > now
            found.append(hold if ahead else dataclasses.replace(hold, created=created))
        self._made, self._looked = made, at
        return tuple(found)


async def pinned(
    section: settings.PreheatSettings,
    inventory: base.ImageInventory,
    requests: Mapping[str, Request],
    local: estimate.LocalImages,
    now: float,
) -> tuple[plan.Pinned, ...]:
    """The pins of an inventory as what the plan decides about."""
    found = []
    for hold in inventory.held("pin"):
        shape = inventory.shapes.get(hold.digest)
        request = requests.get(hold.ref)
        source = request or Request(hold.ref, hold.by, hold.keep)
        used = max(inventory.last_used.get(hold.digest, 0.0), hold.created)
        keep = desired.keep_seconds(source.keep)
        in_use = hold.image_id in inventory.in_use
        found.append(
            plan.Pinned(
                hold=hold.id,
                ref=hold.ref,
                digest=hold.digest,
                rank=dataclasses.replace(source, last_used=used).rank,
                parts={} if shape is None else await local.parts(shape, inventory),
                in_use=in_use,
                expires=None if keep is None else used + keep,
                requested=request is not None and request.keep != "never" and not request.released,
                dropped_until=source.dropped_until,
                retains=_retains(section, shape, in_use, used, now),
            )
        )
    return tuple(found)


async def end_lost(runtime: containerd.Containerd, inventory: base.ImageInventory) -> bool:
    """End pins whose content the runtime lost: nothing can be healed, only pulled again."""
    lost = False
    for hold in inventory.held("pin"):
        # It may have been pinned since the inventory.
        if hold.digest in inventory.content or await runtime.content.has(hold.digest):
            continue
        log.error("the runtime lost a pinned image", image=hold.ref, digest=hold.digest)
        if hold.by == "operator":  # the request stays
            expires = time.time() + desired.REQUEST_SECONDS
            request = base.Hold("pull", hold.ref, hold.by, keep=hold.keep, expires=expires)
            await runtime.begin(request)
        await runtime.unpin(hold)
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
