"""Pinned images stay: removals are healed without a byte, whatever happens in between."""

import asyncio
from pathlib import Path

import pytest

from preheat.runtimes import messages as m
from tests.preheat import rig
from tests.testbed import containerd, proxy, registry

pytestmark = pytest.mark.real

MB = 1_000_000


async def listed(kubelet: containerd.Kubelet, ref: str) -> m.CriImage | None:
    """The image in the runtime's list, complete with its tag and digest."""
    for each in await kubelet.images():
        if ref in each.repo_tags and each.repo_digests:
            return each
    return None


async def _is_marked(kubelet: containerd.Kubelet, ref: str, marked: bool) -> bool:
    found = await listed(kubelet, ref)
    return found is not None and found.pinned is marked


async def test_a_removed_pinned_image_is_back_without_a_byte_even_with_the_registry_down(
    images: registry.Registry,
    gate: proxy.Proxy,
    daemon: containerd.Containerd,
    kubelet: containerd.Kubelet,
    tmp_path: Path,
) -> None:
    layers = [registry.layer("h1", 2 * MB, 21), registry.layer("h2", MB, 22)]
    pushed = images.push("fw/heal", "v1", layers)
    ref = f"{gate.host}/fw/heal:v1"
    async with rig.running(daemon, tmp_path, images=[{"ref": ref}]) as room:
        await rig.until(lambda: room.images() and room.show(ref).pinned)
        content = set(await kubelet.content())
        snapshots = await kubelet.snapshots()
        gate.reset()
        with gate.down():
            for name in (ref, pushed.config, f"{gate.host}/fw/heal@{pushed.top}") * 5:
                await kubelet.remove(name)
                await rig.until(lambda: listed(kubelet, ref), 5.0)
        # Its records come back one by one; the mark is on one of them.
        marked = daemon.release != "bookworm"
        await rig.until(lambda: _is_marked(kubelet, ref, marked), 5.0)
        back = await listed(kubelet, ref)
        await kubelet.collect()
        counts = room.core.healer.counts

    assert gate.requests() == []
    assert back is not None
    assert back.id == pushed.config
    assert set(await kubelet.content()) == content
    assert await kubelet.snapshots() == snapshots
    assert counts.heals >= 1


async def test_a_pull_of_the_tag_does_not_lose_the_pin(
    images: registry.Registry,
    gate: proxy.Proxy,
    daemon: containerd.Containerd,
    kubelet: containerd.Kubelet,
    tmp_path: Path,
) -> None:
    """imagePullPolicy: Always rewrites the tag's record at every pod start."""
    images.push("fw/again", "v1", [registry.layer("again", MB, 23)])
    ref = f"{gate.host}/fw/again:v1"
    async with rig.running(daemon, tmp_path, images=[{"ref": ref}]) as room:
        await rig.until(lambda: room.images() and room.show(ref).pinned)
        for _ in range(3):
            await kubelet.pull(ref)
        status = await kubelet.status(ref)
        await kubelet.remove(ref)
        await rig.until(lambda: listed(kubelet, ref), 5.0)

    assert status is not None
    assert status.pinned is (daemon.release != "bookworm")


async def test_a_restart_of_containerd_between_removal_and_heal_loses_nothing(
    images: registry.Registry,
    gate: proxy.Proxy,
    daemon: containerd.Containerd,
    kubelet: containerd.Kubelet,
    tmp_path: Path,
) -> None:
    images.push("fw/gap", "v1", [registry.layer("gap", MB, 24)])
    ref = f"{gate.host}/fw/gap:v1"
    async with rig.running(daemon, tmp_path, images=[{"ref": ref}]) as room:
        await rig.until(lambda: room.images() and room.show(ref).pinned)
    # No agent: the removal goes unseen, and containerd dies on top of it.
    await kubelet.remove(ref)
    await kubelet.collect()
    assert await listed(kubelet, ref) is None
    daemon.kill()
    daemon.start()
    gate.reset()
    async with rig.running(daemon, tmp_path, images=[{"ref": ref}]) as room:
        await rig.until(lambda: listed(kubelet, ref), 10.0)
        # And once more under the agent's eyes, the event lost with the process.
        room.core.healer.learn([])
        await kubelet.remove(ref)
        daemon.kill()
        daemon.start()
        await rig.until(lambda: listed(kubelet, ref), 10.0)
        await rig.until(lambda: room.show(ref).pinned, 10.0)

    assert sum(seen.bytes for seen in gate.requests() if "/blobs/" in seen.path) < MB / 2


async def test_heals_are_limited_and_the_fight_is_a_finding(
    images: registry.Registry,
    gate: proxy.Proxy,
    daemon: containerd.Containerd,
    kubelet: containerd.Kubelet,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("preheat.heal.SAME_REMOVAL_SECONDS", 0.2)
    images.push("fw/fight", "v1", [registry.layer("fight", MB, 25)])
    ref = f"{gate.host}/fw/fight:v1"
    more = {"images": [{"ref": ref}], "heal": {"per_hour": 2}}
    async with rig.running(daemon, tmp_path, **more) as room:
        await rig.until(lambda: room.images() and room.show(ref).pinned)
        for _ in range(2):
            await asyncio.sleep(0.3)
            await kubelet.remove(ref)
            await rig.until(lambda: listed(kubelet, ref), 5.0)
        await asyncio.sleep(0.3)
        gate.reset()
        await kubelet.remove(ref)
        await asyncio.sleep(0.3)
        await room.core.cycle()
        await room.reconcile(room.core.section)
        still_gone = await listed(kubelet, ref)
        reporter = room._reporter
        counts = room.core.healer.counts

    assert still_gone is None
    assert counts.heals == 2
    assert counts.refused_limit >= 1
    assert isinstance(reporter, rig.Reported)
    assert "preheat-gc-fight" in [each.rule for each in reporter.found]


async def test_nothing_is_healed_under_disk_pressure(
    images: registry.Registry,
    gate: proxy.Proxy,
    daemon: containerd.Containerd,
    kubelet: containerd.Kubelet,
    tmp_path: Path,
) -> None:
    images.push("fw/press", "v1", [registry.layer("press", MB, 26)])
    ref = f"{gate.host}/fw/press:v1"
    async with rig.running(daemon, tmp_path, images=[{"ref": ref}]) as room:
        await rig.until(lambda: room.images() and room.show(ref).pinned)
        pressed = {"gc_high": 0.0001, "gc_low": 0.0001, "eviction_free": 0.001}
        await room.reconcile(rig.section(daemon, images=[{"ref": ref}], kubelet=pressed))
        await room.core.cycle()
        released = not room.show(ref).pinned
        await kubelet.remove(ref)
        await asyncio.sleep(0.3)
        await room.core.cycle()
        await kubelet.collect()

    assert released
    assert await listed(kubelet, ref) is None
    assert await kubelet.snapshots() == set()


async def test_unpin_really_lets_go(
    images: registry.Registry,
    gate: proxy.Proxy,
    daemon: containerd.Containerd,
    kubelet: containerd.Kubelet,
    tmp_path: Path,
) -> None:
    images.push("fw/letgo", "v1", [registry.layer("letgo", MB, 27)])
    ref = f"{gate.host}/fw/letgo:v1"
    async with rig.running(daemon, tmp_path, images=[{"ref": ref}]) as room:
        await rig.until(lambda: room.images() and room.show(ref).pinned)
        row = await room.unpin(ref)
        status = await kubelet.status(ref)
        await kubelet.remove(ref)
        await asyncio.sleep(0.3)
        await room.core.cycle()
        gone = await listed(kubelet, ref)
        left = await kubelet.content()
    # The decision outlives the agent.
    async with rig.running(daemon, tmp_path, images=[{"ref": ref}]) as room:
        await room.core.cycle()
        again = room.show(ref)
        asked = await room.pin(ref)
        await rig.until(lambda: room.show(ref).pinned)

    assert row is not None
    assert (row.state, row.pinned) == ("released", False)
    assert status is not None
    assert not status.pinned
    assert gone is None
    assert left == {}
    assert again.state == "released"
    assert asked.by == "operator"


async def test_a_moved_tag_swaps_pins_without_a_moment_unpinned(
    images: registry.Registry,
    gate: proxy.Proxy,
    daemon: containerd.Containerd,
    kubelet: containerd.Kubelet,
    tmp_path: Path,
) -> None:
    base = registry.layer("base", 2 * MB, 28)
    old = images.push("fw/moved", "main", [base], mark="old")
    ref = f"{gate.host}/fw/moved:main"
    seen: list[set[str]] = []
    stop = asyncio.Event()

    async def watch() -> None:
        while not stop.is_set():
            leases = await kubelet.leases()
            seen.append(
                {
                    lease.labels["nodeagent/image-id"]
                    for lease in leases
                    if lease.labels.get("nodeagent/role") == "pin"
                }
            )
            await asyncio.sleep(0.005)

    async with rig.running(daemon, tmp_path, images=[{"ref": ref}]) as room:
        await rig.until(lambda: room.images() and room.show(ref).pinned)
        new = images.push("fw/moved", "main", [base, registry.layer("top", MB, 29)], mark="new")
        gate.reset()
        watcher = asyncio.create_task(watch())
        room.core.resolver.again(ref)
        room.core.wake()
        await rig.until(lambda: room.show(ref).digest == new.top and room.show(ref).pinned)
        await rig.until(lambda: seen and seen[-1] == {new.config})
        stop.set()
        await watcher

    assert all(seen)
    assert seen[0] == {old.config}
    assert {frozenset(each) for each in seen} >= {frozenset({new.config})}
    assert gate.blob_bytes < 1.2 * MB  # the base was not fetched again
