"""The containerd adapter on real containerd: pulls under leases, resume, pins."""

import asyncio
import os
import time

import pytest

from preheat.runtimes import base
from preheat.runtimes import containerd as adapter
from tests.preheat.rig import Image, Rig, until
from tests.testbed import registry

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

MiB = 1024**2
CYCLES = int(os.environ.get("CYCLES", "300"))  # 1,000 by make test-faults


def pull_hold(ref: str, keep: str = "always") -> base.Hold:
    expires = time.time() + 86400
    return base.Hold("pull", ref, "operator", keep=keep, expires=expires)


async def pin_of(box: adapter.Containerd, ref: str) -> base.Hold:
    """A pin for what ``ref`` names in the runtime now."""
    target = (await box.inventory()).target_of(ref)
    return await box.pin(base.Hold("pin", ref, "operator", target))


async def test_cancelled_pull_resumes(rig: Rig, box: adapter.Containerd) -> None:
    image = rig.push("fw/resume:v1", size=24 * MiB)
    hold = await box.begin(pull_hold(image.ref))
    rig.gate.rate = 20 * MiB
    rig.gate.pause_at = 13 * MiB  # not complete before it is cancelled
    task = asyncio.create_task(box.cri.pull(image.ref, None, hold.id, 60.0))
    await until(lambda: rig.gate.live > 12 * MiB)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await rig.quiet()
    kept = sum(each.offset for each in (await box.content.ingests()).values())

    rig.gate.rate = rig.gate.pause_at = 0
    rig.gate.reset()
    await box.cri.pull(image.ref, None, hold.id, 60.0)

    assert kept > 8 * MiB
    assert rig.gate.blob_bytes <= (image.pushed.fetched - kept) * 1.1
    pin = await pin_of(box, image.ref)
    await box.end(hold)
    assert {lease.id for lease in await rig.kubelet.leases()} == {pin.id}


async def test_a_pull_that_gives_its_bytes_back_is_asked_for_as_before(
    rig: Rig, box: adapter.Containerd
) -> None:
    image = rig.push("fw/empty:v1")
    hold = await box.begin(pull_hold(image.ref))
    await box.cri.pull(image.ref, None, hold.id, 60.0)
    await rig.kubelet.remove(image.ref)
    await rig.kubelet.collect()
    before = await rig.kubelet.content()
    await box.empty(hold)
    after = await rig.kubelet.content()
    (lease,) = await rig.kubelet.leases()
    (there,) = (await box.inventory()).held("pull", image.ref)

    assert image.pushed.layers[0].digest in before
    assert image.pushed.layers[0].digest not in after
    assert lease.id == hold.id
    assert (there.keep, there.by) == (hold.keep, hold.by)


async def test_begin_keeps_an_equal_hold_and_renews_another(
    rig: Rig, box: adapter.Containerd
) -> None:
    """The resources of a renewed containerd lease move with it."""
    image = rig.push("fw/renew:v1")
    first = await box.begin(pull_hold(image.ref))
    same = await box.begin(pull_hold(image.ref))
    await box.cri.pull(image.ref, None, first.id, 60.0)
    await rig.kubelet.remove(image.ref)
    renewed = await box.begin(pull_hold(image.ref, keep="never"))
    await rig.kubelet.collect()
    content = await rig.kubelet.content()
    (lease,) = await rig.kubelet.leases()

    assert same.created == pytest.approx(first.created, abs=1)
    assert lease.id == renewed.id == first.id
    assert lease.labels["nodeagent/keep"] == "never"
    assert image.pushed.layers[0].digest in content


async def test_events_name_the_records_and_what_became_of_them(
    rig: Rig, box: adapter.Containerd
) -> None:
    image = rig.push("fw/events:v1")
    await rig.kubelet.pull(image.ref)
    seen: list[base.Change] = []

    async def listen() -> None:
        async for change in box.changes():
            seen.append(change)  # noqa: PERF401

    listener = asyncio.create_task(listen())
    try:
        # Nobody says when the subscription begins: pull and remove until it has.
        async def heard() -> bool:
            await rig.kubelet.pull(image.ref)
            await rig.kubelet.remove(image.ref)
            wanted = {
                base.Change(name, how)
                for name in (image.ref, image.pushed.config)
                for how in ("made", "removed")
            }
            return wanted <= set(seen)

        await until(heard)
        target = await box.target_of(image.ref)
        await rig.kubelet.pull(image.ref)
        rig.push("fw/events:v1", mark="moved")
        await rig.kubelet.pull(image.ref)
        await until(lambda: base.Change(image.ref, "moved") in seen)
        moved = await box.target_of(image.ref)
    finally:
        listener.cancel()
        await asyncio.gather(listener, return_exceptions=True)
    assert target is None
    assert moved is not None
    assert moved.digest not in ("", image.pushed.top)


async def test_hundreds_of_cycles_leave_nothing(rig: Rig, box: adapter.Containerd) -> None:
    """Pull under a lease, pin, unpin, remove; each tenth pull is cancelled and resumed."""
    images = [rig.push(f"fw/tiny:v{n}", [registry.layer(f"t{n}", 2000, 200 + n)]) for n in range(5)]

    async def cycle(ref: str, cancelled: bool) -> None:
        hold = await box.begin(base.Hold("pull", ref, "operator", keep="always"))
        if cancelled:
            task = asyncio.create_task(box.cri.pull(ref, None, hold.id, 30.0))
            await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await box.cri.pull(ref, None, hold.id, 30.0)
        pin = await pin_of(box, ref)
        await box.end(hold)
        await box.unpin(pin)
        await rig.kubelet.remove(ref)

    async def many(image: Image, count: int) -> None:
        for number in range(count):
            await cycle(image.ref, cancelled=number % 10 == 9)

    await many(images[0], 1)
    with rig.gate.down():  # its connections are this process's as well
        descriptors = len(os.listdir("/proc/self/fd"))
    per_image = CYCLES // len(images) if rig.daemon.release == "trixie" else 20
    async with asyncio.TaskGroup() as group:
        for image in images:
            group.create_task(many(image, per_image))
    await rig.kubelet.collect()

    assert await rig.kubelet.images() == []
    assert await rig.kubelet.leases() == []
    assert await rig.kubelet.ingests() == []
    assert await rig.kubelet.content() == {}
    assert await rig.kubelet.snapshots() == set()
    with rig.gate.down():
        assert len(os.listdir("/proc/self/fd")) <= descriptors + 5
