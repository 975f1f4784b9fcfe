"""Manifests of examples/: a real API server that has the kinds of their projects takes each.

Of Volcano only the Go types can be had (scripts/job_kinds.sh): fields are compared with their JSON
names, and the server takes its pods.
"""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.testbed import docpages, waiting
from tests.testbed.control_plane import ControlPlane

EXAMPLES = docpages.ROOT / "examples"
MANIFESTS = sorted(EXAMPLES.glob("*.yaml"))
DRIVER, DATASET = "nodeagent.io", "coco"
VOLCANO = "volcano-job.yaml"
# Types of Volcano by the field that has them.
VOLCANO_TYPES = {"spec": "JobSpec", "tasks": "TaskSpec", "policies": "LifecyclePolicy"}
_GO_FIELD = re.compile(r"^\s+\w+\s+\S+\s+`json:\"(\w+)[,\"]", re.MULTILINE)


def kinds() -> Path:
    script = str(docpages.ROOT / "scripts" / "job_kinds.sh")
    for words in ((), ("--where",)):
        done = subprocess.run([script, *words], check=True, capture_output=True, text=True)
    return Path(done.stdout.strip())


def shown(file: Path) -> dict[str, Any]:
    (found,) = yaml.safe_load_all(file.read_text())
    assert isinstance(found, dict)
    return found


def mappings(part: Any) -> Iterator[dict[str, Any]]:
    if isinstance(part, dict):
        yield part
        part = list(part.values())
    if isinstance(part, list):
        for each in part:
            yield from mappings(each)


@pytest.mark.parametrize("file", MANIFESTS, ids=lambda file: file.name)
def test_each_job_has_the_volume_and_mounts_it(file: Path) -> None:
    every = list(mappings(shown(file)))
    volumes = [each for each in every if each.get("csi", {}).get("driver") == DRIVER]
    assert volumes, "no volume of ours"
    for volume in volumes:
        assert volume["csi"] == {
            "driver": DRIVER, "readOnly": True, "volumeAttributes": {"dataset": DATASET},
        }  # fmt: skip
        assert any(
            mount["name"] == volume["name"] for each in every
            for mount in each.get("volumeMounts", ())
        )  # fmt: skip
    asked = [each["key"] for each in every if str(each.get("key", "")).startswith("dataset.")]
    assert set(asked) <= {f"dataset.nodeagent.io/{DATASET}"}


def close(schema: dict[str, Any]) -> None:
    """Let anything in where a schema says nothing: Argo's, for editors, has such places, and no
    server takes them."""
    if schema.get("type") == "array":
        schema.setdefault("items", {})
    elif "type" not in schema and not schema.get("x-kubernetes-int-or-string"):
        schema["x-kubernetes-preserve-unknown-fields"] = True
    more = schema.get("additionalProperties")
    for each in (*schema.get("properties", {}).values(), schema.get("items"), more):
        if isinstance(each, dict):
            close(each)


def fields(text: str, name: str) -> set[str]:
    """JSON names of a Go struct."""
    body = re.search(rf"^type {name} struct {{\n(.*?)^}}", text, re.MULTILINE | re.DOTALL)
    assert body, f"{name} is not there"
    return set(_GO_FIELD.findall(body[1]))


def unknown(part: Any, name: str, types: str) -> list[str]:
    """Fields of a Volcano Job that its types do not have."""
    found: list[str] = []
    known = fields(types, VOLCANO_TYPES[name])
    for each in part if isinstance(part, list) else [part]:
        found += [f"{name}.{key}" for key in each if key not in known]
        for key in each.keys() & VOLCANO_TYPES.keys():
            if key != "policies" or name == "spec":
                found += unknown(each[key], key, types)
    return found


@pytest.mark.real
def test_volcano_knows_each_field() -> None:
    types = (kinds() / "job.go").read_text()
    job = shown(EXAMPLES / VOLCANO)
    assert unknown(job["spec"], "spec", types) == []
    assert unknown({"tasks": [{"replica": 1}], "min": 4}, "spec", types) == [
        "spec.min",
        "tasks.replica",
    ]


@pytest.mark.real
def test_server_takes_each_example(plane: ControlPlane) -> None:
    published = [yaml.load(file.read_text(), yaml.CSafeLoader) for file in kinds().glob("*.yaml")]
    assert len(published) == 4
    for kind in published:
        for version in kind["spec"]["versions"]:
            close(version["schema"]["openAPIV3Schema"])
    listed = json.dumps({"apiVersion": "v1", "kind": "List", "items": published})
    plane.kubectl("apply", "--server-side", "-f", "-", given=listed, seconds=120)
    served = (
        "rayjobs.ray.io,rayclusters.ray.io,trainjobs.trainer.kubeflow.org,workflows.argoproj.io"
    )
    waiting.until(
        lambda: plane._kubectl("get", served, "-o", "name").returncode == 0, 60, "the kinds"
    )
    waiting.until(lambda: plane._ask("get", "serviceaccount", "default"), 30, "the account of pods")
    objects = []
    for file in MANIFESTS:
        each = shown(file)
        each["metadata"].pop("namespace")  # the reader's, not there
        if file.name == VOLCANO:
            (task,) = each["spec"]["tasks"]
            each = {
                "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "volcano"},
                "spec": task["template"]["spec"],
            }  # fmt: skip
        if "generateName" in each["metadata"]:
            each["metadata"] = {"name": "workflow"}
        objects.append(each)
    taken = plane.said_of(*objects, words=("--validate=strict",))
    assert taken.count("created (server dry run)") == len(MANIFESTS), taken
    workflow = next(each for each in objects if each["kind"] == "Workflow")
    workflow["spec"]["templates"] = "none"
    assert "templates" in plane.refused(workflow, words=("create", "--validate=strict"))
