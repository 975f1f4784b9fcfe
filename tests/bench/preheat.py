"""Measures image preheating on every containerd: ``python -m tests.bench.preheat``.

Writes build/bench/preheat.json. Heal: from the return of RemoveImage to the image, complete with
tag and digest, in the runtime's list. Resume: bytes fetched after an interruption at half, as a
share of the missing half. Pull: the room's whole way to a pinned image against a bare PullImage.
"""

import asyncio
import contextlib
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import structlog

from tests.preheat import rig
from tests.testbed import containerd, proxy, registry

MB = 1_000_000
HEALS = 100
OUT = Path(__file__).parents[2] / "build" / "bench" / "preheat.json"


def quantiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "median_ms": round(statistics.median(ordered), 2),
        "p99_ms": round(ordered[max(0, int(len(ordered) * 0.99) - 1)], 2),
        "max_ms": round(ordered[-1], 2),
        "count": len(ordered),
    }


async def heal(
    daemon: containerd.Containerd, kubelet: containerd.Kubelet, gate: proxy.Proxy, folder: Path
) -> dict[str, Any]:
    ref = f"{gate.host}/bench/heal:v1"
    after: list[float] = []
    async with rig.running(daemon, folder, images=[{"ref": ref}]) as room:
        await rig.until(lambda: room.images() and room.show(ref).pinned)
        gate.reset()
        for _ in range(HEALS):
            await kubelet.remove(ref)
            begun = time.perf_counter()
            while True:
                found = [i for i in await kubelet.images() if ref in i.repo_tags]
                if found and found[0].repo_digests:
                    break
            after.append((time.perf_counter() - begun) * 1000)
            await asyncio.sleep(0.02)
        requests, fetched = len(gate.requests()), gate.all_bytes
    return quantiles(after) | {"registry_requests": requests, "registry_bytes": fetched}


async def resume(
    daemon: containerd.Containerd, gate: proxy.Proxy, folder: Path, pushed: registry.Pushed
) -> dict[str, Any]:
    ref = f"{gate.host}/bench/big:v1"
    gate.rate = 60 * MB
    async with rig.running(daemon, folder, images=[{"ref": ref}]) as room:
        gate.reset()
        await rig.until(lambda: gate.blob_bytes >= pushed.fetched // 2, 60)
        await room.pause(ref)
        await asyncio.sleep(0.5)
        missing = pushed.fetched - gate.blob_bytes
        gate.rate = 0
        gate.reset()
        await room.resume(ref)
        await rig.state(room, ref, "ready", seconds=60)
        again = gate.blob_bytes
        await room.unpin(ref)
    return {
        "image_bytes": pushed.fetched,
        "missing_bytes": missing,
        "fetched_again_bytes": again,
        "share_of_image": round(again / pushed.fetched, 3),
        "above_missing": round(again / missing - 1, 4),
    }


async def pulls(
    daemon: containerd.Containerd,
    kubelet: containerd.Kubelet,
    gate: proxy.Proxy,
    folder: Path,
    pushed: registry.Pushed,
) -> dict[str, Any]:
    ref = f"{gate.host}/bench/big:v1"
    found: dict[str, Any] = {}
    await kubelet.remove(ref)
    await kubelet.collect()
    begun = time.perf_counter()
    await kubelet.pull(ref)
    found["bare_pull_seconds"] = round(time.perf_counter() - begun, 2)
    for name, limit in (("room_pull_seconds", None), ("ingest_pull_seconds", "100GB")):
        await kubelet.remove(ref)
        await kubelet.collect()
        async with rig.running(daemon, folder, bytes_per_second=limit) as room:
            begun = time.perf_counter()
            await room.preheat(ref)
            await rig.until(lambda r=room: r.show(ref).pinned, 60)  # type: ignore[misc]
            found[name] = round(time.perf_counter() - begun, 2)
            await room.unpin(ref)
    await kubelet.remove(ref)
    await kubelet.collect()
    async with rig.running(daemon, folder) as room:
        gate.reset()
        look = time.perf_counter()
        row = await room.preheat(ref)
        await room.pause(ref)
        await rig.until(lambda: room.show(ref).bytes_total > 0)
        found["estimate_ms"] = round((time.perf_counter() - look) * 1000, 1)
        await room.core.cycle()
        estimated = room.show(ref).bytes_missing
        gate.reset()
        await room.resume(ref)
        await rig.state(room, ref, "ready", seconds=60)
        fetched = sum(s.bytes for s in gate.requests() if s.agent != "nodeagent")
        found["estimate_error"] = round(abs(estimated - fetched) / fetched, 5)
        cycles = []
        for _ in range(20):
            begun = time.perf_counter()
            await room.core.cycle()
            cycles.append((time.perf_counter() - begun) * 1000)
        found["cycle_ms"] = round(statistics.median(cycles), 1)
        assert row.ref == ref
        await room.unpin(ref)
    return found


async def one(release: str, folder: Path, images: registry.Registry) -> dict[str, Any]:
    gate = proxy.Proxy(images.port)
    gate.start()
    daemon = containerd.Containerd(folder / release, release)
    daemon.trust(gate.host, gate.url)
    images.push("bench/heal", "v1", [registry.layer(f"h{n}", 4 * MB, n) for n in range(3)])
    layers = [registry.layer(f"b{n}", s * MB, 10 + n) for n, s in enumerate((120, 120, 60))]
    pushed = images.push("bench/big", "v1", layers)
    kubelet = containerd.Kubelet(daemon.socket)
    try:
        daemon.start()
        (folder / f"{release}-state").mkdir()
        found = {"heal": await heal(daemon, kubelet, gate, folder)}
        found["resume"] = await resume(daemon, gate, folder, pushed)
        found["pull"] = await pulls(daemon, kubelet, gate, folder, pushed)
        return found
    finally:
        await kubelet.close()
        daemon.remove()
        gate.stop()


async def main() -> dict[str, Any]:
    """All figures of all releases; also printed."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(file=sys.stderr))
    folder = Path(tempfile.mkdtemp(prefix="nodeagent-bench-"))
    images = registry.Registry(folder / "registry")
    found: dict[str, Any] = {}
    try:
        images.start()
        for release, version in containerd.RELEASES.items():
            found[f"containerd {version}"] = await one(release, folder, images)
    finally:
        images.stop()
        with contextlib.suppress(OSError):
            shutil.rmtree(folder)
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(found, indent=2) + "\n")
    return found


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main()), indent=2))
