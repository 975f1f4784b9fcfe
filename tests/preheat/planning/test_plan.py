"""The plan keeps its promises over thousands of nodes, requests and pins."""

import dataclasses
from collections.abc import Mapping

from hypothesis import given, settings
from hypothesis import strategies as st

from preheat.planning import plan
from preheat.planning.desired import Request
from preheat.registry.estimate import union
from tests.testbed import examples

# A small world, so that layers are really shared and budgets really bind.
PARTS = {f"s layer{n}": (n % 5 + 1) * 10 for n in range(12)}
PART_SETS = st.sets(st.sampled_from(sorted(PARTS)), min_size=1, max_size=5).map(
    lambda names: {name: PARTS[name] for name in names}
)
RANKS = st.builds(
    lambda by, priority, last_used: Request("", by, priority=priority, last_used=last_used).rank,
    st.sampled_from(["retained", "policy", "operator"]),
    st.integers(-2, 2),
    st.sampled_from([0.0, 1.0, 2.0]),
)
NOW = 1000.0


@st.composite
def nodes(draw: st.DrawFn) -> plan.Node:
    capacity = draw(st.integers(200, 2000))
    return plan.Node(
        capacity=capacity,
        free=draw(st.integers(0, capacity)),
        gc_high=draw(st.sampled_from([0.85, 0.9, 0.99])),
        gc_low=0.8,
        eviction_free=draw(st.sampled_from([0.01, 0.1, 0.15])),
        pin_budget=draw(st.integers(0, 400)),
        freeable=draw(st.integers(0, 100)),
    )


@st.composite
def requests(draw: st.DrawFn) -> list[Request]:
    count = draw(st.integers(0, 6))
    found = []
    for number in range(count):
        parts = draw(PART_SETS)
        present = draw(st.booleans())
        size = sum(parts.values())
        found.append(
            Request(
                ref=f"r{number}",
                by=draw(st.sampled_from(["retained", "policy", "operator"])),
                keep=draw(st.sampled_from(["always", "never"])),
                priority=draw(st.integers(-2, 2)),
                last_used=draw(st.sampled_from([0.0, 1.0, 2.0])),
                digest=draw(st.sampled_from(["d1", "d2"])),
                present=present,
                measured=True,
                fetch=0 if present else draw(st.integers(0, size)),
                unpack=0 if present else draw(st.integers(0, size)),
                parts=parts,
                running=not present and draw(st.booleans()),
                blocked=draw(st.sampled_from(["", "", "", "paused"])),
            )
        )
    return found


@st.composite
def pins(draw: st.DrawFn) -> list[plan.Pinned]:
    keys = draw(
        st.lists(
            st.tuples(st.integers(0, 7), st.sampled_from(["d1", "d2"])), unique=True, max_size=6
        )
    )
    return [
        plan.Pinned(
            hold=f"h{ref}{digest}",
            ref=f"r{ref}",
            digest=digest,
            rank=draw(RANKS),
            parts=draw(PART_SETS),
            in_use=draw(st.booleans()),
            expires=draw(st.sampled_from([None, NOW - 1, NOW + 1])),
            requested=draw(st.sampled_from([True, True, False])),
            dropped_until=draw(st.sampled_from([None, None, NOW - 1, NOW + 1])),
            retains=draw(st.booleans()),
        )
        for ref, digest in keys
    ]


def steps(
    found: plan.Plan, wanted: list[Request], pinned: list[plan.Pinned]
) -> list[list[Mapping[str, int]]]:
    """What is pinned or reserved before and after every single step of the plan."""
    by_ref = {want.ref: want for want in wanted}
    held: dict[str, Mapping[str, int]] = {pin.hold: pin.parts for pin in pinned}
    held |= {w.ref: w.parts for w in wanted if w.running and w.pins}
    seen = [list(held.values())]
    for release in found.releases:
        del held[release.hold]
        seen.append(list(held.values()))
    for ref in (*found.pins, *(r for r in found.pulls if by_ref[r].pins)):
        held[ref] = by_ref[ref].parts
        seen.append(list(held.values()))
    return seen


@settings(max_examples=examples.number(100))
@given(nodes(), requests(), pins(), st.integers(0, 3))
def test_plan_keeps_the_pin_budget_at_every_step(
    node: plan.Node, wanted: list[Request], pinned: list[plan.Pinned], slots: int
) -> None:
    found = plan.decide(node, wanted, pinned, slots, NOW)
    sizes = [union(held) for held in steps(found, wanted, pinned)]
    releases = len(found.releases)

    # Releases only shrink it; after them, every pin and pull stays within.
    assert sizes[: releases + 1] == sorted(sizes[: releases + 1], reverse=True)
    if not found.pause:
        reserved = union(w.parts for w in wanted if w.running and w.pins)
        for size in sizes[releases + 1 :]:
            assert size <= max(node.pin_budget, reserved)


@settings(max_examples=examples.number(100))
@given(nodes(), requests(), pins(), st.integers(0, 3))
def test_plan_never_fills_the_disk_to_the_threshold(
    node: plan.Node, wanted: list[Request], pinned: list[plan.Pinned], slots: int
) -> None:
    found = plan.decide(node, wanted, pinned, slots, NOW)
    by_ref = {want.ref: want for want in wanted}
    used = node.used + sum(want.need for want in wanted if want.running)
    used += sum(by_ref[ref].need for ref in found.pulls)

    if found.pulls and any(by_ref[ref].need for ref in found.pulls):
        assert used < node.gc_high * node.capacity
        assert node.capacity - used > node.eviction_free * node.capacity
    assert len(found.pulls) <= max(0, slots - sum(want.running for want in wanted))
    assert not any(by_ref[ref].blocked or by_ref[ref].present for ref in found.pulls)


@settings(max_examples=examples.number(100))
@given(nodes(), requests(), pins(), st.integers(0, 3))
def test_plan_under_pressure_only_releases_weakest_first(
    node: plan.Node, wanted: list[Request], pinned: list[plan.Pinned], slots: int
) -> None:
    node = dataclasses.replace(node, free=node.capacity // 100)
    found = plan.decide(node, wanted, pinned, slots, NOW)
    by_hold = {pin.hold: pin for pin in pinned}
    pressed = [by_hold[r.hold] for r in found.releases if r.reason == plan.Reason.PRESSURE]

    assert found.pause
    assert not found.pulls
    assert not found.pins
    # A pin ranks at least as high as its request.
    ranks = {(want.ref, want.digest): want.rank for want in wanted if want.pins}
    order = [max(pin.rank, ranks.get((pin.ref, pin.digest), pin.rank)) for pin in pressed]
    assert order == sorted(order)
    assert not any(pin.in_use for pin in pressed)
    kept = [p for p in pinned if p.hold not in {r.hold for r in found.releases} and not p.in_use]
    freed = union(p.parts for p in pinned) - union(
        p.parts for p in pinned if p.hold not in {r.hold for r in found.releases}
    )
    shortage = node.used - node.gc_low * node.capacity - node.freeable
    assert not kept or freed >= shortage


@settings(max_examples=examples.number(100))
@given(nodes(), requests(), pins(), st.integers(0, 3))
def test_plan_releases_nothing_for_a_lower_rank(
    node: plan.Node, wanted: list[Request], pinned: list[plan.Pinned], slots: int
) -> None:
    found = plan.decide(node, wanted, pinned, slots, NOW)
    by_hold = {pin.hold: pin for pin in pinned}
    gain = {*found.pins, *found.pulls}
    for release in found.releases:
        if release.reason == plan.Reason.OUTRANKED:
            victim = by_hold[release.hold]
            winners = [w for w in wanted if w.ref in gain and release.text.endswith(w.ref)]
            assert winners
            assert all(
                victim.rank < w.rank or (victim.ref == w.ref and victim.digest != w.digest)
                for w in winners
            )


@settings(max_examples=examples.number(100))
@given(nodes(), requests(), pins(), st.integers(0, 3))
def test_plan_keeps_what_the_last_one_pinned(
    node: plan.Node, wanted: list[Request], pinned: list[plan.Pinned], slots: int
) -> None:
    """No pin is made and released in turns: the second plan releases none of the first's pins."""
    node = dataclasses.replace(node, free=node.capacity)  # the disk is not what this is about
    # A moved tag's old pin goes one plan after the new one is made; its place is free only then.
    digests = {pin.ref: pin.digest for pin in pinned}
    pinned = [pin for pin in pinned if pin.digest == digests[pin.ref]]
    wanted = [
        dataclasses.replace(w, running=False, digest=digests.get(w.ref, w.digest)) for w in wanted
    ]
    first = plan.decide(node, wanted, pinned, slots, NOW)
    gone = {release.hold for release in first.releases}
    after = [pin for pin in pinned if pin.hold not in gone]
    by_ref = {want.ref: want for want in wanted}
    done = []
    for ref in (*first.pins, *(r for r in first.pulls if by_ref[r].pins)):
        want = by_ref[ref]
        after.append(plan.Pinned(f"new {ref}", ref, want.digest, want.rank, want.parts))
        done.append(f"new {ref}")
    over = {r.ref for r in first.releases if r.reason is plan.Reason.EXPIRED}
    wanted = [
        dataclasses.replace(w, present=w.present or w.ref in first.pulls, fetch=0, unpack=0)
        for w in wanted
        if w.ref not in over  # the agent notes that its time is over
    ]
    second = plan.decide(node, wanted, after, 0, NOW)

    assert not {r.hold for r in second.releases} & set(done)


@settings(max_examples=examples.number(100))
@given(nodes(), requests(), pins(), st.integers(0, 3))
def test_plan_keeps_what_was_dropped_until_its_time(
    node: plan.Node, wanted: list[Request], pinned: list[plan.Pinned], slots: int
) -> None:
    found = plan.decide(node, wanted, pinned, slots, NOW)
    by_hold = {pin.hold: pin for pin in pinned}
    released = {release.hold for release in found.releases}
    for release in found.releases:
        if release.reason == plan.Reason.DROPPED:
            pin = by_hold[release.hold]
            assert pin.dropped_until is not None
            assert pin.dropped_until <= NOW
            assert not pin.retains
    for pin in pinned:
        over = pin.dropped_until is not None and pin.dropped_until <= NOW
        assert not over or pin.hold in released or pin.hold in found.retained
    assert not released & set(found.retained)
    assert all(by_hold[hold].retains for hold in found.retained)


def test_plan_gives_the_place_of_a_dropped_image_to_one_of_the_policy() -> None:
    """Of lower priority, too: what the settings list comes before what they listed."""
    node = plan.Node(1000, 900, 0.85, 0.8, 0.1, 100)
    dropped = Request("old", "policy", priority=9, dropped_until=NOW + 1)
    pin = plan.Pinned("h", "old", "d", dropped.rank, {"s a": 80}, dropped_until=NOW + 1)
    new = dataclasses.replace(present("new", "e", {"s b": 80}), priority=-9)

    assert plan.decide(node, [], [pin], 1, NOW).releases == ()
    found = plan.decide(node, [new], [pin], 1, NOW)
    assert [release.reason for release in found.releases] == [plan.Reason.OUTRANKED]
    assert found.pins == ("new",)


def present(ref: str, digest: str, parts: Mapping[str, int]) -> Request:
    return Request(ref, "policy", digest=digest, present=True, measured=True, parts=parts)


def test_plan_pins_a_moved_tag_before_it_releases_the_old() -> None:
    node = plan.Node(1000, 900, 0.85, 0.8, 0.1, 300)
    old = plan.Pinned("h", "r", "old", (1, 0, 0.0), {"s a": 100})
    new = present("r", "new", {"s b": 100})
    first = plan.decide(node, [new], [old], 1, NOW)
    both = [old, plan.Pinned("h2", "r", "new", (1, 0, 0.0), {"s b": 100})]
    second = plan.decide(node, [new], both, 1, NOW)

    assert first.pins == ("r",)
    assert first.releases == ()
    assert [r.hold for r in second.releases] == ["h"]
    assert second.releases[0].reason == plan.Reason.SUPERSEDED


def test_plan_keeps_an_expired_pin_in_use() -> None:
    node = plan.Node(1000, 900, 0.85, 0.8, 0.1, 300)
    pin = plan.Pinned("h", "r", "d", (0, 0, 0.0), {"s a": 1}, in_use=True, expires=NOW - 1)

    assert plan.decide(node, [], [pin], 1, NOW).releases == ()
    idle = dataclasses.replace(pin, in_use=False)
    assert plan.decide(node, [], [idle], 1, NOW).releases[0].reason == plan.Reason.EXPIRED


def test_plan_does_not_pin_again_what_expired() -> None:
    node = plan.Node(1000, 900, 0.85, 0.8, 0.1, 300)
    pin = plan.Pinned("h", "r", "d", (1, 0, 0.0), {"s a": 1}, expires=NOW - 1)
    request = dataclasses.replace(present("r", "d", {"s a": 1}), keep="for:60")
    found = plan.decide(node, [request], [pin], 1, NOW)

    assert [release.reason for release in found.releases] == [plan.Reason.EXPIRED]
    assert found.pins == ()
    over = dataclasses.replace(request, expired="d", expired_at=NOW)
    assert plan.decide(node, [over], [], 1, NOW).pins == ()
    used = dataclasses.replace(over, last_used=NOW + 1)
    moved = dataclasses.replace(over, digest="e")
    always = dataclasses.replace(over, keep="always")
    for again in (used, moved, always):
        assert plan.decide(node, [again], [], 1, NOW).pins == ("r",)
