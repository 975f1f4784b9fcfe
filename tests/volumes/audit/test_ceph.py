"""The rules about clusters against a real Ceph: skew, other clients, blocklist, a cluster down.

This kernel has no krbd: rbd-fuse shows the images as files, loop devices replace mappings, and
ceph-csi's record (image-meta.json) names the image of a device.
"""

import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.testbed import blockdev, leftovers, waiting
from tests.testbed.ceph import CephCluster
from tests.volumes.audit import stage as stages
from tests.volumes.audit.stage import Stage, settings, watching
from volumes.settings import AuditSettings, ClusterSettings

pytestmark = [pytest.mark.real, pytest.mark.timeout(180)]

# A second client: opens the image for writing and keeps taking the lock, which the first one's
# file system takes back whenever it writes.
WRITER = """
import rados, rbd, sys, time
cluster = rados.Rados(conffile=sys.argv[1], name='client.admin'); cluster.connect(timeout=30)
ioctx = cluster.open_ioctx('rbd')
image = rbd.Image(ioctx, sys.argv[2])
image.write(b'x' * 512, 4 << 20)
print('ready', cluster.get_instance_id(), flush=True)
while True:
    time.sleep(0.2)
    image.write(b'x' * 512, 4 << 20)
"""


@pytest.fixture(scope="module", name="ceph")
def _ceph(cluster: CephCluster) -> CephCluster:
    return cluster


@pytest.fixture
def image(ceph: CephCluster, request: pytest.FixtureRequest) -> str:
    name = f"csi-vol-{abs(hash(request.node.name)) % 10**8}"
    ceph.run("rbd", "create", "--size", "64M", f"rbd/{name}")
    return name


@pytest.fixture
def secret(ceph: CephCluster, tmp_path: Path) -> Path:
    """The least key that the settings' description asks for."""
    ceph.run(
        *("ceph", "auth", "get-or-create", "client.nodeagent"),
        *("mon", "profile rbd-read-only", "osd", "profile rbd-read-only"),
        *("-o", str(tmp_path / "keyring")),
    )
    return tmp_path / "keyring"


@contextlib.contextmanager
def shown_as_files(ceph: CephCluster, folder: Path) -> Iterator[Path]:
    """The pool's images as files; every one opened counts as a client that writes."""
    folder.mkdir()
    ceph.run("rbd-fuse", "-c", str(ceph.conf), "-p", "rbd", str(folder))
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False, timeout=waiting.limit(30))
        # It would wait for its cluster for ever, and a device that still lies on it with it: then
        # every sync(2) of the machine hangs.
        leftovers.end(folder)


@contextlib.contextmanager
def writer(ceph: CephCluster, image: str) -> Iterator[str]:
    process = subprocess.Popen(
        ["/usr/bin/python3", "-c", WRITER, str(ceph.conf), image],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield f"client{process.stdout.readline().split()[1]}"
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def cluster(ceph: CephCluster, secret: Path, **changes: Any) -> list[ClusterSettings]:
    known = {"name": "c1", "monitors": [ceph.monitor], "secret_file": str(secret)}
    return [ClusterSettings.model_validate(known | changes)]


def asking(stage: Stage, **changes: Any) -> AuditSettings:
    quick = {
        "cluster_interval": "1s",
        "cluster_wide_interval": "1s",
        "rules": {"mapped-elsewhere": {"patience": "0s"}, "audit-blind": {"patience": "0s"}},
    }
    return settings(stage, **(quick | changes))


def states(watch: stages.Watching) -> dict[str, str]:
    return {state.name: state.state for state in watch.audit.states}


async def test_version_skew_against_the_expected_version(
    ceph: CephCluster, stage: Stage, secret: Path
) -> None:
    client = ceph.run("rados", "--version").split()[2]
    daemons = ceph.version.split()[2]
    fitting = cluster(ceph, secret, expected_version=client.rpartition(".")[0])
    async with watching(stage, asking(stage), clusters=fitting) as watch:
        as_client = "ok" if client == daemons else "found"
        await watch.until(lambda: states(watch).get("ceph-version-skew") == as_client, "asked")
        newer = cluster(ceph, secret, expected_version="17.2")
        await watch.reconcile(watch.audit.settings, clusters=tuple(newer))

        def judged_anew() -> list[dict[str, Any]]:
            found = watch.found("", "ceph-version-skew")
            return [each for each in found if "expected 17.2" in each["message"]]

        (found,) = await watch.until(judged_anew, "judged anew")
        assert f"expected 17.2, found {daemons}" in found["message"]
        assert f"this node's client {client}" in found["message"]
        assert "1 osd" in found["evidence"]["daemons"]
        view = watch.audit.clusters.views["c1"]
        assert not isinstance(view, str)
        assert view.fsid == ceph.run("ceph", "fsid").strip()
        assert {group.kind for group in view.features} >= {"mon", "osd"}
        assert view.monitors_v1 and view.monitors_v2


async def test_mapped_elsewhere_names_watcher_and_lock(
    ceph: CephCluster, stage: Stage, secret: Path, image: str
) -> None:
    with shown_as_files(ceph, stage.folder / "rbd") as files:
        device = stage.attach(files / image)
        stages.run("mkfs.ext4", "-q", "-F", f"/dev/{device}")
        stage.staged(device, image=image)
        try:
            async with watching(stage, asking(stage), clusters=cluster(ceph, secret)) as watch:
                await watch.until(
                    lambda: states(watch).get("mapped-elsewhere") == "ok", "our own watcher only"
                )
                with writer(ceph, image) as other:
                    found = await watch.finding(device, "mapped-elsewhere")
                    assert found["severity"] == "critical"
                    assert other in found["evidence"]["watchers"]
                    # The lock follows with the second client's first write.
                    await watch.until(
                        lambda: [
                            f
                            for f in watch.audit.findings
                            if f.rule == "mapped-elsewhere" and other in f.evidence["locks"]
                        ],
                        "the second client's lock",
                    )
                # It was killed: its watch goes when it times out, 30 s later, and not before.
        finally:
            stage.close()


async def test_mapped_twice(ceph: CephCluster, stage: Stage, image: str) -> None:
    with shown_as_files(ceph, stage.folder / "rbd") as files:
        first, second = stage.attach(files / image), stage.attach(files / image)
        stages.run("mkfs.ext4", "-q", "-F", f"/dev/{first}")
        stage.staged(first, image=image)
        try:
            async with watching(stage, settings(stage)) as watch:
                found = await watch.until(
                    lambda: [
                        f
                        for f in watch.audit.findings
                        if f.rule == "mapped-twice" and first in f.evidence["devices"]
                    ],
                    "mapped-twice",
                )
                assert second in found[0].evidence["devices"]
                assert found[0].evidence["writers"] == "2"
        finally:
            stage.close()


async def test_blocklisted_client(
    ceph: CephCluster, stage: Stage, secret: Path, image: str
) -> None:
    with shown_as_files(ceph, stage.folder / "rbd") as files:
        device = stage.attach(files / image)
        with open(f"/dev/{device}", "rb") as node:  # makes rbd-fuse open the image
            node.read(4096)
        record = stage.kubelet / "plugins/kubernetes.io/csi/rbd.csi.ceph.com/aa"
        (record / "globalmount").mkdir(parents=True)
        (record / "vol_data.json").write_text(json.dumps({"volumeHandle": "h"}))
        meta = {"pool": "rbd", "image": image, "device": f"/dev/{device}"}
        (record / "globalmount/image-meta.json").write_text(json.dumps(meta))

        def watchers() -> list[dict[str, Any]]:
            shown = ceph.run("rbd", "status", f"rbd/{image}", "--format", "json")
            return list(json.loads(shown)["watchers"])

        address = waiting.until(watchers, 30, "its watcher")[0]["address"]
        try:
            async with watching(stage, asking(stage), clusters=cluster(ceph, secret)) as watch:
                await watch.until(
                    lambda: address in watch.audit.clusters.watched_by.values(), "our watch seen"
                )
                ceph.run("ceph", "osd", "blocklist", "add", address)
                found = await watch.finding(device, "blocklisted-client")
                assert found["severity"] == "critical"
                assert address in found["message"]
        finally:
            ceph.run("ceph", "osd", "blocklist", "rm", address)
            stage.close()


async def test_a_frozen_cluster_makes_its_rules_unknown(
    ceph: CephCluster, stage: Stage, secret: Path
) -> None:
    doctored = cluster(ceph, secret, expected_version="17.2")
    async with watching(stage, asking(stage), clusters=doctored) as watch:
        found = await watch.finding("", "ceph-version-skew")
        await watch.reconcile(asking(stage, cluster_timeout="3s", names=[f"{blockdev.NAMES}*"]))
        with ceph.frozen("mon"):
            await watch.until(
                lambda: states(watch).get("ceph-version-skew") == "unknown", "unknown"
            )
            blind = await watch.finding("", "audit-blind")
            for rule in ("mapped-elsewhere", "ceph-feature-skew", "blocklisted-client"):
                assert rule in blind["message"]
            # Its finding stays and says that nobody could check it.
            still = watch.found("", "ceph-version-skew")
            assert [f["id"] for f in still] == [found["id"]]
            assert still[0]["since"] == found["since"]
            assert "c1" in still[0]["evidence"]["not_looked_at_again"]
            await watch.audit.round()  # the node itself is still scanned, at once
            assert watch.audit.inventory is not None
        await watch.reconcile(asking(stage))
        await watch.until(lambda: states(watch)["ceph-feature-skew"] == "ok", "back")
        await watch.until(lambda: not watch.found("", "audit-blind"), "sees again")


async def test_view_has_blocklist_ranges_and_least_client(
    ceph: CephCluster, stage: Stage, secret: Path
) -> None:
    ceph.run("ceph", "osd", "blocklist", "range", "add", "10.123.0.0/16")
    ceph.run("ceph", "osd", "blocklist", "add", "10.124.0.1:0/77")
    try:
        async with watching(stage, asking(stage), clusters=cluster(ceph, secret)) as watch:
            view = await watch.until(lambda: watch.audit.clusters.views.get("c1"), "asked")
            assert not isinstance(view, str), view
            assert {"cidr:10.123.0.0:0/16", "10.124.0.1:0/77"} <= set(view.blocklist)
            assert (
                view.min_client
                == json.loads(ceph.run("ceph", "osd", "dump", "--format", "json"))[
                    "require_min_compat_client"
                ]
            )
            assert view.min_client and view.gaps == ()  # the least key is enough
    finally:
        ceph.run("ceph", "osd", "blocklist", "range", "rm", "10.123.0.0/16")
        ceph.run("ceph", "osd", "blocklist", "rm", "10.124.0.1:0/77")


async def test_a_wrong_key_is_reported_but_not_shown(
    ceph: CephCluster, stage: Stage, tmp_path: Path
) -> None:
    wrong = tmp_path / "wrong"
    key = "AQAVUCdhj8DLCBAAKA9WzcQG6u44EeNooNObug=="
    wrong.write_text(key)
    async with watching(stage, asking(stage), clusters=cluster(ceph, wrong)) as watch:
        view = await watch.until(lambda: watch.audit.clusters.views.get("c1"), "asked")
        assert isinstance(view, str)
        assert "does not let us in" in view
        assert key not in view
