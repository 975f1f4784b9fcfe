"""The agent knows which layers a snapshotter mounts from the registry. These tests run a real
stargz snapshotter. Of nydus and soci they only have the labels that their sources write."""

import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from preheat.image import manifest
from preheat.registry import estimate
from preheat.runtimes import base, containerd_pb2, store
from tests.preheat.rig import MB, Rig, pinned, started, state, until
from tests.testbed import containerd, proxy, registry, stargz

LAYERS = tuple(
    manifest.Layer(f"sha256:{name}", size, "tar", f"sha256:chain-{name}")
    for name, size in (("a", 10), ("b", 7))
)
SHAPE = manifest.Shape(manifest.Target("t", "sha256:t", 1), (("sha256:t", 1),), LAYERS, "id")


# --- pure -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "remote"),
    [
        ({}, False),
        ({"containerd.io/snapshot.ref": "sha256:x"}, False),
        ({"containerd.io/snapshot/cri.image-ref": "r.e/a:1"}, False),  # asked for, not done
        # stargz-snapshotter and soci-snapshotter: remoteLabel in snapshot/snapshot.go, written when
        # a layer was mounted.
        ({"containerd.io/snapshot/remote": "remote snapshot"}, True),
        # soci-snapshotter, fs/source/source.go: containerd gives it these labels with each layer.
        # Layers that soci fetched and unpacked itself (prepareLocalSnapshot) have them too.
        ({"containerd.io/snapshot/remote/soci.size": "7"}, False),
        ({"containerd.io/snapshot/remote/image.manifest.digest": "sha256:x"}, False),
        # nydus-snapshotter: pkg/label/label.go; snapshot/process.go leaves data layers where they
        # are, and lets containerd fetch and unpack the meta layer.
        ({"containerd.io/snapshot/nydus-blob": "true"}, True),
        ({"containerd.io/snapshot/nydus-bootstrap": "true"}, False),
        ({"containerd.io/snapshot/nydus-signature": "x"}, False),
    ],
)
def test_labels_tell_what_is_mounted_from_the_registry(
    labels: dict[str, str], remote: bool
) -> None:
    info = containerd_pb2.SnapshotInfo(name="x", labels=labels)
    assert store.is_remote(info.labels) is remote


def test_mounted_layers_are_here_and_their_bytes_are_not() -> None:
    chains = frozenset(layer.chain_id for layer in LAYERS)
    inventory = base.ImageInventory(
        content={"sha256:t": 1}, snapshots=chains, remote=frozenset({"sha256:chain-b"})
    )
    assert estimate.is_here(SHAPE, inventory)
    assert estimate.remote_bytes(SHAPE, inventory) == 7
    assert estimate.remote_bytes(SHAPE, base.ImageInventory(snapshots=chains)) == 0


# --- on containerd --------------------------------------------------------------------------------


@pytest_asyncio.fixture
async def lazy(
    images: registry.Registry, gate: proxy.Proxy, release: str, tmp_path: Path
) -> AsyncIterator[Rig]:
    """A rig whose containerd mounts layers through a real stargz snapshotter."""
    snapshotter = stargz.Stargz(tmp_path / "stargz")
    daemon = containerd.Containerd(
        tmp_path / "containerd", release, snapshotter="stargz", remote=snapshotter.socket
    )
    snapshotter.start()
    try:
        async with started(images, gate, daemon, tmp_path) as rig:
            yield rig
    finally:
        snapshotter.stop()


@pytest.mark.real
@pytest.mark.timeout(120)
async def test_mounted_image_is_lazy_and_never_pulled_or_healed_for_that(lazy: Rig) -> None:
    mounted = stargz.layer({f"opt/{n}": random.Random(n).randbytes(3 * MB) for n in range(3)})
    image = lazy.push("fw/lazy:v1", [mounted])
    plain = lazy.push("fw/whole:v1", [registry.layer("whole", MB, 61)])
    wanted = [{"ref": image.ref}, {"ref": plain.ref}]
    async with lazy.running(images=wanted) as room:
        whole = await state(room, plain.ref, "ready")
        await state(room, image.ref, "lazy")
        row = await pinned(room, image.ref)
        await until(lambda: not room.reconciler.pulls.running)
        fetched, pulls = (
            room.reconciler.pulls.totals.fetched_bytes,
            room.reconciler.pulls.totals.pulls,
        )
        for _ in range(3):
            await room.reconciler.cycle()
        again = room.reconciler.pulls.totals.pulls
        await lazy.remove(image.ref)
        await room.reconciler.cycle()
        healed = room.show(image.ref)
        heals = room.reconciler.healer.counts.heals
        content = await lazy.kubelet.content()

    assert mounted.digest not in content, "it was fetched: the snapshotter did not mount it"
    assert row.bytes_missing == len(mounted.packed)
    assert row.bytes_done == row.bytes_total - len(mounted.packed)
    assert "the snapshotter fetches what containers read" in row.reason
    assert (pulls, again) == (2, 2)
    assert fetched <= plain.pushed.fetched + image.pushed.documents
    assert (whole.bytes_missing, whole.reason) == (0, "")
    # The restored records find the mounts that the pin's lease kept.
    assert (healed.state, healed.pinned, heals) == ("lazy", True, 1)


@pytest.mark.real
@pytest.mark.timeout(120)
async def test_layers_are_not_fetched_for_a_snapshotter_that_mounts_them(lazy: Rig) -> None:
    """Under a limit the agent fetches layers itself; these nobody would read."""
    mounted = stargz.layer({"opt/one": b"x" * 3 * MB})
    image = lazy.push("fw/limited:v1", [mounted])
    async with lazy.running(images=[{"ref": image.ref}], bytes_per_second=10 * MB) as room:
        await state(room, image.ref, "lazy")
        content = await lazy.kubelet.content()

    assert mounted.digest not in content
