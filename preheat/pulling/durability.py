"""Whether images survive a power cut: layers are made durable, and those that were not are unpacked
again.

containerd syncs blobs and its databases, not the files that it unpacks. After a power cut an image
can be listed and pinned while its files are empty or missing. So:

* Once the images that are requested are on the node, their file system is synced, and then each of
  their layers gets a label in the runtime.
* At the first look after a boot, layers of ours without the label are *doubted*. An image with a
  doubted layer does not count as present, and the layer is unpacked again from its blob.

Doubts are kept in ``state_dir`` until they are settled, with the boot that they were found in.
Layers of an image that only somebody else pulled are left alone: its containers may run.

Invariant: a layer gets the label only after a sync that began when it was unpacked and not doubted.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import structlog

import kit.child
import kit.errors
import kit.formats
import kit.pause
import kit.tasks
from linux import procfs, syscalls
from preheat.image import manifest
from preheat.registry import resolver
from preheat.runtimes import base, containerd

log = structlog.get_logger("preheat")

STATE = "preheat-boot.json"  # in the state directory
FORMAT = 1
LOST = "lost"  # no boot has this id
REASON = "the node went down before its layers were known to be durable; they are unpacked again"
SAVE_SECONDS = 15.0
SYNC_SECONDS = 600.0
# Several pulls that end one after the other make one sync.
SYNC_EVERY_SECONDS = 30.0
UNPACK_SECONDS = 3600.0  # for one layer
RETRY_FIRST_SECONDS, RETRY_LONGEST_SECONDS = 60.0, 3600.0
_ERRORS = (kit.errors.AgentError, OSError, RuntimeError)


@dataclass(frozen=True)
class Kept:
    """The file's fields. ``doubted``: chain ids."""

    boot: str = ""
    doubted: frozenset[str] = frozenset()


def begun(kept: Kept, boot: str, loose: frozenset[str]) -> Kept:
    """What is doubted in this boot. Pure.

    ``loose``: layers that are not known to be durable. An agent that never ran here before knows
    nothing of them, and does not unpack all images of the node again.
    """
    if kept.boot == boot:
        return kept
    return Kept(boot, kept.doubted | loose if kept.boot else frozenset())


def load(path: Path) -> Kept:
    """HostError when a newer agent wrote it. After a damaged file it counts as another boot: what
    is not known to be durable is doubted."""
    found = kit.formats.read(path, FORMAT, _kept)
    if isinstance(found, kit.formats.Damage):
        return Kept(LOST)
    return Kept() if found is None else found


def _kept(fields: dict[str, Any]) -> Kept:
    boot, doubted = fields["boot"], list(fields["doubted"])
    if any(not isinstance(each, str) for each in (boot, *doubted)):
        raise ValueError("a name in it is no text")
    return Kept(boot, frozenset(doubted))


# Image by top digest: its reference and what it consists of.
Images = Mapping[str, tuple[str, manifest.Shape]]


@dataclass(frozen=True)
class DurabilityTrouble:
    """Layers of an image could not be unpacked again; ``retry_at``: monotonic time."""

    ref: str
    attempts: int
    retry_at: float
    text: str


def loose_layers(inventory: base.ImageInventory) -> frozenset[str]:
    """Layers not known to be durable, without those of images that only others pulled. Pure."""
    ours = {hold.digest for hold in inventory.held("pin")}
    for hold in inventory.holds:  # pulled, and not pinned yet or not at all
        if hold.role == "pull" or hold.state == "done":
            ours.add(inventory.digest_of(hold.ref))
    by_name = {record.target.digest for record in inventory.records}
    chains = {
        digest: frozenset(layer.chain_id for layer in shape.layers)
        for digest, shape in inventory.shapes.items()
    }
    mine = frozenset[str]().union(*(chains[each] for each in ours & chains.keys()))
    others = frozenset[str]().union(*(chains[each] for each in (by_name - ours) & chains.keys()))
    return unconfirmed(inventory) - (others - mine)


def unconfirmed(inventory: base.ImageInventory) -> frozenset[str]:
    """Unpacked layers without the label."""
    return inventory.snapshots - inventory.durable - inventory.remote


class Durability:
    """Works beside the cycles, which tell it what is there: one task at a time."""

    def __init__(
        self,
        runtime: containerd.Containerd,
        path: Path,
        wake: Callable[[], None],
        cycle: asyncio.Lock,
    ) -> None:
        """``path``: of the file. ``cycle``: held by each cycle."""
        self._runtime = runtime
        self._path = path
        self._wake = wake
        self._cycle = cycle
        self._kept = Kept()
        self._saved: Kept | None = None  # what the file has; not read yet
        self._task: asyncio.Task[None] | None = None
        self._sync_at = 0.0  # monotonic time
        self.unpacked_again = 0  # images
        self.unconfirmed = 0  # layers of requested images
        self.troubles: dict[str, DurabilityTrouble] = {}  # by reference

    async def look(self, inventory: base.ImageInventory) -> None:
        """Before the requests are measured. HostError when a newer agent wrote the file."""
        if self._saved is None:
            saved = await asyncio.to_thread(load, self._path)
            self._kept = begun(saved, procfs.boot_id(), loose_layers(inventory))
            self._saved = saved
            if self._kept.doubted:
                log.warning(
                    "the node went down before layers were durable", layers=len(self._kept.doubted)
                )
            # Before anything is pulled: without the file the next boot doubts nothing.
            await self._save()
        if inventory.snapshots:  # those that are gone are no more in doubt
            self._kept = replace(self._kept, doubted=self._kept.doubted & inventory.snapshots)

    def doubted(self, shape: manifest.Shape) -> frozenset[str]:
        """Layers of the image that must be unpacked again."""
        return self._kept.doubted & {layer.chain_id for layer in shape.layers}

    def tend(
        self,
        refs: Iterable[str],
        inventory: base.ImageInventory,
        lookups: resolver.Resolver,
        pressed: bool,
    ) -> None:
        """``refs``: what is requested. Begins what is to be done, if anything."""
        if self._task is not None and not self._task.done():
            return
        images: dict[str, tuple[str, manifest.Shape]] = {}
        for ref in refs:
            lookup = lookups.of(ref)
            # What the tag names here, and what is pulled or half-pulled for it.
            looked_up = lookup.shape if lookup is not None else None
            for shape in (inventory.shapes.get(inventory.digest_of(ref)), looked_up):
                if shape is not None:
                    images[shape.top.digest] = ref, shape
        self._begin(images, inventory, pressed)

    def _begin(self, images: Images, inventory: base.ImageInventory, pressed: bool) -> None:
        now = time.monotonic()
        doubtful = {digest: each for digest, each in images.items() if self.doubted(each[1])}
        self.troubles = {d: each for d, each in self.troubles.items() if d in doubtful}
        again = {d: each for d, each in doubtful.items() if not pressed and self._is_due(d, now)}
        # Not those of images that are being pulled: one sync at the end does for all of them.
        chains = [{layer.chain_id for layer in shape.layers} for _, shape in images.values()]
        whole = frozenset[str]().union(*(each for each in chains if each <= inventory.snapshots))
        loose = (unconfirmed(inventory) & whole) - self._kept.doubted
        self.unconfirmed = len(loose)
        confirm = loose if now >= self._sync_at else frozenset[str]()
        if again or confirm or self._kept != self._saved:
            self._task = asyncio.create_task(
                self._work(again, confirm, inventory.images_path), name="durability"
            )

    def _is_due(self, digest: str, now: float) -> bool:
        return digest not in self.troubles or self.troubles[digest].retry_at <= now

    async def stop(self) -> None:
        await kit.tasks.end(self._task)

    async def _work(self, again: Images, confirm: frozenset[str], images_path: str) -> None:
        await self._save()
        changed = False
        for ref, shape in again.values():
            changed |= await self._unpack_again(ref, shape)
        if confirm:
            changed |= await self._confirm(confirm, images_path)
        await self._save()
        if changed:
            self._wake()

    async def _unpack_again(self, ref: str, shape: manifest.Shape) -> bool:
        which, digest = self.doubted(shape), shape.top.digest
        if not which:  # an image with the same layers came first
            return True
        try:
            await self._runtime.layers.again(shape.layers, which, UNPACK_SECONDS)
        except _ERRORS as error:
            attempts = self.troubles[digest].attempts + 1 if digest in self.troubles else 1
            wait = kit.pause.grown(attempts, RETRY_FIRST_SECONDS, RETRY_LONGEST_SECONDS)
            text, retry_at = str(error), time.monotonic() + kit.pause.jittered(wait)
            self.troubles[digest] = DurabilityTrouble(ref, attempts, retry_at, text)
            log.warning("layers could not be unpacked again", image=ref, error=text)
            return False
        # Not while a cycle works with what it read before: it would take the layers that are gone
        # for sound ones, and call the image ready.
        async with self._cycle:
            self._kept = replace(self._kept, doubted=self._kept.doubted - which)
        self.troubles.pop(digest, None)
        self.unpacked_again += 1
        log.warning("layers unpacked again", image=ref, layers=len(which))
        return True

    async def _confirm(self, layers: frozenset[str], images_path: str) -> bool:
        self._sync_at = time.monotonic() + SYNC_EVERY_SECONDS
        try:
            await kit.child.call(syscalls.syncfs, images_path, deadline=SYNC_SECONDS)
            await self._runtime.layers.note(sorted(layers), durable=True)
        except _ERRORS as error:
            log.warning("layers are not known to be durable", error=str(error))
            return False
        return True

    async def _save(self) -> None:
        kept = self._kept
        if kept == self._saved:
            return
        fields = {"boot": kept.boot, "doubted": sorted(kept.doubted)}
        try:
            await kit.child.call(
                kit.formats.save, str(self._path), fields, FORMAT, deadline=SAVE_SECONDS
            )
        except _ERRORS as error:  # tried again with the next cycle
            log.warning("doubted layers cannot be noted", error=str(error))
        else:
            self._saved = kept
