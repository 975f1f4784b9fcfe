"""An image is there when the kubelet hears so: any snapshotter, discarded layers, moved tags."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from preheat import estimate, local_tags, manifest
from preheat.runtimes import base
from tests.preheat.rig import MB, Rig, pinned, started, state, until
from tests.testbed import containerd, pods, proxy, registry

REF = "r.e/fw/a:v1"
LAYER = manifest.Layer("sha256:l", 10, "tar", "sha256:c")
SHAPE = manifest.Shape(manifest.Target("t", "sha256:t", 1), (("sha256:t", 1),), (LAYER,), "id")


# --- pure -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "snapshots", "here"),
    [
        ({"sha256:t": 1}, {"sha256:c"}, True),
        ({"sha256:t": 1, "sha256:l": 10}, set(), True),  # unpacked when a container starts
        ({"sha256:t": 1}, set(), False),
        ({}, {"sha256:c"}, False),
    ],
)
def test_an_image_is_whole_with_its_layers_in_any_form(
    content: dict[str, int], snapshots: set[str], here: bool
) -> None:
    inventory = base.Inventory(content=content, snapshots=frozenset(snapshots))
    assert estimate.is_here(SHAPE, inventory) is here


def test_an_image_is_here_when_the_runtime_tells_the_kubelet() -> None:
    record = base.Record(REF, SHAPE.top)
    for listed, here in ((None, True), (frozenset({REF}), True), (frozenset[str](), False)):
        inventory = base.Inventory(records=(record,), listed=listed)
        assert inventory.has(REF, SHAPE.top.digest) is here
        assert not inventory.has(REF, "sha256:other")


def test_a_tag_that_moves_on_the_node_counts_until_the_registry_answers() -> None:
    tags = local_tags.LocalTags()
    assert not tags.saw(REF, "old", 100.0)
    assert not tags.is_newer(REF, 50.0)  # at the start nobody knows who is newer
    assert not tags.saw(REF, "old", 110.0)
    assert tags.saw(REF, "new", 120.0)
    assert tags.is_newer(REF, 115.0)
    assert tags.is_newer(REF, 0.0)
    assert not tags.is_newer(REF, 121.0)
    tags.keep([])
    assert not tags.is_newer(REF, 0.0)


# --- on containerd --------------------------------------------------------------------------------


@pytest_asyncio.fixture(params=[False, True], ids=["keep", "discard"])
async def native(
    request: pytest.FixtureRequest,
    images: registry.Registry,
    gate: proxy.Proxy,
    release: str,
    tmp_path: Path,
) -> AsyncIterator[Rig]:
    """A rig whose containerd unpacks with another snapshotter than its default."""
    folder = tmp_path / "native"
    daemon = containerd.Containerd(folder, release, snapshotter="native", discard=request.param)
    async with started(images, gate, daemon, tmp_path) as rig:
        yield rig


@pytest.mark.real
@pytest.mark.timeout(120)
async def test_any_snapshotter_gives_the_right_state(native: Rig) -> None:
    base_layer = registry.layer("native-base", MB, 81)
    image = native.push("fw/native:v1", [base_layer])
    more = native.push("fw/native:v2", [base_layer, registry.layer("native-top", MB, 82)])
    async with native.running(images=[{"ref": image.ref}]) as room:
        await state(room, image.ref, "ready")
        await pinned(room, image.ref)
        await until(lambda: not room.reconciler.running)
        await native.remove(image.ref)
        await room.reconciler.cycle()
        healed = room.show(image.ref)
        before = native.gate.blob_bytes
        await room.reconcile(native.section(images=[{"ref": image.ref}, {"ref": more.ref}]))
        await state(room, more.ref, "ready")
        await room.reconciler.cycle()
        parts = room.reconciler.snapshot.requests[more.ref].parts

    assert (healed.state, healed.pinned, healed.reason) == ("ready", True, "")
    assert native.gate.blob_bytes - before < 1.2 * MB  # the shared layer was there
    # Unpacked sizes come from the snapshotter that has them.
    assert estimate.unpacked_bytes(parts) > 2 * MB


@pytest.mark.real
@pytest.mark.timeout(120)
async def test_tag_that_a_kubelet_moved_is_looked_up_at_once(
    with_pods: tuple[Rig, pods.Pods],
) -> None:
    """The lookup would come within the hour. A pod still runs the old image."""
    rig, hand = with_pods
    old = rig.push("fw/drift:main", size=MB, mark="old")
    wanted: list[dict[str, Any]] = [{"ref": old.ref}]
    async with rig.running(images=wanted) as room:
        await pinned(room, old.ref)
        await until(lambda: not room.reconciler.running)
        sandbox = await hand.run(old.ref)
        new = rig.push("fw/drift:main", size=2 * MB, mark="new")
        await rig.kubelet.pull(old.ref)
        with rig.gate.down():  # the registry is away: what pods use counts
            await room.reconciler.cycle()
            row = room.show(old.ref)
            await room.reconciler.cycle()
            kept = await rig.pin_images()
        await until(lambda: not room.reconciler.snapshot.requests[old.ref].unconfirmed)
        await room.reconciler.cycle()
        await room.reconciler.cycle()
        settled = room.show(old.ref)
        in_use = await rig.pin_images()
        await hand.end(sandbox)
        for _ in range(2):
            await room.reconciler.cycle()
        after = await rig.pin_images()

    assert (row.state, row.digest, row.reason) == ("ready", new.pushed.top, "")
    assert kept == {old.pushed.config, new.pushed.config}
    assert (settled.state, settled.digest, settled.pinned) == ("ready", new.pushed.top, True)
    assert in_use == {old.pushed.config, new.pushed.config}
    assert after == {new.pushed.config}
