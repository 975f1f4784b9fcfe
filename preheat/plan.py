"""The plan: what to release, pin, pull and leave, from what is wanted and what is there. Pure.

Invariants (tests/preheat/test_plan.py drives them with thousands of cases):
* after the releases and then each pin and pull in order, pins and reserved pins together stay
  within the pin budget; when the budget was exceeded before (it was lowered), they only shrink;
* a pull is started only when the disk stays below the kubelet's gc_high with everything that is
  running already;
* nothing of lower rank keeps something of higher rank out, and nothing is released for something
  of equal or lower rank;
* under disk pressure nothing is pulled or pinned.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from preheat.estimate import union

# Free space that we leave below gc_high beside what was estimated: file system overhead.
MARGIN = 0.01

# class, priority, last use: what is released first sorts first. Retained images before images of
# the policy before what an operator pinned by hand.
Rank = tuple[int, int, float]
RETAINED, POLICY, OPERATOR = 0, 1, 2


class Reason(StrEnum):
    DISK = "disk"
    PIN_BUDGET = "pin_budget"
    PRESSURE = "disk_pressure"
    BLOCKED = "blocked"
    EXPIRED = "expired"
    UNWANTED = "unwanted"
    SUPERSEDED = "superseded"
    OUTRANKED = "outranked"


@dataclass(frozen=True)
class Node:
    """The disk that images are on, in bytes, and the thresholds as shares of its capacity."""

    capacity: int
    free: int
    gc_high: float
    gc_low: float
    eviction_free: float
    pin_budget: int
    freeable: int = 0  # of images that garbage collection may take: not pinned, not in use

    @property
    def used(self) -> int:
        return self.capacity - self.free

    @property
    def pressed(self) -> bool:
        """The kubelet deletes images or evicts pods, or is about to."""
        return (
            self.used >= self.gc_high * self.capacity
            or self.free <= self.eviction_free * self.capacity
        )

    @property
    def room(self) -> int:
        """Bytes until gc_high or eviction, whichever comes first, less the margin."""
        limit = min(self.gc_high, 1 - self.eviction_free) - MARGIN
        return int(limit * self.capacity) - self.used


@dataclass(frozen=True)
class Wanted:
    """An image that is to be here. ``blocked``: why it may not be pulled now."""

    ref: str
    digest: str
    rank: Rank
    keep: bool  # to be pinned
    present: bool
    fetch: int
    unpack: int
    parts: Mapping[str, int]
    running: bool = False
    blocked: str = ""

    @property
    def need(self) -> int:
        return self.fetch + self.unpack


@dataclass(frozen=True)
class Pinned:
    """A pin that is there now. ``expires``: Unix time at which its rule lets go."""

    hold: str
    ref: str
    digest: str
    rank: Rank
    parts: Mapping[str, int]
    in_use: bool = False
    expires: float | None = None
    wanted: bool = True  # by somebody still


@dataclass(frozen=True)
class Release:
    hold: str
    ref: str
    reason: Reason
    text: str


@dataclass(frozen=True)
class Skip:
    ref: str
    reason: Reason
    text: str
    need: int = 0
    free: int = 0


@dataclass(frozen=True)
class Plan:
    """To be done in this order: releases, pins, pulls. ``pause``: why pulls must rest, or ''."""

    releases: tuple[Release, ...] = ()
    pins: tuple[str, ...] = ()
    pulls: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    skips: tuple[Skip, ...] = ()
    pause: str = ""
    pinned_bytes: int = 0  # once the releases and pins are done


class _Budget:
    """Pins now, reserved pins of pulls, and what was released on the way."""

    def __init__(self, budget: int, pinned: Iterable[Pinned]) -> None:
        self.budget = budget
        self.pins = {pin.hold: pin for pin in pinned}
        self.reserved: dict[str, Mapping[str, int]] = {}
        self.releases: list[Release] = []

    def bytes(self, *more: Mapping[str, int], without: frozenset[str] = frozenset()) -> int:
        kept = (pin.parts for hold, pin in self.pins.items() if hold not in without)
        return union([*kept, *self.reserved.values(), *more])

    def release(self, pin: Pinned, reason: Reason, text: str) -> None:
        del self.pins[pin.hold]
        self.releases.append(Release(pin.hold, pin.ref, reason, text))

    def weakest(self) -> list[Pinned]:
        return sorted(self.pins.values(), key=lambda pin: (pin.rank, pin.ref, pin.digest))

    def make_room(self, want: Wanted) -> bool:
        """Release pins of lower rank until ``want`` fits; nothing when they do not suffice."""
        if self.bytes(want.parts) <= self.budget:
            return True
        victims: list[Pinned] = []
        for pin in self.weakest():
            # Its own older digest goes as well: the tag has moved on.
            if pin.rank >= want.rank and not (pin.ref == want.ref and pin.digest != want.digest):
                continue
            victims.append(pin)
            gone = frozenset(each.hold for each in victims)
            if self.bytes(want.parts, without=gone) <= self.budget:
                for victim in victims:
                    self.release(victim, Reason.OUTRANKED, f"makes room for {want.ref}")
                return True
        return False


def decide(
    node: Node, wanted: Iterable[Wanted], pinned: Iterable[Pinned], slots: int, now: float
) -> Plan:
    """The plan for one moment. ``slots``: pulls that may run at a time."""
    wants = sorted(wanted, key=lambda want: (want.rank, want.ref), reverse=True)
    budget = _Budget(node.pin_budget, _as_ranked_now(pinned, wants))
    _let_go(budget, wants, now)
    if node.pressed:
        return _under_pressure(node, budget, wants)
    for want in wants:
        if want.running and want.keep:
            budget.reserved[want.ref] = want.parts
    while budget.bytes() > node.pin_budget and budget.pins:
        budget.release(budget.weakest()[0], Reason.PIN_BUDGET, "the pin budget is exceeded")
    skips: list[Skip] = []
    pins = _pins(budget, wants, skips)
    pulls, waiting = _pulls(node, budget, wants, slots, skips)
    return Plan(
        releases=tuple(budget.releases),
        pins=tuple(pins),
        pulls=tuple(pulls),
        waiting=tuple(waiting),
        skips=tuple(skips),
        pinned_bytes=budget.bytes(),
    )


def _as_ranked_now(pinned: Iterable[Pinned], wants: Iterable[Wanted]) -> Iterator[Pinned]:
    """A pin counts as much as the want that it serves: else it went, only to be made again."""
    ranks = {(want.ref, want.digest): want.rank for want in wants if want.keep}
    for pin in pinned:
        rank = max(pin.rank, ranks.get((pin.ref, pin.digest), pin.rank))
        yield dataclasses.replace(pin, rank=rank)


def _let_go(budget: _Budget, wants: list[Wanted], now: float) -> None:
    """Pins whose reason has gone: expired, no longer wanted, or the tag has moved on."""
    current = {want.ref: want.digest for want in wants}
    held = {(pin.ref, pin.digest) for pin in budget.pins.values()}
    for pin in budget.weakest():
        digest = current.get(pin.ref, pin.digest)
        if pin.digest != digest and (pin.ref, digest) in held:
            budget.release(pin, Reason.SUPERSEDED, f"the tag names {digest} now, which is pinned")
        elif not pin.wanted:
            budget.release(pin, Reason.UNWANTED, "no longer in the settings")
        elif pin.expires is not None and pin.expires <= now and not pin.in_use:
            budget.release(pin, Reason.EXPIRED, "its time after the last use is over")


def _under_pressure(node: Node, budget: _Budget, wants: list[Wanted]) -> Plan:
    """Release what the kubelet will need below gc_low and cannot get from unpinned images."""
    shortage = node.used - node.gc_low * node.capacity - node.freeable
    before = budget.bytes()
    for pin in budget.weakest():
        if before - budget.bytes() >= shortage:
            break
        if not pin.in_use:  # releasing those would free nothing
            budget.release(pin, Reason.PRESSURE, "the disk is under pressure")
    text = f"the disk is {100 * node.used / max(1, node.capacity):.0f} % full"
    skips = [
        Skip(want.ref, Reason.PRESSURE, text, want.need, node.room)
        for want in wants
        if not want.present
    ]
    return Plan(
        releases=tuple(budget.releases),
        skips=tuple(skips),
        pause=text,
        pinned_bytes=budget.bytes(),
    )


def _pins(budget: _Budget, wants: list[Wanted], skips: list[Skip]) -> list[str]:
    pins = []
    for want in wants:
        held = any(p.ref == want.ref and p.digest == want.digest for p in budget.pins.values())
        if not (want.keep and want.present) or held or want.running:
            continue
        if budget.make_room(want):
            pins.append(want.ref)
            budget.reserved[want.ref] = want.parts
        else:
            skips.append(_over_budget(budget, want))
    return pins


def _over_budget(budget: _Budget, want: Wanted) -> Skip:
    need = budget.bytes(want.parts) - budget.bytes()
    free = max(0, budget.budget - budget.bytes())
    text = f"pinning takes {need} bytes more, {free} of the pin budget are free"
    return Skip(want.ref, Reason.PIN_BUDGET, text, need, free)


def _pulls(
    node: Node, budget: _Budget, wants: list[Wanted], slots: int, skips: list[Skip]
) -> tuple[list[str], list[str]]:
    pulls: list[str] = []
    waiting: list[str] = []
    slots -= sum(want.running for want in wants)
    room = node.room - sum(want.need for want in wants if want.running)
    for want in wants:
        if want.present or want.running:
            continue
        if want.blocked:
            skips.append(Skip(want.ref, Reason.BLOCKED, want.blocked, want.need, room))
        elif want.need > room:
            text = f"needs {want.need} bytes, {max(0, room)} are free below the kubelet's threshold"
            skips.append(Skip(want.ref, Reason.DISK, text, want.need, max(0, room)))
        elif slots <= 0:
            waiting.append(want.ref)
        elif want.keep and not budget.make_room(want):
            skips.append(_over_budget(budget, want))
        else:
            pulls.append(want.ref)
            slots -= 1
            room -= want.need
            if want.keep:
                budget.reserved[want.ref] = want.parts
    return pulls, waiting
