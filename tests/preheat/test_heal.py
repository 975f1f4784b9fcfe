"""Pinned images stay: removals are healed without a byte, whatever happens in between."""

import asyncio

import pytest

from preheat import heal
from preheat.runtimes import base, cri_pb2
from tests.preheat.rig import MB, Clock, Rig, pinned, until
from tests.testbed import containerd, registry

# --- the healer alone -----------------------------------------------------------------------------


class FakeRuntime:
    """Counts heals."""

    def __init__(self) -> None:
        self.healed: list[tuple[str, ...]] = []

    async def heal(self, hold: base.Hold) -> int:
        self.healed.append(hold.names)
        return len(hold.names)


class Healed:
    """A healer on a fake runtime with a clock of its own."""

    def __init__(self, per_hour: int) -> None:
        self.now = 0.0
        self.pressed = False
        self.runtime = FakeRuntime()
        self.healer = heal.Healer(
            self.runtime,  # type: ignore[arg-type]
            self._pressed,
            per_hour,
            clock=lambda: self.now,
        )

    async def _pressed(self) -> bool:
        return self.pressed


def pin(name: str, *names: str, created: float = 1) -> base.Hold:
    return base.Hold(name, "pin", "r", "policy", names=names, created=created)


async def test_healer_limits_heals_in_any_hour() -> None:
    made = Healed(per_hour=3)
    made.healer.learn([pin("h", "r", "id")])
    times = []
    for _ in range(100):
        made.now += 120.0
        before = len(made.runtime.healed)
        await made.healer.removed("r")
        if len(made.runtime.healed) > before:
            times.append(made.now)

    assert len(times) > 6
    assert all(
        later - earlier >= heal.HOUR for earlier, later in zip(times, times[3:], strict=False)
    )
    assert made.healer.fights == ["r"]
    assert await made.healer.removed("somebody else's")


async def test_healer_counts_one_removal_of_several_records_once() -> None:
    made = Healed(per_hour=1)
    made.healer.learn([pin("h", "r", "id")])
    for name in ("r", "id"):
        made.now += 0.1
        assert await made.healer.removed(name)

    assert made.healer.counts.heals == made.healer.counts.removals == 1


async def test_healer_counts_a_removal_once_that_two_see() -> None:
    """The event, and the comparison of a cycle that runs meanwhile."""
    made = Healed(per_hour=5)
    made.healer.learn([pin("h", "r", "id")])
    heal_once = made.runtime.heal

    async def slowly(hold: base.Hold) -> int:
        await asyncio.sleep(0)
        return await heal_once(hold)

    made.runtime.heal = slowly  # type: ignore[method-assign]
    async with asyncio.TaskGroup() as group:
        group.create_task(made.healer.removed("r"))
        group.create_task(made.healer.resync(base.Inventory()))

    assert made.healer.counts.heals == made.healer.counts.removals == 1


async def test_healer_follows_the_newest_pin_of_a_tag() -> None:
    made = Healed(per_hour=3)
    made.healer.learn([pin("new", "r", "id-new", created=2), pin("old", "r", "id-old")])
    await made.healer.removed("id-old")
    await made.healer.removed("r")

    assert made.runtime.healed == [("id-old",), ("r", "id-new")]


async def test_healer_waits_under_pressure() -> None:
    made = Healed(per_hour=3)
    made.healer.learn([pin("h", "r")])
    made.pressed = True
    assert not await made.healer.removed("r")
    made.pressed = False
    await made.healer.resync(base.Inventory())

    assert made.healer.counts.refused_pressure == 1
    assert made.runtime.healed == [("r",)]


async def test_healer_leaves_forgotten_pins_alone() -> None:
    made = Healed(per_hour=3)
    hold = pin("h", "r")
    made.healer.learn([hold])
    made.healer.forget(hold)

    assert await made.healer.removed("r")
    assert made.runtime.healed == []


# --- the room on containerd -----------------------------------------------------------------------


async def listed(kubelet: containerd.Kubelet, ref: str) -> cri_pb2.Image | None:
    """The image in the runtime's list, complete with its tag and digest."""
    for each in await kubelet.images():
        if ref in each.repo_tags and each.repo_digests:
            return each
    return None


async def back(rig: Rig, ref: str, seconds: float = 10.0) -> None:
    await until(lambda: listed(rig.kubelet, ref), seconds, f"{ref} to be listed")


def honours(rig: Rig) -> bool:
    """Whether this containerd tells the kubelet about pins."""
    return rig.daemon.release != "bookworm"


@pytest.mark.real
async def test_removed_image_returns_without_a_byte(rig: Rig) -> None:
    """Also with the registry down, and by whichever name it is removed."""
    layers = [registry.layer("h1", 2 * MB, 21), registry.layer("h2", MB, 22)]
    image = rig.push("fw/heal:v1", layers)
    digest_name = f"{rig.gate.host}/fw/heal@{image.pushed.top}"
    async with rig.running(images=[{"ref": image.ref}]) as room:
        await pinned(room, image.ref)
        content = set(await rig.kubelet.content())
        snapshots = await rig.kubelet.snapshots()
        rig.gate.reset()
        with rig.gate.down():
            for name in (image.ref, image.pushed.config, digest_name) * 5:
                await rig.kubelet.remove(name)
                await back(rig, image.ref)

        # Its records come back one by one; the mark is on one of them.
        async def marked() -> bool:
            found = await listed(rig.kubelet, image.ref)
            return found is not None and found.pinned is honours(rig)

        await until(marked, 10.0, "the mark")
        found = await listed(rig.kubelet, image.ref)
        await rig.kubelet.collect()
        counts = room.reconciler.healer.counts

    assert rig.gate.requests() == []
    assert found is not None
    assert found.id == image.pushed.config
    assert set(await rig.kubelet.content()) == content
    assert await rig.kubelet.snapshots() == snapshots
    assert counts.heals >= 1


@pytest.mark.real
async def test_pull_of_the_tag_keeps_the_pin(rig: Rig) -> None:
    """imagePullPolicy: Always rewrites the tag's record at every pod start."""
    image = rig.push("fw/again:v1")
    async with rig.running(images=[{"ref": image.ref}]) as room:
        await pinned(room, image.ref)
        for _ in range(3):
            await rig.kubelet.pull(image.ref)
        status = await rig.kubelet.status(image.ref)
        await rig.kubelet.remove(image.ref)
        await back(rig, image.ref)

    assert status is not None
    assert status.pinned is honours(rig)


@pytest.mark.real
async def test_restart_between_removal_and_heal_loses_nothing(rig: Rig) -> None:
    image = rig.push("fw/gap:v1")
    async with rig.running(images=[{"ref": image.ref}]) as room:
        await pinned(room, image.ref)
    # No agent runs: nobody sees the removal, and containerd dies on top of it.
    await rig.kubelet.remove(image.ref)
    await rig.kubelet.collect()
    assert await listed(rig.kubelet, image.ref) is None
    rig.daemon.kill()
    rig.daemon.start()
    rig.gate.reset()
    async with rig.running(images=[{"ref": image.ref}]) as room:
        await back(rig, image.ref)
        # And once more under the agent's eyes: the event is lost with the process.
        room.reconciler.healer.learn([])
        await rig.kubelet.remove(image.ref)
        rig.daemon.kill()
        rig.daemon.start()
        # A heal that was in flight lets the breaker rest, for the second time up to 10 s.
        await back(rig, image.ref, 40.0)
        await pinned(room, image.ref)

    assert sum(seen.bytes for seen in rig.gate.requests() if "/blobs/" in seen.path) < MB / 2


@pytest.mark.real
async def test_heals_stop_at_the_limit_with_a_finding(rig: Rig) -> None:
    image = rig.push("fw/fight:v1")
    clock = Clock()
    async with rig.running(images=[{"ref": image.ref}], heal={"per_hour": 2}) as room:
        healer = room.reconciler.healer
        healer._clock = clock.monotonic
        await pinned(room, image.ref)
        for heals in (1, 2):
            clock.advance(heal.SAME_REMOVAL_SECONDS + 1)
            await rig.remove_all_names(image.ref)
            assert healer.counts.heals == heals
            await back(rig, image.ref)
        clock.advance(heal.SAME_REMOVAL_SECONDS + 1)
        await rig.remove_all_names(image.ref)
        await room.reconciler.cycle()
        await room.reconcile(room.reconciler.section)
        left = await rig.kubelet.records()  # the runtime's list of images lags behind them

    assert not left
    assert healer.counts.refused_limit
    assert healer.counts.heals == 2
    assert "preheat-gc-fight" in [each.rule for each in rig.reported.found]


@pytest.mark.real
async def test_no_heal_under_disk_pressure(rig: Rig) -> None:
    image = rig.push("fw/press:v1")
    wanted = [{"ref": image.ref}]
    async with rig.running(images=wanted) as room:
        await pinned(room, image.ref)
        pressed = {"gc_high": 0.0001, "gc_low": 0.0001, "eviction_free": 0.001}
        await room.reconcile(rig.section(images=wanted, kubelet=pressed))
        await room.reconciler.cycle()
        released = not room.show(image.ref).pinned
        await rig.remove(image.ref)
        await room.reconciler.cycle()
        await rig.kubelet.collect()

    assert released
    assert await listed(rig.kubelet, image.ref) is None
    assert await rig.kubelet.snapshots() == set()


@pytest.mark.real
async def test_unpin_lets_the_image_go(rig: Rig) -> None:
    image = rig.push("fw/letgo:v1")
    wanted = [{"ref": image.ref}]
    async with rig.running(images=wanted) as room:
        await pinned(room, image.ref)
        row = await room.unpin(image.ref)
        status = await rig.kubelet.status(image.ref)
        await rig.remove(image.ref)
        await room.reconciler.cycle()
        gone = await listed(rig.kubelet, image.ref)
        left = await rig.kubelet.content()
    # The decision outlives the agent.
    async with rig.running(images=wanted) as room:
        await room.reconciler.cycle()
        again = room.show(image.ref)
        asked = await room.pin(image.ref)
        await pinned(room, image.ref)

    assert row is not None
    assert (row.state, row.pinned) == ("released", False)
    assert status is not None
    assert not status.pinned
    assert gone is None
    assert left == {}
    assert again.state == "released"
    assert asked.by == "operator"


@pytest.mark.real
async def test_moved_tag_swaps_pins_without_a_gap(rig: Rig) -> None:
    base_layer = registry.layer("base", 2 * MB, 28)
    old = rig.push("fw/moved:main", [base_layer], mark="old")
    seen: list[set[str]] = []
    stop = asyncio.Event()

    async def watch() -> None:
        while not stop.is_set():
            seen.append(await rig.pin_images())

    async with rig.running(images=[{"ref": old.ref}]) as room:
        await pinned(room, old.ref)
        new = rig.push("fw/moved:main", [base_layer, registry.layer("top", MB, 29)], mark="new")
        rig.gate.reset()
        watcher = asyncio.create_task(watch())
        await until(lambda: seen)
        room.reconciler.resolver.again(old.ref)
        room.reconciler.wake()
        await until(lambda: room.show(old.ref).digest == new.pushed.top)
        await pinned(room, old.ref)
        await until(lambda: seen[-1] == {new.pushed.config})
        stop.set()
        await watcher

    assert all(seen)
    assert seen[0] == {old.pushed.config}
    assert rig.gate.blob_bytes < 1.2 * MB  # the base was not fetched again
