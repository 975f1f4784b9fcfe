"""A real Ceph cluster, asked through the worker process."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

import kit.errors
from ceph.client import ClusterClient
from ceph.protocol import Extents, ImageContent, ImageId, ImageName
from ceph.settings import ClusterSettings
from tests.testbed import blockdev, waiting
from tests.testbed.ceph import CephCluster

pytestmark = [pytest.mark.real, pytest.mark.timeout(180)]

KEY = "nodeagent.volume"
SIZE = 64 * blockdev.MiB
DEADLINE = waiting.limit(30.0)  # of a cluster that works, whose client may be starting


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CephCluster]:
    made = CephCluster(tmp_path_factory.mktemp("ceph"), osd_bytes=4 * 2**30)
    try:
        made.start()
        made.run("rbd", "pool", "init", "rbd")
        made.run("rbd", "namespace", "create", "rbd/team")
        yield made
    finally:
        made.stop()


def admin(backend: CephCluster, **changes: Any) -> ClusterSettings:
    return ClusterSettings(**({"name": "c1", "conf": backend.conf, "user": "admin"} | changes))


def reader(backend: CephCluster, folder: Path) -> ClusterSettings:
    """The least key that a view needs, reached by monitors."""
    backend.run(*("ceph", "auth", "get-or-create", "client.reader"),
                *("mon", "profile rbd-read-only", "osd", "profile rbd-read-only"),
                *("-o", str(folder / "keyring")))  # fmt: skip
    return ClusterSettings(
        name="c1", monitors=(backend.monitor,), user="reader", secret_file=folder / "keyring"
    )


@pytest.fixture
async def cluster(backend: CephCluster) -> AsyncIterator[ClusterClient]:
    made = ClusterClient(admin(backend), DEADLINE)
    yield made
    await made.close()


def image(backend: CephCluster, name: str, namespace: str = "") -> ImageId:
    spec = f"rbd/{namespace}/{name}" if namespace else f"rbd/{name}"
    backend.run("rbd", "create", "--size", "64M", spec)
    return image_id(backend, spec, namespace)


def image_id(backend: CephCluster, spec: str, namespace: str = "") -> ImageId:
    info = json.loads(backend.run("rbd", "info", "--format", "json", spec))
    pools = json.loads(backend.run("ceph", "osd", "pool", "ls", "detail", "--format", "json"))
    number = next(pool["pool_id"] for pool in pools if pool["pool_name"] == "rbd")
    return ImageId(number, namespace, info["id"])


def write(backend: CephCluster, spec: str) -> None:
    backend.run("rbd", "bench", "--io-type", "write", "--io-total", "8K", "--io-size", "4K", spec)


@pytest.mark.parametrize("namespace", ["", "team"])
async def test_content_shows_extents_and_metadata_without_leaving_a_watcher(
    backend: CephCluster, cluster: ClusterClient, namespace: str
) -> None:
    wanted = image(backend, f"img{namespace}", namespace)
    spec = f"rbd/{namespace}/img{namespace}" if namespace else "rbd/img"
    assert await cluster.content(wanted, KEY, Extents()) == ImageContent(None, SIZE, None)
    write(backend, spec)
    await cluster.set_metadata(wanted, KEY, "välue")
    assert await cluster.content(wanted, KEY) == ImageContent("välue")
    found = await cluster.content(wanted, KEY, Extents())
    assert found.metadata == "välue" and found.extent is not None and found.extent[1] > 0
    assert backend.run("rbd", "image-meta", "get", spec, KEY).strip() == "välue"
    assert "watcher=" not in backend.run("rbd", "status", spec)


async def test_content_of_a_clone_includes_its_parent(
    backend: CephCluster, cluster: ClusterClient
) -> None:
    image(backend, "parent")
    write(backend, "rbd/parent")
    backend.run("rbd", "snap", "create", "rbd/parent@s")
    backend.run("rbd", "snap", "protect", "rbd/parent@s")
    backend.run("rbd", "clone", "rbd/parent@s", "rbd/child")
    child = image_id(backend, "rbd/child")
    assert (await cluster.content(child, KEY, Extents())).extent is not None


async def test_a_missing_image_is_not_found_and_the_worker_goes_on(
    backend: CephCluster, cluster: ClusterClient
) -> None:
    there = image(backend, "there")
    for gone in (ImageId(there.pool_id, "", "ffffffffffff"), ImageId(999, "", "a")):
        for extents in (Extents(), None):
            with pytest.raises(kit.errors.NotFoundError):
                await cluster.content(gone, KEY, extents)
        with pytest.raises(kit.errors.NotFoundError):
            await cluster.set_metadata(gone, KEY, "v")
    assert (await cluster.content(there, KEY, Extents())).extent is None
    assert cluster.failures == 0
    assert "rbd_header.ffffffffffff" not in backend.run("rados", "-p", "rbd", "ls")


async def test_a_reader_may_ask_but_not_write(backend: CephCluster, tmp_path: Path) -> None:
    wanted = image(backend, "readonly")
    made = ClusterClient(reader(backend, tmp_path), DEADLINE)
    try:
        assert (await made.content(wanted, KEY, Extents())).extent is None
        with pytest.raises(kit.errors.RefusedError, match=r"client\.reader may not"):
            await made.set_metadata(wanted, KEY, "v")
        assert made.failures == 0
    finally:
        await made.close()


async def test_view_with_the_least_key(backend: CephCluster, tmp_path: Path) -> None:
    image(backend, "viewed")
    backend.run("ceph", "osd", "blocklist", "range", "add", "10.123.0.0/16")
    backend.run("ceph", "osd", "blocklist", "add", "10.124.0.1:0/77")
    made = ClusterClient(reader(backend, tmp_path), DEADLINE)
    try:
        names = [ImageName("rbd", "", "viewed"), ImageName("rbd", "", "gone")]
        view = await made.view(names)
        assert view.fsid == made.fsid == backend.fsid
        assert {each.kind for each in view.versions} >= {"mon", "osd"}
        assert {each.kind for each in view.features} >= {"mon", "osd"}
        assert all("16.2" in each.version for each in view.versions)
        assert view.node_client.startswith("16.2")
        assert view.monitors_v1 and view.monitors_v2
        assert view.min_client
        assert {"cidr:10.123.0.0:0/16", "10.124.0.1:0/77"} <= set(view.blocklist)
        viewed, gone = view.images
        assert viewed.features and viewed.error == "" and viewed.watchers == ()
        assert gone.error
        assert view.denied == ()
    finally:
        await made.close()
        backend.run("ceph", "osd", "blocklist", "range", "rm", "10.123.0.0/16")
        backend.run("ceph", "osd", "blocklist", "rm", "10.124.0.1:0/77")


async def test_view_of_a_key_without_rights_has_gaps(backend: CephCluster, tmp_path: Path) -> None:
    caps = ("mon", "allow command 'mon dump'")
    keyring = ("-o", str(tmp_path / "keyring"))
    backend.run("ceph", "auth", "get-or-create", "client.little", *caps, *keyring)
    made = ClusterClient(admin(backend, user="little", secret_file=tmp_path / "keyring"), DEADLINE)
    try:
        view = await made.view(())
        assert "versions" in view.denied and view.versions == ()
        assert view.refused(("versions",)) == [
            "cluster c1: 'ceph versions' is not allowed to this key"
        ]
    finally:
        await made.close()


async def test_a_wrong_key_is_explained_and_not_shown(backend: CephCluster, tmp_path: Path) -> None:
    key = "AQAVUCdhj8DLCBAAKA9WzcQG6u44EeNooNObug=="
    (tmp_path / "k").write_text(key)
    made = ClusterClient(
        admin(backend, secret_file=tmp_path / "k"), DEADLINE, patience=waiting.limit(8.0)
    )
    try:
        with pytest.raises(kit.errors.SourceError, match="does not let us in") as caught:
            await made.connect()
        assert key not in str(caught.value) and made.failures == 1
        # The next question fails at once with the same error and starts nothing.
        with pytest.raises(kit.errors.SourceError, match="does not let us in"):
            await made.connect()
        assert made.failures == 1
    finally:
        await made.close()


async def test_a_frozen_cluster_fails_in_time_and_answers_again(backend: CephCluster) -> None:
    wanted = image(backend, "frozen")
    made = ClusterClient(admin(backend), DEADLINE)
    try:
        await made.content(wanted, KEY, Extents())
        made._deadline = 3.0  # only for answers that do not come
        with backend.frozen("mon", "osd"):
            async with asyncio.timeout(waiting.limit(20)):
                for _ in range(2):
                    with pytest.raises(kit.errors.AgentError):
                        await made.content(wanted, KEY, Extents())
        assert made.failures >= 1
        made._deadline = DEADLINE

        async def answers() -> bool:
            try:
                await made.content(wanted, KEY, Extents())
            except kit.errors.AgentError:
                return False
            return True

        await waiting.until_async(answers, 60, "an answer", pause=0.5)
    finally:
        await made.close()


async def test_a_killed_worker_is_one_failure(cluster: ClusterClient) -> None:
    await cluster.connect()
    pid = cluster._worker.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    asked = asyncio.create_task(cluster.connect())
    await asyncio.sleep(0)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(kit.errors.SourceError, match="ended"):
        await asked
    await asyncio.sleep(1.1)
    assert await cluster.connect() == cluster.fsid
    assert cluster.failures == 1


async def test_settings_that_lead_to_another_cluster_are_an_error(cluster: ClusterClient) -> None:
    await cluster.connect()
    cluster.fsid = "00000000-0000-0000-0000-000000000000"
    with pytest.raises(kit.errors.SourceError, match="another cluster"):
        await cluster.connect()


async def test_a_second_client_shows_as_watcher_and_lock(
    backend: CephCluster, cluster: ClusterClient
) -> None:
    image(backend, "shared")
    script = (
        "import rados, rbd, sys, time\n"
        "cluster = rados.Rados(conffile=sys.argv[1], name='client.admin'); cluster.connect()\n"
        "image = rbd.Image(cluster.open_ioctx('rbd'), 'shared'); image.write(b'x' * 512, 0)\n"
        "print(cluster.get_instance_id(), flush=True); time.sleep(600)\n"
    )
    process = await asyncio.create_subprocess_exec(
        *("/usr/bin/python3", "-c", script, str(backend.conf)), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        client = f"client{(await process.stdout.readline()).decode().strip()}"
        (seen,) = (await cluster.view([ImageName("rbd", "", "shared")])).images
        assert [watcher.client for watcher in seen.watchers] == [client]
        assert [lock.client for lock in seen.locks] == [client]
    finally:
        process.kill()
        await process.wait()
