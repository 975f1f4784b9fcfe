"""The kinds of the agent on a real API server: what it takes and refuses, and how it says so."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from cache.settings import DatasetSettings
from preheat.settings import ImageSettings
from tests.testbed import scripts
from tests.testbed.control_plane import ControlPlane, unique

REPO = Path(__file__).parents[2]
MANIFEST = REPO / "deploy/manifests/crds.yaml"
DIR = {"kind": "dir", "path": "/mnt/coco"}
CEPHFS = {"kind": "cephfs", "monitors": ["10.0.0.1:6789"], "path": "/coco", "snapshot": "v1"}
RBD = {"kind": "rbd", "monitors": ["10.0.0.1:6789"], "pool": "p", "image": "i", "snapshot": "s"}
KEY = {"name": "ceph", "key": "admin"}


def dataset(name: str = "coco", **spec: Any) -> dict[str, Any]:
    given = {"source": DIR, "freshness": "frozen", **spec}
    return {
        "apiVersion": "nodeagent.io/v1alpha1", "kind": "CachedDataset",
        "metadata": {"name": name},
        "spec": {key: value for key, value in given.items() if value is not None},
    }  # fmt: skip


def images(*each: dict[str, Any], **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "nodeagent.io/v1alpha1", "kind": "ImageSet",
        "metadata": {"name": unique("set")}, "spec": {"images": list(each), **spec},
    }  # fmt: skip


def _schema(kind: str) -> dict[str, Any]:
    for each in yaml.safe_load_all(MANIFEST.read_text()):
        if each["spec"]["names"]["kind"] == kind:
            found: dict[str, Any] = each["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
            return found
    raise AssertionError(kind)


def test_manifests_are_made_of_the_models() -> None:
    module = scripts.load("crds")
    for target in module.TARGETS:
        assert target.read_text() == module.document(), "run .venv/bin/python scripts/crds.py"


def test_specs_have_all_fields_of_the_models_and_texts_for_them() -> None:
    spec = _schema("CachedDataset")["properties"]["spec"]["properties"]
    assert set(spec) == (set(DatasetSettings.model_fields) - {"name"}) | {
        "nodeSelector", "secretRef", "spread",
    }  # fmt: skip
    each = _schema("ImageSet")["properties"]["spec"]["properties"]["images"]["items"]["properties"]
    assert set(each) == set(ImageSettings.model_fields) - {"nodes"}

    def untold(schema: dict[str, Any], path: str) -> list[str]:
        found = [] if schema.get("description") else [path]
        for name, inner in schema.get("properties", {}).items():
            found += untold(inner, f"{path}.{name}")
        if "properties" in schema.get("items", {}):
            found += [x for n, i in schema["items"]["properties"].items() for x in untold(i, n)]
        return found

    for kind in ("CachedDataset", "ImageSet", "NodeStorage"):
        assert untold(_schema(kind), kind) == []


@pytest.mark.parametrize(
    ("size", "taken"),
    [("500Gi", True), ("500GiB", True), ("1.5T", True), ("7", True), ("5gigs", False)],
)
def test_size_in_an_object_is_written_as_in_the_settings(size: str, taken: bool) -> None:
    budget = _schema("CachedDataset")["properties"]["spec"]["properties"]["budget"]
    assert budget["x-kubernetes-int-or-string"] and "type" not in budget
    assert bool(re.search(budget["pattern"], size)) == taken
    if taken:
        assert DatasetSettings.model_validate({"name": "coco", **dataset(budget=size)["spec"]})


# The third: what the server says. Nothing: it takes the object, and so does the model.
CASES = [
    ({}, ""),
    ({"source": {**CEPHFS, "secret_file": "/etc/k"}, "freshness": "snapshot"}, ""),
    ({"source": CEPHFS, "freshness": "snapshot", "secretRef": KEY}, ""),
    ({"source": RBD, "freshness": "snapshot", "secretRef": KEY, "priority": 7}, ""),
    ({"source": {**DIR, "path": "/mnt/.snap/v1"}, "freshness": "snapshot"}, ""),
    ({"access": {"owner": 1000, "mode": "0750"}, "warm": False}, ""),
    ({"nodeSelector": {"gpu": "h100"}}, ""),
    *(({"budget": size}, "") for size in (0, 536870912000, "500GiB", "500Gi", "1.5T", "2000")),
    ({"budget": "500gigs"}, "spec.budget"),
    ({"budget": "-1"}, "spec.budget"),
    ({"budget": -1}, "greater than or equal to 0"),
    ({"freshness": None}, 'missing required field "freshness"'),
    ({"freshness": "live"}, 'Unsupported value: "live"'),
    ({"freshness": "snapshot"}, "freshness 'snapshot' needs source.snapshot"),
    (
        {"source": CEPHFS, "freshness": "frozen", "secretRef": KEY},
        "the source is a snapshot; write freshness: snapshot",
    ),
    ({"source": {"kind": "nfs", "path": "/x"}}, 'supported values: "dir", "cephfs", "rbd"'),
    ({"source": {"kind": "dir"}}, "kind dir needs path"),
    (
        {"source": {**CEPHFS, "client": "krbd"}, "freshness": "snapshot", "secretRef": KEY},
        "client of kind cephfs is one of auto, kernel, fuse",
    ),
    ({"source": {**DIR, "path": "mnt"}}, "source.path is relative; begin it with /"),
    ({"source": {**DIR, "pool": "p"}}, "pool is only there with kind rbd"),
    ({"source": {**RBD, "image": ""}, "freshness": "snapshot", "secretRef": KEY}, None),
    (
        {"source": {k: v for k, v in RBD.items() if k != "image"}, "freshness": "snapshot"},
        "kind rbd needs image",
    ),
    ({"source": CEPHFS, "freshness": "snapshot"}, "needs secretRef or source.secret_file"),
    (
        {
            "source": {**CEPHFS, "secret_file": "/k"}, "freshness": "snapshot", "secretRef": KEY,
        },
        "and not both",
    ),
    ({"secretRef": KEY}, "this kind of source has no key"),
    (
        {
            "source": CEPHFS, "freshness": "snapshot",
            "secretRef": {"name": "ceph?x=/../../../../outside/stolen", "key": "admin"},
        },
        "spec.secretRef.name",
    ),
    (
        {"source": CEPHFS, "freshness": "snapshot", "secretRef": {"name": "ceph", "key": "../x"}},
        "spec.secretRef.key",
    ),
    ({"priority": 5000}, "less than or equal to 1000"),
    ({"access": {"mode": "rwx"}}, "spec.access.mode"),
    ({"prioritty": 1}, 'unknown field "prioritty"'),
]  # fmt: skip


@pytest.mark.real
@pytest.mark.parametrize(("spec", "why"), CASES, ids=lambda value: str(value)[:60])
def test_server_and_model_agree_about_datasets(
    plane: ControlPlane, spec: dict[str, Any], why: str | None
) -> None:
    """None: only the model knows; the agent then says so in the status."""
    name = unique("case")
    made = dataset(name, **spec)
    if why:
        assert why in plane.refused(made, words=("create", "--validate=strict")), spec
        return
    plane.said_of(made)
    plain = {k: v for k, v in made["spec"].items() if k not in ("nodeSelector", "secretRef")}
    if "secretRef" in made["spec"]:
        plain["source"] = {**plain["source"], "secret_file": "/run/key"}
    if why is None:
        with pytest.raises(ValueError, match="image"):
            DatasetSettings.model_validate({"name": name, **plain})
    else:
        assert DatasetSettings.model_validate({"name": name, **plain}).name == name


@pytest.mark.real
def test_sets_of_images_are_taken_as_the_model_takes_them(plane: ControlPlane) -> None:
    pins = ("always", "never", "72h", "90m")
    made = images(*({"ref": f"r.test/{i}:1", "pin": pin} for i, pin in enumerate(pins)))
    plane.said_of(made)
    found = [ImageSettings.model_validate(each).pin for each in made["spec"]["images"]]
    assert found[:2] == ["always", "never"]
    assert [each.duration for each in found[2:] if not isinstance(each, str)] == [259200.0, 5400.0]
    for odd, why in (
        ({"ref": "r.test/a", "pin": "sometimes"}, "should match"),
        ({"pin": "always"}, 'missing required field "ref"'),
        ({"ref": "r.test/a", "priority": -5000}, "greater than or equal to -1000"),
    ):
        assert why in plane.refused(images(odd), words=("create",))
    twice = {"ref": "r.test/a:1"}
    assert "Duplicate value" in plane.refused(images(twice, twice), words=("create",))
    assert "at least 1" in plane.refused(images(), words=("create",))


@pytest.mark.real
def test_what_a_dataset_is_cannot_change_and_everything_else_can(plane: ControlPlane) -> None:
    name = unique("fixed")
    made = dataset(name, source=CEPHFS, freshness="snapshot", secretRef=KEY)
    plane.apply(made)
    for change, why in (
        ({"path": "/other"}, "source.path cannot change"),
        ({"filesystem": "two"}, "source.filesystem cannot change"),
    ):
        other = dataset(name, source={**CEPHFS, **change}, freshness="snapshot", secretRef=KEY)
        assert why in plane.refused(other)
    assert "source.kind cannot change" in plane.refused(dataset(name))
    assert "source.pool cannot change" in plane.refused(dataset(name, source=RBD, secretRef=KEY))
    moved = {**CEPHFS, "monitors": ["10.0.0.2:6789"], "client": "fuse", "snapshot": "v2"}
    plane.apply(
        dataset(name, source=moved, freshness="snapshot", secretRef={"name": "new"}, priority=3)
    )
    assert plane.get("cds", name)["spec"]["priority"] == 3
    plane.kubectl("delete", "cds", name)
    assert "at most 63 characters" in plane.refused(dataset("x" * 64))


@pytest.mark.real
def test_kinds_explain_themselves(plane: ControlPlane) -> None:
    spec = plane.kubectl("explain", "cacheddatasets.spec")
    assert "docs/settings.md" in spec and "Only nodes with all these labels" in spec
    source = plane.kubectl("explain", "cds.spec.source.client")
    assert "ENUM" in source and "ceph-fuse" in source
    assert "72h" in plane.kubectl("explain", "ims.spec.images.pin")
    assert "garbage collection" in plane.kubectl("explain", "nst.status.images")
    columns = plane.kubectl("api-resources", "--api-group=nodeagent.io")
    assert [line.split()[:2] for line in columns.splitlines()[1:]] == [
        ["cacheddatasets", "cds"], ["imagesets", "ims"], ["nodestorages", "nst"],
    ]  # fmt: skip
