"""What the objects of ceph-csi say of a claim, read without a cluster."""

import base64
import copy
import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kit.errors
import kit.pause
from cache import uninstall
from cache.settings import (
    CacheSettings,
    CephfsSource,
    DatasetSettings,
    PvcSource,
    RbdSource,
    at_snapshot,
)
from cache.sources import base, cephfs, cephfs_mount, claims, kinds, rbd_child
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
    """``changes``: of objects, by path; None: there is no such object; a number: how the API server
    refuses it."""
    objects = copy.deepcopy(OBJECTS) | (changes or {})

    async def ask(path: str, about: str) -> Any:
        answer = objects.get(path) or 404
        if isinstance(answer, int):
            raise KubeError(about, "no object", answer)
        return answer

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
    assert (made.key, made.snapshot) == ("AQBkey==", "")
    assert made.key not in repr(made)
    assert made.key not in repr(cephfs_mount.Way(made.source, (), made.key, "dataset a"))
    assert "ReadWriteMany" in made.note


async def test_a_volume_that_nobody_may_write_needs_no_promise() -> None:
    made = await found(PLAIN, changed(VOLUME, "spec", "accessModes", to=["ReadOnlyMany"]))
    assert made.note == ""


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, f"csi-snap-{UUID}"),
        (changed(CLASS, "parameters", to={"snapshotNamePrefix": "nightly-"}), f"nightly-{UUID}"),
        ({CLASS: None}, f"csi-snap-{UUID}"),  # deleted since: what it made has the usual name
    ],
)
async def test_a_snapshot_of_a_subvolume_is_looked_for_by_its_name(
    changes: dict[str, Any], name: str
) -> None:
    made = await found(AT_V1, changes)
    assert (made.snapshot, made.note) == (name, "")


ATTRIBUTES = ("spec", "csi", "volumeAttributes")
GROUP = "/volumes/csi"


@pytest.mark.parametrize(
    "changes",
    [
        changed(VOLUME, *ATTRIBUTES, "subvolumePath", to=f"{GROUP}/csi-vol-{UUID}/"),
        changed(VOLUME, *ATTRIBUTES, "subvolumePath", to=f"{GROUP}/"),  # of a parent of old Ceph
        changed(VOLUME, *ATTRIBUTES, "subvolumePath", to=GROUP),
        changed(VOLUME, *ATTRIBUTES, "backingSnapshot", to="true"),
        changed(VOLUME, *ATTRIBUTES, "backingSnapshot", to="1"),
        changed(VOLUME, *ATTRIBUTES, "backingSnapshotID", to=HANDLE),
    ],
)
@pytest.mark.parametrize("origin", [None, {"kind": "VolumeSnapshot", "name": "v1"}])
async def test_a_claim_that_shows_a_snapshot_is_refused(
    origin: Any, changes: dict[str, Any]
) -> None:
    """ceph-csi makes a read-only claim of a snapshot without a copy: its volume names the directory
    above the data of another volume, whose claim has not allowed anything."""
    claim = changed(CLAIM, "spec", "dataSource", to=origin)
    for source in (PLAIN, AT_V1):
        with pytest.raises(claims.ClaimError, match="shows a snapshot of another vol") as refused:
            await found(source, claim | changes)
        assert "source.snapshot" in refused.value.remedy


@pytest.mark.parametrize("path", [TREE, f"{GROUP}/csi-vol-{UUID}", f"{GROUP}/nightly-{UUID}"])
async def test_a_claim_with_data_of_its_own_is_read_wherever_ceph_keeps_it(path: str) -> None:
    """A legacy subvolume has no directory below that of its name."""
    volume = changed(VOLUME, *ATTRIBUTES, "subvolumePath", to=path)
    volume[VOLUME]["spec"]["csi"]["volumeAttributes"]["backingSnapshot"] = "false"  # it is a copy
    made = await found(PLAIN, volume)
    assert isinstance(made.source, CephfsSource)
    assert made.source.path == path


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
        (changed(VOLUME, "spec", "csi", "volumeAttributes", "encrypted", to="T"),
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


@pytest.mark.parametrize(
    ("answers", "status"),
    [({CONFIG: 500}, 500), ({CONFIG: 429}, 429), ({CONFIG: 403}, 403), ({ROOK: 403}, 403),
     ({CONFIG: 403, ROOK: {"data": {}}}, 403), ({ROOK: 503}, 503)],
)  # fmt: skip
async def test_a_config_map_that_nobody_could_read_is_not_one_without_monitors(
    answers: dict[str, Any], status: int
) -> None:
    with pytest.raises(KubeError) as failed:
        await found(PLAIN, {CONFIG: None} | answers)
    assert failed.value.status == status


async def test_a_config_map_that_may_not_be_read_does_not_hide_the_other() -> None:
    entry = OBJECTS[CONFIG]["data"]["config.json"]
    made = await found(PLAIN, {CONFIG: 403, ROOK: {"data": {"csi-cluster-config-json": entry}}})
    assert made.source.monitors == ("10.0.0.1:6789", "10.0.0.2:6789")


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
        self.changes: dict[str, Any] = {}
        monkeypatch.setattr(claims, "asked", self._answer)

    async def _answer(self, source: PvcSource, *_: Any) -> claims.ClaimedSource:
        self.asked.append(source.snapshot)
        if self.answer is not None:
            raise self.answer
        return await found(source, self.changes)


def list_in_ceph(monkeypatch: pytest.MonkeyPatch, *names: str) -> list[str | None]:
    """The volume has these snapshots; the snapshots that it was opened at to list them."""
    opened: list[str | None] = []

    async def snapshots(made: cephfs.Cephfs, _: float) -> dict[str, float]:
        opened.append(made.identity["snapshot"])
        return dict.fromkeys(names, 1.0)

    monkeypatch.setattr(cephfs.Cephfs, "snapshots", snapshots)
    return opened


async def look(lookup: claims.ClaimLookup, source: PvcSource) -> claims.ClaimedSource:
    return await lookup.find(source, Path("/run/key"), "dataset a", 5.0)


class Clock:
    """The lookup's; chance takes nothing from its pauses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(claims, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(kit.pause, "jittered", lambda seconds: seconds)


async def test_each_snapshot_is_asked_for_once_until_its_source_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever follows a claim lists its snapshots each half minute, on each node."""
    server, lookup, clock = Server(monkeypatch), claims.ClaimLookup(ThisNode), Clock(monkeypatch)
    for _ in range(5):
        await look(lookup, PLAIN)
        await look(lookup, AT_V1)
    assert server.asked == [None, "v1"]
    lookup.ask_again()
    await look(lookup, PLAIN)
    assert server.asked == [None, "v1"], "not at each try"
    clock.now += claims.AGAIN_SECONDS[0]
    await look(lookup, PLAIN)
    assert server.asked == [None, "v1", None]


async def test_the_api_server_is_asked_ever_less_often_while_ceph_is_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server, lookup, clock = Server(monkeypatch), claims.ClaimLookup(ThisNode), Clock(monkeypatch)
    first, longest = claims.AGAIN_SECONDS

    async def pauses(hours: float) -> list[float]:
        """Between questions, while each second somebody finds that Ceph does not answer."""
        asked_at: list[float] = []
        for _ in range(int(3600 * hours)):
            before = len(server.asked)
            await look(lookup, PLAIN)
            if len(server.asked) > before:
                asked_at.append(clock.now)
            lookup.ask_again()
            clock.now += 1.0
        return [later - one for one, later in itertools.pairwise(asked_at)]

    grown = [first, 120.0, 240.0, 480.0, 960.0, longest]
    assert (await pauses(5))[:8] == [*grown, longest, longest]
    lookup.answered()  # and at once it fails again
    assert (await pauses(2))[:5] == grown[1:]


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


def of_claim(
    folder: Path, lookup: claims.ClaimLookup, source: PvcSource = PLAIN, freshness: Any = "frozen"
) -> claims.ClaimSource:
    settings = DatasetSettings.model_construct(name="a", freshness=freshness, source=source)
    made = kinds.source_of(settings, folder, lookup)
    assert isinstance(made, claims.ClaimSource)
    return made


@pytest.mark.parametrize("name", ["_csi-snap-x_1", "made-by-hand"])
async def test_a_followed_snapshot_is_looked_for_in_ceph_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the name of a directory in .snap, and of no VolumeSnapshot."""
    server, lookup = Server(monkeypatch), claims.ClaimLookup(ThisNode)
    listed = list_in_ceph(monkeypatch, name)
    for each in ("any", name):
        at = at_snapshot(PLAIN, each)
        assert isinstance(at, PvcSource)
        made = of_claim(tmp_path, lookup, at, "follow")
        assert await made.snapshots(5.0) == {name: 1.0}
    assert (server.asked, listed) == ([None], [None, None])
    inner = await made._reachable(5.0)
    assert inner.identity["snapshot"] == name
    key = kinds.folder_of(tmp_path, "a") / cephfs_mount.CLAIM_KEY
    assert key.stat().st_mode & 0o777 == 0o600


async def test_a_written_snapshot_is_asked_for_by_its_name_whatever_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One as 'follow' finds them could be of what the claim has not allowed."""
    server = Server(monkeypatch)
    at = PLAIN.model_copy(update={"snapshot": "_csi-snap-x_1"})
    made = of_claim(tmp_path, claims.ClaimLookup(ThisNode), at, "snapshot")
    with pytest.raises(kit.errors.SourceError):
        await made.reach(5.0)
    assert server.asked == ["_csi-snap-x_1"]


@pytest.mark.parametrize("name", [f"_csi-snap-{UUID}_1099", f"csi-snap-{UUID}", ""])
async def test_a_snapshot_is_found_where_each_ceph_keeps_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A level above the data; in old subvolumes beside the data. What nobody finds is asked for
    again: another VolumeSnapshot may have that name by now."""
    Server(monkeypatch)
    lookup, clock = claims.ClaimLookup(ThisNode), Clock(monkeypatch)
    list_in_ceph(monkeypatch, "_csi-snap-other_1", *([name] if name else []))
    made = of_claim(tmp_path, lookup, AT_V1, "snapshot")
    if name:
        assert (await made._reachable(5.0)).identity["snapshot"] == name
        return
    with pytest.raises(base.GoneError, match=f"csi-snap-{UUID}"):
        await made.reach(5.0)
    assert lookup._due[AT_V1] == clock.now + claims.AGAIN_SECONDS[0]


LEFT = ("keyring", "ceph.conf", cephfs_mount.CLAIM_KEY)


@pytest.mark.parametrize("kind", [cephfs_mount.SHOWN, rbd_child.MAPPED])
async def test_what_an_earlier_agent_left_of_a_claim_is_released(kind: str, tmp_path: Path) -> None:
    """Nobody asked the API server yet: the files in the folder tell what it was."""
    folder = kinds.folder_of(tmp_path, "a")
    folder.mkdir(parents=True)
    for name in (*LEFT, kind):
        (folder / name).write_text("{}")
    await of_claim(tmp_path, claims.ClaimLookup(ThisNode)).release()
    assert not folder.exists()


@pytest.mark.parametrize("kind", [cephfs_mount.SHOWN, rbd_child.MAPPED, ""])
async def test_nothing_is_left_of_a_dataset_that_nobody_knows(kind: str, tmp_path: Path) -> None:
    """It is in no settings any more: what its source was, only the files tell."""
    folder, memory = kinds.folder_of(tmp_path, "a"), kinds.memory_of(tmp_path, "a")
    for parent in (folder, memory.parent):
        parent.mkdir(parents=True)
    memory.write_text('{"block": true}')
    for name in filter(None, (*LEFT, kind)):
        (folder / name).write_text("{}")
    await kinds.forget(tmp_path, "a")
    assert not [each for each in tmp_path.rglob("*") if each.is_file()]


async def test_a_claim_that_is_of_another_kind_by_now_is_read_as_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was made anew, of another class. The next agent knows; the key outlives the release of
    what it was before."""
    server, lookup = Server(monkeypatch), claims.ClaimLookup(ThisNode)
    list_in_ceph(monkeypatch, f"_csi-snap-{UUID}_1")
    made = of_claim(tmp_path, lookup, AT_V1, "snapshot")
    for is_image in (False, True, False):
        server.changes = changed(VOLUME, "spec", "csi", to=RBD) if is_image else {}
        lookup.forget()
        await made._reachable(5.0)
        assert made.block is is_image
        assert (kinds.folder_of(tmp_path, "a") / cephfs_mount.CLAIM_KEY).read_text() == "AQBkey=="
        assert of_claim(tmp_path, lookup, AT_V1, "snapshot").block is is_image


def test_what_is_remembered_of_claims_is_taken_off_the_node(tmp_path: Path) -> None:
    memory = kinds.memory_of(tmp_path, "a")
    memory.parent.mkdir()
    memory.write_text('{"block": true}')
    section = CacheSettings(store=tmp_path / "store", views=tmp_path / "views").as_json()
    traces = uninstall.find(section, str(tmp_path))
    assert [each["name"] for each in traces if each["kind"] == "state"] == [str(memory.parent)]
