"""Images from OCI layouts on real containerds: imported, used, resumed, pinned, released."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from preheat import layout
from tests.preheat.rig import MB, Rig, find, pinned, state, until
from tests.testbed import layouts, pods, registry

pytestmark = [pytest.mark.real, pytest.mark.timeout(180)]

NAME = "registry.example/fw/torch"  # nobody listens there


def wanted(folder: Path, tag: str, **more: Any) -> list[dict[str, Any]]:
    return [{"ref": f"{NAME}:{tag}", "source": f"oci:{folder}", **more}]


async def test_an_image_of_a_layout_is_like_any_other(
    with_pods: tuple[Rig, pods.Pods], tmp_path: Path
) -> None:
    """Shared layers are not read, pods run it, it is healed, and its release leaves nothing."""
    rig, hand = with_pods
    low, top = registry.layer("low", 3 * MB, 51), registry.layer("top", MB, 52)
    pulled = rig.push("fw/base:v1", [low])  # an image of the registry with the same lower layer
    await rig.kubelet.pull(pulled.ref)
    program = registry.layer_of({"bin/true": b"\x7fELF"})
    folder = tmp_path / "layout"
    made = layouts.write(folder, "v1", [low, top, program], index=True)
    (folder / "blobs" / "sha256" / low.digest.removeprefix("sha256:")).unlink()
    moved: list[str] = []
    blob = layout.Layout.blob

    def counted(self: layout.Layout, digest: str, size: int, offset: int) -> Any:
        moved.append(digest)
        return blob(self, digest, size, offset)

    before = rig.gate.blob_bytes
    layout.Layout.blob = counted  # type: ignore[method-assign]
    try:
        async with rig.running(images=wanted(folder, "v1")) as room:
            await state(room, f"{NAME}:v1", "ready")
            row = await pinned(room, f"{NAME}:v1")
            await until(lambda: not room.reconciler.running)
            roles = await rig.roles()
            status = await rig.kubelet.status(f"{NAME}:v1")
            by_digest = await rig.kubelet.status(f"{NAME}@{made.top}")
            there = await rig.kubelet.snapshots()
            brought = rig.gate.blob_bytes - before  # the pod's sandbox image comes later
            sandbox = await hand.run(f"{NAME}:v1")
            await hand.end(sandbox)
            await rig.kubelet.collect()
            await rig.remove(f"{NAME}:v1")
            healed = await rig.kubelet.status(f"{NAME}:v1")
            await room.reconciler.cycle()
            kept = room.show(f"{NAME}:v1")
            await room.unpin(f"{NAME}:v1")
            left = [each for each in await rig.roles() if each != "note"]
    finally:
        layout.Layout.blob = blob  # type: ignore[method-assign]

    assert brought == 0
    assert sorted(moved) == sorted([top.digest, program.digest])
    assert (row.digest, row.bytes_done) == (made.top, row.bytes_total)
    assert roles == ["pin"]
    assert status is not None
    assert by_digest is not None
    assert status.id == by_digest.id == made.config
    assert not [each for each in there if each.startswith("nodeagent-")]
    assert healed is not None
    assert healed.id == made.config
    assert (kept.state, kept.pinned) == ("ready", True)
    assert left == []


async def test_an_import_that_is_interrupted_goes_on_where_it_was(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelled in the middle, containerd killed, then to its end; and a cancel leaves nothing."""
    big = registry.layer("big", 24 * MB, 53)
    folder = tmp_path / "layout"
    layouts.write(folder, "v1", [big])
    packed = layouts.pack(folder, tmp_path / "l.tar")
    ref, offsets = f"{NAME}:v1", list[int]()
    blob = layout.Layout.blob

    def counted(self: layout.Layout, digest: str, size: int, offset: int) -> Any:
        offsets.append(offset)
        return blob(self, digest, size, offset)

    monkeypatch.setattr(layout.Layout, "blob", counted)

    def half(room: Any) -> bool:
        row = find(room, ref)
        return row is not None and row.state == "pulling" and row.bytes_done > 6 * MB

    slow: dict[str, Any] = {"images": wanted(packed, "v1"), "bytes_per_second": 4 * MB}
    async with rig.running(**slow) as room:
        await until(lambda: half(room), what="half of it to be there")
    rig.daemon.kill()
    rig.daemon.start()
    async with rig.running(images=wanted(packed, "v1")) as room:
        row = await pinned(room, ref)
        await until(lambda: not room.reconciler.running)
        await room.unpin(ref)
        await rig.kubelet.remove(ref)
    # Another image, cancelled by an operator: its bytes go at once.
    other = layouts.write(folder, "v2", [registry.layer("other", 24 * MB, 54)])
    async with rig.running(bytes_per_second=4 * MB) as room:
        await room.preheat(f"{NAME}:v2", source=f"oci:{folder}")

        async def begun() -> bool:
            return any(each.offset > MB for each in await rig.kubelet.ingests())

        await until(begun, what="its bytes to come")
        await room.cancel(f"{NAME}:v2")
        ingests = await rig.kubelet.ingests()
        roles = await rig.roles()
        content = await rig.kubelet.content()

    assert row.state == "ready"
    assert offsets[0] == 0
    assert offsets[1] > 4 * MB  # only what containerd had in its buffers is read again
    assert not [each for each in ingests if each.ref.startswith("nodeagent-")]
    assert "pull" not in roles
    assert other.layers[0].digest not in content


async def test_a_layout_that_moves_or_lies(rig: Rig, tmp_path: Path) -> None:
    """A tag that moves there; bytes that are not what their digest says; a layout that goes."""
    views = tmp_path / "views"
    folder = views / "shared" / "data" / "images"
    first = layouts.write(folder, "v1", [registry.layer("one", MB, 55)])
    ref = f"{NAME}:v1"
    images = [{"ref": ref, "source": "oci:shared/images"}]
    async with rig.running(images=images, datasets=str(views), refresh=10) as room:
        before = await pinned(room, ref)
        await until(lambda: not room.reconciler.running)
        second = layouts.write(folder, "v1", [registry.layer("two", MB, 56)])
        room.reconciler.resolver.again(ref)

        async def moved() -> bool:
            await room.reconciler.cycle()
            row = room.show(ref)
            return row.digest == second.top and row.pinned and row.state == "ready"

        await until(moved, what="the new image to be pinned")
        await until(lambda: not room.reconciler.running)
        await room.reconciler.cycle()
        ids = await rig.pin_images()
        status = await rig.kubelet.status(ref)

        bad = layouts.write(folder, "bad", [registry.layer("bad", MB, 57)])
        blob = folder / "blobs" / "sha256" / bad.layers[0].digest.removeprefix("sha256:")
        data = bytearray(blob.read_bytes())
        data[len(data) // 2] ^= 1
        blob.write_bytes(data)
        await room.preheat(f"{NAME}:bad", source="oci:shared/images")
        failed = await state(room, f"{NAME}:bad", "failed")
        ingests = await rig.kubelet.ingests()
        await room.cancel(f"{NAME}:bad")

        (views / "shared").rename(views / "gone")
        room.reconciler.resolver.again(ref)
        await asyncio.sleep(0)
        for _ in range(3):
            await room.reconciler.cycle()
        lost = room.show(ref)
        await room.preheat(f"{NAME}:none", source="oci:shared/images")
        absent = await state(room, f"{NAME}:none", "failed")

    assert before.digest == first.top
    assert ids == {second.config}
    assert status is not None
    assert status.id == second.config
    assert failed.failure_kind == "corrupt"
    assert not [each for each in ingests if each.ref.startswith("nodeagent-")]
    assert (lost.state, lost.pinned) == ("ready", True)  # what is here stays
    assert absent.failure_kind == "network"  # the dataset may be served again
    assert "its dataset shared is not served on this node now" in absent.reason


@pytest.mark.parametrize("release", ["sid"], indirect=True)
async def test_images_that_share_layers_are_imported_together(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four at a time: each layer is read once and unpacked once."""
    shared = [registry.layer(f"shared-{number}", 2 * MB, 60 + number) for number in range(3)]
    for tag in "abcd":
        layouts.write(tmp_path / "layout", tag, [*shared, registry.layer(tag, 100_000, ord(tag))])
    read: list[str] = []
    blob = layout.Layout.blob

    def counted(self: layout.Layout, digest: str, size: int, offset: int) -> Any:
        read.append(digest)
        return blob(self, digest, size, offset)

    monkeypatch.setattr(layout.Layout, "blob", counted)
    images = [each for tag in "abcd" for each in wanted(tmp_path / "layout", tag)]
    async with rig.running(images=images, concurrency=4) as room:
        for each in images:
            await pinned(room, each["ref"])
        failed = sum(room.reconciler.totals.failed.values())
        there = await rig.kubelet.snapshots()

    assert failed == 0
    assert len(read) == len(set(read)) == 3 + 4
    assert len(there) == 3 + 4
