"""What is looked at next, and how rarely. Pure."""

import dataclasses
import itertools
from pathlib import Path

import pytest

from linux import blockdev
from nodeagent import findings as reporting
from tests.volumes.audit import world
from volumes.audit import scheduler, service, status
from volumes.audit.inventory import model, scan

IDLE = world.device(name="rbd0", number=(252, 0), diskseq=1)
OTHER = world.device(name="rbd1", number=(252, 1), diskseq=2)
LEAKED = world.device(name="rbd2", number=(252, 2), diskseq=3, active=("ext4",))


def consider(
    now: float, memory: scheduler.Memory, *devices: blockdev.BlockDevice, fresh: bool = False
) -> tuple[scheduler.Depth, scheduler.Memory]:
    scene = dataclasses.replace(world.scene(devices=devices), now=now)
    assert scene.inventory is not None
    return scheduler.consider(scene, scene.inventory, memory, fresh=fresh)


def step(
    now: float, memory: scheduler.Memory, *devices: blockdev.BlockDevice, fresh: bool = False
) -> tuple[scheduler.Depth, scheduler.Memory]:
    """As ``consider``, and what is wished for is then looked at with success."""
    wish, memory = consider(now, memory, *devices, fresh=fresh)
    return wish, scheduler.fulfilled(memory, wish, now)


def pause(now: float, memory: scheduler.Memory) -> float:
    return scheduler.next_round(memory, world.scene().settings, now, None, None)


def test_an_idle_mapping_waits_for_its_minute_and_wakes_nobody_before() -> None:
    wish, memory = step(1000.0, scheduler.Memory(deep_at=1000.0), IDLE)
    assert not wish
    assert pause(1000.0, memory) == 60.0
    wish, memory = step(1060.0, memory, IDLE)
    assert wish == scheduler.Depth(deep=False, users_of=("rbd0",))
    assert pause(1060.0, memory) == 240.0  # the slow pass; nothing else is waited for


def test_devices_that_wait_for_the_same_look_are_asked_about_together() -> None:
    _, memory = step(1000.0, scheduler.Memory(deep_at=1000.0), IDLE)
    _, memory = step(1003.0, memory, IDLE, OTHER)
    wish, memory = step(1060.0, memory, IDLE, OTHER)
    assert wish.users_of == ("rbd0", "rbd1")
    _, memory = step(1000.0, scheduler.Memory(deep_at=1000.0), IDLE)
    _, memory = step(1030.0, memory, IDLE, OTHER)
    wish, _ = step(1060.0, memory, IDLE, OTHER)
    assert wish.users_of == ("rbd0",)  # the other has hardly begun to wait


def test_a_device_that_no_mount_explains_is_asked_about_at_once_and_then_ever_rarer() -> None:
    wish, memory = step(1000.0, scheduler.Memory(deep_at=1000.0), LEAKED)
    assert wish.deep  # the namespaces first
    wish, memory = step(1000.0, memory, LEAKED, fresh=True)
    assert wish == scheduler.Depth(deep=False, users_of=("rbd2",))
    asked = []
    now = 1000.0
    while now < 1400:
        now += 1.0
        wish, memory = step(now, memory, LEAKED, fresh=True)
        if wish.users_of:
            asked.append(now)
    gaps = [b - a for a, b in itertools.pairwise(asked)]
    assert gaps[:4] == [4, 8, 16, 32]
    assert set(gaps[4:]) == {60}


def test_a_device_that_went_is_forgotten() -> None:
    _, memory = step(1000.0, scheduler.Memory(deep_at=1000.0), IDLE, OTHER)
    _, memory = step(1001.0, memory, OTHER)
    assert [name for name, _, _ in memory.suspects] == ["rbd1"]


def test_what_was_wished_for_but_not_done_is_wished_for_again() -> None:
    start = scheduler.Memory(deep_at=1000.0)
    wish, memory = consider(1001.0, start, LEAKED)
    assert wish.deep
    assert memory.deep_at == 1000.0
    again, memory = consider(1002.0, memory, LEAKED)  # that look timed out
    assert again.deep
    memory = scheduler.fulfilled(memory, again, 1002.0)
    wish, memory = consider(1003.0, memory, LEAKED, fresh=True)
    assert wish.users_of == ("rbd2",)
    again, memory = consider(1004.0, memory, LEAKED, fresh=True)
    assert again == wish
    memory = scheduler.fulfilled(memory, again, 1004.0)
    assert not consider(1005.0, memory, LEAKED, fresh=True)[0]


async def test_a_short_lived_private_copy_is_looked_for_again_before_it_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``unshare -m`` of two seconds, just when the namespaces are visited."""
    kubelet = world.place("/", device=(8, 1))
    copy = world.space(world.place("/", device=(8, 1), propagation="private"))
    deep_looks = 0
    lasts = False
    now = 1000.0

    async def look(request: scan.Request, deadline: float) -> model.Inventory:
        nonlocal deep_looks
        deep_looks += request.deep
        return dataclasses.replace(
            world.INVENTORY,
            deep=request.deep,
            devices=(),
            kubelet=kubelet,
            spaces=(copy,) if request.deep and (deep_looks == 1 or lasts) else (),
            spaces_at=now if request.deep else 0.0,
        )

    def found() -> list[str]:
        return [f.rule for f in audit.findings if f.rule == "private-propagation"]

    monkeypatch.setattr("time.time", lambda: now)
    for lasts in (False, True):
        deep_looks = 0
        audit = service.Audit(
            world.scene().settings,
            drivers=("rbd",),
            state_dir=tmp_path,
            reporter=reporting.Findings(),
        )
        monkeypatch.setattr(audit.scanner, "scan", look)
        for after, looks in ((0.0, 1), (10.0, 1), (6.0, 2), (20.0, 2)):
            now += after
            assert found() == []
            await audit.round()
            assert deep_looks == looks
            if looks == 2:
                break
        assert found() == (["private-propagation"] if lasts else [])


def test_users_of_a_layer_are_kept_until_the_device_is_asked_about_again() -> None:
    layered = world.device(layers=(blockdev.Layer("dm-0", (253, 0)),))
    user = model.User(world.OWNER, (253, 0), ("fd 3",), 99)
    asked = dataclasses.replace(
        world.INVENTORY, devices=(layered,), users=(user,), users_of=((252, 0), (253, 0))
    )
    quick = dataclasses.replace(world.INVENTORY, devices=(layered,), deep=False)
    kept = scheduler.merged(quick, asked)
    assert (kept.users, kept.users_of) == ((user,), ((252, 0), (253, 0)))
    again = dataclasses.replace(quick, users_of=((252, 0), (253, 0)))
    assert scheduler.merged(again, kept).users == ()
    assert scheduler.merged(world.INVENTORY, kept).users == ()  # the layer went


def test_gaps_of_a_visit_to_the_namespaces_stand_until_the_next_one() -> None:
    gaps = ("mount namespace 7: Operation not permitted",)
    deep = dataclasses.replace(world.INVENTORY, deep_gaps=gaps, space_gaps=gaps, gaps=("old",))
    quick = dataclasses.replace(world.INVENTORY, deep=False, gaps=("new",))
    seen = scheduler.merged(scheduler.merged(quick, deep), deep)
    assert (seen.gaps, seen.deep_gaps, seen.space_gaps) == (("new",), gaps, gaps)
    assert scheduler.merged(world.INVENTORY, seen).space_gaps == ()


def test_a_mount_during_a_visit_is_a_change_after_it() -> None:
    memory = scheduler.Memory(deep_at=1000.0, changed_at=1001.0)
    assert not scheduler.fulfilled(memory, scheduler.Depth(True, ()), 1002.0).changed
    memory = dataclasses.replace(memory, changed_at=1002.5)
    assert scheduler.fulfilled(memory, scheduler.Depth(True, ()), 1002.0).changed


def test_a_failed_look_is_tried_again_soon_but_not_at_once() -> None:
    settings = world.scene().settings
    memory = scheduler.Memory()  # a visit is long overdue
    pause = scheduler.next_round(memory, settings, 1000.0, 0.0, 0.0, blind=True)
    assert pause == max(settings.settle, scheduler.RETRY_SECONDS)


async def test_a_visit_that_fails_keeps_the_rules_unknown_until_one_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = 2
    looks: list[bool] = []

    async def look(request: scan.Request, deadline: float) -> model.Inventory:
        looks.append(request.deep)
        if request.deep and looks.count(True) <= failures:
            raise scan.BlindError("volume audit", "no answer", "")
        hidden = ("3 processes may not be looked at",) if request.deep else ()
        return dataclasses.replace(world.INVENTORY, deep=request.deep, devices=(), deep_gaps=hidden)

    audit = service.Audit(
        world.scene().settings, drivers=("rbd",), state_dir=tmp_path, reporter=reporting.Findings()
    )
    monkeypatch.setattr(audit.scanner, "scan", look)
    for _ in range(failures):
        assert await audit.round() is None
        assert {s.name: s.state for s in audit.states}["leaked-mount"] == "unknown"
    assert looks == [False, True] * failures  # a quick look that works does not make it see
    assert await audit.round() is not None
    assert {s.name: s.state for s in audit.states}["leaked-mount"] == "ok"
    assert await audit.round() is not None
    assert looks == [False, True] * (failures + 1) + [False]
    assert status.overview(audit)["gaps"] == ["3 processes may not be looked at"]
