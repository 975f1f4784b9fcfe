"""Image preheating on every containerd, with a real registry behind a counting proxy.

Heal: from the return of RemoveImage to the image, complete with tag and digest, in the runtime's
list. Resume: bytes fetched after an interruption at half. Pull: the room's whole way to a pinned
image against a bare PullImage. Ranges: a layer of 2 GiB beside ``ctr images pull``.
"""

import asyncio
import contextlib
import functools
import gzip
import hashlib
import io
import mmap
import random
import statistics
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from tests.bench import harness
from tests.preheat.rig import MB, Rig, pinned, started, state, until
from tests.testbed import containerd, proxy, registry, waiting

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
        "heal": harness.at_most([p99], 50, "ms", note),
        "heal_requests": harness.at_most([requests], 1, "requests", f"{fetched} bytes"),
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


def _large(file: Path, size: int) -> registry.Layer:
    """A tar.gz of ``size`` random bytes, on disk: it does not fit into memory several times."""
    source, part = random.Random(77), min(size, 64 * MB)
    raw = hashlib.sha256()

    class Both(io.RawIOBase):
        """Into the packed file and into the digest of what is packed."""

        def writable(self) -> bool:
            return True

        def write(self, data: Any) -> int:
            raw.update(data)
            return packed.write(data)

    with (
        gzip.GzipFile(file, "wb", compresslevel=0, mtime=0) as packed,
        tarfile.open(fileobj=Both(), mode="w|", format=tarfile.USTAR_FORMAT) as archive,
    ):
        for number in range(max(1, size // part)):
            info = tarfile.TarInfo(f"opt/large/f{number}.bin")
            info.size, info.mtime = part, 1_700_000_000
            archive.addfile(info, io.BytesIO(source.randbytes(part)))
    with file.open("rb") as opened:
        data = cast(bytes, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))
    return registry.Layer("sha256:" + raw.hexdigest(), data, size)


@contextlib.contextmanager
def _limited(port: int, rate: int) -> Iterator[str]:
    """The host of a registry that limits each connection, in a process of its own."""
    command = [sys.executable, "-m", "tests.testbed.proxy", str(port), str(rate)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=harness.ROOT
    ) as child:
        assert child.stdin is not None and child.stdout is not None
        try:
            yield f"127.0.0.1:{int(child.stdout.readline())}"
        finally:
            child.stdin.close()
            child.wait(timeout=waiting.limit(20))


async def _ranges(folder: Path, images: registry.Registry, place: harness.Workplace) -> Figures:
    """One layer of 2 GiB: ``ctr images pull`` beside the room with one connection, four
    and eight; from a registry that limits each connection, and from one that does not."""
    file = folder / "layer.tar.gz"
    pushed = images.push("bench/large", "v1", [_large(file, place.size(2048, 2) * 1024**2)])
    file.unlink()
    found: Figures = {}
    gate = proxy.Proxy(images.port)  # of the rig; no layer goes through it
    gate.start()
    with contextlib.ExitStack() as stack:
        stack.callback(gate.stop)
        limited = stack.enter_context(_limited(images.port, place.size(30, 2) * MB))
        direct = f"127.0.0.1:{images.port}"
        daemon = containerd.Containerd(folder / "ranges", "sid")
        daemon.trust(limited, f"http://{limited}")
        daemon.trust(direct, f"http://{direct}")
        async with started(images, gate, daemon, folder) as rig:
            cases = {
                "limited": (limited, {1: 0.9, 4: 2.0, 8: 2.0}, 1),
                "unlimited": (direct, {1: 0.95, 4: 0.95}, 3),
            }
            for name, (host, targets, rounds) in cases.items():
                speeds: dict[int, list[float]] = {0: [], **{many: [] for many in targets}}
                for number in range(place.size(rounds, 1)):
                    for many, kept in speeds.items():
                        seconds = await _seconds(rig, f"{host}/bench/large:v1", many)
                        kept.append(pushed.fetched / MB / seconds)
                    said = ", ".join(f"{many}: {kept[-1]:.0f}" for many, kept in speeds.items())
                    harness.say(f"  {name} {number + 1}: {said} MB/s")
                for many, target in targets.items():
                    found[f"connections_{many}_{name}"] = harness.at_least(
                        speeds[many], speeds[0], target, "MB/s"
                    )
    return found


async def _seconds(rig: Rig, ref: str, connections: int) -> float:
    """How long a pull takes; 0 connections: with ctr, without the room."""
    if connections:
        async with rig.running(connections=connections) as room:
            begun = time.perf_counter()
            await room.preheat(ref)
            await pinned(room, ref, seconds=300)
            took = time.perf_counter() - begun
            await room.unpin(ref)
    else:
        ctr = [str(rig.daemon.binary.parent / "ctr"), "-a", str(rig.daemon.socket), "-n", "k8s.io"]
        command = [*ctr, "images", "pull", "--hosts-dir", str(rig.daemon.certs), ref]
        begun = time.perf_counter()
        await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True)
        took = time.perf_counter() - begun
    await until(lambda: _listed(rig, ref), what="the image in the kubelet's list")
    await rig.kubelet.remove(ref)
    await rig.kubelet.collect()
    return took


async def _listed(rig: Rig, ref: str) -> bool:
    return await rig.kubelet.status(ref) is not None


def _run_ranges(place: harness.Workplace) -> harness.Results:
    with place.room("preheat") as folder:
        images = registry.Registry(folder / "registry")
        try:
            images.start()
            found = asyncio.run(_ranges(folder, images, place))
        finally:
            images.stop()
    yield from found.items()


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
GROUPS["ranges"] = _run_ranges
