"""The second witness on a real API server, with the chart's rights, and the real kernel guard."""

import contextlib
import hashlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kube.objects import attachment_name
from kube.settings import AccessSettings, ThisNode
from tests.testbed import blockdev, cell, kubernetes, waiting
from tests.testbed.agent import Agent
from volumes.ledger.statement import HOLDS_DATA
from volumes.ledger.witness import Witness
from volumes.settings import WitnessSettings

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

DRIVER = "rbd.csi.ceph.com"
CHART = Path(__file__).parents[3] / "deploy" / "chart"
ACCOUNT = "system:serviceaccount:default:nodeagent"
RBAC = "rbac.authorization.k8s.io"


@pytest.fixture(scope="module")
def rights(kube: kubernetes.Kubernetes) -> str:
    """The agent's account as the chart makes it; a token of it."""
    made = kubernetes.helm(
        "template", "nodeagent", str(CHART), "--namespace", "default",
        "--set", "kubernetes.enabled=false,policies.hostPaths.mode=off",
        "--set", "policies.readOnlyVolumes.mode=off", *kubernetes.IMAGE,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    kinds = ("ServiceAccount", "ClusterRole", "ClusterRoleBinding")
    wanted = [
        each for each in yaml.safe_load_all(made.stdout)
        if each and (each["kind"] in kinds or each["kind"].startswith("ValidatingAdmission"))
    ]  # fmt: skip
    assert len(wanted) == 5
    kube.apply(*wanted)
    return kube.kubectl("create", "token", "nodeagent").strip()


OWNER = {"apiVersion": "v1", "kind": "Namespace", "name": "default", "uid": "UID"}


@pytest.fixture(scope="module")
def reader(kube: kubernetes.Kubernetes) -> str:
    """The token of an account that may read and not mark."""
    name = {"metadata": {"name": "agent-reads"}}
    get = [
        {"apiGroups": [""], "resources": ["persistentvolumes"], "verbs": ["get"]},
        {"apiGroups": ["storage.k8s.io"], "resources": ["volumeattachments"], "verbs": ["get"]},
    ]
    who = {"kind": "ServiceAccount", "name": "agent-reads", "namespace": "default"}
    kube.apply(
        {"apiVersion": "v1", "kind": "ServiceAccount",
         "metadata": {"name": "agent-reads", "namespace": "default"}},
        {"apiVersion": f"{RBAC}/v1", "kind": "ClusterRole", **name, "rules": get},
        {"apiVersion": f"{RBAC}/v1", "kind": "ClusterRoleBinding", **name, "subjects": [who],
         "roleRef": {"apiGroup": RBAC, "kind": "ClusterRole", "name": "agent-reads"}},
    )  # fmt: skip
    return kube.kubectl("create", "token", "agent-reads").strip()


def _volume(name: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name},
        "spec": {
            "capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"],
            "storageClassName": "none", "persistentVolumeReclaimPolicy": "Retain",
            "csi": {"driver": DRIVER, "volumeHandle": f"handle-of-{name}"},
        },
    }  # fmt: skip


def _attachment(name: str, node: str) -> dict[str, Any]:
    """As the attach controller makes it."""
    return {
        "apiVersion": "storage.k8s.io/v1", "kind": "VolumeAttachment",
        "metadata": {"name": attachment_name(DRIVER, f"handle-of-{name}", node)},
        "spec": {
            "attacher": DRIVER, "nodeName": node, "source": {"persistentVolumeName": name},
        },
    }  # fmt: skip


def _stage(kubelet: Path, name: str, device: str) -> None:
    """The records that kubelet (csi_attacher.go, MountDevice) and ceph-csi (image-meta.json) write
    before the image is mapped."""
    handle = f"handle-of-{name}"
    digest = hashlib.sha256(handle.encode()).hexdigest()
    home = kubelet / "plugins/kubernetes.io/csi" / DRIVER / digest
    (home / "globalmount").mkdir(parents=True)
    record = {"volumeHandle": handle, "driverName": DRIVER}
    (home / "vol_data.json").write_text(json.dumps(record))
    meta = {"pool": "p", "image": name, "device": device}
    (home / "globalmount" / "image-meta.json").write_text(json.dumps(meta))


class Node:
    """A node of its own: an agent with an empty ledger, kubelet's records, and a blank device."""

    def __init__(self, folder: Path, device: str, where: cell.Cell, agent: Agent) -> None:
        self.folder, self.device, self.where, self.agent = folder, device, where, agent

    def mkfs(self) -> bool:
        done = self.where.run("mkfs.ext4", "-q", "-F", self.device)
        assert done.returncode == 0 or "not permitted" in done.stderr, done.stderr
        return done.returncode == 0

    def reasons(self) -> list[str]:
        """Once the device was decided on."""
        row: dict[str, Any] = waiting.until(
            lambda: self._decided(), 20, "a decision", detail=lambda: self.agent.log.read_text()
        )
        found: list[str] = row["reasons"]
        return found

    def _decided(self) -> dict[str, Any] | None:
        row: dict[str, Any] = self.agent.guarded(self.device)
        return row if row and (row["reasons"] or row["may_be_formatted"]) else None

    def leased(self) -> bool:
        return bool(self.agent.guarded(self.device).get("may_be_formatted"))

    def explained(self) -> str:
        return self.agent.cli("volume", "explain", self.device).stdout


@contextlib.contextmanager
def _node(
    folder: Path, where: cell.Cell, name: str, server: str, ca: Path, token: str, **more: Any
) -> Iterator[Node]:
    folder.mkdir()
    (folder / "token").write_text(token)
    kubelet = folder / "kubelet"
    kubelet.mkdir()
    settings = {
        "kubelet": {"root_dir": str(kubelet)},
        "kubernetes": {
            "server": server, "ca_file": str(ca), "token_file": str(folder / "token"),
            "objects": False,
        },
        "volumes": {
            "guard": cell.settings(where), "audit": {"names": [blockdev.NAMES]}, "kubernetes": more,
        },
    }  # fmt: skip
    with blockdev.loop(blockdev.blank(folder / "image", 64 * blockdev.MiB)) as device:
        _stage(kubelet, name, device)
        agent = Agent(folder / "agent", settings)
        agent.start()
        try:
            yield Node(folder, device, where, agent)
        finally:
            agent.stop()


@pytest.fixture
def ca(kube: kubernetes.Kubernetes) -> Path:
    return kube.folder / "pki" / "ca.crt"


def _marks(kube: kubernetes.Kubernetes, name: str) -> dict[str, str]:
    found: dict[str, str] = kube.get("pv", name)["metadata"].get("annotations", {})
    return {key: text for key, text in found.items() if key.startswith(HOLDS_DATA)}


def test_first_format_is_marked_and_no_other_node_formats_again(
    kube: kubernetes.Kubernetes, rights: str, where: cell.Cell, ca: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    server = f"https://127.0.0.1:{kube.api_port}"
    claim = {"accessModes": ["ReadWriteOnce"], "storageClassName": "none", "volumeName": "pvc-a",
             "resources": {"requests": {"storage": "1Gi"}}}  # fmt: skip
    pod = {"nodeName": kubernetes.NODE, "containers": [{"name": "c", "image": kube.busybox}],
           "volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "a"}}]}  # fmt: skip
    kube.apply(
        {"apiVersion": "storage.k8s.io/v1", "kind": "CSIDriver", "metadata": {"name": DRIVER},
         "spec": {"attachRequired": True}},
        _volume("pvc-a"),
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim",
         "metadata": {"name": "a", "namespace": "default"}, "spec": claim},
    )  # fmt: skip
    waiting.until(
        lambda: kube.get("pvc", "a")["status"]["phase"] == "Bound",
        60, "the claim to be bound", pause=0.2,
    )  # fmt: skip
    kube.apply(
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a", "namespace": "default"},
         "spec": pod},
    )  # fmt: skip
    # The attach controller's own object, by the name that the agent computes.
    name = attachment_name(DRIVER, "handle-of-pvc-a", kubernetes.NODE)
    waiting.until(
        lambda: name in kube.kubectl("get", "volumeattachments", "-o", "name"),
        60, "the attach controller", detail=lambda: kube.kubectl("get", "volumeattachments"),
    )  # fmt: skip
    try:
        monkeypatch.setenv("NODE_NAME", kubernetes.NODE)
        with _node(tmp_path / "one", where, "pvc-a", server, ca, rights) as node:
            waiting.until(node.leased, 20, "a lease", detail=lambda: node.agent.log.read_text())
            assert _marks(kube, "pvc-a") == {}
            assert "pvc-a, created 0.0h ago, knows of no content" in node.explained()
            assert node.mkfs()
            marks = waiting.until(lambda: _marks(kube, "pvc-a"), 20, "the mark")
            mark = json.loads(marks[HOLDS_DATA])
            uuid = blockdev.run("blkid", "-p", "-s", "UUID", "-o", "value", node.device).stdout
            assert (mark["type"], mark["uuid"], mark["node"]) == ("ext4", uuid.strip(), "localhost")
    finally:
        kube.kubectl("delete", "pod", "a", "--force", "--wait=false")

    # The volume moves; there it reads as blank, and that node's ledger knows nothing.
    kube.apply(_attachment("pvc-a", "node-2"))
    monkeypatch.setenv("NODE_NAME", "node-2")
    with _node(tmp_path / "two", where, "pvc-a", server, ca, rights) as node:
        (reason,) = node.reasons()
        assert f"pvc-a says that it holds data (ext4 {mark['uuid']}" in reason
        assert not node.mkfs()
        explained = node.explained()
        assert "formatting refused" in explained
        assert "Next: It reads as empty, and its PersistentVolume pvc-a says" in explained
    assert _marks(kube, "pvc-a") == marks


@pytest.mark.parametrize("way", ["closed", "hangs"])
def test_without_the_api_server_a_format_waits_and_is_not_impossible(
    rights: str, where: cell.Cell, ca: Path, tmp_path: Path, way: str
) -> None:
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        if way == "hangs":
            door.listen()
        server = f"https://127.0.0.1:{door.getsockname()[1]}"
        with _node(
            tmp_path / "n", where, "pvc-b", server, ca, rights, outage="600s", timeout="0.5s"
        ) as node:
            (reason,) = node.reasons()
            assert "cannot be asked" in reason and "after 600s without an answer" in reason
            assert not node.mkfs()
            assert "Kubernetes did not answer" in node.explained()
            assert [f["rule"] for f in node.agent.findings()].count("witness-silent") == 1
            status = node.agent.get("/v1/volumes/guard")["kubernetes"]
            assert status["failed"] and status["trouble"]
            node.agent.stop()
            node.agent.settings["volumes"]["kubernetes"]["outage"] = "1s"
            node.agent.start()
            # kubelet tries again and again.
            waiting.until(node.mkfs, 30, "the format", pause=0.5)


def test_account_that_may_only_read_keeps_to_marks_and_says_what_it_lacks(
    kube: kubernetes.Kubernetes, reader: str, where: cell.Cell, ca: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    server = f"https://127.0.0.1:{kube.api_port}"
    monkeypatch.setenv("NODE_NAME", "node-3")
    kube.apply(*(make for name in ("pvc-c", "pvc-d")
                 for make in (_volume(name), _attachment(name, "node-3"))))  # fmt: skip
    kube.kubectl("annotate", "pv", "pvc-d", f"{HOLDS_DATA}=since long ago")
    with _node(tmp_path / "c", where, "pvc-c", server, ca, reader) as node:
        waiting.until(node.leased, 20, "a lease")
        assert node.mkfs()
        waiting.until(
            lambda: "volumes-not-marked" in {f["rule"] for f in node.agent.findings()},
            20, "the finding", detail=node.agent.findings,
        )  # fmt: skip
    assert _marks(kube, "pvc-c") == {}
    with _node(tmp_path / "d", where, "pvc-d", server, ca, reader) as node:
        (reason,) = node.reasons()
        assert "pvc-d says that it holds data (since long ago)" in reason
        assert not node.mkfs()


async def test_taint_of_a_repair_leaves_other_taints_alone(kube: kubernetes.Kubernetes) -> None:
    """By a kubeconfig whose login is a certificate."""

    def taints() -> list[str]:
        return [each["key"] for each in kube.get("node", kubernetes.NODE)["spec"].get("taints", [])]

    async def find(_: object) -> None:
        return None

    kube.kubectl("taint", "node", kubernetes.NODE, "a-test=x:PreferNoSchedule")
    cluster = AccessSettings(kubeconfig=kube._kubeconfig("admin"))
    here = ThisNode(name=kubernetes.NODE, cluster=cluster)
    witness = Witness(WitnessSettings(), here, find)
    try:
        for wanted in (True, True, False, False):
            await witness.taint(wanted)
            assert taints() == ["a-test", *(["nodeagent.io/volume-repair"] if wanted else [])]
    finally:
        await witness.close()
        kube.kubectl("taint", "node", kubernetes.NODE, "a-test-")


@pytest.mark.parametrize(
    ("change", "allowed"),
    [
        ({"metadata": {"annotations": {HOLDS_DATA: "x"}}}, True),
        ({"metadata": {"annotations": {f"{HOLDS_DATA}-in-0": "x"}}}, True),
        ({"metadata": {"annotations": {HOLDS_DATA: None}}}, False),
        ({"metadata": {"annotations": {"nodeagent.io/allow-format": "x"}}}, False),
        ({"metadata": {"annotations": {"other": "y"}}}, False),
        ({"metadata": {"labels": {"a": "b"}}}, False),
        ({"metadata": {"finalizers": []}}, False),
        # The garbage collector deletes what is owned by something that is not there.
        ({"metadata": {"ownerReferences": [{**OWNER, "controller": True}]}}, False),
        ({"spec": {"persistentVolumeReclaimPolicy": "Delete"}}, False),
    ],
)
def test_policy_lets_the_agent_mark_and_change_nothing_else(
    kube: kubernetes.Kubernetes, rights: str, change: dict[str, Any], allowed: bool
) -> None:
    kube.apply(_volume("pvc-e"))
    uid = kube.kubectl("get", "namespace", "default", "-o", "jsonpath={.metadata.uid}")
    owned = json.dumps({"metadata": {"ownerReferences": [OWNER]}}).replace("UID", uid)
    kube.kubectl("patch", "pv", "pvc-e", "--type=merge", "-p", owned)
    wanted = json.dumps(change).replace("UID", uid)
    kube.kubectl("annotate", "--overwrite", "pv", "pvc-e", f"{HOLDS_DATA}=old", "other=x")

    def patch() -> bool:
        done = kube._kubectl("patch", "pv", "pvc-e", "--as", ACCOUNT, "--type=merge", "-p", wanted)
        assert done.returncode == 0 or "ValidatingAdmissionPolicy" in done.stderr, done.stderr
        return done.returncode == 0

    if allowed:
        assert patch()
    else:  # a new policy is in force after a moment
        waiting.until(lambda: not patch(), 20, "the policy to refuse it")
