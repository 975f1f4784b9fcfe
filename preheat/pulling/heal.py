"""Healing: a pinned image that somebody removed is restored within milliseconds.

No runtime lets us forbid a removal. Where the runtime does not tell the kubelet about pins, the
kubelet's garbage collection deletes the records of pinned images. The containerd lease of the pin
still keeps every byte, so a heal only writes the records again.

A heal follows each removal event, and a full comparison follows each gap in the events.

A tag may have moved to another image before it was removed: then its old digest must not come back
under it. So a heal restores a tag only while it is known that it named the pinned digest when it
was last there; events of moves, and inventories, tell. The pin's own reference comes back as well
when nothing is known of it (no agent ran); names by digest and the image id cannot move.

Invariants: a heal needs no byte from the registry; one image is healed at most ``per_hour`` times
in any hour; nothing is healed under disk pressure (the bytes stay until the plan releases the pin).
"""

import asyncio
import collections
import dataclasses
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

import structlog

from preheat.image import manifest
from preheat.runtimes import base, containerd

log = structlog.get_logger("preheat")

HOUR = 3600.0
# One removal of an image removes several records, one after the other.
SAME_REMOVAL_SECONDS = 2.0
LOG_EVERY_SECONDS = 60.0
FIGHT_HEALS = 6  # of one image in an hour; the kubelet removes it at most 12 times

Pressed = Callable[[], Awaitable[bool]]


@dataclass
class Counts:
    removals: int = 0  # of pinned images, by somebody else
    heals: int = 0
    refused_pressure: int = 0
    refused_limit: int = 0
    saved_bytes: int = 0


@dataclass
class _Past:
    """When this pin was healed within the last hour."""

    starts: collections.deque[float] = field(default_factory=collections.deque)
    limited: bool = False
    logged: float = -LOG_EVERY_SECONDS


class Healer:
    """Knows every pin by the names of its records, and what these names were last seen to mean."""

    def __init__(
        self,
        runtime: containerd.Containerd,
        pressed: Pressed,
        per_hour: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runtime = runtime
        self._pressed = pressed
        self._clock = clock
        self.per_hour = per_hour
        self.counts = Counts()
        self._by_name: dict[str, tuple[base.Hold, ...]] = {}  # the newest pin last
        self._means: dict[str, str] = {}  # name -> top digest; empty: moved, not seen since
        self._moves: dict[str, int] = {}  # name -> number of its latest event
        self.moves = 0  # events of moves so far
        self._sees = False  # no event is missed
        self._past: dict[str, _Past] = {}
        self._one = asyncio.Lock()
        # Compressed bytes by top digest, for what a heal saved.
        self.sizes: Mapping[str, int] = {}

    def learn(self, inventory: base.ImageInventory, moves: int) -> None:
        """Take its pins as all that exist, and what their names mean.

        ``moves``: as it was before the inventory was asked for. What moved since is known better.
        """
        pins = inventory.held("pin")
        # The newest pin of a tag says where the tag must point.
        pins.sort(key=lambda hold: hold.created)
        self._by_name = {}
        for hold in pins:
            self._add(hold)
        known = {hold.id for hold in pins}
        self._past = {key: past for key, past in self._past.items() if key in known}
        self._means = {n: digest for n, digest in self._means.items() if n in self._by_name}
        self._moves = {n: at for n, at in self._moves.items() if n in self._by_name}
        for record in inventory.records if self._sees else ():
            if record.name in self._by_name and self._moves.get(record.name, 0) <= moves:
                self._means[record.name] = record.target.digest

    def sees(self, every: bool) -> None:
        """Whether every event comes from now on. Without that a tag that was seen to mean a pinned
        image may have moved unseen; one that was seen to mean another is no pin's all the same."""
        self._sees = every
        if not every:
            self._means = {
                name: digest
                for name, digest in self._means.items()
                if not any(hold.digest == digest for hold in self._by_name.get(name, ()))
            }

    def forget(self, hold: base.Hold) -> None:
        """Call before a pin is released: its removal must not be healed."""
        self._by_name = {
            name: left
            for name, pins in self._by_name.items()
            if (left := tuple(each for each in pins if each.id != hold.id))
        }

    def remember(self, hold: base.Hold) -> None:
        self.forget(hold)
        self._add(hold)

    def _add(self, hold: base.Hold) -> None:
        for name in hold.names:
            self._by_name[name] = (*self._by_name.get(name, ()), hold)

    def restores(self, hold: base.Hold, name: str) -> bool:
        """Whether a heal of this pin may write ``name`` when it is missing."""
        if manifest.is_digest(name) or name.endswith(f"@{hold.digest}"):
            return True
        means = self._means.get(name)
        return means == hold.digest or (means is None and name == hold.ref)

    def _owner(self, name: str) -> base.Hold | None:
        """The newest pin that may restore ``name``."""
        pins = reversed(self._by_name.get(name, ()))
        return next((hold for hold in pins if self.restores(hold, name)), None)

    @property
    def _pins(self) -> dict[str, base.Hold]:
        return {hold.id: hold for pins in self._by_name.values() for hold in pins}

    @property
    def fights(self) -> list[str]:
        """References of pins that somebody removes again and again."""
        since = self._clock() - HOUR
        fought = {
            hold_id
            for hold_id, past in self._past.items()
            if past.limited or sum(start > since for start in past.starts) >= FIGHT_HEALS
        }
        return sorted({hold.ref for hold in self._pins.values() if hold.id in fought})

    async def changed(self, change: base.Change) -> bool:
        """See what a record names now, or heal it; as ``removed``."""
        if change.how == "removed":
            return await self.removed(change.name)
        name = change.name
        if name in self._by_name:
            self.moves += 1
            self._moves[name] = self.moves
            if change.how == "moved":
                self._means[name] = ""  # also when it is gone again before we look
            target = await self._runtime.target_of(name)
            if target is not None:
                self._means[name] = target.digest
        return True

    async def removed(self, name: str) -> bool:
        """Heal the pin of a removed record. False when the pin is still without its records."""
        if name not in self._by_name:
            return True
        hold = self._owner(name)
        return hold is not None and await self._heal(hold)

    async def resync(self, inventory: base.ImageInventory) -> None:
        """Heal everything that is missing from the inventory."""
        names = {record.name for record in inventory.records}
        for hold in self._pins.values():
            if hold.digest not in inventory.content:
                continue  # records alone would be an image that does not work
            if not names.issuperset(self._names(hold)):
                await self._heal(hold)

    def _names(self, hold: base.Hold) -> tuple[str, ...]:
        """The names that it may restore, and no newer pin."""
        owners = ((name, self._owner(name)) for name in hold.names)
        return tuple(name for name, owner in owners if owner is not None and owner.id == hold.id)

    async def _heal(self, hold: base.Hold) -> bool:
        # An event and a comparison may see one removal at once; it is one heal all the same.
        async with self._one:
            return await self._heal_now(hold)

    async def _heal_now(self, hold: base.Hold) -> bool:
        now = self._clock()
        past = self._past.setdefault(hold.id, _Past())
        while past.starts and past.starts[0] <= now - HOUR:
            past.starts.popleft()
        is_new = not past.starts or past.starts[-1] < now - SAME_REMOVAL_SECONDS
        if is_new:
            self.counts.removals += 1
        if await self._pressed():
            self.counts.refused_pressure += is_new
            return False
        if is_new and len(past.starts) >= self.per_hour:
            self.counts.refused_limit += 1
            past.limited = True
            return False
        past.limited = False
        healed = await self._runtime.heal(dataclasses.replace(hold, names=self._names(hold)))
        if is_new and healed:
            past.starts.append(now)
            self.counts.heals += 1
            self.counts.saved_bytes += self.sizes.get(hold.digest, 0)
            if now - past.logged >= LOG_EVERY_SECONDS:
                past.logged = now
                log.warning("removed pinned image healed", image=hold.ref, in_hour=len(past.starts))
        return True
