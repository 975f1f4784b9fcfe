"""The room on real containerd: what happens to requested images, alone and beside others."""

import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.preheat.rig import MB, Clock, Rig, find, pinned, started, state, until
from tests.testbed import containerd, pods, proxy, registry

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]


async def test_requested_image_is_pulled_pinned_and_shown(rig: Rig) -> None:
    image = rig.push("fw/wanted:v1", size=4 * MB)
    async with rig.running(images=[{"ref": image.ref}]) as room:
        await state(room, image.ref, "ready")
        row = await pinned(room, image.ref)
        await until(lambda: not room.reconciler.running)
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
    kubelet = {"gc_high": 0.85, "gc_low": 0.8, "eviction_free": 0.1}
    async with small.running(images=[{"ref": image.ref}], kubelet=kubelet) as room:
        row = await state(room, image.ref, "skipped")
        skip = room.reconciler.snapshot.decided.skips[0]

    layer = image.pushed.layers[0].digest
    assert not [s for s in small.gate.requests() if layer in s.path and not s.range]
    assert skip.reason == "disk"
    assert skip.need > 2 * 39 * MB
    assert "free below the kubelet" in row.reason


async def test_no_space_midway_gives_every_byte_back(small: Rig) -> None:
    """Something else fills the disk while the pull runs."""
    image = small.push("fw/enospc:v1", size=20 * MB)
    small.gate.rate = 20 * MB
    before = _used(small)
    filler = small.daemon.folder / "filler"
    async with small.running(images=[{"ref": image.ref}]) as room:
        await until(lambda: small.gate.blob_bytes > 3 * MB)
        free = os.statvfs(small.daemon.folder)
        filler.write_bytes(bytes(free.f_bavail * free.f_frsize - 6 * MB))
        await until(lambda: room.reconciler.totals.failed["disk"] > 0)
        filled = filler.stat().st_size
        await until(lambda: _used(small) - filled - before < 2 * MB)
        row = room.show(image.ref)
        leases, ingests = await small.kubelet.leases(), await small.kubelet.ingests()
        filler.unlink()
        small.gate.rate = 0
        await room.resume(image.ref)
        await state(room, image.ref, "ready")

    assert row.failure_kind == "disk" or row.state == "skipped"
    assert leases == []
    assert ingests == []


async def test_higher_priority_takes_the_pin_budget(rig: Rig) -> None:
    low, high = (rig.push(f"fw/rank:{name}", size=5 * MB) for name in ("low", "high"))
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
    assert plan.pinned_bytes <= 12 * MB


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
        await until(lambda: not one.reconciler.running and not other.reconciler.running)
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
        await until(lambda: not room.reconciler.running)
        await room.reconciler.cycle()
        roles = await rig.roles()
        ingests = await rig.kubelet.ingests()

    at_most = 1.1 if limit is None else 1.35  # the agent's own part, until it gave way
    assert rig.gate.blob_bytes <= at_most * image.pushed.fetched
    assert roles == ["pin"]
    assert ingests == []


async def test_images_that_share_a_layer_under_a_limit_fetch_it_once(rig: Rig) -> None:
    """containerd locks a blob for its first writer and answers UNAVAILABLE to the next one."""
    shared = registry.layer("limited-base", 6 * MB, 61)
    images = []
    for number in range(10):
        own = registry.layer(f"limited{number}", MB // 4, 70 + number)
        images.append(rig.push(f"fw/limited{number}:v1", [shared, own]))
    others = sum(len(each.pushed.layers[1].packed) for each in images[1:])
    unique = images[0].pushed.fetched + others
    more: dict[str, Any] = {"bytes_per_second": 8 * MB, "concurrency": 10}
    async with rig.running(images=[{"ref": each.ref} for each in images], **more) as room:
        for each in images:
            await state(room, each.ref, "ready", seconds=60)
        trips, failed = room.reconciler.runtime.trips, dict(room.reconciler.totals.failed)

    assert rig.gate.blob_bytes <= 1.1 * unique
    assert trips == 0
    assert set(failed.values()) == {0}


async def test_hostile_image_of_somebody_else_stops_nothing(rig: Rig) -> None:
    hostile = rig.push("user/deep:v1", size=MB, deep=3000)
    await rig.kubelet.pull(hostile.ref)
    image = rig.push("fw/beside:v1", size=MB)
    async with rig.running(images=[{"ref": image.ref}]) as room:
        await state(room, image.ref, "ready")
        await pinned(room, image.ref)
        await room.reconciler.cycle()
        snapshot = room.reconciler.snapshot

    names = {record.name for record in snapshot.inventory.records}
    assert hostile.ref in names
    assert set(snapshot.shapes) == {image.pushed.top}


# --- images in use --------------------------------------------------------------------------------


@pytest_asyncio.fixture
async def with_pods(rig: Rig) -> AsyncIterator[tuple[Rig, pods.Pods]]:
    """A rig whose containerd can run pods."""
    sandbox = pods.pause_image(rig.images)
    rig.daemon.stop()
    rig.daemon.start(sandbox=f"{rig.gate.host}/{sandbox}")
    yield rig, pods.Pods(rig.kubelet)


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
        await until(lambda: not room.reconciler.running)
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


async def test_use_is_counted_and_remembered(with_pods: tuple[Rig, pods.Pods]) -> None:
    rig, hand = with_pods
    image = rig.push("fw/used:v1", size=2 * MB)
    more: dict[str, Any] = {"images": [{"ref": image.ref, "pin": {"for": 3600}}]}
    async with rig.running(**more) as room:
        await pinned(room, image.ref)
        sandbox = await hand.run(image.ref)
        await room.reconciler.cycle()
        await room.reconciler.cycle()
        saved = room.reconciler.totals.used_bytes
        await hand.end(sandbox)
        await room.reconciler.cycle()
    async with rig.running(**more) as room:
        await room.reconciler.cycle()
        row = room.show(image.ref)
        (pin,) = room.reconciler.snapshot.pinned

    assert saved == image.pushed.fetched
    assert row.last_used is not None
    assert pin.expires == pytest.approx(row.last_used + 3600, abs=5)
