"""Pods that name a dataset: what the policy adds to them, and where the scheduler puts them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kube import agents, rendered
from tests.kube.test_crds import dataset
from tests.testbed import agent, waiting
from tests.testbed.control_plane import ControlPlane, unique

pytestmark = [pytest.mark.real, pytest.mark.timeout(150)]

ASKS = "nodeagent.io/dataset"
KINDS = ("MutatingAdmissionPolicy", "MutatingAdmissionPolicyBinding")
API = "policies.datasets.api=v1beta1"
PLAIN: dict[str, Any] = {
    "containers": [{"name": "train", "image": "train:1"}],
    "automountServiceAccountToken": False,
}


def mounting(*names: str) -> list[dict[str, Any]]:
    mounts = [{"name": each, "mountPath": f"/{each}"} for each in names]
    return [{"name": "train", "image": "train:1", "volumeMounts": mounts}]


def volume(name: str = "coco", label: str = "", **more: str) -> dict[str, Any]:
    attributes = {"dataset": name, "wait": "available", "layout": "direct", **more}
    csi = {"driver": "nodeagent.io", "readOnly": True, "volumeAttributes": attributes}
    return {"name": label or name, "csi": csi}


def near(*names: str, first: tuple[Any, ...] = (), **more: Any) -> dict[str, Any]:
    """An affinity to nodes that have all of the datasets."""
    terms = [
        {
            "weight": 100,
            "preference": {
                "matchExpressions": [{"key": f"dataset.nodeagent.io/{n}", "operator": "Exists"}]
            },
        }
        for n in names
    ]
    preferred = {"preferredDuringSchedulingIgnoredDuringExecution": [*first, *terms]}
    return {"nodeAffinity": {**preferred, **more}}


SELECTS = {"matchExpressions": [{"key": "gpu", "operator": "In", "values": ["h100"]}]}
REQUIRED: dict[str, Any] = {
    "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [SELECTS]}
}
OTHER_TERM = {"weight": 3, "preference": SELECTS}
APART = {
    "podAntiAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": [
            {"labelSelector": {"matchLabels": {"a": "b"}}, "topologyKey": "kubernetes.io/hostname"}
        ]
    }
}
SCRATCH = {"name": "scratch", "emptyDir": {}}
RESTRICTED = {
    "runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"},
}  # fmt: skip
TWO = [*mounting("coco"), {"name": "side", "image": "side:1"}]
BEFORE = {**mounting("coco")[0], "name": "before"}

# What the pod is annotated with, what it asks for, and what that comes to, all of it written out.
SHAPES: dict[str, tuple[dict[str, str], dict[str, Any], dict[str, Any]]] = {
    "nothing but the annotation": (
        {ASKS: "coco"}, {}, {"volumes": [volume()], "affinity": near("coco")},
    ),
    "a mount by the dataset's name": (
        {ASKS: "coco"},
        {"containers": mounting("coco")},
        {"containers": mounting("coco"), "volumes": [volume()], "affinity": near("coco")},
    ),
    "volumes of its own": (
        {ASKS: "coco"},
        {"containers": mounting("scratch", "coco"), "volumes": [SCRATCH]},
        {
            "containers": mounting("scratch", "coco"), "volumes": [SCRATCH, volume()],
            "affinity": near("coco"),
        },
    ),
    "nodes that it must have": (
        {ASKS: "coco"},
        {"affinity": {"nodeAffinity": REQUIRED}},
        {"affinity": near("coco", **REQUIRED), "volumes": [volume()]},
    ),
    "nodes that it prefers": (
        {ASKS: "coco"},
        {"affinity": near(first=(OTHER_TERM,))},
        {"affinity": near("coco", first=(OTHER_TERM,)), "volumes": [volume()]},
    ),
    "pods that it stays away from": (
        {ASKS: "coco"},
        {"affinity": APART},
        {"affinity": {**APART, **near("coco")}, "volumes": [volume()]},
    ),
    "the volume, by another name": (
        {ASKS: "coco"},
        {"containers": mounting("data"), "volumes": [volume(label="data", wait="complete")]},
        {
            "containers": mounting("data"), "volumes": [volume(label="data", wait="complete")],
            "affinity": near("coco"),
        },
    ),
    "another volume by that name": (
        {ASKS: "coco"},
        {"volumes": [{"name": "coco", "emptyDir": {}}]},
        {"volumes": [{"name": "coco", "emptyDir": {}}], "affinity": near("coco")},
    ),
    "two datasets": (
        {ASKS: "coco, imagenet"},
        {"containers": mounting("coco", "imagenet")},
        {
            "containers": mounting("coco", "imagenet"),
            "volumes": [volume(), volume("imagenet")], "affinity": near("coco", "imagenet"),
        },
    ),
    "a dataset twice": (
        {ASKS: "coco,imagenet, coco,"},
        {"containers": mounting("coco", "imagenet")},
        {
            "containers": mounting("coco", "imagenet"),
            "volumes": [volume(), volume("imagenet")], "affinity": near("coco", "imagenet"),
        },
    ),
    "a dot in the name, and how to wait": (
        {ASKS: "coco.v2", f"{ASKS}-wait": "complete", f"{ASKS}-layout": "parent"},
        {"containers": mounting("coco-v2")},
        {
            "containers": mounting("coco-v2"),
            "volumes": [volume("coco.v2", "coco-v2", wait="complete", layout="parent")],
            "affinity": near("coco.v2"),
        },
    ),
    "restricted, with two containers and one before": (
        {ASKS: "coco"},
        {"containers": TWO, "initContainers": [BEFORE], "securityContext": RESTRICTED},
        {
            "containers": TWO, "initContainers": [BEFORE], "securityContext": RESTRICTED,
            "volumes": [volume()], "affinity": near("coco"),
        },
    ),
    "all of it already": (
        {ASKS: "coco"},
        {"containers": mounting("coco"), "volumes": [volume()], "affinity": near("coco")},
        {"containers": mounting("coco"), "volumes": [volume()], "affinity": near("coco")},
    ),
    "no annotation": ({"other": "x"}, {}, {}),
    "an empty annotation": ({ASKS: " , "}, {}, {}),
}  # fmt: skip


def pod(spec: dict[str, Any], annotations: dict[str, str]) -> dict[str, Any]:
    metadata = {"name": unique("pod"), "namespace": "default", "annotations": annotations}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {**PLAIN, **spec}}


def taken(plane: ControlPlane, made: dict[str, Any]) -> dict[str, Any]:
    """What the server makes of it."""
    done = plane._kubectl(
        "create", "--dry-run=server", "-o", "json", "-f", "-", given=json.dumps(made)
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def policy(plane: ControlPlane) -> Iterator[None]:
    found = rendered.of_kind(rendered.chart("--set", API), *KINDS)
    assert len(found) == 2
    plane.apply(
        {
            "apiVersion": "v1", "kind": "ServiceAccount",
            "metadata": {"name": "default", "namespace": "default"},
        }
    )  # fmt: skip
    plane.apply(*found)
    asking = pod({}, {ASKS: "coco"})
    waiting.until(lambda: "volumes" in taken(plane, asking)["spec"], 30, "the policy to count")
    yield
    for each in found[::-1]:
        plane.kubectl("delete", each["kind"].lower(), each["metadata"]["name"])


@pytest.mark.parametrize("shape", SHAPES)
def test_pod_is_as_if_all_had_been_written(plane: ControlPlane, policy: None, shape: str) -> None:
    annotations, asked, expected = SHAPES[shape]
    found = taken(plane, pod(asked, annotations))
    wanted = taken(plane, pod(expected, {}))
    assert found["spec"].keys() == wanted["spec"].keys()
    for field, value in wanted["spec"].items():
        assert found["spec"][field] == value, field
    assert found["metadata"]["annotations"] == annotations
    assert found["metadata"].get("labels") == wanted["metadata"].get("labels")


def test_name_that_is_none_is_refused_readably(plane: ControlPlane, policy: None) -> None:
    made = pod({}, {ASKS: "Co co"})
    done = plane._kubectl("create", "--dry-run=server", "-f", "-", given=json.dumps(made))
    assert done.returncode != 0 and 'spec.volumes[0].name: Invalid value: "Co co"' in done.stderr
    made = pod({}, {ASKS: "a.b,a-b"})
    done = plane._kubectl("create", "--dry-run=server", "-f", "-", given=json.dumps(made))
    assert done.returncode != 0 and 'spec.volumes[1].name: Duplicate value: "a-b"' in done.stderr


def test_policy_is_there_only_when_asked_for() -> None:
    assert rendered.of_kind(rendered.chart(), *KINDS) == []
    for api in ("v1", "v1beta1", "v1alpha1"):
        found = rendered.of_kind(rendered.chart("--set", f"policies.datasets.api={api}"), *KINDS)
        assert {each["apiVersion"] for each in found} == {f"admissionregistration.k8s.io/{api}"}


# --- where they go

CAPACITY = {"cpu": "16", "memory": "64Gi", "pods": "110", "ephemeral-storage": "100Gi"}
NEAR, FAR = "gpu-near", ("gpu-far-1", "gpu-far-2", "gpu-far-3")


@pytest.fixture
def node(plane: ControlPlane, area: Path) -> Iterator[agent.Agent]:
    """The one with an agent, among nodes that have none."""
    try:
        for name in FAR:
            plane.node(name, field="many")
        with agents.made(plane, area / "node", NEAR, {"field": "many"}) as made:
            for name in (NEAR, *FAR):
                patch = {"status": {"capacity": CAPACITY, "allocatable": CAPACITY}}
                plane.kubectl(
                    "patch", "node", name, "--subresource=status", "-p", json.dumps(patch)
                )
            yield made
    finally:
        plane.kubectl("delete", "node", *FAR, "--ignore-not-found", "--wait=false")


def placed(plane: ControlPlane, count: int, annotations: dict[str, str]) -> list[str]:
    """The nodes of as many pods; they are gone afterwards."""
    spec = {"tolerations": [{"operator": "Exists"}], "nodeSelector": {"field": "many"}}
    made = [pod(spec, annotations) for _ in range(count)]
    names = [each["metadata"]["name"] for each in made]

    def nodes() -> list[str]:
        found = {e["metadata"]["name"]: e["spec"].get("nodeName", "")
                 for e in plane.get("pods", "-n", "default")["items"]}  # fmt: skip
        return [found.get(name, "") for name in names]

    try:
        plane.apply(*made)
        waiting.until(lambda: all(nodes()), 60, "the scheduler", detail=nodes)
        return nodes()
    finally:
        plane.kubectl("delete", "pod", "-n", "default", *names, "--force", "--grace-period=0")


def test_pods_go_where_their_data_is_and_elsewhere_when_it_is_gone(
    plane: ControlPlane, policy: None, node: agent.Agent, area: Path
) -> None:
    files = area / "files"
    files.mkdir()
    (files / "a").write_text("data of a")
    name = unique("coco")
    asks = {ASKS: name}

    def labelled() -> str:
        return plane.kubectl("get", "nodes", "-l", f"dataset.nodeagent.io/{name}", "-o", "name")

    node.start()
    assert placed(plane, 8, asks)  # nobody has it: it is only a preference
    plane.apply(dataset(name, source={"kind": "dir", "path": str(files)}))
    waiting.until(labelled, 60, "the label", detail=node.said)
    assert placed(plane, 8, asks) == [NEAR] * 8
    assert set(placed(plane, 8, {})) & set(FAR)  # nothing else draws pods there
    node.remove(name)
    waiting.until(lambda: not labelled(), 60, "the label to go")
    assert set(placed(plane, 8, asks)) & set(FAR)
