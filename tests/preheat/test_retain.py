"""Images in use, with real pods: kept a while after their last use, never released while used."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.preheat import rig
from tests.testbed import containerd, pods, proxy, registry

pytestmark = pytest.mark.real

MB = 1_000_000


@pytest_asyncio.fixture
async def cluster_pods(
    images: registry.Registry, gate: proxy.Proxy, release: str, tmp_path: Path
) -> AsyncIterator[tuple[containerd.Containerd, containerd.Kubelet, pods.Pods]]:
    """A containerd that can run pods."""
    sandbox = pods.pause_image(images)
    server = containerd.Containerd(tmp_path / "containerd", release)
    server.trust(gate.host, gate.url)
    hand = containerd.Kubelet(server.socket)
    try:
        server.start(sandbox=f"{gate.host}/{sandbox}")
        yield server, hand, pods.Pods(hand)
    finally:
        await hand.close()
        server.remove()


async def test_an_image_that_a_pod_used_is_kept_for_a_while_and_then_let_go(
    images: registry.Registry,
    gate: proxy.Proxy,
    cluster_pods: tuple[containerd.Containerd, containerd.Kubelet, pods.Pods],
    tmp_path: Path,
) -> None:
    daemon, kubelet, hand = cluster_pods
    images.push("user/job", "v1", [registry.layer("job", 2 * MB, 301)])
    ref = f"{gate.host}/user/job:v1"
    await kubelet.pull(ref)
    sandbox = await hand.run(ref)
    more: dict[str, Any] = {"retain": {"for": 2, "at_least": "1MB"}}
    async with rig.running(daemon, tmp_path, **more) as room:
        await rig.until(lambda: any(row.ref == ref and row.pinned for row in room.images()))
        used = room.show(ref)
        await asyncio.sleep(2.5)
        await room.core.cycle()
        while_used = room.show(ref).pinned
        await hand.end(sandbox)
        await room.core.cycle()
        # Garbage collection right after the pod has gone does not get it.
        await kubelet.remove(ref)
        await rig.until(lambda: kubelet.status(ref), 5.0)
        await asyncio.sleep(2.5)
        await room.core.cycle()
        await room.core.cycle()
        later = [row for row in room.images() if row.ref == ref]
        await kubelet.remove(ref)
        await asyncio.sleep(0.3)
        gone = await kubelet.status(ref)

    assert used.by == "retained"
    assert used.in_use
    assert while_used
    assert later == []
    assert gone is None


async def test_use_of_a_preheated_image_is_counted_as_saved_and_remembered(
    images: registry.Registry,
    gate: proxy.Proxy,
    cluster_pods: tuple[containerd.Containerd, containerd.Kubelet, pods.Pods],
    tmp_path: Path,
) -> None:
    daemon, _, hand = cluster_pods
    pushed = images.push("fw/used", "v1", [registry.layer("used", 2 * MB, 302)])
    ref = f"{gate.host}/fw/used:v1"
    more: dict[str, Any] = {"images": [{"ref": ref, "pin": {"for": 3600}}]}
    async with rig.running(daemon, tmp_path, **more) as room:
        await rig.until(lambda: room.images() and room.show(ref).pinned)
        sandbox = await hand.run(ref)
        await room.core.cycle()
        await room.core.cycle()
        saved = room.core.totals.used_bytes
        await hand.end(sandbox)
        await room.core.cycle()
    async with rig.running(daemon, tmp_path, **more) as room:
        await room.core.cycle()
        row = room.show(ref)
        pin = room.core.view.pinned[0]

    assert saved == pushed.fetched
    assert row.last_used is not None
    assert pin.expires == pytest.approx(row.last_used + 3600, abs=5)
