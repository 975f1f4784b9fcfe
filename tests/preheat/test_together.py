"""More than one at a time: two agents, an agent and a kubelet, and a thousand cycles."""

import asyncio
import os
from pathlib import Path

import pytest

from preheat.runtimes import base
from preheat.runtimes import containerd as adapter
from tests.preheat import rig
from tests.testbed import containerd, proxy, registry

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

MB = 1_000_000


async def test_two_agents_download_once_and_hold_once(
    images: registry.Registry,
    gate: proxy.Proxy,
    daemon: containerd.Containerd,
    kubelet: containerd.Kubelet,
    tmp_path: Path,
) -> None:
    pushed = images.push("fw/two", "v1", [registry.layer("two", 8 * MB, 91)])
    ref = f"{gate.host}/fw/two:v1"
    gate.rate = 16 * MB
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    wanted = [{"ref": ref}]
    async with (
        rig.running(daemon, tmp_path / "a", images=wanted) as one,
        rig.running(daemon, tmp_path / "b", images=wanted) as other,
    ):
        await rig.until(lambda: one.images() and one.show(ref).pinned)
        await rig.until(lambda: other.images() and other.show(ref).pinned)
        await rig.until(lambda: not one.core.running and not other.core.running)
        for room in (one, other):
            await room.core.cycle()
        leases = await kubelet.leases()

    layers = sum(len(layer.packed) for layer in pushed.layers)
    whole = [s for s in gate.requests() if s.bytes >= layers]
    assert len(whole) == 1
    assert [lease.labels["nodeagent/role"] for lease in leases] == ["pin"]


@pytest.mark.parametrize("limit", [None, "4MB"], ids=["runtime", "limited"])
async def test_a_kubelet_pulling_the_same_image_shares_the_download(
    images: registry.Registry,
    gate: proxy.Proxy,
    daemon: containerd.Containerd,
    kubelet: containerd.Kubelet,
    tmp_path: Path,
    limit: str | None,
) -> None:
    """Under a limit the agent gives way: the pod that waits is not held to the agent's rate."""
    pushed = images.push("fw/share", "v1", [registry.layer("share", 48 * MB, 92)])
    ref = f"{gate.host}/fw/share:v1"
    gate.rate = 24 * MB
    async with rig.running(daemon, tmp_path, images=[{"ref": ref}], bytes_per_second=limit) as room:
        await rig.until(lambda: gate.blob_bytes > MB)
        await kubelet.pull(ref)
        await rig.state(room, ref, "ready")
        await rig.until(lambda: room.show(ref).pinned and not room.core.running)
        await room.core.cycle()
        leases = [x for x in await kubelet.leases() if "nodeagent/role" in x.labels]
        ingests = await kubelet.ingests()

    at_most = 1.1 if limit is None else 1.35  # the agent's own part, until it gave way
    assert gate.blob_bytes <= at_most * pushed.fetched
    assert [lease.labels["nodeagent/role"] for lease in leases] == ["pin"]
    assert ingests == ()


async def test_a_thousand_cycles_leave_nothing_behind(
    images: registry.Registry,
    gate: proxy.Proxy,
    daemon: containerd.Containerd,
    kubelet: containerd.Kubelet,
    box: adapter.Containerd,
    tmp_path: Path,
) -> None:
    """Pull under a lease, pin, unpin, remove; each tenth pull is cancelled and resumed."""
    refs = []
    for number in range(5):
        images.push("fw/tiny", f"v{number}", [registry.layer(f"t{number}", 2000, 200 + number)])
        refs.append(f"{gate.host}/fw/tiny:v{number}")

    async def cycle(ref: str, cancelled: bool) -> None:
        hold = await box.begin(base.Hold(id="", role="pull", ref=ref, by="operator", keep="always"))
        if cancelled:
            task = asyncio.create_task(box.pull(ref, None, hold, 30.0))
            await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        image_id = await box.pull(ref, None, hold, 30.0)
        inventory = await box.inventory()
        target = next(r.target for r in inventory.records if r.name == ref)
        pin = await box.pin(
            base.Hold(id="", role="pin", ref=ref, by="operator", target=target, image_id=image_id)
        )
        await box.end(hold)
        await box.unpin(pin)
        await kubelet.remove(ref)

    async def many(ref: str, count: int) -> None:
        for number in range(count):
            await cycle(ref, cancelled=number % 10 == 9)

    await many(refs[0], 1)
    with gate.down():  # its connections are this process's as well
        descriptors = len(os.listdir("/proc/self/fd"))
    per_image = 200 if daemon.release == "trixie" else 20
    async with asyncio.TaskGroup() as group:
        for ref in refs:
            group.create_task(many(ref, per_image))
    await kubelet.collect()

    assert await kubelet.images() == ()
    assert await kubelet.leases() == ()
    assert await kubelet.ingests() == ()
    assert await kubelet.content() == {}
    assert await kubelet.snapshots() == set()
    with gate.down():
        assert len(os.listdir("/proc/self/fd")) <= descriptors + 5
