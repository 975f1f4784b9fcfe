"""Pins are whole or gone: after kills at each step, after an agent that left, after release-all."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kit.errors
import kit.files
import kit.traces
from preheat import uninstall
from preheat.image import manifest
from preheat.runtimes import base, containerd_pb2, store
from preheat.runtimes import containerd as adapter
from preheat.runtimes import containerd_api as api
from preheat.runtimes import holds as holding
from tests.preheat.rig import MB, Image, Rig, brought, idle, pinned, started, state, until
from tests.testbed import containerd, proxy, registry

DIGEST = "sha256:" + "a" * 64
ID = "sha256:" + "b" * 64
NOW = 1_000_000.0


# --- what to put right, pure ----------------------------------------------------------------------


def record(name: str = ID, digest: str = DIGEST, **more: bool) -> base.Record:
    return base.Record(name, manifest.Target("t", digest, 1), **more)


def pin(expires: float | None = None, image_id: str = ID) -> base.Hold:
    target = manifest.Target("t", DIGEST, 1)
    return base.Hold("pin", "r", "policy", target, image_id, expires=expires, id="p")


def decide(
    *records: base.Record,
    holds: tuple[base.Hold, ...] = (),
    honoured: bool | None = True,
    after: float | None = None,
) -> holding.Mends:
    return holding.decide(base.ImageInventory(records=records, holds=holds), honoured, after, NOW)


def test_a_pin_without_its_mark_gets_it() -> None:
    for unmarked in (record(), record(pinned=True), record(ours=True)):
        assert decide(unmarked, holds=(pin(),)).unmarked == (pin(),)
    marked = record(pinned=True, ours=True)
    assert decide(marked, holds=(pin(),)) == holding.Mends()
    assert decide(marked, holds=(pin(),), honoured=None).unmarked == (pin(),)  # to find out
    assert decide(holds=(pin(),)) == holding.Mends()  # the record is healed first
    assert decide(record(), holds=(pin(),), honoured=False) == holding.Mends()


def test_a_mark_without_a_pin_goes_if_it_is_ours() -> None:
    ours = record(pinned=True, ours=True)
    assert decide(ours).stray == (ours,)
    assert decide(record(pinned=True)) == holding.Mends()
    assert decide(ours, holds=(pin(),), honoured=False).stray == (ours,)


def test_what_the_runtime_pins_itself_is_left_to_it() -> None:
    sandbox = (record("localhost/pause:1", pinned=True), record(pinned=True))
    assert decide(*sandbox, holds=(pin(),)) == holding.Mends()


@pytest.mark.parametrize(
    ("expires", "after", "due"),
    [
        (None, None, False),
        (NOW + 9, None, True),  # the setting was taken out
        (None, 100.0, True),
        (NOW + 51, 100.0, False),
        (NOW + 49, 100.0, True),
        (NOW + 900, 100.0, True),  # it was longer
    ],
)
def test_holds_that_expire_are_renewed_in_time(
    expires: float | None, after: float | None, due: bool
) -> None:
    found = decide(holds=(pin(expires),), honoured=False, after=after)
    assert found.renew == ((pin(expires),) if due else ())


# --- on containerd --------------------------------------------------------------------------------


class Killed(BaseException):
    """The agent was killed: no clean-up of its own may run."""


class Steps:
    """Counts the changing calls of an adapter; kills at call ``at``, before or after it."""

    def __init__(self, box: adapter.Containerd, at: int, after: bool, kill: Callable[[], None]):
        self._change, self._at, self._after, self._kill = box.connection.change, at, after, kill
        self.count = 0
        box.connection.change = self.change  # type: ignore[method-assign]

    async def change(self, *given: Any, **more: Any) -> Any:
        self.count += 1
        if self.count == self._at and not self._after:
            self._kill()
        if self.count > self._at or (self.count == self._at and not self._after):
            raise Killed
        answer = await self._change(*given, **more)
        if self.count == self._at:
            self._kill()
            raise Killed
        return answer


async def marked(rig: Rig) -> set[str]:
    return {each.name for each in await rig.kubelet.records() if each.labels.get(holding.PINNED)}


async def whole(rig: Rig, image: Image, *, held: bool) -> None:
    """The image has one pin with its content and its mark, or nothing of ours is there."""
    leases = [x for x in await rig.kubelet.leases() if "nodeagent/role" in x.labels]
    assert [lease.labels["nodeagent/role"] for lease in leases] == (["pin"] if held else [])
    honours = rig.daemon.release != "bookworm"
    assert await marked(rig) == ({image.pushed.config} if held and honours else set())
    if held:
        assert ("content", image.pushed.top) in await rig.kubelet.resources(leases[0].id)
        # Garbage collection takes nothing of it, even when its records go.
        await rig.kubelet.remove(image.ref)
        await rig.kubelet.collect()
        content = await rig.kubelet.content()
        assert image.pushed.top in content
        assert {layer.digest for layer in image.pushed.layers} <= set(content)


async def changed(box: adapter.Containerd, _: Image) -> None:
    """The same pin for somebody else: its lease is renewed."""
    (hold,) = (await box.inventory()).held("pin")
    await box.begin(dataclasses.replace(hold, by="retained", keep="for:60"))


async def ended(box: adapter.Containerd, _: Image) -> None:
    for hold in (await box.inventory()).held("pin"):
        await box.unpin(hold)


def nothing() -> None:
    """The agent alone is killed."""


async def interrupted(rig: Rig, work: Any, image: Image, at: int, after: bool, who: str) -> bool:
    """Do ``work`` until the kill at call ``at``; whether it came so far."""
    box = adapter.Containerd(rig.daemon.socket)
    try:
        await box.connect()
        Steps(box, at, after, rig.daemon.kill if who == "containerd" else nothing)
        try:
            await work(box, image)
        except Killed:
            return True
        return False
    finally:
        await box.close()
        if not rig.daemon.alive:
            rig.daemon.start()


@pytest.mark.real
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("release", "work", "who"),
    [
        *[("trixie", work, who) for work in (brought, ended) for who in ("agent", "containerd")],
        ("trixie", changed, "agent"),
        *[(other, work, "agent") for other in ("bookworm", "sid") for work in (brought, ended)],
    ],
    indirect=["release"],
)
async def test_kill_at_each_step_loses_and_leaks_no_pin(rig: Rig, work: Any, who: str) -> None:
    image = rig.push("fw/steps:v1", size=MB // 4)
    wanted = [{"ref": image.ref}]
    done = 0
    for at in range(1, 30):
        for after in (False, True):
            if work is not brought:
                async with rig.running(images=wanted) as room:
                    await pinned(room, image.ref)
                    await idle(room)
            if not await interrupted(rig, work, image, at, after, who):
                break
            done += 1
            # Whoever wants it, has it; whoever does not, has nothing.
            async with rig.running(images=wanted) as room:
                await pinned(room, image.ref)
                await idle(room)
                await room.reconciler.cycle()
                await room.reconciler.cycle()
                await whole(rig, image, held=True)
            async with rig.running(drop_after=0) as room:
                await room.reconciler.cycle()
                await room.reconciler.cycle()
                await whole(rig, image, held=False)
            await rig.kubelet.remove(image.ref)
        else:
            continue
        break
    else:
        raise AssertionError("the work never ended")
    assert done >= 2


async def everything(kubelet: containerd.Kubelet) -> dict[str, Any]:
    """Leases, records and content with all their labels."""
    return {
        "leases": {each.id: dict(each.labels) for each in await kubelet.leases()},
        "records": {
            each.name: (each.target.digest, dict(each.labels)) for each in await kubelet.records()
        },
        "content": {name: dict(each.labels) for name, each in (await kubelet.content()).items()},
        "ingests": [each.ref for each in await kubelet.ingests()],
        "snapshots": await kubelet.snapshot_labels(),
    }


@pytest.mark.real
@pytest.mark.timeout(120)
async def test_release_all_leaves_the_node_as_it_was(rig: Rig, tmp_path: Path) -> None:
    """Pins of the policy and of an operator, notes, half a pull, leases of another version."""
    one, two, three = (rig.push(f"fw/before:v{n}", size=MB) for n in range(3))
    half = rig.push("fw/half:v1", size=8 * MB)
    for each in (one, two, three):
        await rig.kubelet.pull(each.ref)
    before = await everything(rig.kubelet)
    rig.gate.pause_at = 4 * MB  # of half, which then stays what its name says
    # Under a limit, however high, the agent fetches layers itself.
    section = rig.section(images=[{"ref": one.ref}, {"ref": half.ref}], bytes_per_second="64MB")
    async with rig.running(images=section.images, bytes_per_second="64MB") as room:
        await pinned(room, one.ref)
        await room.pin(two.ref)
        await room.pin(three.ref)
        await room.unpin(three.ref)
        await room.reconciler.runtime.content.note_use(one.pushed.top, NOW)

        async def begun() -> bool:
            return any(i.ref.startswith("nodeagent-") and i.offset for i in await ingests())

        ingests = rig.kubelet.ingests
        await until(begun, what="a part of the layer to be written")

        async def durable() -> bool:
            labels = (await rig.kubelet.snapshot_labels()).values()
            return any(store.DURABLE in each for each in labels)

        await until(durable, 60, "a layer to be durable")
        await room.pause(half.ref)
    newer = holding.lease_labels(pin()) | {"nodeagent/format": "99"}
    create = containerd_pb2.CreateLeaseRequest(id="nodeagent-pin-99", labels=newer)
    service = "/containerd.services.leases.v1.Leases/Create"
    await rig.kubelet.raw(service, create.SerializeToString())
    theirs = containerd_pb2.CreateLeaseRequest(id="nodeagent-is-not-the-owner")
    await rig.kubelet.raw(service, theirs.SerializeToString())
    before["leases"]["nodeagent-is-not-the-owner"] = {}
    during = await everything(rig.kubelet)

    listed = await uninstall.release_all(section.socket, yes=False)
    assert await everything(rig.kubelet) == during, "listing changes nothing"
    released = await uninstall.release_all(section.socket, yes=True)
    again = await uninstall.release_all(section.socket, yes=True)
    await rig.kubelet.collect()

    assert await everything(rig.kubelet) == before
    assert released == listed
    assert {"pin", "pull", "note", "lease", "partial layers", "labels"} == {
        each.kind for each in released
    }
    assert again == []


@pytest.mark.real
@pytest.mark.timeout(120)
async def test_agent_adopts_or_clears_what_it_finds(rig: Rig) -> None:
    image, other = (rig.push(f"fw/found:{name}", size=MB // 2) for name in ("mine", "stray"))
    wanted = [{"ref": image.ref}, {"ref": other.ref}]
    honours = rig.daemon.release != "bookworm"
    async with rig.running(images=wanted) as room:
        for each in (image, other):
            await pinned(room, each.ref)
        await idle(room)
    # As the runbook of an earlier version said: the leases are deleted, the labels stay. And an
    # agent of that version wrote no label of its own.
    box = adapter.Containerd(rig.daemon.socket)
    await box.connect()
    pins = {hold.ref: hold for hold in (await box.inventory()).held("pin")}
    delete = containerd_pb2.DeleteLeaseRequest(id=pins[other.ref].id)
    await rig.kubelet.raw(
        "/containerd.services.leases.v1.Leases/Delete", delete.SerializeToString()
    )
    if honours:
        records = {each.name: each for each in await rig.kubelet.records()}
        old = records[image.pushed.config]
        old.labels.clear()
        update = containerd_pb2.UpdateImageRequest(
            image=old, update_mask=api.label_mask(holding.OWN, holding.PINNED)
        )
        await box.connection.change(api.UPDATE_IMAGE, update)
        assert await marked(rig) == {other.pushed.config}
    await box.close()
    # A new agent whose settings know one of them.
    async with rig.running(images=wanted[:1]) as room:
        await pinned(room, image.ref)
        await room.reconciler.cycle()
        found = await marked(rig)
        roles = await rig.roles()

    assert found == ({image.pushed.config} if honours else set())
    assert roles == ["pin"]


@pytest.mark.real
@pytest.mark.timeout(180)
async def test_pins_last_through_upgrades_of_containerd(
    images: registry.Registry, gate: proxy.Proxy, tmp_path: Path
) -> None:
    """One root for 1.6, 1.7 and 2.x, one after the other; the image is fetched once."""
    wanted: list[dict[str, str]] = []
    fetched = 0
    for release in containerd.RELEASES:
        daemon = containerd.Containerd(tmp_path / "containerd", release)
        daemon.trust(gate.host, gate.url)
        kubelet = containerd.Kubelet(daemon.socket)
        rig = Rig(images, gate, daemon, kubelet, tmp_path)
        if not wanted:
            image = rig.push("fw/upgraded:v1", size=MB)
            wanted.append({"ref": image.ref})
        try:
            daemon.start()
            before = await rig.pin_images()
            async with rig.running(images=wanted) as room:
                await pinned(room, image.ref)
                await idle(room)
                await room.reconciler.cycle()
                await whole(rig, image, held=True)
                await room.reconciler.cycle()  # it was removed just now
            assert before == ({image.pushed.config} if fetched else set())
            fetched = fetched or gate.blob_bytes
            assert gate.blob_bytes == fetched
            status = await kubelet.status(image.ref)
            assert status is not None
            assert status.pinned is (release != "bookworm")
        finally:
            await kubelet.close()
            daemon.stop()
    async with started(images, gate, daemon, tmp_path) as rig, rig.running(drop_after=0) as room:
        await room.reconciler.cycle()
        await room.reconciler.cycle()
        await whole(rig, image, held=False)


@pytest.mark.real
@pytest.mark.timeout(120)
async def test_image_that_the_runtime_lost_is_pulled_again(rig: Rig) -> None:
    """Somebody removed its records and its content: nothing is left to heal."""
    image = rig.push("fw/lost:v1", size=MB // 2)
    wanted = [{"ref": image.ref}]
    async with rig.running(images=wanted) as room:
        await pinned(room, image.ref)
    await rig.kubelet.remove(image.ref)
    for digest in await rig.kubelet.content():
        request = containerd_pb2.ContentInfoRequest(digest=digest)  # Delete's has the same field
        await rig.kubelet.raw(
            "/containerd.services.content.v1.Content/Delete", request.SerializeToString()
        )
    await rig.kubelet.collect()  # the snapshots too
    async with rig.running(images=wanted) as room:
        await state(room, image.ref, "ready")
        await pinned(room, image.ref)
        await idle(room)
        await room.reconciler.cycle()
        await whole(rig, image, held=True)


@pytest.mark.real
@pytest.mark.timeout(120)
async def test_pins_that_expire_end_without_an_agent(rig: Rig) -> None:
    image = rig.push("fw/deadman:v1", size=MB // 2)
    wanted = [{"ref": image.ref}]
    async with rig.running(images=wanted, release_after="4h") as room:
        await pinned(room, image.ref)
        await idle(room)
        lasting = [lease.labels[holding.EXPIRE] for lease in await rig.kubelet.leases()]
        assert len(lasting) == 1
        assert await marked(rig) == set()
        # Healed as ever.
        await rig.remove(image.ref)
        assert await rig.kubelet.status(image.ref) is not None
    before = await everything(rig.kubelet)
    # The agent has gone, and its time is over: containerd's clock cannot be moved, ours can.
    box = adapter.Containerd(rig.daemon.socket)
    await box.connect()
    box.release_after = 1.0
    await box.tend(await box.inventory())
    await box.tend(await box.inventory())
    renewed = [lease.labels[holding.EXPIRE] for lease in await rig.kubelet.leases()]
    await box.close()
    assert renewed < lasting

    async def over() -> bool:
        await rig.kubelet.collect()
        return await rig.kubelet.leases() == []

    await until(over, 20.0, "the leases to expire")
    after = await everything(rig.kubelet)
    assert before["records"] == after["records"]
    status = await rig.kubelet.status(image.ref)
    assert status is not None
    assert not status.pinned
    # And without the setting pins last, with their mark.
    async with rig.running(images=wanted) as room:
        await pinned(room, image.ref)
        await room.reconciler.cycle()
        (lease,) = await rig.kubelet.leases()
        assert holding.EXPIRE not in lease.labels
        await whole(rig, image, held=True)


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "state"
    folder.mkdir()
    with kit.files.closing(kit.files.lock(folder / "lock", 0)):
        yield folder


def test_release_all_is_refused_while_an_agent_runs(locked: Path) -> None:
    refused = pytest.raises(kit.errors.RefusedError, match="an agent runs with it")
    with refused, kit.traces.without_agent(locked):
        raise AssertionError("not reached")
