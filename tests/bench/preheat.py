"""Image preheating on every containerd, with a real registry behind a counting proxy.

Heal: from the return of RemoveImage to the image, complete with tag and digest, in the runtime's
list. Resume: bytes fetched after an interruption at half. Pull: the room's whole way to a pinned
image against a bare PullImage.
"""

import asyncio
import functools
import statistics
import time
from pathlib import Path

from tests.bench import harness
from tests.preheat.rig import MB, Rig, pinned, started, state, until
from tests.testbed import containerd, proxy, registry

MOST_CYCLE_MS = 500
Figures = dict[str, harness.Entry]


async def _heal(rig: Rig, heals: int) -> Figures:
    gate = rig.gate
    ref = f"{gate.host}/bench/heal:v1"
    after: list[float] = []
    async with rig.running(images=[{"ref": ref}]) as room:
        await pinned(room, ref)
        gate.reset()
        for _ in range(heals):
            await rig.kubelet.remove(ref)
            begun = time.perf_counter()
            while True:
                found = [i for i in await rig.kubelet.images() if ref in i.repo_tags]
                if found and found[0].repo_digests:
                    break
            after.append((time.perf_counter() - begun) * 1000)
            await asyncio.sleep(0.02)
        requests, fetched = len(gate.requests()), gate.all_bytes
    p99 = sorted(after)[int(heals * 0.99) - 1]
    note = f"p99 of {heals}, median {statistics.median(after):.1f}"
    return {
        "heal": harness.at_most([p99], 50, "ms", note, heals),
        "heal_requests": harness.at_most([requests], 1, "requests", f"{fetched} bytes", heals),
    }


async def _resume(rig: Rig, pushed: registry.Pushed) -> Figures:
    gate = rig.gate
    ref = f"{gate.host}/bench/big:v1"
    gate.rate = pushed.fetched // 5
    async with rig.running(images=[{"ref": ref}]) as room:
        gate.reset()
        await until(lambda: gate.blob_bytes >= pushed.fetched // 2, 60)
        await room.pause(ref)
        await asyncio.sleep(0.5)
        missing = max(1, pushed.fetched - gate.blob_bytes)  # a late pause leaves nothing
        gate.rate = 0
        gate.reset()
        await room.resume(ref)
        await state(room, ref, "ready", seconds=60)
        again = gate.blob_bytes
        await room.unpin(ref)
    above = 100 * (again / missing - 1)
    note = f"fetched above the missing {missing} of {pushed.fetched} bytes"
    return {"resume": harness.at_most([above], 10, "%", note)}


async def _pulls(rig: Rig, pushed: registry.Pushed) -> Figures:
    gate, kubelet = rig.gate, rig.kubelet
    ref = f"{gate.host}/bench/big:v1"
    seconds: dict[str, float] = {}
    await kubelet.remove(ref)
    await kubelet.collect()
    begun = time.perf_counter()
    await kubelet.pull(ref)
    seconds["bare"] = time.perf_counter() - begun
    for name, limit in (("pull", None), ("ingest", "100GB")):
        await kubelet.remove(ref)
        await kubelet.collect()
        async with rig.running(bytes_per_second=limit) as room:
            begun = time.perf_counter()
            await room.preheat(ref)
            await pinned(room, ref, seconds=60)
            seconds[name] = time.perf_counter() - begun
            await room.unpin(ref)
    await kubelet.remove(ref)
    await kubelet.collect()
    async with rig.running() as room:
        gate.reset()
        row = await room.preheat(ref)
        await room.pause(ref)
        await until(lambda: room.show(ref).bytes_total > 0)
        await room.reconciler.cycle()
        estimated = room.show(ref).bytes_missing
        gate.reset()
        await room.resume(ref)
        await state(room, ref, "ready", seconds=60)
        fetched = sum(s.bytes for s in gate.requests() if s.agent != "nodeagent")
        error = 100 * abs(estimated - fetched) / fetched
        cycles = []
        for _ in range(20):
            begun = time.perf_counter()
            await room.reconciler.cycle()
            cycles.append((time.perf_counter() - begun) * 1000)
        assert row.ref == ref
        await room.unpin(ref)
    rates = {name: pushed.fetched / MB / each for name, each in seconds.items()}
    return {
        "estimate_error": harness.at_most([error], 1, "%", f"of {fetched} bytes"),
        "cycle": harness.at_most(cycles, MOST_CYCLE_MS, "ms", "one turn with nothing to do"),
        "pull_vs_bare": harness.at_least([rates["pull"]], [rates["bare"]], 0.6, "MB/s"),
        "ingest_vs_bare": harness.at_least([rates["ingest"]], [rates["bare"]], 0.3, "MB/s"),
    }


async def _release(
    release: str, folder: Path, images: registry.Registry, place: harness.Workplace
) -> Figures:
    gate = proxy.Proxy(images.port)
    gate.start()
    size = place.size(120, 2) * MB
    images.push("bench/heal", "v1", [registry.layer(f"h{n}", size // 30, n) for n in range(3)])
    parts = enumerate((size, size, size // 2))
    layers = [registry.layer(f"b{n}", part, 10 + n) for n, part in parts]
    pushed = images.push("bench/big", "v1", layers)
    daemon = containerd.Containerd(folder / release, release)
    try:
        async with started(images, gate, daemon, folder) as rig:
            found = await _heal(rig, place.size(100, 3))
            found |= await _resume(rig, pushed)
            return found | await _pulls(rig, pushed)
    finally:
        gate.stop()


def _run(release: str, place: harness.Workplace) -> harness.Results:
    with place.room("preheat") as folder:
        images = registry.Registry(folder / "registry")
        try:
            images.start()
            found = asyncio.run(_release(release, folder, images, place))
        finally:
            images.stop()
    for name, entry in found.items():
        yield f"{name}_{release}", entry


GROUPS: dict[str, harness.Group] = {
    release: functools.partial(_run, release) for release in containerd.RELEASES
}
