"""The command and the agents mean the same, though neither imports the other."""

import typing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from fleet import folding, main, pods, server, shapes
from nodeagent.cluster import intent, kinds, rollup

REPO = Path(__file__).parents[2]


def schema(kind: str) -> Any:
    """Of a kind, as the API server has it."""
    for each in yaml.safe_load_all((REPO / "deploy/manifests/crds.yaml").read_text()):
        if each["spec"]["names"]["kind"] == kind:
            return each["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    raise AssertionError(kind)


def lacking(shape: type[msgspec.Struct], properties: Any, at: str) -> list[str]:
    """Fields that the command reads and no agent can write."""
    found = []
    for field in msgspec.structs.fields(shape):
        name = f"{at}.{field.encode_name}"
        if field.encode_name not in properties:
            found.append(name)
            continue
        below = properties[field.encode_name]
        below = below.get("items", below).get("properties", {})
        for part in (field.type, *typing.get_args(field.type)):
            if isinstance(part, type) and issubclass(part, shapes.Told):
                found += lacking(part, below, name)
    return found


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("NodeStorage", shapes.StorageStatus),
        ("CachedDataset", shapes.WishStatus),
        ("ImageSet", shapes.WishStatus),
    ],
)
def test_every_field_that_is_read_is_one_of_the_objects(kind: str, shape: Any) -> None:
    assert lacking(shape, schema(kind)["status"]["properties"], kind) == []


def test_a_field_that_no_agent_writes_is_found() -> None:
    class Wrong(shapes.Told, frozen=True):
        wrtten: str = ""

    assert lacking(Wrong, schema("NodeStorage")["status"]["properties"], "x") == ["x.wrtten"]


def test_names_and_limits_are_those_of_agents() -> None:
    assert (server.GROUP, server.VERSION) == (kinds.GROUP, kinds.VERSION)
    assert folding.SILENT_SECONDS == rollup.SILENT_SECONDS
    assert main.LONGEST_VALUE == intent.LONGEST_VALUE
    verbs = {each.verb for _, found in kinds.intents() for each in found.requests}
    assert main.WARM.removeprefix(f"{kinds.GROUP}/") in verbs
    plurals = {found.plural for _, found in kinds.intents()} | {kinds.NODE_STORAGES}
    assert {server.NODE_STORAGES, main.DATASETS, main.IMAGE_SETS} == plurals
    assert main.DATASETS == "cacheddatasets"


def test_pods_of_the_chart_are_found() -> None:
    key, _, value = pods.SELECTOR.partition("=")
    (pod,) = [
        each["spec"]["template"]
        for each in yaml.safe_load_all((REPO / "deploy/manifests/nodeagent.yaml").read_text())
        if each and each["kind"] == "DaemonSet"
    ]
    assert pod["metadata"]["labels"][key] == value
    assert pods.CONTAINER in [each["name"] for each in pod["spec"]["containers"]]
