"""Claims of ceph-csi as datasets: real subvolumes and images, objects as ceph-csi writes them.

Nothing of ceph-csi runs: the objects are made by hand, with the fields that its code writes
(``cache.sources.claims``), and bound as the controllers would.
"""

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kube import agents, rendered
from tests.testbed import agent, rbdimage, waiting
from tests.testbed.ceph import CephCluster
from tests.testbed.control_plane import ControlPlane, unique

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

CSI = "ceph-csi"  # namespace
GROUP = "snapshot.storage.k8s.io"
KINDS = ("VolumeSnapshot", "VolumeSnapshotContent", "VolumeSnapshotClass")
FILES = {f"d{n % 3}/f{n}": f"file {n}".encode() * n for n in range(1, 60)}


def crd(kind: str) -> dict[str, Any]:
    """As the snapshot controller brings it, without its schema."""
    plural = {"VolumeSnapshotClass": "volumesnapshotclasses"}.get(kind, f"{kind.lower()}s")
    any_object = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    return {
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{plural}.{GROUP}",
            "annotations": {"api-approved.kubernetes.io": "unapproved, a test"},
        },
        "spec": {
            "group": GROUP, "scope": "Namespaced" if kind == "VolumeSnapshot" else "Cluster",
            "names": {"kind": kind, "plural": plural, "singular": kind.lower()},
            "versions": [
                {
                    "name": "v1", "served": True, "storage": True,
                    "schema": {"openAPIV3Schema": any_object},
                }
            ],
        },
    }  # fmt: skip


class Site:
    """What ceph-csi would have made: a namespace of a team, claims, volumes, snapshots."""

    def __init__(self, plane: ControlPlane, cluster: CephCluster) -> None:
        self.plane, self.cluster = plane, cluster
        self.space = unique("train")
        self.id = str(uuid.uuid4())  # ceph-csi's clusterID

    def prepare(self) -> None:
        plane = self.plane
        plane.apply(*(crd(kind) for kind in KINDS))
        spaces = [{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
                  for name in (CSI, self.space)]  # fmt: skip
        config = [{"clusterID": self.id, "monitors": [self.cluster.monitor]}]
        plane.apply(
            *spaces,
            {
                "apiVersion": "v1", "kind": "ConfigMap",
                "metadata": {"name": "ceph-csi-config", "namespace": CSI},
                "data": {"config.json": json.dumps(config)},
            },
            {
                "apiVersion": "v1", "kind": "Secret",
                "metadata": {"name": "csi-node", "namespace": CSI},
                "stringData": {"userID": "admin", "userKey": self.cluster.secret()},
            },
            *rendered.claims(CSI, "csi-node"),
            {
                "apiVersion": f"{GROUP}/v1", "kind": "VolumeSnapshotClass",
                "metadata": {"name": "csi"}, "driver": "x", "deletionPolicy": "Delete",
            },
        )  # fmt: skip

    def claim(
        self, name: str, driver: str, attributes: dict[str, str], handle: str, **spec: Any
    ) -> None:
        """A claim and its volume, bound."""
        volume = f"pvc-{uuid.uuid4()}"
        common = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
        self.plane.apply(
            {
                "apiVersion": "v1", "kind": "PersistentVolumeClaim",
                "metadata": {
                    "name": name, "namespace": self.space,
                    "annotations": {"nodeagent.io/cache": "allowed"},
                },
                "spec": {
                    **common, "volumeName": volume,
                    "resources": {"requests": {"storage": "1Gi"}}, **spec,
                },
            }
        )  # fmt: skip
        uid = self.plane.get("pvc", name, "-n", self.space)["metadata"]["uid"]
        reference = {"kind": "PersistentVolumeClaim", "namespace": self.space, "name": name}
        self.plane.apply(
            {
                "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": volume},
                "spec": {
                    **common, "capacity": {"storage": "1Gi"}, "claimRef": reference | {"uid": uid},
                    "persistentVolumeReclaimPolicy": "Retain",
                    "csi": {
                        "driver": driver, "volumeHandle": handle,
                        "nodeStageSecretRef": {"name": "csi-node", "namespace": CSI},
                        "volumeAttributes": {"clusterID": self.id, **attributes},
                    },
                },
            }
        )  # fmt: skip
        waiting.until(
            lambda: self.plane.get("pvc", name, "-n", self.space)["status"]["phase"] == "Bound",
            30, "the claim to be bound",
        )  # fmt: skip

    def snapshot(self, name: str, claim: str, uid: str) -> None:
        """A VolumeSnapshot of a claim, whose snapshot in Ceph is csi-snap-``uid``."""
        volume = self.plane.get("pvc", claim, "-n", self.space)["spec"]["volumeName"]
        handle = self.plane.get("pv", volume)["spec"]["csi"]["volumeHandle"]
        content = f"snapcontent-{uuid.uuid4()}"
        version = {"apiVersion": f"{GROUP}/v1"}
        self.plane.apply(
            version | {
                "kind": "VolumeSnapshot", "metadata": {"name": name, "namespace": self.space},
                "status": {"boundVolumeSnapshotContentName": content},
            }
        )  # fmt: skip
        mine = self.plane.get("volumesnapshot", name, "-n", self.space)["metadata"]["uid"]
        self.plane.apply(
            version | {
                "kind": "VolumeSnapshotContent", "metadata": {"name": content},
                "spec": {
                    "volumeSnapshotRef": {"uid": mine}, "volumeSnapshotClassName": "csi",
                    "source": {"volumeHandle": handle},
                },
                "status": {"snapshotHandle": f"0001-0024-{self.id}-0000000000000001-{uid}"},
            }
        )  # fmt: skip

    def subvolume(self, name: str) -> str:
        """Its path in CephFS; made as ceph-csi makes it."""
        made = f"csi-vol-{uuid.uuid4()}"
        run = self.cluster.run
        run("ceph", "fs", "subvolumegroup", "create", "cephfs", "csi")
        run("ceph", "fs", "subvolume", "create", "cephfs", made, "--group_name", "csi")
        path = run("ceph", "fs", "subvolume", "getpath", "cephfs", made, "csi").strip()
        attributes = {"fsName": "cephfs", "subvolumeName": made, "subvolumePath": path}
        self.claim(name, "cephfs.csi.ceph.com", attributes, f"0001-0024-{self.id}-{made}")
        return path


@pytest.fixture
def site(plane: ControlPlane, cluster: CephCluster) -> Site:
    made = Site(plane, cluster)
    made.prepare()
    return made


@pytest.fixture
def node(plane: ControlPlane, area: Path) -> Iterator[agent.Agent]:
    name = unique("node")
    with agents.made(plane, area, name) as made:
        made.cache.update({"budget": "2GiB", "reserve": "1%", "source_check": "1s"})
        yield made


def dataset(site: Site, name: str, claim: str, **more: Any) -> dict[str, Any]:
    source = {"kind": "pvc", "namespace": site.space, "name": claim}
    snapshot = more.pop("snapshot", None)
    return {
        "apiVersion": "nodeagent.io/v1alpha1", "kind": "CachedDataset", "metadata": {"name": name},
        "spec": {
            "freshness": "snapshot" if snapshot else "frozen",
            "source": source | ({"snapshot": snapshot} if snapshot else {}), **more,
        },
    }  # fmt: skip


def write(folder: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def read(view: Path) -> dict[str, bytes]:
    return {
        str(each.relative_to(view)): each.read_bytes()
        for each in view.rglob("*")
        if each.is_file() and "lost+found" not in each.parts
    }


def knows(node: agent.Agent, name: str) -> bool:
    return name in [each["name"] for each in node.get("/v1/datasets")["datasets"]]


def restart(node: agent.Agent) -> None:
    node.kill()
    node.start()


def wait_complete(node: agent.Agent, name: str) -> dict[str, Any]:
    waiting.until(
        lambda: knows(node, name) and node.dataset(name)["state"] == "complete", 120, "the fill",
        detail=lambda: (node.dataset(name) if knows(node, name) else "", node.said()),
    )  # fmt: skip
    return node.dataset(name)


def test_a_cephfs_claim_is_read_from_the_ssd_and_so_is_its_snapshot(
    site: Site, node: agent.Agent, area: Path
) -> None:
    claim, live, fixed = unique("imagenet"), unique("live"), unique("fixed")
    path = site.subvolume(claim)
    with site.cluster.mounted(area / "writer") as top:
        folder = Path(f"{top}{path}")
        write(folder, FILES)
        site.cluster.wait_until_not_recent()
        uid = str(uuid.uuid4())
        site.cluster.run(
            *("ceph", "fs", "subvolume", "snapshot", "create", "cephfs"),
            *(path.split("/")[-2], f"csi-snap-{uid}", "--group_name", "csi"),
        )
        site.snapshot("v1", claim, uid)
        (folder / "later").write_bytes(b"after the snapshot")
        node.start()
        site.plane.apply(dataset(site, live, claim), dataset(site, fixed, claim, snapshot="v1"))
        shown = wait_complete(node, fixed)
        assert read(node.view(fixed)) == FILES
        assert shown["source"]["kind"] == "pvc"
        assert shown["source"]["name"] == claim
        wait_complete(node, live)
        assert read(node.view(live)) == FILES | {"later": b"after the snapshot"}
        assert any("may write to the claim" in each for each in node.dataset(live)["notes"])
        said = node.said()
        assert site.cluster.secret() not in said

    # Another agent needs no API server to serve what is complete.
    site.plane.kubectl("delete", "pvc", claim, "-n", site.space, "--wait=false")
    restart(node)
    wait_complete(node, fixed)
    assert read(node.view(fixed)) == FILES


def test_a_claim_is_followed_by_the_snapshots_of_its_volume(
    site: Site, node: agent.Agent, area: Path
) -> None:
    claim, name = unique("imagenet"), unique("cds")
    path = site.subvolume(claim)

    def snapshot() -> None:
        site.cluster.wait_until_not_recent()
        site.cluster.run(
            *("ceph", "fs", "subvolume", "snapshot", "create", "cephfs"),
            *(path.split("/")[-2], f"csi-snap-{uuid.uuid4()}", "--group_name", "csi"),
        )

    with site.cluster.mounted(area / "writer") as top:
        folder = Path(f"{top}{path}")
        write(folder, FILES)
        snapshot()
        node.settings["cache"]["follow_interval"] = "1s"
        node.start()
        site.plane.apply(dataset(site, name, claim, freshness="follow", snapshots="_csi-snap-*"))
        wait_complete(node, name)
        assert read(node.view(name)) == FILES
        (folder / "later").write_bytes(b"in the second snapshot")
        snapshot()
        newer = FILES | {"later": b"in the second snapshot"}
        waiting.until(
            lambda: read(node.view(name)) == newer, 120, "the second snapshot",
            detail=lambda: (node.dataset(name), node.said()),
        )  # fmt: skip


def test_a_claim_that_may_not_be_cached_says_why_and_is_taken_once_it_may(
    site: Site, node: agent.Agent, area: Path
) -> None:
    claim, name = unique("imagenet"), unique("cds")
    path = site.subvolume(claim)
    with site.cluster.mounted(area / "writer") as top:
        write(Path(f"{top}{path}"), FILES)
    site.plane.kubectl("annotate", "pvc", claim, "-n", site.space, "nodeagent.io/cache-")
    node.start()
    site.plane.apply(dataset(site, name, claim))
    waiting.until(
        lambda: knows(node, name) and "annotate pvc" in node.dataset(name)["why"], 60,
        "the reason", detail=node.said,
    )  # fmt: skip
    assert node.dataset(name)["state"] == "waiting"
    site.plane.kubectl("annotate", "pvc", claim, "-n", site.space, "nodeagent.io/cache=allowed")
    node.tell(name, "warm")
    wait_complete(node, name)
    assert read(node.view(name)) == FILES


def test_a_claim_that_shows_a_snapshot_shows_no_live_data_of_its_parent(
    site: Site, node: agent.Agent, area: Path
) -> None:
    """As ceph-csi writes the volume of a claim that was made of a snapshot without a copy."""
    parent, shallow, name = unique("imagenet"), unique("shallow"), unique("cds")
    path = site.subvolume(parent)
    with site.cluster.mounted(area / "writer") as top:
        write(Path(f"{top}{path}"), FILES)
    above = f"{path.rpartition('/')[0]}/"
    attributes = {"fsName": "cephfs", "subvolumeName": "csi-vol-x", "subvolumePath": above}
    site.claim(shallow, "cephfs.csi.ceph.com", attributes, f"0001-{shallow}")
    node.start()
    site.plane.apply(dataset(site, name, shallow))
    waiting.until(
        lambda: knows(node, name) and "shows a snapshot" in node.dataset(name)["why"], 60,
        "the reason", detail=node.said,
    )  # fmt: skip
    assert not list((node.state / "sources").rglob("csi-vol-*"))


def test_an_rbd_claim_is_cached_from_the_image_of_its_snapshot(
    site: Site, node: agent.Agent, area: Path
) -> None:
    claim, name, uid = unique("train"), unique("cds"), str(uuid.uuid4())
    made = area / "image"
    rbdimage.file_system(made, "ext4", 64 * 2**20, lambda top: write(top, FILES))
    # ceph-csi's snapshot is an image with a snapshot, both of this name.
    image = f"csi-snap-{uid}"
    site.cluster.run("rbd", "import", "--no-progress", str(made), f"rbd/{image}")
    site.cluster.run("rbd", "snap", "create", "--no-progress", f"rbd/{image}@{image}")
    attributes = {"pool": "rbd", "imageName": "csi-vol-1", "journalPool": "rbd"}
    site.claim(claim, "rbd.csi.ceph.com", attributes, f"0001-{claim}")
    site.snapshot("v1", claim, uid)
    node.start()
    site.plane.apply(dataset(site, name, claim, snapshot="v1"))
    wait_complete(node, name)
    assert read(node.view(name)) == FILES
    restart(node)  # it knows what it has before anybody says what the claim names
    wait_complete(node, name)
    assert read(node.view(name)) == FILES

    memory, folder = node.state / "claims" / f"{name}.json", node.state / "sources" / name
    assert memory.exists()
    restart(node)
    site.plane.kubectl("delete", "cacheddataset", name)
    waiting.until(
        lambda: not memory.exists() and not folder.exists(), 60, "nothing to be left",
        detail=node.said,
    )  # fmt: skip
