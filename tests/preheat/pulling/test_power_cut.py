"""The power goes while images are pulled, pinned or unpacked again: what is ready is whole.

containerd's root is a disk of its own, and only that loses power.
"""

import hashlib
import io
import subprocess
import tarfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from linux import mountinfo, procfs
from preheat import status
from preheat.component import Preheat
from preheat.image import manifest
from preheat.pulling import durability
from preheat.runtimes import base, store
from preheat.runtimes import containerd_pb2 as pb
from tests.cache.test_space import disk
from tests.preheat import rig as rigs
from tests.preheat.rig import MB, Image, Rig, pinned, state, until
from tests.testbed import containerd, grave, power, proxy, registry, waiting

A, B, C = (f"sha256:{letter * 64}" for letter in "abc")


# --- what is doubted, pure ------------------------------------------------------------------------


def shape(top: str, *chain_ids: str) -> manifest.Shape:
    layers = tuple(manifest.Layer(f"sha256:{c[7] * 63}0", 1, "t", c) for c in chain_ids)
    return manifest.Shape(manifest.Target("t", top, 1), ((top, 1),), layers, "sha256:" + "9" * 64)


def test_doubts_begin_with_a_boot_and_stay_until_they_are_settled() -> None:
    one, two = frozenset({A}), frozenset({B})
    first = durability.begun(durability.Kept(), "boot 1", one)
    assert first == durability.Kept("boot 1"), "the first agent of all knows nothing"
    assert durability.begun(first, "boot 1", one) == first
    second = durability.begun(first, "boot 2", one)
    assert second == durability.Kept("boot 2", one)
    assert durability.begun(second, "boot 2", two) == second
    assert durability.begun(second, "boot 3", two) == durability.Kept("boot 3", one | two)


def test_layers_that_only_somebody_else_pulled_are_not_doubted() -> None:
    tops = {"x": "sha256:" + "1" * 64, "y": "sha256:" + "2" * 64}
    shapes = {tops["x"]: shape(tops["x"], A, B), tops["y"]: shape(tops["y"], A, C)}
    records = tuple(base.Record(n, manifest.Target("t", d, 1)) for n, d in tops.items())

    def loose(*holds: base.Hold) -> frozenset[str]:
        every = frozenset({A, B, C})
        return durability.loose_layers(
            base.ImageInventory(records=records, holds=holds, snapshots=every, shapes=shapes)
        )

    assert loose() == frozenset()
    assert loose(base.Hold("pin", "x", "policy", records[0].target)) == {A, B}
    assert loose(base.Hold("pull", "y", "policy")) == {A, C}, "pulled, and not pinned yet"
    assert loose(base.Hold("note", "y", "policy", state="done")) == {A, C}, "pin: never"
    assert loose(base.Hold("note", "y", "operator", state="released")) == frozenset()
    half_pulled = base.ImageInventory(snapshots=frozenset({A, B}), durable=frozenset({B}))
    assert durability.loose_layers(half_pulled) == {A}


def test_only_a_stack_of_directories_is_unpacked_in_place() -> None:
    def place(kind: str, *options: str) -> pb.Mount | None:
        return store.in_place([pb.Mount(type=kind, source=kind, options=options)])

    assert place("bind", "ro") is None
    assert place("overlay", "upperdir=/u") is None
    assert store.in_place([]) is None
    lowest = place("overlay", "index=off", "upperdir=/u", "lowerdir=/s/1/fs")
    assert lowest == pb.Mount(type="bind", source="/s/1/fs", options=["rw", "rbind"])
    upper = place("overlay", "lowerdir=/s/2/fs:/s/1/fs")
    assert upper is not None
    assert list(upper.options) == ["upperdir=/s/2/fs", "lowerdir=/s/1/fs"]


# --- on containerd --------------------------------------------------------------------------------


@dataclass
class Node:
    """A containerd on a disk of its own, and what the machine says of its boot."""

    rig: Rig
    ssd: Path
    fstype: str
    boots: list[str] = field(default_factory=lambda: ["boot 0"])

    def boot_id(self) -> str:
        return self.boots[-1]

    def cut(self, flag: int = power.LOG_LOST) -> None:
        power.cut(self.ssd, flag)

    def boot(self) -> None:
        """After ``cut``, with no agent running."""
        daemon = self.rig.daemon
        daemon.kill()
        for each in mountinfo.read():
            if each.target.startswith(f"{self.ssd}/"):  # where a layer was being unpacked
                subprocess.run(
                    ["umount", "-l", each.target], check=False, timeout=waiting.limit(60)
                )
        power.remount(self.ssd, self.ssd.with_suffix(".img"))
        self.boots.append(f"boot {len(self.boots)}")
        daemon.start()

    def damaged(self, *layers: registry.Layer) -> list[str]:
        """Files of the layers that are not as in their tar, wherever the layers are unpacked."""
        places = self.ssd / "io.containerd.snapshotter.v1.overlayfs" / "snapshots"
        found = []
        for layer in layers:
            for name, data in files(layer).items():
                copies = list(places.glob(f"*/fs/{name}"))
                if [hashlib.sha256(p.read_bytes()).digest() for p in copies] != [data]:
                    found.append(name)
        return found

    async def labelled(self) -> int:
        """Layers that are known to be durable."""
        labels = await self.rig.kubelet.snapshot_labels()
        return sum(each.get(store.DURABLE) == "yes" for each in labels.values())

    async def nothing_left(self, image: Image, *more: str) -> None:
        """One pin and nothing else of ours, no half of anything; ``more``: other snapshots."""
        kubelet = self.rig.kubelet

        async def clean() -> bool:
            await kubelet.collect()
            left = await kubelet.snapshots() - {*chains(image), *more}
            return not left and not await kubelet.ingests() and await self.rig.roles() == ["pin"]

        await until(clean, what="nothing to be left of what was interrupted")


def chains(image: Image) -> list[str]:
    return manifest.chain_ids([layer.raw_digest for layer in image.pushed.layers])


def files(layer: registry.Layer) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(layer.packed), mode="r:gz") as archive:
        return {
            each.name: hashlib.sha256(reader.read()).digest()
            for each in archive
            if (reader := archive.extractfile(each)) is not None
        }


@asynccontextmanager
async def node_on(
    fstype: str,
    images: registry.Registry,
    gate: proxy.Proxy,
    daemon: containerd.Containerd,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Node]:
    with disk(folder, fstype, 400 * 2**20) as ssd:
        daemon.folder.mkdir()
        (daemon.folder / "root").symlink_to(ssd)
        async with rigs.started(images, gate, daemon, folder) as made:
            found = Node(made, ssd, fstype)
            monkeypatch.setattr(procfs, "boot_id", found.boot_id)
            yield found


@pytest_asyncio.fixture(params=["bookworm-ext4", "sid-ext4", "sid-xfs"])
async def node(
    request: pytest.FixtureRequest,
    images: registry.Registry,
    gate: proxy.Proxy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Node]:
    release, fstype = request.param.split("-")
    daemon = containerd.Containerd(tmp_path / "containerd", release)
    async with node_on(fstype, images, gate, daemon, tmp_path, monkeypatch) as found:
        yield found


def torch(rig: Rig, name: str) -> Image:
    layers = [registry.layer(f"{name}{n}", 3 * MB, n, files=20) for n in range(2)]
    return rig.push(f"fw/{name}:v1", layers)


async def hangs(*_: Any) -> bool:
    """Stands for a sync that has not come back."""
    return False


async def durable(node: Node, room: Preheat, count: int) -> None:
    async def all_labelled() -> bool:
        return await node.labelled() == count

    await until(all_labelled, 60, "every layer to be durable", detail=lambda: room.images())


@pytest.mark.real
@pytest.mark.timeout(240)
async def test_a_pinned_image_has_its_files_after_power_cuts(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = torch(node.rig, "pinned")
    wanted: dict[str, Any] = {"images": [{"ref": image.ref}]}
    with monkeypatch.context() as patched:
        # The power goes before the sync has come back.
        patched.setattr(durability.Durability, "_confirm", hangs)
        async with node.rig.running(**wanted) as room:
            await pinned(room, image.ref)
            # As of a container that the kubelet has not removed yet after the boot.
            await container(node, image)
            node.cut()
    node.boot()
    assert len(node.damaged(*image.pushed.layers)) > 30, "nothing was at risk"
    before = node.rig.gate.blob_bytes
    async with node.rig.running(**wanted) as room:
        await state(room, image.ref, "ready", seconds=60)
        with grave.wrong_bytes():
            assert node.damaged(*image.pushed.layers) == []
        assert room.show(image.ref).pinned
        assert room.reconciler.durability.unpacked_again == 1
        await durable(node, room, 2)
        node.cut()
    node.boot()
    with grave.wrong_bytes():
        assert node.damaged(*image.pushed.layers) == [], "they were said to be durable"
    async with node.rig.running(**wanted) as room:
        await state(room, image.ref, "ready", seconds=60)
        assert room.reconciler.durability.unpacked_again == 0
    assert node.rig.gate.blob_bytes == before, "nothing is fetched again"
    await node.nothing_left(image, "container")


async def container(node: Node, image: Image) -> None:
    """What a container has of an image: a snapshot on top of its layers."""
    top = chains(image)[-1]
    request = pb.PrepareSnapshotRequest(snapshotter="overlayfs", key="container", parent=top)
    create = pb.CreateLeaseRequest(id="container").SerializeToString()
    await node.rig.kubelet.raw("/containerd.services.leases.v1.Leases/Create", create)
    path = "/containerd.services.snapshots.v1.Snapshots/Prepare"
    await node.rig.kubelet.raw(path, request.SerializeToString(), lease="container")


@pytest.mark.real
@pytest.mark.timeout(240)
@pytest.mark.parametrize("node", ["bookworm-ext4", "sid-ext4"], indirect=True)
async def test_a_pull_goes_on_after_a_power_cut_with_whole_layers(node: Node) -> None:
    """The lower layer was unpacked when the power went, the upper one was half-fetched."""
    rig = node.rig
    low, high = registry.layer("low", 2 * MB, 1, files=20), registry.layer("high", 12 * MB, 2)
    image = rig.push("fw/half:v1", [low, high])
    rig.gate.rate = 2 * MB
    wanted: dict[str, Any] = {"images": [{"ref": image.ref}]}
    async with rig.running(**wanted):

        async def half() -> bool:
            ingests = await rig.kubelet.ingests()
            return chains(image)[0] in await rig.kubelet.snapshots() and any(
                each.offset > 2 * MB for each in ingests
            )

        await until(half, 60, "one layer and a half")
        node.cut()
    rig.gate.rate = 0
    await rig.quiet()
    node.boot()
    assert node.damaged(low), "nothing was at risk"
    rig.gate.reset()
    async with rig.running(**wanted) as room:
        await pinned(room, image.ref, seconds=60)
        with grave.wrong_bytes():
            assert node.damaged(low, high) == []
        assert room.reconciler.durability.unpacked_again == 1
        await durable(node, room, 2)
    # The layer that was complete is not fetched again.
    assert rig.gate.blob_bytes < len(high.packed) + len(low.packed) // 2
    await node.nothing_left(image)


@pytest.mark.real
@pytest.mark.timeout(240)
async def test_without_blobs_layers_are_pulled_again_once_no_container_has_them(
    images: registry.Registry, gate: proxy.Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durability, "RETRY_FIRST_SECONDS", 0.1)
    monkeypatch.setattr(durability, "RETRY_LONGEST_SECONDS", 0.1)
    daemon = containerd.Containerd(tmp_path / "containerd", "sid", discard=True)
    async with node_on("ext4", images, gate, daemon, tmp_path, monkeypatch) as node:
        image = torch(node.rig, "discarded")
        wanted: dict[str, Any] = {"images": [{"ref": image.ref}]}
        with monkeypatch.context() as patched:
            patched.setattr(durability.Durability, "_confirm", hangs)
            async with node.rig.running(**wanted) as room:
                await pinned(room, image.ref)
                await container(node, image)
                node.cut()
        node.boot()
        assert node.damaged(*image.pushed.layers), "nothing was at risk"
        async with node.rig.running(**wanted) as room:

            def found() -> bool:
                room.reconciler.wake()
                return any(
                    each.rule == "preheat-power-cut" for each in status.findings(room.reconciler)
                )

            await until(found, 60, "a finding", detail=lambda: room.reconciler.durability.troubles)
            shown = room.show(image.ref)
            assert shown.state == "waiting"
            assert "the node went down" in shown.reason
            remove = pb.SnapshotRequest(snapshotter="overlayfs", key="container")
            path = "/containerd.services.snapshots.v1.Snapshots/Remove"
            await node.rig.kubelet.raw(path, remove.SerializeToString())

            def ready() -> bool:
                room.reconciler.wake()
                return room.show(image.ref).state == "ready"

            await until(ready, 60, "the image", detail=lambda: room.show(image.ref))
            with grave.wrong_bytes():
                assert node.damaged(*image.pushed.layers) == []
            assert not room.reconciler.durability.troubles
            await durable(node, room, 2)
        await node.nothing_left(image)
