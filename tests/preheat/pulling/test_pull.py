"""Pulls: the rate limit, and interrupted pulls of a 300 MB image that continue where they were.

The bytes are counted by the proxy.
"""

import asyncio
from typing import Any

import pytest

from preheat import settings
from preheat.image import manifest
from preheat.pulling import pull
from preheat.registry import client
from tests.preheat.rig import MB, Rig, state, until
from tests.testbed import agent, registry

PAUSE_AT = 65 * MB  # of each layer: more than half of the image, and never the whole
real = pytest.mark.real


async def test_limiter_keeps_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    async def sleep(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr("preheat.pulling.pull.asyncio.sleep", sleep)
    limit = pull.Limiter(1000.0, clock=lambda: clock[0])
    for _ in range(100):
        await limit.take(100)
    assert 9.0 <= clock[0] <= 10.1


def test_layers_that_more_pulls_wait_for_come_first() -> None:
    own, shared = (manifest.Layer(name, 1, "", "") for name in ("own", "shared"))
    writers = pull.Writers()
    with writers.demand([own, shared]):
        alone = writers.by_demand([own, shared])
        with writers.demand([shared]):
            both = writers.by_demand([own, shared])
        after = writers.by_demand([own, shared])

    assert alone == after == [own, shared]
    assert both == [shared, own]


def test_each_layer_that_is_fetched_at_once_has_a_connection() -> None:
    """One that waits for a connection looks like a registry that sends nothing."""
    most = settings.PreheatSettings.model_fields["concurrency"].metadata
    at_once = max(each.le for each in most if hasattr(each, "le"))
    assert pull.INGESTS_AT_ONCE * at_once <= client.MOST_STREAMS


ONE, OTHER = ("sha256:" + letter * 64 for letter in "ab")


@pytest.mark.parametrize(
    ("text", "spoilt"),
    [
        (
            f'failed commit on ref "layer-{ONE}": unexpected commit digest {OTHER}, expected {ONE}',
            {f"layer-{ONE}", f"nodeagent-{ONE}"},
        ),
        # Ours: what the runtime fetches of the same layer is somebody else's.
        (f"unexpected commit digest {OTHER}, expected {ONE}", {f"nodeagent-{ONE}"}),
        (f"{ONE} is shorter than the manifest says", {f"nodeagent-{ONE}"}),
        (f'failed commit on ref "layer-{OTHER}": unexpected commit digest', set()),
        ("gzip: invalid header", set()),
    ],
)
def test_only_the_layer_that_the_error_names_is_begun_anew(text: str, spoilt: set[str]) -> None:
    """The other half-fetched layers are right, and a pod may wait for them."""
    assert pull.spoilt(text, {ONE, "sha256:" + "c" * 64}) == spoilt


@pytest.fixture(scope="session")
def big(images: registry.Registry) -> registry.Pushed:
    """300 MB in three layers."""
    sizes = (120, 120, 60)
    layers = [registry.layer(f"big{n}", s * MB, 100 + n) for n, s in enumerate(sizes)]
    return images.push("fw/big", "v1", layers)


def not_to_the_end(rig: Rig) -> None:
    """However late a test comes to stop it."""
    rig.gate.pause_at = PAUSE_AT


async def half(rig: Rig, big: registry.Pushed) -> None:
    await until(lambda: rig.gate.blob_bytes >= big.fetched // 2, 60.0, "half of the image")


async def rest_of(rig: Rig, big: registry.Pushed) -> int:
    """The bytes still missing once nothing flows any more; from now on all of it may come.

    What containerd has stored counts, and not what the proxy sent: that is in socket buffers, too.
    """
    await rig.quiet()
    missing = big.fetched - rig.daemon.stored_bytes()
    rig.gate.pause_at = 0
    rig.gate.reset()
    return missing


@real
@pytest.mark.timeout(180)
async def test_without_a_lease_a_cancelled_pull_restarts_from_zero(
    rig: Rig, big: registry.Pushed
) -> None:
    """The control: what a pull without a lease of ours does."""
    ref = f"{rig.gate.host}/fw/big:v1"
    not_to_the_end(rig)
    task = asyncio.create_task(rig.kubelet.pull(ref))
    await half(rig, big)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await rest_of(rig, big)
    # A cancel is answered before: containerd still closes the parts.
    await until(rig.daemon.has_closed_parts, 60, "the parts to be closed")

    async def nothing_is_left() -> bool:
        # By itself containerd collects only after a hundred changes of its database.
        await rig.kubelet.collect()
        return rig.daemon.stored_bytes() < 0.05 * big.fetched

    await until(nothing_is_left, 60, "the collection of the parts")

    await rig.kubelet.pull(ref)

    assert rig.gate.blob_bytes > 0.95 * big.fetched


@real
@pytest.mark.timeout(180)
async def test_paused_pull_fetches_only_the_rest(rig: Rig, big: registry.Pushed) -> None:
    ref = f"{rig.gate.host}/fw/big:v1"
    not_to_the_end(rig)
    async with rig.running(images=[{"ref": ref}]) as room:
        await half(rig, big)
        paused = await room.pause(ref)
        missing = await rest_of(rig, big)
        await room.resume(ref)
        await state(room, ref, "ready", seconds=60)

    assert paused.state == "paused"
    assert missing <= 0.7 * big.fetched
    assert rig.gate.blob_bytes <= 1.1 * missing
    assert any(seen.range for seen in rig.gate.requests())


@real
@pytest.mark.timeout(180)
async def test_limited_pull_keeps_its_rate_and_resumes(rig: Rig, big: registry.Pushed) -> None:
    ref = f"{rig.gate.host}/fw/big:v1"
    limit = 60 * MB
    loop = asyncio.get_running_loop()
    more: dict[str, Any] = {"images": [{"ref": ref}], "bytes_per_second": limit}
    async with rig.running(**more) as room:
        await until(lambda: rig.gate.blob_bytes > 10 * MB)
        at, begun = loop.time(), rig.gate.blob_bytes
        await half(rig, big)
        await room.pause(ref)
        took = loop.time() - at
        await rig.quiet()
    # Only what was in buffers when it was paused may be lost.
    async with rig.running(**(more | {"bytes_per_second": None})) as room:
        inventory = await room.reconciler.runtime.inventory()
        kept = sum(each.offset for each in inventory.ingests.values())
        kept += sum(inventory.content.get(each.digest, 0) for each in big.layers)
        rig.gate.reset()
        await room.resume(ref)
        await state(room, ref, "ready", seconds=60)

    # What containerd stored, and not what the proxy sent: that is in socket buffers too.
    assert kept <= begun + limit * (took + pull.BURST_SECONDS)
    assert kept > 0.4 * big.fetched
    assert rig.gate.blob_bytes <= 1.1 * (big.fetched - kept)


@real
@pytest.mark.timeout(180)
async def test_pull_survives_sigkill_of_containerd(rig: Rig, big: registry.Pushed) -> None:
    ref = f"{rig.gate.host}/fw/big:v1"
    not_to_the_end(rig)
    async with rig.running(images=[{"ref": ref}]) as room:
        await half(rig, big)
        rig.daemon.kill()
        missing = await rest_of(rig, big)
        rig.daemon.start()
        await state(room, ref, "ready", seconds=60)

    assert missing <= 0.7 * big.fetched
    assert rig.gate.blob_bytes <= 1.1 * missing


@real
@pytest.mark.timeout(180)
async def test_operators_pull_survives_sigkill_of_the_agent(
    rig: Rig, node: agent.Agent, big: registry.Pushed
) -> None:
    """The whole way: command line, agent process, containerd. The request itself survives too."""
    ref = f"{rig.gate.host}/fw/big:v1"
    not_to_the_end(rig)
    await asyncio.to_thread(node.cli_json, "image", "preheat", ref)
    await half(rig, big)
    node.kill()
    missing = await rest_of(rig, big)
    await asyncio.to_thread(node.start)
    await until(lambda: node.get("/readyz")["ready"], what="the agent to be ready")
    row = await asyncio.to_thread(node.cli_json, "image", "preheat", ref, "--wait")
    (shown,) = await asyncio.to_thread(node.cli_json, "image", "list")

    assert node.stop() == 0
    assert row["state"] == "ready"
    assert missing <= 0.7 * big.fetched
    assert rig.gate.blob_bytes <= 1.1 * missing
    assert shown["ref"] == ref
    assert shown["digest"] == big.top
    assert shown["state"] == "ready"
    assert shown["pinned"] is True
    assert shown["bytes_total"] == shown["bytes_done"] == big.fetched


@real
async def test_corrupt_layer_leaves_the_download_of_a_waiting_pod(rig: Rig) -> None:
    """Both images have a layer that the runtime fetches for the kubelet."""
    shared = registry.layer("pod-base", 6 * MB, 91)
    waited = rig.push("fw/pod:v1", [shared])
    bad = rig.push("fw/corrupt:v1", [shared, registry.layer("corrupt", MB // 4, 92)])
    rig.gate.corrupt = {bad.pushed.layers[1].digest}
    rig.gate.pause_at = 3 * MB
    pod = asyncio.create_task(rig.kubelet.pull(waited.ref))
    await until(lambda: rig.gate.blob_bytes >= 3 * MB, what="half of the layer")
    async with rig.running(images=[{"ref": bad.ref}], bytes_per_second=16 * MB) as room:
        failed = room.reconciler.pulls.totals.failed
        await until(lambda: failed["corrupt"] > 0, what="the corrupt layer")
        rig.gate.pause_at = 0
        await pod
        there = await rig.kubelet.status(waited.ref)

    assert there is not None
