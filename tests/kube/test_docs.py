"""Objects in the docs: a real API server takes each of them."""

import subprocess
from typing import Any

import pytest
import yaml

from tests.testbed import docpages, kubernetes, waiting
from tests.testbed.control_plane import ControlPlane


def objects() -> list[dict[str, Any]]:
    return [
        whole(document)
        for block in docpages.all_blocks()
        if block.language == "yaml"
        for document in yaml.safe_load_all(block.text)
        if docpages.is_object(document)
    ]


def whole(shown: dict[str, Any]) -> dict[str, Any]:
    """What the docs leave out: the reader's own container. What has no kind is of a pod."""
    made = {**shown, "metadata": {"name": "shown", **shown.get("metadata", {})}}
    made["metadata"].pop("namespace", None)  # the reader's, not there
    if "kind" in shown:
        return made
    spec = made.pop("spec", None)
    if spec is None:
        spec = {key: made.pop(key) for key in ("volumes", "containers") if key in made}
    container = {"name": "train", "image": "registry.example/train:1"}
    spec["containers"] = [{**container, **each} for each in spec.get("containers", [{}])]
    mounted = {m["name"] for each in spec["containers"] for m in each.get("volumeMounts", ())}
    named = {each["name"] for each in spec.get("volumes", ())}
    # The policy of the annotation adds them; test_pods.py compares what it adds.
    added = [{"name": name, "emptyDir": {}} for name in sorted(mounted - named)]
    if added:
        assert "nodeagent.io/dataset" in made["metadata"]["annotations"]
        spec["volumes"] = [*spec.get("volumes", ()), *added]
    return {"apiVersion": "v1", "kind": "Pod", **made, "spec": spec}


@pytest.mark.real
def test_server_takes_the_objects_of_the_docs(plane: ControlPlane) -> None:
    shown = objects()
    kinds = {each["kind"] for each in shown}
    assert kinds >= {"CachedDataset", "ImageSet", "Pod", "PersistentVolume", "ClusterRole"}
    for number, each in enumerate(shown):
        each["metadata"]["name"] += f"-{number}"  # several have one name
    waiting.until(lambda: plane._ask("get", "serviceaccount", "default"), 30, "the account of pods")
    taken = plane.said_of(*shown, words=("--validate=strict",))
    assert taken.count("created (server dry run)") == len(shown), taken
    assert "Warning" not in taken, taken


# As ceph-csi's manifests, its Helm chart and its operator name it and its container.
PLUGINS = ("csi-rbdplugin", "ceph-csi-rbd-nodeplugin", "rook-ceph.rbd.csi.ceph.com-nodeplugin")


@pytest.mark.real
def test_ceph_csi_is_found_and_patched_whatever_its_daemonset_is_called(
    plane: ControlPlane,
) -> None:
    for name in PLUGINS:
        labels = {"app": name}
        containers = [
            {"name": each, "image": "registry.example/csi:1"}
            for each in ("driver-registrar", "csi-rbdplugin", "liveness-prometheus")
        ]
        plane.apply({
            "apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": {"name": name},
            "spec": {
                "selector": {"matchLabels": labels},
                "template": {
                    "metadata": {"labels": labels},
                    "spec": {"hostPID": True, "containers": containers},
                },
            },
        })  # fmt: skip
    (block,) = (each for each in docpages.all_blocks() if each.page == "guard.md" and each.is_shell)
    look, patch = (line.removeprefix("$ ") for line in block.text.splitlines())
    found = _run(plane, look)
    assert sorted(line.split()[1] for line in found.splitlines()) == sorted(PLUGINS)
    for line in found.splitlines():
        space, name, *_ = line.split()
        _run(plane, patch.replace("NAMESPACE", space).replace("NAME", name))
        pod = plane.get("daemonset", name)["spec"]["template"]["spec"]
        assert [each["name"] for each in pod["initContainers"]] == ["wait-for-format-guard"]
        assert len(pod["containers"]) == 3
        assert {each["name"] for each in pod["volumes"]} == {"guard-bpf", "guard-state"}


def _run(plane: ControlPlane, command: str) -> str:
    """What a reader's shell prints of ``command``."""
    done = subprocess.run(
        ["bash", "-ec", command], cwd=docpages.ROOT, text=True, capture_output=True, check=False,
        env={
            "PATH": f"{kubernetes.BIN}:/usr/bin:/bin", "KUBECONFIG": str(plane.admin.kubeconfig),
            "HOME": str(plane.folder),  # kubectl keeps what it learns there
        },
        timeout=waiting.limit(60),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout
