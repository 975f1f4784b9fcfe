"""Images that pods mount as volumes (KEP-4639) are in use like those of their containers."""

from typing import Any

import pytest

from preheat.component import Preheat
from preheat.image import manifest
from preheat.runtimes import base
from preheat.runtimes import containerd as adapter
from tests.preheat.rig import MB, Clock, Image, Rig, brought, find, idle, pinned, until
from tests.testbed import kubernetes, pods, registry

ID, TOP, OTHER = (f"sha256:{letter * 64}" for letter in "abc")
TARGET = manifest.Target("application/vnd.oci.image.index.v1+json", TOP, 10)
RECORDS = tuple(base.Record(name, TARGET) for name in ("r.e/m:v1", f"r.e/m@{TOP}", ID))


@pytest.mark.parametrize("named", [ID, "r.e/m:v1", f"r.e/m@{TOP}"])
def test_an_image_in_use_is_found_by_id_and_by_name(named: str) -> None:
    found = base.image_ids([named, OTHER, "r.e/gone:v1", ""], RECORDS)
    assert {ID, OTHER} <= found
    assert found <= {ID, OTHER, TOP}


async def _kept(rig: Rig, ref: str) -> bool:
    """Whether the kubelet's RemoveImage is answered by a heal."""
    await rig.remove(ref)
    return await rig.kubelet.status(ref) is not None


async def _freeable(room: Preheat) -> int:
    await room.reconciler.cycle()
    node = room.reconciler.snapshot.node
    assert node is not None
    return node.freeable


@pytest.mark.real
@pytest.mark.timeout(120)
@pytest.mark.parametrize("release", ["sid"], indirect=True)  # containerd mounts images from 2.1 on
async def test_an_image_volume_keeps_its_image(
    with_pods: tuple[Rig, pods.Pods], clock: Clock
) -> None:
    rig, hand = with_pods
    job = rig.push("user/job:v1")
    model = rig.push("fw/model:v1", size=2 * MB)
    user = await rig.kubelet.pull(job.ref)
    timed: dict[str, Any] = {"images": [{"ref": model.ref, "pin": {"for": 600}}]}
    async with rig.running(**timed) as room:
        await pinned(room, model.ref)
        await idle(room)
        volume = (await rig.kubelet.status(model.ref) or pytest.fail("not pulled")).id
        sandbox = await hand.run(job.ref, [volume])
        await room.reconciler.cycle()
        clock.advance(700)
        for _ in range(2):
            await room.reconciler.cycle()
        used = room.show(model.ref)
        healed = await _kept(rig, model.ref)
        await hand.end(sandbox)
        await room.reconciler.cycle()
        after = room.show(model.ref)  # its time begins when the last use ends
        clock.advance(700)
        for _ in range(2):
            await room.reconciler.cycle()
        over = room.show(model.ref)
        in_use = room.reconciler.snapshot.inventory.in_use

    # As a retained image: nobody lists it, a pod mounts it.
    sandbox = await hand.run(job.ref, [volume])
    async with rig.running(retain={"for": 600, "at_least": "1MB"}) as room:
        retained = await pinned(room, model.ref)
        await hand.end(sandbox)
        await room.reconciler.cycle()
        clock.advance(700)
        for _ in range(2):
            await room.reconciler.cycle()
        later = find(room, model.ref)

    # Unpinned and in use: garbage collection cannot take it, and the plan must not count on that.
    sandbox = await hand.run(job.ref, [volume])
    async with rig.running() as room:
        freeable = await _freeable(room)
        await hand.end(sandbox)
        more = await _freeable(room)

    assert user != volume
    assert (used.in_use, used.pinned) == (True, True)
    assert healed
    assert (after.in_use, after.pinned) == (False, True)
    assert (over.in_use, over.pinned) == (False, False)
    assert volume not in in_use
    assert (retained.by, retained.in_use) == ("retained", True)
    assert later is None
    assert more - freeable > model.pushed.fetched


# --- with a kubelet -------------------------------------------------------------------------------


def pushed(kube: kubernetes.Kubernetes, name: str) -> Image:
    layer = registry.layer_of({"weights": b"w" * 1000, "name": name.encode()})
    return Image(f"{kubernetes.HOST}/{name}:1", kube.registry.push(name, "1", [layer]))


def mounting(kube: kubernetes.Kubernetes, ref: str) -> dict[str, Any]:
    """A pod that mounts an image, which its kubelet must not pull."""
    container = {
        "name": "main",
        "image": kube.busybox,
        "command": ["/bin/busybox", "sleep", "100000"],
        "volumeMounts": [{"name": "model", "mountPath": "/model"}],
    }
    volume = {"name": "model", "image": {"reference": ref, "pullPolicy": "Never"}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "reader", "namespace": "default"},
        "spec": {
            "containers": [container],
            "volumes": [volume],
            "terminationGracePeriodSeconds": 0,
        },
    }


@pytest.mark.real
@pytest.mark.timeout(240)
async def test_a_real_kubelet_mounts_a_pinned_image_and_it_is_in_use_until_the_pod_has_gone(
    newer: kubernetes.Kubernetes,
) -> None:
    image = pushed(newer, "fw/model")
    image_id = image.pushed.config
    box = adapter.Containerd(newer.root / "run/containerd/containerd.sock")
    try:
        await box.connect()
        await brought(box, image)
        before = (await box.inventory()).in_use

        newer.apply(mounting(newer, image.ref))

        def runs() -> bool:
            return bool(newer.get("pod", "reader")["status"].get("phase") == "Running")

        await until(runs, 60, "the pod to run", detail=lambda: newer.get("pod", "reader")["status"])
        read = newer.kubectl("exec", "reader", "--", "/bin/busybox", "wc", "-c", "/model/weights")
        during = (await box.inventory()).in_use
        newer.kubectl("delete", "pod", "reader")

        async def unused() -> bool:
            return image_id not in (await box.inventory()).in_use

        await until(unused, 60, "the image to be out of use")
        kept = await box.inventory()
    finally:
        await box.close()

    assert read.split()[0] == "1000"
    assert image_id not in before
    assert image_id in during
    assert [each.image_id for each in kept.held("pin")] == [image_id]
    assert kept.digest_of(image.ref) == image.pushed.top
