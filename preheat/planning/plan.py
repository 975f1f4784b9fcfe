"""The plan: what to release, pin, pull and leave, from the requests and what the node has. Pure.

Invariants (tests/preheat/planning/test_plan.py checks them over thousands of cases):
* after the releases and then each pin and pull in order, pins and the pins reserved for pulls stay
  within the pin budget together; where they exceeded it before (it was lowered), they only shrink;
* a pull starts only when the disk stays below the kubelet's gc_high with everything that runs now;
* an image of lower rank never keeps one of higher rank out, and nothing is released for an image of
  equal or lower rank;
* under disk pressure nothing is pulled or pinned;
* a pin that the settings dropped is not released for that before its time.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

import kit.units
from preheat.planning import desired
from preheat.planning.desired import Rank, Request
from preheat.registry import failure, resolver
from preheat.registry.estimate import union
from preheat.runtimes import base

# Why an image must not be pulled now. Pure.


@dataclass(frozen=True)
class Facts:
    """What is known of one requested image that is not here. Times are Unix times."""

    request: Request
    digest: str
    lookup: resolver.Lookup | None
    pull_at: float  # when its turn comes, see schedule.Schedule.pull_at
    failed: failure.PullFailure | None
    pins: tuple[base.Hold, ...]  # of this reference, which a heal would bring back
    limited: bool = False  # bytes_per_second holds, which only the agent's own fetches keep


def hurdle(facts: Facts, now: float) -> str:
    """Why it must not be pulled now; empty when it may."""
    request, lookup, failed = facts.request, facts.lookup, facts.failed
    if request.released:
        return "released by an operator; 'nodeagent image preheat REF' requests it again"
    if request.paused:
        return "paused by an operator"
    if request.dropped_until is not None:
        return request.dropped_text
    if request.is_over:
        return "its time since the last use is over; it is requested again when it is used"
    if request.done:
        return "was pulled once and removed since; 'pin: never' does not fetch it again"
    # What the runtime lost cannot be healed, only pulled.
    healable = request.fetch == 0
    if healable and facts.digest in (hold.digest for hold in facts.pins):
        # A pull would bypass the limit of heals.
        return "removed from the runtime although pinned; waiting for the next heal"
    untold = lookup is not None and lookup.leaves_it_to_the_runtime
    if lookup is None or (lookup.shape is None and not untold):
        return "its registry lookup is in progress or waits for its turn"
    if lookup.private and not request.share_private:
        return desired.PRIVATE
    # What the runtime tries without our lookup, it tries without a login, but a mirror may not ask.
    doubtful = lookup.private is None and lookup.has_login and (lookup.mirrored or not untold)
    if doubtful and not request.share_private:
        why = lookup.failed.message if lookup.failed is not None else "its registry did not say"
        return f"not known to be public ({why}); allow it with share_private, or wait"
    if untold and facts.limited:
        return "its registry lookup failed, and bytes_per_second allows no pull without one"
    if failed is not None and (failed.retry_at is None or failed.retry_at > now):
        return failed.message
    if request.by == "policy" and facts.pull_at > now:
        return f"its turn comes in {facts.pull_at - now:.0f} s (spread, windows)"
    return ""


# Space left free below gc_high beyond the estimate, as a share of the disk: file system overhead.
MARGIN = 0.01


class Reason(StrEnum):
    DISK = "disk"
    PIN_BUDGET = "pin_budget"
    PRESSURE = "disk_pressure"
    BLOCKED = "blocked"
    EXPIRED = "expired"
    UNWANTED = "unwanted"
    DROPPED = "dropped"
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
    freeable: int = 0  # bytes of images that are neither pinned nor in use
    inodes_free: float = 1.0  # shares of all inodes
    eviction_inodes: float = 0.0
    inodes: int = 0  # of the whole file system; 0: it has no table of them
    thresholds_assumed: bool = False  # they are not from the kubelet's own configuration
    thresholds: str = ""  # where they are from, for people

    @property
    def used(self) -> int:
        return self.capacity - self.free

    @property
    def pressed(self) -> bool:
        """Whether the kubelet deletes images or evicts pods, or is about to."""
        return (
            self.used >= self.gc_high * self.capacity
            or self.free <= self.eviction_free * self.capacity
            or self.lacks_inodes
        )

    @property
    def lacks_inodes(self) -> bool:
        return self.inodes_free < self.eviction_inodes

    @property
    def inodes_room(self) -> int:
        """Inodes until the kubelet's threshold."""
        return int((self.inodes_free - self.eviction_inodes) * self.inodes)

    @property
    def room(self) -> int:
        """Bytes until gc_high or eviction, whichever comes first, minus the margin."""
        limit = min(self.gc_high, 1 - self.eviction_free) - MARGIN
        return int(limit * self.capacity) - self.used


@dataclass(frozen=True)
class Pinned:
    """A pin that exists. ``expires``: Unix time at which its rule ends. ``dropped_until``: Unix
    time to which it stays although the settings ask for it no longer; ``retains``: after that its
    use keeps it.
    """

    hold: str
    ref: str
    digest: str
    rank: Rank
    parts: Mapping[str, int]
    in_use: bool = False
    expires: float | None = None
    requested: bool = True  # somebody still wants it pinned
    dropped_until: float | None = None
    retains: bool = False


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
    """To be done in this order: releases, pins, pulls. ``pause``: why all pulls must stop.

    ``retained``: holds of dropped images that their use keeps from now on.
    """

    releases: tuple[Release, ...] = ()
    retained: tuple[str, ...] = ()
    pins: tuple[str, ...] = ()
    pulls: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    skips: tuple[Skip, ...] = ()
    pause: str = ""


class _Budget:
    """The pins, the pins reserved for pulls, and what was released on the way."""

    def __init__(self, budget: int, pinned: Iterable[Pinned]) -> None:
        self.budget = budget
        self.pins = {pin.hold: pin for pin in pinned}
        self.reserved: dict[str, Mapping[str, int]] = {}
        self.releases: list[Release] = []
        self.retained: list[str] = []
        self.expired: set[tuple[str, str]] = set()  # reference and digest

    def bytes(self, *more: Mapping[str, int], without: frozenset[str] = frozenset()) -> int:
        kept = (pin.parts for hold, pin in self.pins.items() if hold not in without)
        return union([*kept, *self.reserved.values(), *more])

    def release(self, pin: Pinned, reason: Reason, text: str) -> None:
        del self.pins[pin.hold]
        self.releases.append(Release(pin.hold, pin.ref, reason, text))

    def holds(self, request: Request) -> bool:
        return any(p.ref == request.ref and p.digest == request.digest for p in self.pins.values())

    def plan(self, skips: Iterable[Skip], pause: str = "") -> Plan:
        """What it released and retained, and nothing to add."""
        retained = tuple(hold for hold in self.retained if hold in self.pins)
        return Plan(tuple(self.releases), retained, skips=tuple(skips), pause=pause)

    def weakest(self) -> list[Pinned]:
        return sorted(self.pins.values(), key=lambda pin: (pin.rank, pin.ref, pin.digest))

    def make_room(self, request: Request) -> bool:
        """Release pins of lower rank until ``request`` fits; none if all would not suffice."""
        if self.bytes(request.parts) <= self.budget:
            return True
        victims: list[Pinned] = []
        for pin in self.weakest():
            # Its own older digest may go too: the tag has moved.
            if pin.rank >= request.rank and not (
                pin.ref == request.ref and pin.digest != request.digest
            ):
                continue
            victims.append(pin)
            gone = frozenset(each.hold for each in victims)
            if self.bytes(request.parts, without=gone) <= self.budget:
                for victim in victims:
                    self.release(victim, Reason.OUTRANKED, f"makes room for {request.ref}")
                return True
        return False


def decide(
    node: Node, requests: Iterable[Request], pinned: Iterable[Pinned], slots: int, now: float
) -> Plan:
    """The plan for one moment. ``slots``: how many pulls may run at a time."""
    ranked = sorted(requests, key=lambda each: (each.rank, each.ref), reverse=True)
    budget = _Budget(node.pin_budget, _ranked(pinned, ranked))
    _release_obsolete(budget, ranked, now)
    if node.pressed:
        return _under_pressure(node, budget, ranked)
    for request in ranked:
        if request.running and request.pins:
            budget.reserved[request.ref] = request.parts
    while budget.bytes() > node.pin_budget and budget.pins:
        budget.release(budget.weakest()[0], Reason.PIN_BUDGET, "the pin budget is exceeded")
    return _with_additions(node, budget, ranked, slots)


def _ranked(pinned: Iterable[Pinned], requests: Iterable[Request]) -> Iterator[Pinned]:
    """Rank a pin at least as high as its request, so that it is not released and made in turns."""
    ranks = {(each.ref, each.digest): each.rank for each in requests if each.pins}
    for pin in pinned:
        rank = max(pin.rank, ranks.get((pin.ref, pin.digest), pin.rank))
        yield dataclasses.replace(pin, rank=rank)


def _release_obsolete(budget: _Budget, requests: list[Request], now: float) -> None:
    """Release pins that expired, that nobody requests or were dropped, or whose tag has moved."""
    current = {each.ref: each.digest for each in requests if not each.unconfirmed}
    held = {(pin.ref, pin.digest) for pin in budget.pins.values()}
    for pin in budget.weakest():
        digest = current.get(pin.ref, pin.digest)
        moved = pin.digest != digest and (pin.ref, digest) in held
        if moved and not pin.in_use:  # a container of it may be started again
            budget.release(pin, Reason.SUPERSEDED, f"the tag names {digest} now, which is pinned")
        elif not pin.requested:
            budget.release(pin, Reason.UNWANTED, "nobody requests it any more")
        elif pin.expires is not None and pin.expires <= now and not pin.in_use:
            budget.release(pin, Reason.EXPIRED, "its time since the last use is over")
            budget.expired.add((pin.ref, pin.digest))
        elif pin.dropped_until is not None and pin.dropped_until <= now:
            if pin.retains:
                budget.retained.append(pin.hold)
            else:
                text = "the settings list it no longer, and drop_after is over"
                budget.release(pin, Reason.DROPPED, text)


def _under_pressure(node: Node, budget: _Budget, requests: list[Request]) -> Plan:
    """Release what the kubelet needs to get below gc_low and cannot take from unpinned images."""
    shortage = node.used - node.gc_low * node.capacity - node.freeable
    if node.lacks_inodes and node.freeable <= 0:
        shortage = max(shortage, 1)  # one pin in each plan, until the kubelet finds enough
    before = budget.bytes()
    for pin in budget.weakest():
        if before - budget.bytes() >= shortage:
            break
        if not pin.in_use:  # releasing one in use would free nothing
            budget.release(pin, Reason.PRESSURE, "the disk is under pressure")
    text = f"the disk is {100 * node.used / max(1, node.capacity):.0f} % full"
    if node.lacks_inodes:
        text = f"the disk has {100 * node.inodes_free:.0f} % of its inodes free"
    absent = [each for each in requests if not each.present]
    skips = [Skip(each.ref, Reason.PRESSURE, text, each.need, node.room) for each in absent]
    return budget.plan(skips, pause=text)


def _over_budget(budget: _Budget, request: Request) -> Skip:
    need = budget.bytes(request.parts) - budget.bytes()
    free = max(0, budget.budget - budget.bytes())
    size = kit.units.format_size
    text = f"pinning it needs {size(need)} more, the pin budget has {size(free)} left"
    return Skip(request.ref, Reason.PIN_BUDGET, text, need, free)


def _with_additions(node: Node, budget: _Budget, ranked: list[Request], slots: int) -> Plan:
    """The plan with what to pin now, what to pull now and what waits for a slot.

    Pins and pulls go by rank together. Pins before all pulls would let a new pin of low rank stay
    while a better one is released for a pull, and the next plan would turn that round.
    """
    pins: list[str] = []
    pulls: list[str] = []
    waiting: list[str] = []
    skips: list[Skip] = []
    slots -= sum(each.running for each in ranked)
    room = node.room - sum(each.need for each in ranked if each.running)
    inodes = node.inodes_room - sum(each.inodes for each in ranked if each.running)
    for each in ranked:
        if each.running:
            continue
        if each.present:
            if not each.pins or budget.holds(each) or (each.ref, each.digest) in budget.expired:
                continue
            if budget.make_room(each):
                pins.append(each.ref)
                budget.reserved[each.ref] = each.parts
            else:
                skips.append(_over_budget(budget, each))
        elif each.blocked:
            skips.append(Skip(each.ref, Reason.BLOCKED, each.blocked, each.need, room))
        elif each.need > room:
            size, free = kit.units.format_size, max(0, room)
            text = (
                f"it needs {size(each.need)}, {size(free)} are free below the kubelet's threshold"
            )
            skips.append(Skip(each.ref, Reason.DISK, text, each.need, free))
        elif each.inodes > inodes and node.inodes:
            text = (
                f"it took {each.inodes:,} inodes of the disk, {max(0, inodes):,} are free above "
                "the kubelet's threshold"
            )
            skips.append(Skip(each.ref, Reason.DISK, text, each.need, max(0, room)))
        elif slots <= 0:
            waiting.append(each.ref)
        elif each.pins and not budget.make_room(each):
            skips.append(_over_budget(budget, each))
        else:
            pulls.append(each.ref)
            slots -= 1
            room -= each.need
            inodes -= each.inodes
            if each.pins:
                budget.reserved[each.ref] = each.parts
    return dataclasses.replace(
        budget.plan(skips), pins=tuple(pins), pulls=tuple(pulls), waiting=tuple(waiting)
    )
