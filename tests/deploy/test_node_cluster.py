"""A dataset of the cluster on a real kubelet: the chart's own rights, from kubectl to a pod."""

import pytest

from tests.deploy.test_node_csi import SPACE, Pods, inline, space
from tests.kube.test_crds import dataset
from tests.testbed import installed, kubernetes, waiting

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]
__all__ = ["space"]

NAME = "by-object"


def test_dataset_comes_with_its_object_serves_a_pod_and_goes(
    node: installed.Node, space: str
) -> None:
    assert space == SPACE
    kube = node.kube
    source = {"kind": "dir", "path": f"/mnt/{installed.DATASET}"}
    kube.apply(dataset(NAME, source=source, nodeSelector={"nvidia.com/gpu.present": "true"}))
    kube.kubectl(
        "wait", "--for=condition=Ready", f"cacheddataset/{NAME}", "--timeout=200s", seconds=210
    )
    shown = kube.kubectl("get", "cacheddatasets", NAME).splitlines()[1].split()
    assert shown[:3] == [NAME, "1/1", "100"]
    status = kube.get("nodestorage", kubernetes.NODE)["status"]
    assert status["guard"]["mode"] == "dry-run"
    waiting.until(
        lambda: [
            each["pinned"] for each in kube.get("nodestorage", kubernetes.NODE)["status"]["images"]
        ]
        == [True],
        60, "the pinned image", detail=node.detail,
    )  # fmt: skip
    made = Pods(node, {"reader": (inline(dataset=NAME), "/data")})
    try:
        made.read()
        kube.kubectl("delete", "cds", NAME)
        waiting.until(
            lambda: any(
                made.names[0] in each["message"]
                for each in kube.get("nodestorage", kubernetes.NODE)["status"]["objects"]
                if each["name"] == NAME and not each["accepted"]
            ),
            60, "the pod to be named", detail=node.detail,
        )  # fmt: skip
        made.read()  # it has what it had
    finally:
        made.delete()
    view = kube.root / installed.STATE / "views" / NAME
    waiting.until(lambda: not view.exists(), 60, "the view to go", detail=node.detail)
    conditions = {
        e["type"]: e["status"] for e in kube.get("node", kubernetes.NODE)["status"]["conditions"]
    }
    assert conditions["Ready"] == "True"
    assert conditions["CacheDegraded"] == "False"
