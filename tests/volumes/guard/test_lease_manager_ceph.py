"""The guard and a real Ceph cluster: ledger in image metadata, extents through librbd.

This machine has no krbd, so the devices here are loop devices that are given the identity of a real
image (test_guest.py has real ones); everything that is asked of the cluster is real.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import linux.blockdev
from ceph.protocol import Extents
from ceph.settings import ClusterSettings
from linux.rbd_sysfs import RbdImage
from tests.testbed import blockdev, cell, ceph, waiting
from tests.volumes.guard.world import witness
from volumes import settings
from volumes.guard import kernel, lease, lease_manager, steps
from volumes.ledger import mirror, store

pytestmark = [pytest.mark.real, pytest.mark.timeout(180)]

SIZE = 64 * blockdev.MiB
ANSWER_SECONDS = cell.ANSWER_SECONDS  # of a cluster that works, whose client may be starting
HANG_SECONDS = 3.0


@pytest.fixture(scope="module")
def backend(cluster: ceph.CephCluster) -> ceph.CephCluster:
    cluster.run("rbd", "pool", "init", "rbd")
    if "team" not in cluster.run("rbd", "namespace", "list", "rbd"):
        cluster.run("rbd", "namespace", "create", "rbd/team")
    return cluster


def _credentials(backend: ceph.CephCluster) -> ClusterSettings:
    return ClusterSettings(name="c1", conf=backend.conf, user="admin")


def _image(backend: ceph.CephCluster, name: str, namespace: str = "") -> RbdImage:
    spec = f"rbd/{namespace}/{name}" if namespace else f"rbd/{name}"
    backend.run("rbd", "create", "--size", "64M", spec)
    info = json.loads(backend.run("rbd", "info", "--format", "json", spec))
    pools = json.loads(backend.run("ceph", "osd", "pool", "ls", "detail", "--format", "json"))
    number = next(p["pool_id"] for p in pools if p["pool_name"] == "rbd")
    return RbdImage("rbd", name, namespace, "", info["id"], backend.fsid, number)


@pytest.fixture
async def clusters(backend: ceph.CephCluster) -> AsyncIterator[mirror.Mirror]:
    made = mirror.Mirror((_credentials(backend),), ANSWER_SECONDS)
    yield made
    await made.close()


@pytest.mark.parametrize("namespace", ["", "team"])
async def test_ask_reports_extents_and_metadata(
    backend: ceph.CephCluster, clusters: mirror.Mirror, namespace: str
) -> None:
    image = _image(backend, f"img{namespace}", namespace)
    spec = image.spec
    assert await clusters.ask(image, Extents()) == mirror.Answer(
        store.Knowledge.NONE, store.Knowledge.NONE, size=SIZE
    )

    backend.run("rbd", "bench", "--io-type", "write", "--io-total", "8K", "--io-size", "4K", spec)
    known = store.Entry("v", "t").saw("ext4", "u", "", 1.0, "n")
    assert await clusters.write(image, known)

    answer = await clusters.ask(image, Extents())
    assert (answer.extents, answer.mirror) == (store.Knowledge.CONTENT, store.Knowledge.CONTENT)
    assert answer.known == known
    listed = backend.run("rbd", "image-meta", "list", "--format", "json", spec)
    assert json.loads(json.loads(listed)["nodeagent.volume"])["uuid"] == "u"  # what people see
    assert "watcher=" not in backend.run("rbd", "status", spec)


async def test_ask_does_not_ask_about_other_clusters(clusters: mirror.Mirror) -> None:
    other = RbdImage("rbd", "a", "", "", "a", "00000000-0000-0000-0000-000000000000", 1)
    assert await clusters.ask(other, Extents()) == mirror.NOT_ASKED


async def test_hanging_cluster_is_unknown_in_time_and_recovers(
    backend: ceph.CephCluster,
) -> None:
    image = _image(backend, "hang")
    made = mirror.Mirror((_credentials(backend),), ANSWER_SECONDS)
    try:
        assert (await made.ask(image, Extents())).extents is store.Knowledge.NONE
        await made.apply((_credentials(backend),), HANG_SECONDS)
        with backend.frozen("mon", "osd"):
            async with asyncio.timeout(waiting.limit(20)):
                for _ in range(2):
                    answer = await made.ask(image, Extents())
                    assert answer.extents is answer.mirror is store.Knowledge.UNKNOWN
        await made.apply((_credentials(backend),), ANSWER_SECONDS)

        async def answered() -> bool:
            return (await made.ask(image, Extents())).extents is store.Knowledge.NONE

        await waiting.until_async(answered, 60, "an answer", pause=0.5)
    finally:
        await made.close()


# --- the lease manager over devices with the identity of a real image


class Bench:
    """One agent's lease manager with a state directory of its own, over a guarded cell."""

    def __init__(
        self, folder: Path, where: cell.Cell, backend: ceph.CephCluster,
        deadline: float = ANSWER_SECONDS,
    ) -> None:  # fmt: skip
        self.guard = where.guard()
        wanted = settings.GuardSettings(
            drivers=("loop",), cluster_timeout=deadline, probe_timeout=cell.ANSWER_SECONDS
        )
        self.guard.apply(kernel.wanted(wanted, kernel.Mode.ENFORCE, {7: "loop"}))
        self.ledger = store.LedgerStore(folder)
        self.ledger.load()
        self.clusters = mirror.Mirror((_credentials(backend),), deadline)
        errors = lease.ErrorLog()
        errors.readable = True
        executor = steps.Executor(self.guard, self.ledger, self.clusters, witness())
        self.manager = lease_manager.LeaseManager(wanted, executor, errors)

    async def decided(self, device: str) -> steps.Known:
        name = Path(device).name
        self.manager.schedule(name)
        known: steps.Known = await waiting.until_async(
            lambda: (k := self.manager.known.get(name)) and k.reasons is not None and k,
            90, "a decision",
        )  # fmt: skip
        return known

    async def close(self) -> None:
        await self.manager.close()
        await self.clusters.close()
        self.guard.close()


@pytest.fixture
def identities(monkeypatch: pytest.MonkeyPatch) -> dict[str, RbdImage]:
    """Device path -> the image that it is taken for."""
    import dataclasses

    given: dict[str, RbdImage] = {}
    real = linux.blockdev.identify

    def identify(name: str) -> linux.blockdev.BlockDevice | None:
        found = real(name)
        if found is None or found.path not in given:
            return found
        return dataclasses.replace(found, driver="rbd", image=given[found.path])

    monkeypatch.setattr(linux.blockdev, "identify", identify)
    return given


async def test_metadata_of_another_agent_refuses_lease(
    backend: ceph.CephCluster, where: cell.Cell, identities: dict[str, RbdImage],
    tmp_path: Path,
) -> None:  # fmt: skip
    image = _image(backend, "shared")
    first = Bench(tmp_path / "a", where, backend)
    second = Bench(tmp_path / "b", where, backend)
    try:
        with blockdev.loop(blockdev.blank(tmp_path / "image", SIZE)) as device:
            identities[device] = image
            known = await first.decided(device)
            assert known.reasons == ()
            told = (await second.clusters.ask(image)).known
            assert told is not None and told.permitted  # written down before it was given
            done = await asyncio.to_thread(where.run, "mkfs.ext4", "-q", device)
            assert done.returncode == 0

            async def stored() -> bool:
                return bool((known := (await second.clusters.ask(image)).known) and known.type)

            await waiting.until_async(stored, 60, "the content in the image's metadata", pause=0.1)
            first.manager.forget(Path(device).name)

        # Another node: the image's metadata is all it has; its device reads as zeros. The cluster
        # would say "no extents" (nothing was written to the image itself): metadata alone decides.
        with blockdev.loop(blockdev.blank(tmp_path / "zeros", SIZE)) as device:
            identities[device] = image
            known = await second.decided(device)
            assert any("image's metadata says that it holds data" in r for r in known.reasons or ())
            assert known.missing.startswith("ext4")
            assert where.run("mkfs.ext4", "-q", device).returncode != 0
    finally:
        await first.close()
        await second.close()


async def test_extents_refuse_lease_of_zeros(
    backend: ceph.CephCluster, where: cell.Cell, identities: dict[str, RbdImage],
    tmp_path: Path,
) -> None:  # fmt: skip
    image = _image(backend, "extents")
    backend.run(*("rbd", "bench", "--io-type", "write", "--io-total", "8K", "--io-size", "4K"),
                "rbd/extents")  # fmt: skip
    agent = Bench(tmp_path / "a", where, backend)
    try:
        with blockdev.loop(blockdev.blank(tmp_path / "zeros", SIZE)) as device:
            identities[device] = image
            known = await agent.decided(device)
            assert known.reasons == ("the cluster says that extents of it are allocated",)
            assert where.run("mkfs.ext4", "-q", device).returncode != 0
    finally:
        await agent.close()


async def test_cluster_down_refuses_lease(
    backend: ceph.CephCluster, where: cell.Cell, identities: dict[str, RbdImage],
    tmp_path: Path,
) -> None:  # fmt: skip
    image = _image(backend, "down")
    agent = Bench(tmp_path / "a", where, backend, HANG_SECONDS)
    try:
        with blockdev.loop(blockdev.blank(tmp_path / "zeros", SIZE)) as device:
            identities[device] = image
            with backend.frozen("mon", "osd"):
                known = await agent.decided(device)
                assert any("the cluster could not say" in r for r in known.reasons or ())
                assert where.run("mkfs.ext4", "-q", device).returncode != 0
    finally:
        await agent.close()
