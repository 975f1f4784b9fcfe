"""Healing: a pinned image that somebody removed is restored within milliseconds.

No runtime lets us forbid a removal. Where the runtime does not tell the kubelet about pins, the
kubelet's garbage collection deletes the records of pinned images. The containerd lease of the pin
still keeps every byte, so a heal only writes the records again.

A heal follows each removal event, and a full comparison follows each gap in the events.

Invariants: a heal needs no byte from the registry; one image is healed at most ``per_hour`` times
in any hour; nothing is healed under disk pressure (the bytes stay until the plan releases the pin).
"""

import asyncio
import collections
import dataclasses
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field

import structlog

from preheat.runtimes import base

log = structlog.get_logger("preheat")

HOUR = 3600.0
# One removal of an image removes several records, one after the other.
SAME_REMOVAL_SECONDS = 2.0
LOG_EVERY_SECONDS = 60.0

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
    """Knows every pin by the names of its records."""

    def __init__(
        self,
        runtime: base.Runtime,
        pressed: Pressed,
        per_hour: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runtime = runtime
        self._pressed = pressed
        self._clock = clock
        self.per_hour = per_hour
        self.counts = Counts()
        self._by_name: dict[str, base.Hold] = {}
        self._past: dict[str, _Past] = {}
        self._one = asyncio.Lock()
        # Compressed bytes by top digest, for what a heal saved.
        self.sizes: Mapping[str, int] = {}

    def learn(self, holds: Iterable[base.Hold]) -> None:
        """Take the pins among ``holds`` as all that exist."""
        pins = [hold for hold in holds if hold.role == "pin"]
        # The newest pin of a tag says where the tag must point.
        pins.sort(key=lambda hold: hold.created)
        self._by_name = {name: hold for hold in pins for name in hold.names}
        known = {hold.id for hold in pins}
        self._past = {key: past for key, past in self._past.items() if key in known}

    def forget(self, hold: base.Hold) -> None:
        """Call before a pin is released: its removal must not be healed."""
        self._by_name = {n: h for n, h in self._by_name.items() if h.id != hold.id}

    def remember(self, hold: base.Hold) -> None:
        self._by_name |= dict.fromkeys(hold.names, hold)

    @property
    def fights(self) -> list[str]:
        """References of pins that reached the limit of heals."""
        limited = {hold_id for hold_id, past in self._past.items() if past.limited}
        return sorted({h.ref for h in self._by_name.values() if h.id in limited})

    async def removed(self, name: str) -> bool:
        """Heal the pin of a removed record. False when the pin is still without its records."""
        hold = self._by_name.get(name)
        return hold is None or await self._heal(hold)

    async def resync(self, inventory: base.Inventory) -> None:
        """Heal everything that is missing from the inventory."""
        names = {record.name for record in inventory.records}
        for hold in {h.id: h for h in self._by_name.values()}.values():
            if hold.target is not None and hold.target.digest not in inventory.content:
                continue  # records alone would be an image that does not work
            if not names.issuperset(self._names(hold)):
                await self._heal(hold)

    def _names(self, hold: base.Hold) -> tuple[str, ...]:
        """The names that no newer pin has taken over."""
        return tuple(name for name in hold.names if self._by_name.get(name) is hold)

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
            digest = hold.target.digest if hold.target is not None else ""
            self.counts.saved_bytes += self.sizes.get(digest, 0)
            if now - past.logged >= LOG_EVERY_SECONDS:
                past.logged = now
                log.warning("removed pinned image healed", image=hold.ref, in_hour=len(past.starts))
        return True
