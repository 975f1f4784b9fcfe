"""Volumes by the name of a dataset on a real kubelet: restricted pods, kills, restarts, leftovers.

``SOAK_PODS``: how many pods start at once.
"""

import contextlib
import json
import os
import ssl
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.testbed import blockdev, installed, kubernetes, waiting
from tests.testbed.agent import ApiError

SPACE = "restricted"
DRIVER = "nodeagent.io"
PODS = int(os.environ.get("SOAK_PODS", "6"))

pytestmark = [pytest.mark.real, pytest.mark.timeout(300 + 10 * PODS)]

READ = installed.read(PODS / 10)
RESTRICTED = {
    "runAsUser": 65534,
    "runAsNonRoot": True,
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}


@pytest.fixture(scope="module")
def space(node: installed.Node) -> Iterator[str]:
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    metadata = {"name": SPACE, "labels": labels}
    kube = node.kube
    kube.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
    waiting.until(
        lambda: kube._ask("get", "serviceaccount", "-n", SPACE, "default"), 30, "the account"
    )
    waiting.until(
        lambda: DRIVER in kube.kubectl("get", "csinode", kubernetes.NODE, "-o", "yaml"),
        60, "kubelet to know the driver", detail=node.detail,
    )  # fmt: skip
    yield SPACE
    # Another module may need the namespace again: it must have gone by then.
    kube.kubectl("delete", "namespace", SPACE, "--timeout=200s", seconds=210)


@pytest.fixture
def filling(node: installed.Node) -> None:
    """The dataset is known and not stored; its fill rests until it is told to go on."""

    def removed() -> bool:
        try:
            node.agent.call("DELETE", f"/v1/datasets/{installed.DATASET}")
        except ApiError as error:
            if error.status == 409:  # a pod of the test before is still ending
                return False
            raise
        return True

    waiting.until(removed, 90, "the dataset to be unused", detail=node.detail)
    node.agent.tell(installed.DATASET, "warm")
    node.agent.tell(installed.DATASET, "pause")


def inline(**attributes: str) -> dict[str, Any]:
    given = {"dataset": installed.DATASET, **attributes}
    return {"csi": {"driver": DRIVER, "readOnly": True, "volumeAttributes": given}}


def pod_of(node: installed.Node, name: str, volume: dict[str, Any], data: str) -> dict[str, Any]:
    mount = {"name": "data", "mountPath": "/data", "mountPropagation": "HostToContainer"}
    made = installed.pod_of(
        name, node.kube.busybox, READ.replace("/data/data", data),
        container={"volumeMounts": [mount], "securityContext": RESTRICTED},
        volumes=[{"name": "data", **volume}],
    )  # fmt: skip
    made["metadata"]["namespace"] = SPACE
    return made


class Pods:
    """Pods that read the whole dataset again and again."""

    def __init__(
        self, node: installed.Node, volumes: dict[str, tuple[dict[str, Any], str]]
    ) -> None:
        self.node = node
        run = uuid.uuid4().hex[:6]
        self.names = [f"{kind}-{run}" for kind in volumes]
        node.kube.apply(
            *(
                pod_of(node, name, *each)
                for name, each in zip(self.names, volumes.values(), strict=True)
            )
        )

    def rounds(self, name: str) -> int:
        """Whole rounds that it has read; AssertionError when one failed."""
        logs = self.node.kube.root.glob(f"var/log/pods/{SPACE}_{name}_*/main/*.log")
        said = "".join(each.read_text() for each in sorted(logs))
        assert "ERROR" not in said, said[-500:]
        return len(said.splitlines())

    def read(self, *names: str, seconds: float = 120.0) -> None:
        """Until each of them (by default all) has read one more round from now on."""
        before = {name: self.rounds(name) for name in names or self.names}
        waiting.until(
            lambda: all(self.rounds(name) > count for name, count in before.items()),
            seconds, "pods to read", pause=0.2, detail=self.detail,
        )  # fmt: skip

    def detail(self) -> str:
        kube = self.node.kube
        events = kube.kubectl("get", "events", "-n", SPACE, "--sort-by=.lastTimestamp")
        return events[-4000:] + self.node.detail()[-3000:]

    def delete(self, *, wait: bool = True) -> None:
        kube = self.node.kube
        kube.kubectl(
            "delete", "pod", "-n", SPACE, *self.names, "--wait=false", "--ignore-not-found"
        )
        if wait:
            self.gone()

    def gone(self) -> None:
        """Until the pods have gone, and everything that was mounted for them."""
        kube = self.node.kube
        waiting.until(
            lambda: not kube.get("pods", "-n", SPACE)["items"], 180, "pods to go",
            pause=0.3, detail=self.detail,
        )  # fmt: skip
        waiting.until(
            lambda: not volumes_on(kube), 30, "volumes to go", detail=lambda: volumes_on(kube)
        )
        records = kube.root / installed.STATE / "state" / "csi"
        assert not records.exists() or not sorted(records.iterdir())


def volumes_on(kube: kubernetes.Kubernetes) -> list[str]:
    """What is mounted for CSI volumes on the node."""
    table = kube.on_node("cat", "/proc/self/mountinfo").stdout
    return [line for line in table.splitlines() if "kubernetes.io~csi" in line]


def summary(kube: kubernetes.Kubernetes) -> Any:
    """Kubelet's figures. The API server passes nothing on to a node on loopback."""
    pki = kube.folder / "pki"
    context = ssl.create_default_context(cafile=pki / "ca.crt")
    context.load_cert_chain(pki / "admin.crt", pki / "admin.key")
    address = f"https://127.0.0.1:{kube.kubelet_port}/stats/summary"
    with urllib.request.urlopen(address, context=context, timeout=waiting.limit(20)) as answer:
        return json.load(answer)


def events(node: installed.Node, pod: str) -> str:
    found = node.kube.get("events", "-n", SPACE, "--field-selector", f"involvedObject.name={pod}")
    return "\n".join(each["message"] for each in found["items"])


def until_said(node: installed.Node, pod: str, words: str) -> None:
    waiting.until(
        lambda: words in events(node, pod), 60, words, pause=0.2, detail=lambda: events(node, pod)
    )


@contextlib.contextmanager
def pods(node: installed.Node, **volumes: tuple[dict[str, Any], str]) -> Iterator[Pods]:
    made = Pods(node, volumes)
    try:
        yield made
    except BaseException:
        made.delete(wait=False)
        raise
    made.delete()


def test_restricted_pods_read_while_the_dataset_fills_and_after(
    node: installed.Node, space: str, filling: None
) -> None:
    with pods(
        node,
        direct=(inline(), "/data"),
        parent=(inline(layout="parent"), "/data/data"),
        complete=(inline(wait="complete"), "/data"),
    ) as readers:
        direct, parent, complete = readers.names
        readers.read(direct, parent)
        until_said(node, complete, "not complete yet: ")
        assert not readers.rounds(complete)
        node.agent.tell(installed.DATASET, "resume")
        node.agent.wait_state(installed.DATASET, "complete")
        readers.read()
        served = volumes_on(node.kube)
        assert any("/store/" in line and "/mount/data " in line for line in served), served


def test_wrong_pods_are_told_why(node: installed.Node, space: str) -> None:
    writes = inline()
    writes["csi"]["readOnly"] = False
    wrong = {
        "unknown": (inline(dataset="imagnet"), "this node does not have it"),
        "layout": (inline(layout="flat"), "layout 'flat'; it is direct or parent"),
        "writes": (writes, "readOnly is false, and datasets are only read"),
    }
    with pods(node, **{name: (each[0], "/data") for name, each in wrong.items()}) as made:
        for name, (_, words) in zip(made.names, wrong.values(), strict=True):
            until_said(node, name, words)


def test_a_persistent_volume_is_read_and_measured(node: installed.Node, space: str) -> None:
    csi = {"driver": DRIVER, "volumeHandle": "imagenet", "readOnly": True,
           "volumeAttributes": {"dataset": installed.DATASET}}  # fmt: skip
    common = {"accessModes": ["ReadOnlyMany"], "storageClassName": ""}
    size = {"storage": "1Gi"}
    node.kube.apply(
        {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "imagenet"},
         "spec": {**common, "capacity": size, "csi": csi,
                  "persistentVolumeReclaimPolicy": "Retain"}},
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim",
         "metadata": {"name": "imagenet", "namespace": SPACE},
         "spec": {**common, "volumeName": "imagenet", "resources": {"requests": size}}},
    )  # fmt: skip
    claim = {"persistentVolumeClaim": {"claimName": "imagenet"}}

    def measured() -> dict[str, Any] | None:
        for pod in summary(node.kube)["pods"]:
            for volume in pod.get("volume", ()):
                if volume.get("pvcRef", {}).get("name") == "imagenet":
                    return dict(volume)
        return None

    with pods(node, claim=(claim, "/data")) as readers:
        readers.read()
        found: dict[str, Any] = waiting.until(measured, 60, "kubelet's figures", pause=1)
    shown = node.agent.dataset(installed.DATASET)
    assert found["capacityBytes"] == found["usedBytes"] == shown["bytes"]["total"]
    assert found["inodes"] == found["inodesUsed"] == shown["files"]["total"]
    node.kube.kubectl("delete", "pvc", "-n", SPACE, "imagenet", "--wait=false")
    node.kube.kubectl("delete", "pv", "imagenet", "--wait=false")


def test_many_pods_outlast_kills_of_the_agent_and_a_new_kubelet(
    node: installed.Node, space: str
) -> None:
    layouts = ((inline(), "/data"), (inline(layout="parent"), "/data/data"))
    with pods(node, **{f"many-{n}": layouts[n % 2] for n in range(PODS)}) as readers:
        waiting.until(lambda: volumes_on(node.kube), 60, "the first volume")
        node.kill()  # while it publishes the others
        readers.read(seconds=240 + 5 * PODS)
        node.kube.restart_kubelet()
        readers.read()
        node.delete()  # another agent
        readers.read()
        with pytest.raises(Exception, match="pod restricted/many-"):
            node.agent.call("DELETE", f"/v1/datasets/{installed.DATASET}")
        before = len(volumes_on(node.kube))
        readers.delete(wait=False)
        waiting.until(lambda: len(volumes_on(node.kube)) < before, 60, "the first to go")
        node.kill()  # while it unpublishes the others
        readers.gone()


def test_the_agent_keeps_no_device_of_other_volumes_busy(node: installed.Node, area: Path) -> None:
    """Its container has a copy of every mount below the kubelet's pods. An unmount reaches all."""
    kube = node.kube

    def mount(device: str, stack: contextlib.ExitStack) -> str:
        target = f"/var/lib/kubelet/pods/{uuid.uuid4()}/volumes/kubernetes.io~csi/pv/mount"
        # The kubelet deletes empty directories of pods that it does not know.
        again = 'for i in $(seq 20); do mkdir -p "$2" && mount "$1" "$2" && exit; done; exit 1'
        kube.on_node("sh", "-c", again, "sh", device, target)
        stack.callback(kube.on_node, "umount", target, check=False)
        return target

    def seen(target: str) -> int:
        return node.run("cat", "/proc/self/mountinfo").count(f" {target} ")

    with contextlib.ExitStack() as stack:
        devices = []
        for name in ("before", "after"):
            file = area / name
            with file.open("wb") as stream:
                stream.truncate(32 * blockdev.MiB)
            devices.append(stack.enter_context(blockdev.loop(file)))
            blockdev.run("mkfs.ext4", "-q", devices[-1])
        targets = [mount(devices[0], stack)]
        node.delete()  # the container is made while this is mounted
        targets.append(mount(devices[1], stack))
        for target, device in zip(targets, devices, strict=True):
            # Below both mounts of the container: the kubelet's directory, and its pods.
            assert seen(target) == 2
            kube.on_node("umount", target)
            assert seen(target) == 0
            os.close(os.open(device, os.O_RDONLY | os.O_EXCL))  # EBUSY while it is mounted
