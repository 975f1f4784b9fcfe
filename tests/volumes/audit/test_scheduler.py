"""Which scan is next, and how often. Pure."""

import dataclasses
import itertools

from linux import blockdev
from tests.volumes.audit import world
from volumes.audit import scheduler
from volumes.audit.inventory import model

IDLE = world.device(name="rbd0", number=(252, 0), diskseq=1)
OTHER = world.device(name="rbd1", number=(252, 1), diskseq=2)
LEAKED = world.device(name="rbd2", number=(252, 2), diskseq=3, active=("ext4",))


def consider(
    now: float, memory: scheduler.ScanMemory, *devices: blockdev.BlockDevice, fresh: bool = False
) -> tuple[scheduler.Depth, scheduler.ScanMemory]:
    scene = dataclasses.replace(world.scene(devices=devices), now=now)
    assert scene.inventory is not None
    return scheduler.consider(scene, scene.inventory, memory, fresh=fresh)


def step(
    now: float, memory: scheduler.ScanMemory, *devices: blockdev.BlockDevice, fresh: bool = False
) -> tuple[scheduler.Depth, scheduler.ScanMemory]:
    """``consider``, followed by a successful scan of what it asks for."""
    depth, memory = consider(now, memory, *devices, fresh=fresh)
    return depth, scheduler.fulfilled(memory, depth, now)


def pause(now: float, memory: scheduler.ScanMemory) -> float:
    return scheduler.next_round(memory, world.scene().settings, now, None, None)


def test_idle_mapping_is_searched_after_a_minute() -> None:
    depth, memory = step(1000.0, scheduler.ScanMemory(deep_at=1000.0), IDLE)
    assert not depth
    assert pause(1000.0, memory) == 60.0
    depth, memory = step(1060.0, memory, IDLE)
    assert depth == scheduler.Depth(deep=False, users_of=("rbd0",))
    assert pause(1060.0, memory) == 240.0  # the full scan; nothing else is due


def test_due_devices_share_one_search() -> None:
    _, memory = step(1000.0, scheduler.ScanMemory(deep_at=1000.0), IDLE)
    _, memory = step(1003.0, memory, IDLE, OTHER)
    depth, memory = step(1060.0, memory, IDLE, OTHER)
    assert depth.users_of == ("rbd0", "rbd1")
    _, memory = step(1000.0, scheduler.ScanMemory(deep_at=1000.0), IDLE)
    _, memory = step(1030.0, memory, IDLE, OTHER)
    depth, _ = step(1060.0, memory, IDLE, OTHER)
    assert depth.users_of == ("rbd0",)  # the other has hardly begun to wait


def test_unexplained_device_is_searched_at_once_then_less_often() -> None:
    depth, memory = step(1000.0, scheduler.ScanMemory(deep_at=1000.0), LEAKED)
    assert depth.deep  # the namespaces first
    depth, memory = step(1000.0, memory, LEAKED, fresh=True)
    assert depth == scheduler.Depth(deep=False, users_of=("rbd2",))
    asked = []
    now = 1000.0
    while now < 1400:
        now += 1.0
        depth, memory = step(now, memory, LEAKED, fresh=True)
        if depth.users_of:
            asked.append(now)
    gaps = [b - a for a, b in itertools.pairwise(asked)]
    assert gaps[:4] == [4, 8, 16, 32]
    assert set(gaps[4:]) == {60}


def test_detached_device_is_forgotten() -> None:
    _, memory = step(1000.0, scheduler.ScanMemory(deep_at=1000.0), IDLE, OTHER)
    _, memory = step(1001.0, memory, OTHER)
    assert [name for name, _, _ in memory.suspects] == ["rbd1"]


def test_failed_scan_is_requested_again() -> None:
    start = scheduler.ScanMemory(deep_at=1000.0)
    depth, memory = consider(1001.0, start, LEAKED)
    assert depth.deep
    assert memory.deep_at == 1000.0
    again, memory = consider(1002.0, memory, LEAKED)  # that look timed out
    assert again.deep
    memory = scheduler.fulfilled(memory, again, 1002.0)
    depth, memory = consider(1003.0, memory, LEAKED, fresh=True)
    assert depth.users_of == ("rbd2",)
    again, memory = consider(1004.0, memory, LEAKED, fresh=True)
    assert again == depth
    memory = scheduler.fulfilled(memory, again, 1004.0)
    assert not consider(1005.0, memory, LEAKED, fresh=True)[0]


def test_merged_keeps_users_until_the_next_search() -> None:
    layered = world.device(layers=(blockdev.DeviceLayer("dm-0", (253, 0)),))
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


def test_mount_during_a_visit_counts_as_change_after_it() -> None:
    memory = scheduler.ScanMemory(deep_at=1000.0, changed_at=1001.0)
    assert not scheduler.fulfilled(memory, scheduler.Depth(True, ()), 1002.0).changed
    memory = dataclasses.replace(memory, changed_at=1002.5)
    assert scheduler.fulfilled(memory, scheduler.Depth(True, ()), 1002.0).changed


def test_next_round_after_a_failed_scan() -> None:
    settings = world.scene().settings
    memory = scheduler.ScanMemory()  # a visit is long overdue
    pause = scheduler.next_round(memory, settings, 1000.0, 0.0, 0.0, blind=True)
    assert pause == max(settings.settle, scheduler.RETRY_SECONDS)
