"""Pinned images stay: removals are healed without a byte, whatever happens in between."""

import asyncio

import pytest

from preheat.image import manifest
from preheat.pulling import heal
from preheat.runtimes import base, cri_pb2
from preheat.settings import PreheatSettings
from tests.preheat.rig import MB, Clock, Rig, pinned, until
from tests.testbed import containerd, registry

# --- the healer alone -----------------------------------------------------------------------------


class FakeRuntime:
    """Counts heals."""

    def __init__(self) -> None:
        self.healed: list[tuple[str, ...]] = []
        self.records: dict[str, str] = {}  # name -> digest

    async def target_of(self, name: str) -> manifest.Target | None:
        digest = self.records.get(name)
        return None if digest is None else manifest.Target("t", digest, 1)

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

    def learn(self, *pins: base.Hold, **records: str) -> None:
        """These are the pins; ``records``: what names mean, as an inventory shows it."""
        found = tuple(
            base.Record(name, manifest.Target("t", digest, 1)) for name, digest in records.items()
        )
        self.healer.learn(base.ImageInventory(records=found, holds=pins), self.healer.moves)

    async def removed(self, name: str) -> tuple[str, ...]:
        """The names that come back when this one is removed."""
        self.runtime.healed.clear()
        await self.healer.changed(base.Change(name, "removed"))
        return self.runtime.healed[0] if self.runtime.healed else ()


OLD, NEW, OLD_ID, NEW_ID = (f"sha256:{letter * 64}" for letter in "abcd")


def pin(name: str, *names: str, created: float = 1, digest: str = OLD) -> base.Hold:
    target = manifest.Target("t", digest, 1)
    return base.Hold("pin", "r", "policy", target, names=names, created=created, id=name)


async def test_healer_limits_heals_in_any_hour() -> None:
    made = Healed(per_hour=3)
    made.learn(pin("h", "r", OLD_ID))
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


@pytest.mark.parametrize(("every", "is_fight"), [(300.0, True), (590.0, True), (1200.0, False)])
async def test_a_fight_with_the_kubelet_is_told_while_the_image_is_still_restored(
    every: float, is_fight: bool
) -> None:
    """The kubelet collects at most every five minutes: no limit of heals is reached by it."""
    made = Healed(per_hour=PreheatSettings.heals_per_hour)
    made.learn(pin("h", "r", OLD_ID))
    while made.now < 2 * heal.HOUR:
        made.now += every
        assert await made.healer.removed("r")
    assert made.healer.fights == ["r"] * is_fight
    made.now += heal.HOUR
    assert made.healer.fights == []


async def test_healer_counts_one_removal_of_several_records_once() -> None:
    made = Healed(per_hour=1)
    made.learn(pin("h", "r", OLD_ID))
    for name in ("r", OLD_ID):
        made.now += 0.1
        assert await made.healer.removed(name)

    assert made.healer.counts.heals == made.healer.counts.removals == 1


async def test_healer_counts_a_removal_once_that_two_see() -> None:
    """The event, and the comparison of a cycle that runs meanwhile."""
    made = Healed(per_hour=5)
    made.learn(pin("h", "r", OLD_ID))
    heal_once = made.runtime.heal

    async def slowly(hold: base.Hold) -> int:
        await asyncio.sleep(0)
        return await heal_once(hold)

    made.runtime.heal = slowly  # type: ignore[method-assign]
    async with asyncio.TaskGroup() as group:
        group.create_task(made.healer.removed("r"))
        group.create_task(made.healer.resync(base.ImageInventory(content={OLD: 1})))

    assert made.healer.counts.heals == made.healer.counts.removals == 1


async def test_healer_follows_the_newest_pin_of_a_tag() -> None:
    made = Healed(per_hour=3)
    new = pin("new", "r", NEW_ID, created=2, digest=NEW)
    made.learn(new, pin("old", "r", OLD_ID))
    await made.healer.removed(OLD_ID)
    await made.healer.removed("r")

    assert made.runtime.healed == [(OLD_ID,), ("r", NEW_ID)]


# What happens to the records of a pinned image, r its reference, and what a removal of the last
# name then brings back. "t" is a tag that nobody asked for: it named the digest at the pin.
MOVES = {
    "nothing": ([], "t", {"r", "t", OLD_ID, f"x@{OLD}"}),
    "the tag moves": ([("moved", "t", NEW)], "t", set()),
    "the tag moves, the image goes": ([("moved", "t", NEW)], OLD_ID, {"r", OLD_ID, f"x@{OLD}"}),
    "the tag moves and is gone before we look": ([("moved", "t", "")], "t", set()),
    "the tag goes and comes anew": ([("made", "t", NEW)], "t", set()),
    "the tag comes back": ([("moved", "t", NEW), ("moved", "t", OLD)], "t", {"r", "t", OLD_ID,
                           f"x@{OLD}"}),
    "the reference moves": ([("moved", "r", NEW)], "r", set()),
    "the reference is pulled anew, unmoved": ([("moved", "r", OLD)], "r", {"r", "t", OLD_ID,
                                              f"x@{OLD}"}),
    "our own heal": ([("made", "r", "")], "r", {"r", "t", OLD_ID, f"x@{OLD}"}),
}  # fmt: skip


@pytest.mark.parametrize("what", MOVES)
async def test_heal_brings_no_old_digest_back_under_a_name_that_moved(what: str) -> None:
    events, last, wanted = MOVES[what]
    made = Healed(per_hour=9)
    made.healer.sees(True)
    hold = pin("h", OLD_ID, "r", "t", f"x@{OLD}")
    made.learn(hold, r=OLD, t=OLD)
    for how, name, digest in events:
        made.runtime.records = {name: digest} if digest else {}
        await made.healer.changed(base.Change(name, how))  # type: ignore[arg-type]

    assert set(await made.removed(last)) == wanted
    # Nor later, by a comparison, or when another of its names is healed.
    await made.healer.resync(base.ImageInventory(content={OLD: 1}))
    moved = {name for _, name, digest in events if digest == NEW} - {"t" if "back" in what else ""}
    assert not moved & {name for names in made.runtime.healed for name in names}
    assert made.healer.restores(hold, "r") is ("r" not in moved)


async def test_after_a_gap_only_what_cannot_have_moved_comes_back() -> None:
    """And the pin's own reference, unless it was seen to move before."""
    made = Healed(per_hour=9)
    hold = pin("h", OLD_ID, "r", "t", f"x@{OLD}")
    made.healer.sees(True)
    made.learn(hold, r=OLD, t=OLD)
    made.healer.sees(False)
    made.learn(hold, t=OLD)  # asked for before the events come again: it may move after it
    assert set(await made.removed("r")) == {"r", OLD_ID, f"x@{OLD}"}
    made.healer.sees(True)
    made.learn(hold, r=NEW, t=OLD)
    made.healer.sees(False)
    assert await made.removed("r") == ()
    assert set(await made.removed(OLD_ID)) == {OLD_ID, f"x@{OLD}"}


async def test_inventory_that_is_older_than_an_event_does_not_count() -> None:
    made = Healed(per_hour=9)
    made.healer.sees(True)
    hold = pin("h", OLD_ID, "r", "t")
    made.learn(hold, r=OLD, t=OLD)
    moves = made.healer.moves
    made.runtime.records = {"t": NEW}
    await made.healer.changed(base.Change("t", "moved"))
    before = base.Record("t", manifest.Target("t", OLD, 1))
    made.healer.learn(base.ImageInventory(records=(before,), holds=(hold,)), moves)

    assert await made.removed("t") == ()


async def test_pin_of_what_a_tag_names_now_takes_the_tag_over() -> None:
    """Two pins of one reference: each time the one whose digest the tag last had."""
    made = Healed(per_hour=9)
    made.healer.sees(True)
    old, new = pin("old", OLD_ID, "r"), pin("new", NEW_ID, "r", created=2, digest=NEW)
    made.learn(old, new, r=NEW)
    assert set(await made.removed("r")) == {NEW_ID, "r"}
    made.runtime.records = {"r": OLD}  # it moves back, and the newer pin is still there
    await made.healer.changed(base.Change("r", "moved"))
    assert set(await made.removed("r")) == {OLD_ID, "r"}


async def test_healer_waits_under_pressure() -> None:
    made = Healed(per_hour=3)
    made.learn(pin("h", "r"))
    made.pressed = True
    assert not await made.healer.removed("r")
    made.pressed = False
    await made.healer.resync(base.ImageInventory(content={OLD: 1}))

    assert made.healer.counts.refused_pressure == 1
    assert made.runtime.healed == [("r",)]


async def test_healer_leaves_forgotten_pins_alone() -> None:
    made = Healed(per_hour=3)
    hold = pin("h", "r")
    made.learn(hold)
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
        room.reconciler.healer.learn(base.ImageInventory(), 0)
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
    async with rig.running(images=[{"ref": image.ref}], heals_per_hour=2) as room:
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
        await room.reconcile(rig.section(images=wanted, thresholds={"high": 0, "low": 0}))
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


@pytest.mark.real
async def test_old_digest_does_not_come_back_under_a_tag_that_moved(rig: Rig) -> None:
    """A tag that nobody listed, and then the listed one: pulled anew by a pod, then collected."""
    layers = [registry.layer("moves", MB, 30)]
    image = rig.push("fw/torch:v2", layers)
    latest = rig.push("fw/torch:latest", layers)
    assert latest.pushed.top == image.pushed.top
    await rig.kubelet.pull(latest.ref)
    async with rig.running(images=[{"ref": image.ref}]) as room:
        await pinned(room, image.ref)

        async def moved(ref: str) -> registry.Pushed:
            """Another image gets the tag, is pulled and goes by its id."""
            pushed = rig.push(f"fw/torch:{ref.rpartition(':')[2]}", mark=ref).pushed
            await rig.kubelet.pull(ref)
            before = rig.handled.count(ref)
            await rig.kubelet.remove(pushed.config)
            await until(lambda: rig.handled.count(ref) > before)
            return pushed

        await moved(latest.ref)
        await room.reconciler.cycle()
        unlisted = [each for each in await rig.kubelet.records() if each.name == latest.ref]
        kept = await listed(rig.kubelet, image.ref)
        new = await moved(image.ref)
        named = {each.name: each.target.digest for each in await rig.kubelet.records()}
        # What the tag means now is pulled, without waiting for its refresh.
        await until(lambda: room.show(image.ref).digest == new.top)
        await pinned(room, image.ref)
        again = await rig.kubelet.status(image.ref)

    assert unlisted == []
    assert kept is not None
    assert kept.id == image.pushed.config
    assert named.get(image.ref) in (None, new.top)
    assert again is not None
    assert again.id == new.config


@pytest.mark.real
async def test_tag_that_still_names_the_pinned_image_comes_back_with_it(rig: Rig) -> None:
    layers = [registry.layer("stays", MB, 31)]
    image, latest = (rig.push(f"fw/stays:{tag}", layers) for tag in ("v2", "latest"))
    await rig.kubelet.pull(latest.ref)
    async with rig.running(images=[{"ref": image.ref}]) as room:
        await pinned(room, image.ref)

        async def known() -> bool:
            await room.reconciler.cycle()
            holds = room.reconciler.snapshot.inventory.held("pin")
            return any(room.reconciler.healer.restores(each, latest.ref) for each in holds)

        await until(known)
        rig.gate.reset()
        await rig.kubelet.remove(image.pushed.config)
        await back(rig, image.ref)
        await back(rig, latest.ref)

    assert rig.gate.requests() == []
