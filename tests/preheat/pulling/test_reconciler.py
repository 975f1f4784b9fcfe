"""The room on real containerd: what happens to requested images, alone and beside others."""

import os
import random
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import kit.errors
from preheat.image import manifest
from preheat.runtimes import cri
from tests.preheat.rig import MB, Clock, Rig, find, pinned, started, state, until
from tests.testbed import containerd, pods, proxy, registry

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]


async def test_requested_image_is_pulled_pinned_and_shown(rig: Rig) -> None:
    image = rig.push("fw/wanted:v1", size=4 * MB)
    async with rig.running(images=[{"ref": image.ref}]) as room:
        await state(room, image.ref, "ready")
        row = await pinned(room, image.ref)
        await until(lambda: not room.reconciler.pulls.running)
        roles = await rig.roles()
        status = await rig.kubelet.status(image.ref)

    assert row.digest == image.pushed.top
    assert row.bytes_total == row.bytes_done == image.pushed.fetched
    assert roles == ["pin"]
    assert status is not None
    assert status.pinned is (rig.daemon.release != "bookworm")


# --- not enough space -----------------------------------------------------------------------------


@pytest_asyncio.fixture
async def small(
    images: registry.Registry, gate: proxy.Proxy, release: str, tmp_path: Path
) -> AsyncIterator[Rig]:
    """A rig whose containerd has a disk of 64 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "nodeagent-test", str(folder)], check=True
    )
    try:
        daemon = containerd.Containerd(folder, release)
        async with started(images, gate, daemon, tmp_path) as rig:
            yield rig
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


def _used(rig: Rig) -> int:
    found = os.statvfs(rig.daemon.folder)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


async def test_image_that_does_not_fit_is_skipped_unfetched(small: Rig) -> None:
    image = small.push("fw/large:v1", size=40 * MB)
    thresholds = {"high": 85, "low": 80, "free": "10%"}
    async with small.running(images=[{"ref": image.ref}], thresholds=thresholds) as room:
        row = await state(room, image.ref, "skipped")
        skip = room.reconciler.snapshot.decided.skips[0]

    layer = image.pushed.layers[0].digest
    asked = [s for s in small.gate.requests() if layer in s.path]
    assert [(s.agent, s.bytes) for s in asked] == [("nodeagent", 4)]  # how large it becomes
    assert skip.reason == "disk"
    assert skip.need > 2 * 39 * MB
    assert "free below the kubelet" in row.reason


async def test_layer_that_shrinks_well_is_skipped_unfetched(small: Rig) -> None:
    """A log of zeros, as useradd makes for a large id."""
    zeros = registry.layer_of({"var/log/lastlog": bytes(200 * MB)})
    image = small.push("fw/zeros:v1", [zeros])
    thresholds = {"high": 85, "low": 80, "free": "10%"}
    async with small.running(images=[{"ref": image.ref}], thresholds=thresholds) as room:
        row = await state(room, image.ref, "skipped")

    assert len(zeros.packed) < MB
    assert row.bytes_unpacked > 200 * MB
    asked = [seen.agent for seen in small.gate.requests() if zeros.digest in seen.path]
    assert asked == ["nodeagent"]


async def test_no_space_midway_gives_every_byte_back(small: Rig) -> None:
    """Something else fills the disk while the pull runs."""
    image = small.push("fw/enospc:v1", size=12 * MB)
    small.gate.pause_at = 4 * MB  # until the disk is full
    before = _used(small)
    filler = small.daemon.folder / "filler"
    async with small.running(images=[{"ref": image.ref}]) as room:
        await until(lambda: small.gate.blob_bytes > 3 * MB)
        free = os.statvfs(small.daemon.folder)
        filler.write_bytes(bytes(free.f_bavail * free.f_frsize - 6 * MB))
        small.gate.pause_at = 0
        await until(lambda: room.reconciler.pulls.totals.failed["disk"] > 0)
        filled = filler.stat().st_size
        await until(lambda: _used(small) - filled - before < 2 * MB)
        row = room.show(image.ref)
        leases, ingests = await small.kubelet.leases(), await small.kubelet.ingests()
        fetched = room.reconciler.pulls.totals.fetched_bytes
        filler.unlink()
        await room.resume(image.ref)
        await state(room, image.ref, "ready")

    assert fetched > 2 * MB, "the failed attempt fetched, too"
    assert row.failure_kind == "disk" or row.state == "skipped"
    assert leases == []
    assert ingests == []


async def test_higher_priority_takes_the_pin_budget(rig: Rig) -> None:
    # Each takes 8 MB as planned: 2 MB packed, and three times that unpacked.
    low, high = (
        rig.push(
            f"fw/rank:{name}",
            [registry.layer_of({name: random.Random(name).randbytes(2 * MB) + bytes(4 * MB)})],
        )
        for name in ("low", "high")
    )
    wanted = [{"ref": low.ref, "priority": 0}, {"ref": high.ref, "priority": 10}]
    async with rig.running(images=wanted[:1], pin_budget="12MB") as room:
        await pinned(room, low.ref)
        await room.reconcile(rig.section(images=wanted, pin_budget="12MB"))
        await pinned(room, high.ref)
        await room.reconciler.cycle()
        row = room.show(low.ref)
        plan = room.reconciler.snapshot.decided

    assert not row.pinned
    assert any(skip.reason == "pin_budget" and skip.ref == low.ref for skip in plan.skips)


# --- two at a time --------------------------------------------------------------------------------


async def test_two_agents_download_once_and_pin_once(rig: Rig) -> None:
    image = rig.push("fw/two:v1", size=8 * MB)
    rig.gate.rate = 16 * MB
    wanted = [{"ref": image.ref}]
    folders = [rig.folder / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    async with (
        rig.running(folders[0], images=wanted) as one,
        rig.running(folders[1], images=wanted) as other,
    ):
        for room in (one, other):
            await pinned(room, image.ref)
        await until(lambda: not one.reconciler.pulls.running and not other.reconciler.pulls.running)
        for room in (one, other):
            await room.reconciler.cycle()
        roles = await rig.roles()

    layers = sum(len(layer.packed) for layer in image.pushed.layers)
    assert len([s for s in rig.gate.requests() if s.bytes >= layers]) == 1
    assert roles == ["pin"]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("limit", [None, "4MB"], ids=["runtime", "limited"])
async def test_kubelet_pulling_the_same_image_shares_the_download(
    rig: Rig, limit: str | None
) -> None:
    """Under a limit the agent gives way: the pod that waits is not held to the agent's rate."""
    image = rig.push("fw/share:v1", size=48 * MB)
    rig.gate.rate = 24 * MB
    async with rig.running(images=[{"ref": image.ref}], bytes_per_second=limit) as room:
        await until(lambda: rig.gate.blob_bytes > MB)
        await rig.kubelet.pull(image.ref)
        await state(room, image.ref, "ready")
        await pinned(room, image.ref)
        await until(lambda: not room.reconciler.pulls.running)
        await room.reconciler.cycle()
        roles = await rig.roles()
        ingests = await rig.kubelet.ingests()

    layer = image.pushed.layers[0]
    ended = [each for each in rig.gate.requests() if layer.digest in each.path]
    fetched = [each.bytes for each in ended if each.agent.startswith("containerd") and each.bytes]
    assert fetched == [len(layer.packed)]
    # The agent's own request ends before that. Its part: what it read in the second until it saw
    # the other download, and what the kernel had taken ahead of it (tcp_rmem: 4 to 8 MB here).
    assert ended[-1].agent.startswith("containerd")
    assert rig.gate.blob_bytes <= (1.1 if limit is None else 1.6) * image.pushed.fetched
    assert roles == ["pin"]
    assert ingests == []


async def _stored(rig: Rig, digest: str, least: int) -> bool:
    """Whether containerd has ``least`` bytes of a blob that is written."""
    return any(each.offset >= least for each in await rig.kubelet.ingests() if digest in each.ref)


@pytest.mark.parametrize("restarted", [False, True], ids=["", "restarted"])
@pytest.mark.parametrize("count", [2, 10])
async def test_images_that_share_a_layer_under_a_limit_fetch_it_once(
    rig: Rig, count: int, restarted: bool
) -> None:
    """containerd locks a blob for its first writer and answers UNAVAILABLE to the next one.

    Restarted in the middle, it breaks every call in flight at once: one lost connection, at most
    one trip of the breaker, and each layer goes on where it was.
    """
    shared = registry.layer("limited-base", 6 * MB, 61)
    images = []
    for number in range(count):
        own = registry.layer(f"limited{number}", MB // 4, 70 + number)
        images.append(rig.push(f"fw/limited{number}:v1", [shared, own]))
    others = sum(len(each.pushed.layers[1].packed) for each in images[1:])
    unique = images[0].pushed.fetched + others
    more: dict[str, Any] = {"bytes_per_second": 4 * MB, "concurrency": count}
    async with rig.running(images=[{"ref": each.ref} for each in images], **more) as room:
        connection = room.reconciler.runtime.connection  # containerd's
        if restarted:
            await until(lambda: _stored(rig, shared.digest, 3 * MB), what="half of the layer")
            rig.daemon.stop()
            await rig.quiet()
            rig.gate.reset()
            rig.daemon.start()
        for each in images:
            await state(room, each.ref, "ready", seconds=60)
            await pinned(room, each.ref)
        trips, failed = (
            room.reconciler.runtime.connection.breaker.total,
            dict(room.reconciler.pulls.totals.failed),
        )

    resumed = [
        int(seen.range.removeprefix("bytes=").rstrip("-"))
        for seen in rig.gate.requests()
        if shared.digest in seen.path and seen.range.endswith("-")
    ]
    kept = resumed[0] if restarted else 0
    assert rig.gate.blob_bytes <= 1.1 * (unique - kept)
    assert kept >= restarted * 2 * MB  # up to 1 MiB was in containerd's buffers
    assert trips <= (connection.broken if restarted else 0)
    assert {kind for kind, times in failed.items() if times} <= (
        {"runtime"} if restarted else set()
    )


async def test_an_open_breaker_keeps_no_pin_and_begins_no_pull(rig: Rig) -> None:
    image, other = rig.push("fw/free:v1", size=MB), rig.push("fw/later:v1", size=MB)
    async with rig.running(images=[{"ref": image.ref}]) as room:
        await state(room, image.ref, "ready")
        await pinned(room, image.ref)
        await until(lambda: not room.reconciler.pulls.running)
        breaker = room.reconciler.runtime.connection.breaker
        for _ in range(3):
            breaker.trip(cri.PULL_IMAGE)
        with pytest.raises(kit.errors.SourceError, match="changes nothing for"):
            await room.preheat(other.ref)
        released = await room.unpin(image.ref)
        roles = await rig.roles()
        rests, trouble = breaker.rests, room.reconciler.trouble

    assert released is not None
    assert (released.state, released.pinned) == ("released", False)
    assert roles == ["note"]
    assert rests > 0
    assert trouble == ""


async def test_hostile_image_of_somebody_else_stops_nothing(rig: Rig) -> None:
    deep = rig.push("user/deep:v1", size=MB, deep=3000)
    large = rig.push("user/large:v1", size=MB, mark="x" * (manifest.LARGEST_DOCUMENT + 1))
    for hostile in (deep, large):
        await rig.kubelet.pull(hostile.ref)
    image = rig.push("fw/beside:v1", size=MB)
    async with rig.running(images=[{"ref": image.ref}]) as room:
        await state(room, image.ref, "ready")
        await pinned(room, image.ref)
        await room.reconciler.cycle()
        snapshot = room.reconciler.snapshot

    names = {record.name for record in snapshot.inventory.records}
    assert {deep.ref, large.ref} <= names
    assert set(snapshot.inventory.shapes) == {image.pushed.top}


# --- images in use --------------------------------------------------------------------------------


async def test_used_image_is_kept_for_a_while_and_then_released(
    with_pods: tuple[Rig, pods.Pods], clock: Clock
) -> None:
    rig, hand = with_pods
    image = rig.push("user/job:v1", size=2 * MB)
    await rig.kubelet.pull(image.ref)
    sandbox = await hand.run(image.ref)
    more: dict[str, Any] = {"retain": {"for": 600, "at_least": "1MB"}}
    async with rig.running(**more) as room:
        used = await pinned(room, image.ref)
        clock.advance(700)
        await room.reconciler.cycle()
        while_used = room.show(image.ref).pinned
        await hand.end(sandbox)
        await room.reconciler.cycle()
        # Garbage collection right after the pod has gone does not get it.
        await rig.kubelet.remove(image.ref)
        await until(lambda: rig.kubelet.status(image.ref), 5.0)
        clock.advance(700)
        await room.reconciler.cycle()
        await room.reconciler.cycle()
        later = find(room, image.ref)
        await rig.remove(image.ref)
        gone = await rig.kubelet.status(image.ref)

    assert used.by == "retained"
    assert used.in_use
    assert while_used
    assert later is None
    assert gone is None


async def test_pin_for_a_time_ends_until_the_image_is_used_again(
    with_pods: tuple[Rig, pods.Pods], clock: Clock
) -> None:
    rig, hand = with_pods
    image = rig.push("fw/timed:v1", size=2 * MB)
    async with rig.running(images=[{"ref": image.ref, "pin": {"for": 600}}]) as room:
        await pinned(room, image.ref)
        await until(lambda: not room.reconciler.pulls.running)
        clock.advance(700)
        for _ in range(3):
            await room.reconciler.cycle()
        over = room.show(image.ref).pinned
        clock.advance(700)
        await hand.run(image.ref)
        await room.reconciler.cycle()
        again = await pinned(room, image.ref)

    assert not over
    assert again.in_use


async def test_dropped_image_stays_for_a_day_and_comes_back_as_it_was(
    rig: Rig, clock: Clock
) -> None:
    image = rig.push("fw/slip:v1", size=2 * MB)
    wanted = [{"ref": image.ref, "priority": 5}]
    async with rig.running(images=wanted) as room:
        await pinned(room, image.ref)
        await until(lambda: not room.reconciler.pulls.running)
        before = await rig.kubelet.leases()
        await room.reconcile(rig.section())
        await room.reconciler.cycle()
        slipped = room.show(image.ref)
        clock.advance(86400 - 600)
    # The agent restarts meanwhile: the day began before.
    async with rig.running() as room:
        await room.reconciler.cycle()
        restarted = room.show(image.ref)
        status = await rig.kubelet.status(image.ref)
        await rig.remove(image.ref)  # and it is healed as long as it is kept
        healed = await rig.kubelet.status(image.ref)
        await room.reconcile(rig.section(images=wanted))
        await room.reconciler.cycle()
        back, after = room.show(image.ref), await rig.kubelet.leases()
        await room.reconcile(rig.section())
        await room.reconciler.cycle()
        clock.advance(86400 + 1)
        for _ in range(2):
            await room.reconciler.cycle()
        left = await rig.roles()
        gone = find(room, image.ref)

    assert (slipped.state, slipped.pinned, slipped.by) == ("ready", True, "policy")
    assert slipped.reason.startswith("dropped from policy; released at 20")
    assert restarted.dropped_until == pytest.approx(slipped.dropped_until, abs=2)
    assert status is not None
    assert healed is not None
    assert (back.dropped_until, back.priority, back.pinned) == (None, 5, True)
    assert after == before
    assert rig.gate.blob_bytes < image.pushed.fetched + MB / 10  # look-ups, no layer
    assert left == []
    assert gone is None


async def test_dropped_image_that_pods_use_is_retained(
    with_pods: tuple[Rig, pods.Pods], clock: Clock
) -> None:
    rig, hand = with_pods
    image = rig.push("fw/indeed:v1", size=2 * MB)
    more: dict[str, Any] = {"retain": {"for": 600, "at_least": "1MB"}, "drop_after": 3600}
    async with rig.running(images=[{"ref": image.ref}], **more) as room:
        await pinned(room, image.ref)
        sandbox = await hand.run(image.ref)
        await room.reconcile(rig.section(**more))
        await room.reconciler.cycle()
        dropped = room.show(image.ref)
        clock.advance(3700)
        for _ in range(2):
            await room.reconciler.cycle()
        kept = room.show(image.ref)
        await hand.end(sandbox)
        await room.reconciler.cycle()
        ended = room.show(image.ref)
        roles = await rig.roles()
        clock.advance(700)
        for _ in range(2):
            await room.reconciler.cycle()
        left = await rig.roles()

    assert dropped.dropped_until is not None
    assert [(each.by, each.state, each.pinned) for each in (kept, ended)] == [
        ("retained", "ready", True)
    ] * 2
    assert kept.dropped_until is None
    assert roles == ["pin"]
    assert left == []


async def test_use_is_counted_and_remembered(with_pods: tuple[Rig, pods.Pods]) -> None:
    rig, hand = with_pods
    image = rig.push("fw/used:v1", size=2 * MB)
    more: dict[str, Any] = {"images": [{"ref": image.ref, "pin": {"for": 3600}}]}
    async with rig.running(**more) as room:
        await pinned(room, image.ref)
        sandbox = await hand.run(image.ref)
        await room.reconciler.cycle()
        await room.reconciler.cycle()
        saved = room.reconciler.uses.used_bytes
    async with rig.running(**more) as room:
        await room.reconciler.cycle()
        again = room.reconciler.uses.used_bytes
        await hand.end(sandbox)
        await room.reconciler.cycle()
        row = room.show(image.ref)
        (pin,) = room.reconciler.snapshot.pinned

    assert saved == image.pushed.fetched
    assert again == 0, "another agent counted that use"
    assert row.last_used is not None
    assert pin.expires == pytest.approx(row.last_used + 3600, abs=5)
