"""An image is there when the kubelet hears so: any snapshotter, discarded layers, moved tags."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from preheat.image import manifest
from preheat.registry import estimate, failure, resolver
from preheat.runtimes import base
from tests.preheat.image.test_manifest import CHOICES, index_of
from tests.preheat.rig import MB, Rig, pinned, started, state, until
from tests.testbed import containerd, front, pods, proxy, registry

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
    inventory = base.ImageInventory(content=content, snapshots=frozenset(snapshots))
    assert estimate.is_here(SHAPE, inventory) is here


def test_an_image_is_here_when_the_runtime_tells_the_kubelet() -> None:
    record = base.Record(REF, SHAPE.top)
    for listed, here in ((None, True), (frozenset({REF}), True), (frozenset[str](), False)):
        inventory = base.ImageInventory(records=(record,), listed=listed)
        assert inventory.has(REF, SHAPE.top.digest) is here
        assert not inventory.has(REF, "sha256:other")


def test_a_tag_that_moves_on_the_node_counts_until_the_registry_answers() -> None:
    lookup = resolver.Lookup(manifest.parse(REF))
    assert not lookup.saw_here("old", 100.0)
    assert lookup.moved_at == 0.0, "at the start nobody knows who is newer"
    assert not lookup.saw_here("old", 110.0)
    assert lookup.saw_here("new", 120.0)
    assert not lookup.saw_here("new", 130.0)
    assert lookup.moved_at == 120.0


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
        await until(lambda: not room.reconciler.pulls.running)
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
        await until(lambda: not room.reconciler.pulls.running)
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


def push_index(rig: Rig, name: str, platforms: list[str]) -> tuple[str, list[registry.Pushed]]:
    """An image for each platform and an index of them; its reference at the proxy."""
    made, entries = [], []
    for number, platform in enumerate(index_of(platforms)):
        layer = registry.layer(f"{name}{number}", 2000, number)
        tag, mark = f"{name}-{number}", f"{name}{number}"
        one = rig.images.push("fw/choice", tag, [layer], index=False, mark=mark)
        size = one.documents - _config_size(rig, one)
        made.append(one)
        kind = registry.MANIFEST
        entry = {"mediaType": kind, "digest": one.top, "size": size}
        entries.append(entry | ({"platform": platform} if platform else {}))
    body = {"schemaVersion": 2, "mediaType": registry.INDEX, "manifests": entries}
    rig.images.put_manifest("fw/choice", name, body)
    return f"{rig.gate.host}/fw/choice:{name}", made


def _config_size(rig: Rig, image: registry.Pushed) -> int:
    path = f"/v2/{image.repository}/blobs/{image.config}"
    return len(rig.images._request("GET", path)[2])


@pytest.mark.real
@pytest.mark.timeout(120)
async def test_manifest_is_chosen_as_the_runtime_chooses_it(rig: Rig) -> None:
    """What is waited for is what the runtime brings: else it is pulled for ever."""
    amd64 = {n: c for n, c in CHOICES.items() if c[0] == "linux/amd64" and c[2] is not None}
    wanted, got = {}, {}
    for number, (name, (_, platforms, chosen)) in enumerate(amd64.items()):
        ref, made = push_index(rig, f"c{number}", platforms)
        with contextlib.suppress(grpc.RpcError):
            await rig.kubelet.pull(ref)
        status = await rig.kubelet.status(ref)
        assert chosen is not None
        wanted[name] = made[chosen].config
        got[name] = status.id if status is not None else "not pulled"
    # Their CRI wants the manifest of the other entry, which it did not fetch, and says so.
    wanted["one without a platform"] = "not pulled"
    if rig.daemon.release == "sid":  # 2.x pulls no 386 for amd64, and says so
        wanted["386 where there is no other"] = "not pulled"
    assert got == wanted


@pytest.mark.real
@pytest.mark.timeout(120)
async def test_index_with_variants_is_pulled_once(rig: Rig) -> None:
    ref, made = push_index(rig, "variants", ["linux/amd64/v3", "linux/amd64"])
    async with rig.running(images=[{"ref": ref}]) as room:
        row = await pinned(room, ref)
        await until(lambda: not room.reconciler.pulls.running)
        await room.reconciler.cycle()
        pulls = room.reconciler.pulls.totals.pulls

    assert (row.state, row.image_id) == ("ready", made[1].config)
    assert pulls == 1


@pytest.mark.real
@pytest.mark.timeout(120)
async def test_index_below_an_index_is_pulled_pinned_and_counted(rig: Rig) -> None:
    one = rig.images.push("fw/choice", "below", [registry.layer("below", 2000, 1)], index=False)
    size = one.documents - _config_size(rig, one)
    body = {"mediaType": registry.MANIFEST, "digest": one.top, "size": size}
    for tag in ("inner", "nested"):
        index = {"schemaVersion": 2, "mediaType": registry.INDEX, "manifests": [body]}
        digest, size = rig.images.put_manifest("fw/choice", tag, index)
        body = {"mediaType": registry.INDEX, "digest": digest, "size": size}
    ref = f"{rig.gate.host}/fw/choice:nested"
    async with rig.running(images=[{"ref": ref}]) as room:
        first = await pinned(room, ref)
        await until(lambda: not room.reconciler.pulls.running)
        await room.reconciler.cycle()
        kept = estimate.union(pin.parts for pin in room.reconciler.snapshot.pinned)

    assert (first.state, first.image_id) == ("ready", one.config)
    assert kept > 2000


@pytest.mark.real
@pytest.mark.timeout(120)
async def test_pull_that_brings_no_image_waits_and_is_a_finding(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the reason: here the agent takes another platform's manifest for the node's."""
    ref, _ = push_index(rig, "mistaken", ["linux/arm64", "linux/amd64"])
    monkeypatch.setattr(manifest, "for_platform", lambda index, _: index["manifests"][0])
    async with rig.running(images=[{"ref": ref}]) as room:
        row = await state(room, ref, "failed")
        for _ in range(3):
            await room.reconciler.cycle()
        await until(lambda: not room.reconciler.pulls.running)
        pulls = room.reconciler.pulls.totals.pulls
        await room.reconcile(room.reconciler.section)
        found = [each for each in rig.reported.found if each.subject == ref]
        first = row.retry_at
        # The next one waits longer: what came of the first is not forgotten by its success.
        await room.resume(ref)
        await until(lambda: room.reconciler.pulls.totals.pulls > pulls)
        again = await state(room, ref, "failed")

    assert pulls == 1
    assert (row.failure_kind, row.attempts) == ("incomplete", 1)
    assert "the runtime says that it pulled it" in row.reason
    assert [each.rule for each in found] == ["preheat-pull-failed"]
    assert first is not None
    assert again.failure_kind == "incomplete"


@pytest.mark.real
@pytest.mark.timeout(120)
async def test_page_in_place_of_a_manifest_is_no_image(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mirror that answers 200 and HTML. What the kubelet has counts, not containerd's record."""
    short = failure._WAITS | {
        failure.Kind.BAD_IMAGE: (0.2, 0.4),
        failure.Kind.NOT_FOUND: (0.2, 0.4),
    }
    layers = [registry.layer("portal", MB, 84)]
    pushed = rig.images.push("fw/portal", "v1", layers)
    portal = front.Front(rig.images.port)
    portal.start()
    try:
        portal.page = True
        place = rig.daemon.certs / "portal.example"
        place.mkdir()
        text = f'server = "{portal.url}"\n[host."{portal.url}"]\n'
        (place / "hosts.toml").write_text(text)
        ref = "portal.example/fw/portal:v1"
        async with rig.running(images=[{"ref": ref}]) as room:
            row = await state(room, ref, "failed", "ready")
            await room.reconciler.cycle()
            still = room.show(ref)
            listed = await rig.kubelet.status(ref)
            monkeypatch.setattr(failure, "_WAITS", short)
            portal.page = False
            await room.resume(ref)
            await until(lambda: room.show(ref).state == "ready")
            after = await pinned(room, ref)

    finally:
        portal.stop()
    assert listed is None
    assert (row.state, still.state) == ("failed", "failed")
    assert (after.digest, after.failure_kind) == (pushed.top, "")
