"""The containerd adapter on real containerd: pulls under leases, resume, pins, heals."""

import asyncio
import time

import pytest

from preheat import manifest
from preheat.runtimes import base
from preheat.runtimes import containerd as adapter
from tests.testbed import containerd, proxy, registry

pytestmark = pytest.mark.real

MiB = 1024**2


def pull_hold(ref: str) -> base.Hold:
    return base.Hold(
        id="", role="pull", ref=ref, by="operator", keep="always", expires=time.time() + 86400
    )


def pin_hold(ref: str, pushed: registry.Pushed, size: int) -> base.Hold:
    target = manifest.Target(registry.INDEX, pushed.top, size)
    return base.Hold(
        id="", role="pin", ref=ref, by="operator", target=target, image_id=pushed.config
    )


async def pin_of(box: adapter.Containerd, ref: str) -> base.Hold:
    """A pin for what ``ref`` names in the runtime now."""
    inventory = await box.inventory()
    target = next(record.target for record in inventory.records if record.name == ref)
    return await box.pin(base.Hold(id="", role="pin", ref=ref, by="operator", target=target))


async def test_a_cancelled_pull_goes_on_where_it_was(
    images: registry.Registry,
    gate: proxy.Proxy,
    box: adapter.Containerd,
    kubelet: containerd.Kubelet,
) -> None:
    pushed = images.push("fw/resume", "v1", [registry.layer("a", 24 * MiB, 1)])
    ref = f"{gate.host}/fw/resume:v1"
    hold = await box.begin(pull_hold(ref))
    gate.rate = 20 * MiB
    task = asyncio.create_task(box.pull(ref, None, hold, 60.0))
    while gate.live < 12 * MiB:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0.2)
    kept = sum(each.offset for each in (await box.ingests()).values())

    gate.rate = 0
    gate.reset()
    await box.pull(ref, None, hold, 60.0)

    missing = pushed.fetched - kept
    assert kept > 8 * MiB
    assert gate.blob_bytes <= missing * 1.1
    pin = await pin_of(box, ref)
    await box.end(hold)
    assert {lease.id for lease in await kubelet.leases()} == {pin.id}
