"""What the objects of ceph-csi say of a claim, read without a cluster."""

import base64
import copy
import json
from pathlib import Path
from typing import Any

import pytest

import kit.errors
from cache.settings import CephfsSource, DatasetSettings, PvcSource, RbdSource, at_snapshot
from cache.sources import cephfs, claims
from kube.client import KubeError
from kube.settings import ThisNode

UUID = "c4e2dba0-0b6f-4c3c-9f0d-3f1d1d6c2a11"
TREE = f"/volumes/csi/csi-vol-{UUID}/4f5a0c5e-0b1c-4f7c-8f2c-1d2b3c4d5e6f"
HANDLE = f"0001-0024-ba68226a-672f-4ba5-97bc-22840318b2ec-0000000000000001-{UUID}"
CLAIM = "/api/v1/namespaces/train/persistentvolumeclaims/imagenet"
VOLUME = "/api/v1/persistentvolumes/pvc-1"
SECRET = "/api/v1/namespaces/ceph/secrets/csi-node"
CONFIG = "/api/v1/namespaces/ceph/configmaps/ceph-csi-config"
ROOK = "/api/v1/namespaces/ceph/configmaps/rook-ceph-csi-config"
SNAPSHOT = f"{claims.SNAPSHOTS}/namespaces/train/volumesnapshots/v1"
CONTENT = f"{claims.SNAPSHOTS}/volumesnapshotcontents/content-1"
CLASS = f"{claims.SNAPSHOTS}/volumesnapshotclasses/csi"


def b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


OBJECTS: dict[str, Any] = {
    CLAIM: {
        "metadata": {
            "name": "imagenet", "namespace": "train", "uid": "claim-1",
            "annotations": {claims.ALLOWED: "allowed"},
        },
        "spec": {"volumeName": "pvc-1", "volumeMode": "Filesystem"},
        "status": {"phase": "Bound"},
    },
    VOLUME: {
        "metadata": {"name": "pvc-1"},
        "spec": {
            "accessModes": ["ReadWriteMany"], "claimRef": {"uid": "claim-1"},
            "csi": {
                "driver": "cephfs.csi.ceph.com", "volumeHandle": HANDLE,
                "nodeStageSecretRef": {"name": "csi-node", "namespace": "ceph"},
                "volumeAttributes": {
                    "clusterID": "ba68", "fsName": "cephfs", "subvolumeName": f"csi-vol-{UUID}",
                    "subvolumePath": TREE,
                },
            },
        },
    },
    SECRET: {"data": {"userID": b64("csi-cephfs-node"), "userKey": b64("AQBkey==")}},
    CONFIG: {
        "data": {
            "config.json": json.dumps(
                [
                    {"clusterID": "other", "monitors": ["9.9.9.9:6789"]},
                    {
                        "clusterID": "ba68", "monitors": ["10.0.0.1:6789", "10.0.0.2:6789"],
                        "rbd": {"radosNamespace": "ns1"},
                    },
                ]
            )
        }
    },
    SNAPSHOT: {
        "metadata": {"uid": "snap-1"}, "status": {"boundVolumeSnapshotContentName": "content-1"},
    },
    CONTENT: {
        "spec": {
            "volumeSnapshotRef": {"uid": "snap-1"}, "volumeSnapshotClassName": "csi",
            "source": {"volumeHandle": HANDLE},
        },
        "status": {"snapshotHandle": HANDLE},
    },
    CLASS: {"parameters": {}},
}  # fmt: skip
RBD = {
    "driver": "rook-ceph.rbd.csi.ceph.com", "volumeHandle": HANDLE,
    "nodeStageSecretRef": {"name": "csi-node", "namespace": "ceph"},
    "volumeAttributes": {"clusterID": "ba68", "pool": "replicapool", "imageName": "csi-vol-1"},
}  # fmt: skip


async def found(source: PvcSource, changes: dict[str, Any] | None = None) -> claims.ClaimedSource:
    """``changes``: of objects, by path; None: there is no such object."""
    objects = copy.deepcopy(OBJECTS) | (changes or {})

    async def ask(path: str, about: str) -> Any:
        if objects.get(path) is None:
            raise KubeError(about, "not found", 404)
        return objects[path]

    return await claims.find(source, Path("/run/key"), ask)


def changed(path: str, *keys: str, to: Any) -> dict[str, Any]:
    """An object in which one value is another one."""
    made = copy.deepcopy(OBJECTS[path])
    inner = made
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = to
    return {path: made}


PLAIN = PvcSource(kind="pvc", namespace="train", name="imagenet")
AT_V1 = PLAIN.model_copy(update={"snapshot": "v1"})


async def test_a_cephfs_claim_is_its_subvolume() -> None:
    made = await found(PLAIN)
    assert made.source == CephfsSource(
        kind="cephfs", monitors=("10.0.0.1:6789", "10.0.0.2:6789"), filesystem="cephfs", path=TREE,
        user="csi-cephfs-node", secret_file=Path("/run/key"),
    )  # fmt: skip
    assert (made.key, made.marker) == ("AQBkey==", "")
    assert "ReadWriteMany" in made.note


async def test_a_volume_that_nobody_may_write_needs_no_promise() -> None:
    made = await found(PLAIN, changed(VOLUME, "spec", "accessModes", to=["ReadOnlyMany"]))
    assert made.note == ""


async def test_a_snapshot_of_a_subvolume_is_looked_for_by_its_beginning() -> None:
    made = await found(AT_V1)
    assert (made.marker, made.note) == (f"_csi-snap-{UUID}_", "")
    named = changed(CLASS, "parameters", to={"snapshotNamePrefix": "nightly-"})
    assert (await found(AT_V1, named)).marker == f"_nightly-{UUID}_"


async def test_a_claim_that_shows_a_snapshot_is_never_read_as_its_parent() -> None:
    """ceph-csi mounts the snapshot itself for a read-only claim made of one, and its volume names
    the directory of the parent."""
    claim = changed(CLAIM, "spec", "dataSource", to={"kind": "VolumeSnapshot", "name": "v1"})
    volume = changed(VOLUME, "spec", "accessModes", to=["ReadOnlyMany"])
    assert (await found(PLAIN, claim | volume)).marker == f"_csi-snap-{UUID}_"
    volume[VOLUME]["spec"]["csi"]["volumeAttributes"]["backingSnapshot"] = "false"
    assert (await found(PLAIN, claim | volume)).marker == ""  # it is a copy
    written = changed(VOLUME, "spec", "csi", "volumeAttributes", "backingSnapshot", to="true")
    assert (await found(PLAIN, claim | written)).marker == f"_csi-snap-{UUID}_"


async def test_an_rbd_claim_is_the_image_of_its_snapshot() -> None:
    made = await found(AT_V1, changed(VOLUME, "spec", "csi", to=RBD))
    name = f"csi-snap-{UUID}"
    assert made.source == RbdSource(
        kind="rbd", monitors=("10.0.0.1:6789", "10.0.0.2:6789"), pool="replicapool",
        namespace="ns1", image=name, snapshot=name, user="csi-cephfs-node",
        secret_file=Path("/run/key"),
    )  # fmt: skip


async def test_monitors_and_logins_are_found_where_rook_and_old_versions_keep_them() -> None:
    entry = OBJECTS[CONFIG]["data"]["config.json"]
    at_rook = {CONFIG: None, ROOK: {"data": {"csi-cluster-config-json": entry}}}
    old = {SECRET: {"data": {"adminID": b64("admin"), "adminKey": b64("AQBold==")}}}
    made = await found(PLAIN, at_rook | old)
    assert (made.source.user, made.key) == ("admin", "AQBold==")
    assert made.source.monitors == ("10.0.0.1:6789", "10.0.0.2:6789")


async def test_a_static_volume_names_its_path_itself() -> None:
    attributes = {"clusterID": "ba68", "fsName": "b", "staticVolume": "true", "rootPath": "/v/g/s"}
    made = await found(PLAIN, changed(VOLUME, "spec", "csi", "volumeAttributes", to=attributes))
    assert isinstance(made.source, CephfsSource)
    assert (made.source.filesystem, made.source.path) == ("b", "/v/g/s")


@pytest.mark.parametrize(
    ("changes", "why", "remedy"),
    [
        (changed(CLAIM, "metadata", "annotations", to={}), "annotation", "kubectl annotate pvc"),
        (changed(CLAIM, "metadata", "annotations", to={claims.ALLOWED: "true"}),
         "annotation", "nodeagent.io/cache=allowed"),
        (changed(CLAIM, "status", to={"phase": "Pending"}), "not bound", "describe pvc"),
        (changed(CLAIM, "spec", "volumeMode", to="Block"), "Block", "Filesystem"),
        (changed(VOLUME, "spec", "claimRef", to={"uid": "another"}), "another claim", "describe"),
        (changed(VOLUME, "spec", "claimRef", to=None), "another claim", "describe pv"),
        (changed(VOLUME, "spec", "csi", "driver", to="ebs.csi.aws.com"), "ebs.csi", "dir"),
        (changed(VOLUME, "spec", "csi", "driver", to="fakecephfs.csi.ceph.com"), "fake", "dir"),
        (changed(VOLUME, "spec", "csi", to=None), "no CSI driver", "dir"),
        (changed(VOLUME, "spec", "csi", "nodeStageSecretRef", to=None), "Secret", "StorageClass"),
        (changed(VOLUME, "spec", "csi", "volumeAttributes", "subvolumePath", to=""),
         "subvolumePath", "kind: cephfs"),
        (changed(VOLUME, "spec", "csi", "volumeAttributes", "encrypted", to="true"),
         "encrypted", "copy"),
        (changed(VOLUME, "spec", "csi", to=RBD), "snapshot only", "VolumeSnapshot"),
        (changed(SECRET, "data", to={"userID": "!"}), "userKey", "Secret"),
        ({CONFIG: None}, "no ConfigMap", "ceph-csi"),
        (changed(CONFIG, "data", "config.json", to="[{}]"), "no monitors", "config.json"),
        (changed(CONFIG, "data", "config.json", to="{"), "no monitors", "config.json"),
    ],
)  # fmt: skip
async def test_what_cannot_be_cached_is_refused_with_what_to_do(
    changes: dict[str, Any], why: str, remedy: str
) -> None:
    with pytest.raises(claims.ClaimError, match=why) as refused:
        await found(PLAIN, changes)
    assert remedy in refused.value.remedy


@pytest.mark.parametrize(
    "changes",
    [
        changed(SNAPSHOT, "status", to={}),
        changed(CONTENT, "status", to={}),
        changed(CONTENT, "spec", "volumeSnapshotRef", to={"uid": "another"}),
    ],
)
async def test_a_snapshot_that_is_not_ready_is_waited_for(changes: dict[str, Any]) -> None:
    with pytest.raises(claims.ClaimError, match="not (bound|ready)"):
        await found(AT_V1, changes)


@pytest.mark.parametrize("origin", [{"volumeHandle": "another"}, {"snapshotHandle": HANDLE}, None])
async def test_a_snapshot_of_another_volume_is_not_read_with_this_claim_s_consent(
    origin: Any,
) -> None:
    """One claim of a namespace may be cached, its neighbour not."""
    with pytest.raises(claims.ClaimError, match="not of this claim's volume"):
        await found(AT_V1, changed(CONTENT, "spec", "source", to=origin))
    shown = changed(CLAIM, "spec", "dataSource", to={"kind": "VolumeSnapshot", "name": "v1"})
    volume = changed(VOLUME, "spec", "accessModes", to=["ReadOnlyMany"])
    other = changed(CONTENT, "spec", "source", to={"volumeHandle": "parent"})
    assert (await found(PLAIN, shown | volume | other)).marker, "the claim itself shows it"


@pytest.mark.parametrize("name", ["..", "a/b", ""])
async def test_no_name_leads_to_another_object(name: str) -> None:
    asked = PLAIN.model_copy(update={"name": name})
    with pytest.raises(KubeError):
        await found(asked)


class Server:
    """Answers as ``answer`` says, and counts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[str | None] = []
        self.answer: Exception | None = None
        monkeypatch.setattr(claims, "asked", self._answer)

    async def _answer(self, source: PvcSource, *_: Any) -> claims.ClaimedSource:
        self.asked.append(source.snapshot)
        if self.answer is not None:
            raise self.answer
        return await found(source)


async def look(lookup: claims.ClaimLookup, source: PvcSource) -> claims.ClaimedSource:
    return await lookup.find(source, Path("/run/key"), "dataset a", 5.0)


async def test_each_snapshot_is_asked_for_once_until_its_source_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever follows a claim lists its snapshots each half minute, on each node."""
    server, lookup = Server(monkeypatch), claims.ClaimLookup(ThisNode)
    for _ in range(5):
        await look(lookup, PLAIN)
        await look(lookup, AT_V1)
    assert server.asked == [None, "v1"]
    lookup.ask_again()
    await look(lookup, PLAIN)
    assert server.asked == [None, "v1"], "not at each try"
    monkeypatch.setattr(claims, "AGAIN_SECONDS", -1.0)
    lookup.ask_again()
    await look(lookup, PLAIN)
    assert server.asked == [None, "v1", None]


async def test_a_claim_is_read_as_before_while_nobody_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server, lookup = Server(monkeypatch), claims.ClaimLookup(ThisNode)
    server.answer = KubeError("the API server", "no connection")
    with pytest.raises(kit.errors.SourceError, match="not known what it names: .*no connection"):
        await look(lookup, PLAIN)
    server.answer = None
    known = await look(lookup, PLAIN)
    lookup.forget()
    server.answer = KubeError("the API server", "no connection")
    assert await look(lookup, PLAIN) == known
    lookup.forget()
    server.answer = claims.ClaimError("its annotation was taken away", "allow it")
    with pytest.raises(kit.errors.SourceError, match="taken away"):
        await look(lookup, PLAIN)


async def test_a_followed_snapshot_is_looked_for_in_ceph_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """'_csi-snap-..._1' is no name of a VolumeSnapshot."""
    server, lookup = Server(monkeypatch), claims.ClaimLookup(ThisNode)
    settings = DatasetSettings(name="a", freshness="follow", snapshots="_csi-snap-*", source=PLAIN)
    listed: list[str | None] = []

    async def snapshots(made: cephfs.Cephfs, _: float) -> dict[str, float]:
        listed.append(made.identity["snapshot"])
        return {"_csi-snap-x_1": 1.0}

    monkeypatch.setattr(cephfs.Cephfs, "snapshots", snapshots)
    for name in ("any", "_csi-snap-x_1"):
        at = at_snapshot(PLAIN, name)
        assert isinstance(at, PvcSource)
        made = claims.ClaimSource(settings, at, tmp_path / "a", tmp_path / "memory", lookup)
        assert await made.snapshots(5.0) == {"_csi-snap-x_1": 1.0}
    assert (server.asked, listed) == ([None], [None, None])
    inner = await made._reachable(5.0)
    assert inner.identity["snapshot"] == "_csi-snap-x_1"
    assert (tmp_path / "a" / claims.KEY).stat().st_mode & 0o777 == 0o600
