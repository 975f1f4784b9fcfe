"""Costs: shared layers, and estimates against what a pull really takes."""

import subprocess
from pathlib import Path

import pytest

from preheat.image import manifest
from preheat.registry import estimate
from preheat.runtimes import base
from tests.preheat.rig import MB, Rig, pinned, started, state, until
from tests.testbed import containerd, proxy, registry

DIGEST = "sha256:" + "a" * 64


def shape_of(*layers: str) -> manifest.Shape:
    diffs = [manifest.digest_of(each.encode()) for each in layers]
    top = manifest.digest_of("".join(layers).encode())
    return manifest.Shape(
        manifest.Target("t", top, 1),
        ((top, 1),),
        tuple(
            manifest.Layer(diff, 100, "tar+gzip", chain)
            for diff, chain in zip(diffs, manifest.chain_ids(diffs), strict=True)
        ),
        DIGEST,
    )


def test_cost_counts_what_the_node_lacks() -> None:
    shape = shape_of("a", "b", "c")
    a, b, c = shape.layers
    inventory = base.ImageInventory(
        content={shape.top.digest: 1},
        snapshots=frozenset({a.chain_id}),
        ingests={b.digest: base.Ingest(theirs=40)},
    )
    cost = estimate.cost(shape, inventory, {b.chain_id: 250})

    assert cost.fetch == 60 + 100
    assert cost.unpack == 250 + 300  # the size of c is guessed
    assert estimate.missing(shape, inventory) == (b, c)
    assert not estimate.is_here(shape, inventory)


@pytest.mark.parametrize(
    ("size", "says", "media_type", "takes"),
    [
        (100, 0, "tar+gzip", 300),  # nothing is known
        (100, 110, "tar+gzip", 110),
        (100, 90_000, "tar+gzip", 90_000),  # zeros
        (100, 40, "tar+gzip", 300),  # of the last of several members
        (100, 0, "x.tar", 100),
        (2 * 2**30, 3 * 2**30, "tar+gzip", 6 * 2**30),  # it counts to 4 GiB, then from 0
        (2**30, 5 * 2**28, "tar+gzip", 3 * 2**30),  # it may be 5.25 GiB
        (2**30, 7 * 2**29, "tar+gzip", 7 * 2**29),  # more than is usual
        (399 * 2**20, 2**29, "tar+gzip", 2**29),  # 4 GiB more would be a tenfold
    ],
)
def test_a_layer_takes_what_it_says_or_what_is_usual(
    size: int, says: int, media_type: str, takes: int
) -> None:
    layer = manifest.Layer(DIGEST, size, media_type, DIGEST, says)
    shape = manifest.Shape(manifest.Target("t", DIGEST, 1), (), (layer,), DIGEST)
    assert estimate.cost(shape, base.ImageInventory(), {}).unpack == takes


def test_union_counts_shared_parts_once() -> None:
    base_image, app = shape_of("a", "b"), shape_of("a", "b", "c")
    costs = [estimate.cost(each, base.ImageInventory(), {}).parts for each in (base_image, app)]

    assert estimate.union(costs) == 2 * 1 + 3 * 100 + 3 * 300
    assert estimate.unpacked_bytes(costs[1]) == 3 * 300


@pytest.mark.real
@pytest.mark.timeout(120)
@pytest.mark.parametrize("discard", [False, True], ids=["keep", "discard"])
async def test_estimates_match_the_bytes_fetched(
    images: registry.Registry, gate: proxy.Proxy, release: str, discard: bool, tmp_path: Path
) -> None:
    """Within a hundredth, shared layers included."""
    daemon = containerd.Containerd(tmp_path / "containerd", release, discard=discard)
    async with started(images, gate, daemon, tmp_path) as rig:
        layers = [
            registry.layer("cbase0", 6 * MB, 51),
            registry.layer("cbase1", 9 * MB, 52, level=1),
        ]
        own = [registry.layer("c1", 3 * MB, 53), registry.layer("c2", 4 * MB, 54)]
        first = rig.push("fw/cost:v1", [*layers, own[0]])
        second = rig.push("fw/cost:v2", [*layers, own[1]], index=False)
        third = rig.push("fw/other:v1", [layers[0], own[1]])
        figures = [await _measure(rig, each.ref) for each in (first, second, third)]
        await rig.kubelet.collect()
        content = await rig.kubelet.content()

    for estimated, unpacked, fetched, grown in figures:
        assert abs(estimated - fetched) <= 0.01 * fetched
        assert grown <= 1.02 * (estimated + unpacked) + MB
    assert figures[0][0] == first.pushed.fetched
    assert figures[1][0] < 0.3 * second.pushed.fetched
    # cbase0 is shared with the same chain; the layer above lies on another chain here.
    assert figures[2][0] <= third.pushed.fetched - len(layers[0].packed)
    assert any(layer.digest in content for layer in layers) is not discard


async def _measure(rig: Rig, ref: str) -> tuple[int, int, int, int]:
    """Estimated bytes to fetch and unpacked, bytes fetched, and growth of the disk use."""
    async with rig.running() as room:
        await room.preheat(ref)
        await room.pause(ref)
        await until(lambda: room.show(ref).bytes_total > 0)
        await room.reconciler.cycle()
        paused = room.show(ref)
        rig.gate.reset()
        used = _disk_use(rig.daemon)
        await room.resume(ref)
        await pinned(room, ref)
        await state(room, ref, "ready")
        await until(lambda: not room.reconciler.pulls.running)
        fetched = sum(s.bytes for s in rig.gate.requests() if s.agent != "nodeagent")
        return paused.bytes_missing, paused.bytes_unpacked, fetched, _disk_use(rig.daemon) - used


def _disk_use(daemon: containerd.Containerd) -> int:
    out = subprocess.run(
        ["du", "-sB1", str(daemon.folder / "root")], capture_output=True, text=True, check=False
    )
    return int(out.stdout.split()[0])
