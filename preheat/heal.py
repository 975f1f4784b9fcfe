"""Pinned images back at once: on each removal event, and by a full look after any gap.

Invariants: a heal needs no byte from the registry; at most ``per_hour`` heals of one image in any
hour; none while the disk is under pressure (the bytes stay held until the plan decides).
"""

import collections
import dataclasses
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

import structlog

from preheat.runtimes import base

log = structlog.get_logger("preheat")

HOUR = 3600.0
# A removal takes an image's records one after the other: one removal, one heal.
SAME_REMOVAL_SECONDS = 2.0
LOG_EVERY_SECONDS = 60.0

Pressed = Callable[[], Awaitable[bool]]


@dataclass
class Counts:
    removals: int = 0  # of pinned images, by somebody else
    heals: int = 0
    records: int = 0
    refused_pressure: int = 0
    refused_limit: int = 0
    saved_bytes: int = 0


@dataclass
class _Past:
    """Starts of the heals within the last hour; bounded by the limit."""

    starts: collections.deque[float] = field(default_factory=collections.deque)
    limited: bool = False
    logged: float = -LOG_EVERY_SECONDS


class Healer:
    """Knows every pin by the names of its records."""

    def __init__(
        self,
        box: base.Runtime,
        pressed: Pressed,
        per_hour: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._box = box
        self._pressed = pressed
        self._clock = clock
        self.per_hour = per_hour
        self.counts = Counts()
        self._by_name: dict[str, base.Hold] = {}
        self._past: dict[str, _Past] = {}
        self.sizes: dict[str, int] = {}  # hold id -> compressed bytes, for what a heal saved

    def learn(self, holds: Iterable[base.Hold]) -> None:
        """The pins there are now; anything else is forgotten."""
        pins = [hold for hold in holds if hold.role == "pin"]
        # The newest pin of a tag says where the tag is to point.
        pins.sort(key=lambda hold: hold.created)
        self._by_name = {name: hold for hold in pins for name in hold.names}
        known = {hold.id for hold in pins}
        for gone in set(self._past) - known:
            del self._past[gone]
        for gone in set(self.sizes) - known:
            del self.sizes[gone]

    def forget(self, hold: base.Hold) -> None:
        """Before a pin is let go: its removal is no longer our business."""
        self._by_name = {n: h for n, h in self._by_name.items() if h.id != hold.id}

    def remember(self, hold: base.Hold) -> None:
        self._by_name |= dict.fromkeys(hold.names, hold)

    @property
    def fights(self) -> list[str]:
        """References of pins that reached the limit of heals."""
        limited = {hold_id for hold_id, past in self._past.items() if past.limited}
        return sorted({h.ref for h in self._by_name.values() if h.id in limited})

    async def removed(self, name: str) -> bool:
        """A record went; put it back if it is pinned. Whether everything pinned is in place."""
        hold = self._by_name.get(name)
        return hold is None or await self._heal(hold)

    async def resync(self, inventory: base.Inventory) -> None:
        """Heal whatever is missing, whoever missed the event."""
        names = {record.name for record in inventory.records}
        for hold in {h.id: h for h in self._by_name.values()}.values():
            mine = [name for name in hold.names if self._by_name.get(name) is hold]
            if not names.issuperset(mine):
                await self._heal(hold)

    async def _heal(self, hold: base.Hold) -> bool:
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
        mine = tuple(name for name in hold.names if self._by_name.get(name) is hold)
        healed = await self._box.heal(dataclasses.replace(hold, names=mine))
        self.counts.records += healed
        if is_new and healed:
            past.starts.append(now)
            self.counts.heals += 1
            self.counts.saved_bytes += self.sizes.get(hold.id, 0)
            if now - past.logged >= LOG_EVERY_SECONDS:
                past.logged = now
                log.warning(
                    "pinned image was removed and is back", image=hold.ref, in_hour=len(past.starts)
                )
        return True
