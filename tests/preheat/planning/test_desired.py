"""Requests: who wants which image, from the settings, from operators and from use."""

import dataclasses
from typing import Any

import pytest

from preheat import settings
from preheat.image import manifest
from preheat.planning import desired
from preheat.planning.desired import Request
from preheat.runtimes import base

DIGEST = "sha256:" + "a" * 64
REF = "r.e/fw/a:v1"


def section(**more: Any) -> settings.PreheatSettings:
    return settings.PreheatSettings.model_validate(more)


def hold(role: Any, by: Any, state: str = "", keep: str = "") -> base.Hold:
    return base.Hold(role, REF, by, state=state, keep=keep, id=f"nodeagent-{role}-1")


def test_gather_takes_the_images_of_this_node() -> None:
    images = [
        {"ref": REF, "pin": {"for": "72h"}, "priority": 3},
        {"ref": "r.e/fw/b:v1", "nodes": {"gpu": "h100"}},
        {"ref": "r.e/fw/c:v1", "nodes": {"gpu": "h100", "zone": "a"}},
    ]
    found = desired.gather(section(images=images, node_labels={"gpu": "h100"}), ())

    assert set(found) == {REF, "r.e/fw/b:v1"}
    assert found[REF] == Request(REF, "policy", "for:259200", 3)


def test_gather_puts_operators_before_the_policy() -> None:
    policy = section(images=[{"ref": REF, "priority": 3, "pin": "never"}])
    found = desired.gather(policy, [hold("pull", "operator", keep="for:60"), hold("pin", "policy")])

    assert found[REF] == Request(REF, "operator", "for:60", 3, share_private=True)


@pytest.mark.parametrize("state", ["released", "paused", "done"])
def test_gather_applies_notes(state: str) -> None:
    policy = section(images=[{"ref": REF}])
    (found,) = desired.gather(policy, [hold("note", "operator", state)]).values()

    assert [getattr(found, each) for each in ("released", "paused", "done")] == [
        state == each for each in ("released", "paused", "done")
    ]


def test_rank_orders_retained_policy_operator() -> None:
    requests = [
        Request(REF, "operator", last_used=1),
        Request(REF, "policy", priority=5),
        Request(REF, "policy", priority=-5),
        Request(REF, "retained", last_used=2),
        Request(REF, "retained", priority=9, last_used=1),
    ]

    assert sorted(requests, key=lambda each: each.rank, reverse=True) == requests


@pytest.mark.parametrize(
    ("more", "pins"),
    [
        ({}, True),
        ({"keep": "for:60"}, True),
        ({"keep": "never"}, False),
        ({"released": True}, False),
        ({"measured": False}, False),
    ],
)
def test_request_pins_what_it_knows_and_may_keep(more: dict[str, Any], pins: bool) -> None:
    assert Request(REF, "policy", **({"measured": True} | more)).pins is pins


LEAST = settings.RetainSettings.at_least


def inventory(size: int = LEAST, **more: Any) -> base.ImageInventory:
    target = manifest.Target("t", DIGEST, 1)
    layer = manifest.Layer("sha256:l", size, "tar", "sha256:c")
    return base.ImageInventory(
        records=(base.Record(REF, target),),
        in_use=frozenset({"id"}),
        shapes={DIGEST: manifest.Shape(target, (), (layer,), "id")},
        **more,
    )


def test_retained_are_images_in_use() -> None:
    retain = section(retain={"for": "1h"})
    found = desired.retained(retain, inventory(), {})

    assert found == {REF: Request(REF, "retained", "for:3600")}
    assert desired.retained(section(), inventory(), {}) == {}
    assert desired.retained(retain, inventory(LEAST - 1), {}) == {}
    assert desired.retained(retain, inventory(), {REF: found[REF]}) == {}
    released = inventory(holds=(hold("note", "operator", "released"),))
    assert desired.retained(retain, released, {}) == {}


NOW = 1000.0


def held(*found: base.Hold) -> base.ImageInventory:
    return base.ImageInventory(holds=found)


def at(hold: base.Hold, created: float) -> base.Hold:
    return dataclasses.replace(hold, created=created)


@pytest.mark.parametrize("role", ["pin", "pull"])
def test_what_the_settings_dropped_stays_until_its_time(role: Any) -> None:
    policy = section(drop_after="1h")
    kept = hold(role, "policy", keep="for:60")
    note = at(hold("note", "policy", "dropped"), NOW - 600)

    first = desired.lingering(policy, held(kept), {}, NOW)
    assert first == {REF: Request(REF, "policy", "for:60", dropped_until=NOW + 3600)}
    assert desired.newly_dropped(held(kept), first) == [REF]
    # The note says since when, whoever reads it.
    later = desired.lingering(policy, held(kept, note), {}, NOW)
    assert later[REF].dropped_until == NOW - 600 + 3600
    assert not later[REF].pins
    assert not later[REF].is_looked_up
    assert desired.newly_dropped(held(kept, note), later) == []
    assert desired.stale_notes(held(kept, note), later) == []
    assert not later[REF].is_ended(NOW)
    assert later[REF].is_ended(NOW + 3000)


def test_an_image_that_is_back_in_the_settings_was_never_dropped() -> None:
    policy = section(images=[{"ref": REF, "priority": 3}])
    inventory = held(hold("pin", "policy"), hold("note", "policy", "dropped"))
    wanted = desired.gather(policy, inventory.holds)

    assert desired.lingering(policy, inventory, wanted, NOW) == {}
    assert wanted[REF] == Request(REF, "policy", priority=3)
    assert [each.state for each in desired.stale_notes(inventory, wanted)] == ["dropped"]


def test_dropped_is_neither_what_an_operator_asked_nor_what_use_keeps() -> None:
    retain = section(retain={"for": "1h"})
    used, asked = hold("pin", "retained"), hold("pin", "operator")

    assert desired.lingering(retain, held(asked), {REF: Request(REF, "operator")}, NOW) == {}
    kept = desired.lingering(retain, held(used), {}, NOW)[REF]
    assert (kept.by, kept.keep, kept.dropped_until) == ("retained", "for:3600", None)
    # Without ``retain`` nobody asks for it any more.
    dropped = desired.lingering(section(drop_after=60), held(used), {}, NOW)[REF]
    assert dropped.dropped_until == NOW + 60
    assert dropped.rank < Request(REF, "policy", priority=-1000).rank


def test_a_released_image_is_not_kept_for_being_dropped() -> None:
    inventory = held(hold("pin", "policy"), hold("note", "operator", "released"))
    assert desired.lingering(section(), inventory, {}, NOW)[REF].is_ended(NOW)


def test_stale_notes_are_those_about_nothing() -> None:
    paused, released = hold("note", "operator", "paused"), hold("note", "operator", "released")
    present = inventory(holds=(paused, released))
    absent = base.ImageInventory(holds=(paused, released))

    assert desired.stale_notes(present, {}) == [paused]
    assert desired.stale_notes(absent, {}) == [paused, released]
    assert desired.stale_notes(absent, {REF: Request(REF, "policy")}) == []


def test_notes_of_a_clock_that_was_ahead_are_known() -> None:
    wanted = {REF: Request(REF, "policy", keep="for:60")}
    now, ahead = (at(hold("note", "policy", "expired"), NOW + n) for n in (0.0, 3600.0))
    assert desired.stale_notes(held(now), wanted) == []
    assert desired.stale_notes(held(ahead), wanted) == []
    assert desired.notes_ahead(held(now), NOW) == []
    assert desired.notes_ahead(held(ahead), NOW) == [ahead]
