"""What is looked at next, and how rarely. Pure."""

import dataclasses
import itertools

from tests.volumes.audit import world
from volumes.audit import attention
from volumes.inventory import model

IDLE = world.device(name="rbd0", number=(252, 0), diskseq=1)
OTHER = world.device(name="rbd1", number=(252, 1), diskseq=2)
LEAKED = world.device(name="rbd2", number=(252, 2), diskseq=3, active=("ext4",))


def step(
    now: float, memory: attention.Memory, *devices: model.Device, fresh: bool = False
) -> tuple[attention.Wish, attention.Memory]:
    scene = dataclasses.replace(world.scene(devices=devices), now=now)
    assert scene.inventory is not None
    return attention.consider(scene, scene.inventory, memory, scene.settings, fresh=fresh)


def pause(now: float, memory: attention.Memory) -> float:
    return attention.next_look(memory, world.scene().settings, now, None, None)


def test_an_idle_mapping_waits_for_its_minute_and_wakes_nobody_before() -> None:
    wish, memory = step(1000.0, attention.Memory(deep_at=1000.0), IDLE)
    assert not wish
    assert pause(1000.0, memory) == 60.0
    wish, memory = step(1060.0, memory, IDLE)
    assert wish == attention.Wish(deep=False, users_of=("rbd0",))
    assert pause(1060.0, memory) == 240.0  # the slow pass; nothing else is waited for


def test_devices_that_wait_for_the_same_look_are_asked_about_together() -> None:
    _, memory = step(1000.0, attention.Memory(deep_at=1000.0), IDLE)
    _, memory = step(1003.0, memory, IDLE, OTHER)
    wish, memory = step(1060.0, memory, IDLE, OTHER)
    assert wish.users_of == ("rbd0", "rbd1")
    _, memory = step(1000.0, attention.Memory(deep_at=1000.0), IDLE)
    _, memory = step(1030.0, memory, IDLE, OTHER)
    wish, _ = step(1060.0, memory, IDLE, OTHER)
    assert wish.users_of == ("rbd0",)  # the other has hardly begun to wait


def test_a_device_that_no_mount_explains_is_asked_about_at_once_and_then_ever_rarer() -> None:
    wish, memory = step(1000.0, attention.Memory(deep_at=1000.0), LEAKED)
    assert wish.deep  # the namespaces first
    wish, memory = step(1000.0, memory, LEAKED, fresh=True)
    assert wish == attention.Wish(deep=False, users_of=("rbd2",))
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
    _, memory = step(1000.0, attention.Memory(deep_at=1000.0), IDLE, OTHER)
    _, memory = step(1001.0, memory, OTHER)
    assert [name for name, _, _ in memory.suspects] == ["rbd1"]
