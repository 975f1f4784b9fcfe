"""Datasets of the cluster on a real agent: they begin, change and end with their objects."""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nodeagent.cluster import intent, kinds
from tests.kube import agents
from tests.kube.test_crds import dataset
from tests.testbed import agent, waiting
from tests.testbed.control_plane import NAMESPACE, ControlPlane, unique

pytestmark = [pytest.mark.real, pytest.mark.timeout(150)]

NODE = "gpu-objects"


@pytest.fixture
def node(plane: ControlPlane, area: Path) -> Iterator[agent.Agent]:
    with agents.made(plane, area / "node", NODE, {"gpu": "h100"}, drop_after="1h") as made:
        yield made


@pytest.fixture
def files(area: Path) -> Path:
    folder = area / "files"
    folder.mkdir()
    (folder / "a").write_text("data of a")
    return folder


def names(node: agent.Agent) -> list[str]:
    return [each["name"] for each in node.call("GET", "/v1/datasets")["datasets"]]


def is_complete(node: agent.Agent, name: str) -> Any:
    return name in names(node) and node.call("GET", f"/v1/datasets/{name}")["state"] == "complete"


def findings(node: agent.Agent) -> dict[str, str]:
    found = node.call("GET", "/v1/findings")["findings"]
    return {each["rule"]: each["message"] for each in found}


def leaving(plane: ControlPlane) -> str:
    found: str = plane.get("nst", NODE)["status"]["summary"]["leaving"]
    return found


def test_dataset_begins_changes_and_ends_with_its_object(
    plane: ControlPlane, node: agent.Agent, files: Path
) -> None:
    name = unique("coco")
    source = {"kind": "dir", "path": str(files)}
    node.start()
    plane.apply(dataset(name, source=source, nodeSelector={"gpu": "h100"}))
    plane.apply(dataset(unique("other"), source=source, nodeSelector={"gpu": "a100"}))
    waiting.until(lambda: is_complete(node, name), 30, "the dataset", detail=node.said)
    assert names(node) == [name]
    assert (node.view(name) / "a").read_text() == "data of a"

    plane.kubectl("patch", "cds", name, "--type=merge", "-p", '{"spec": {"priority": 7}}')
    waiting.until(
        lambda: node.call("GET", f"/v1/datasets/{name}")["priority"] == 7, 30, "the change"
    )

    # A reader holds the view: it stays, and the agent says who.
    reader = subprocess.Popen(["sleep", "1000"], cwd=node.view(name))
    try:
        plane.kubectl("delete", "cds", name)
        waiting.until(
            lambda: f"{reader.pid}" in findings(node).get("intent-in-use", ""),
            30, "the reader to be named", detail=lambda: findings(node),
        )  # fmt: skip
        waiting.until(lambda: leaving(plane) == "1", 30, "the object of the node to count it")
        assert (node.view(name) / "a").read_text() == "data of a"
    finally:
        reader.kill()
        reader.wait()
    waiting.until(lambda: not node.view(name).exists(), 40, "the view to go", detail=node.said)
    waiting.until(lambda: node.generations(name) == [], 30, "the store to be given up")
    waiting.until(lambda: "intent-in-use" not in findings(node), 30, "the finding to clear")
    waiting.until(lambda: leaving(plane) == "0", 30, "the object of the node to say so")


def test_file_wins_and_the_object_waits_for_it(
    plane: ControlPlane, node: agent.Agent, files: Path, area: Path
) -> None:
    other = area / "other"
    other.mkdir()
    (other / "a").write_text("of the object")
    name = unique("coco")
    node.add_dir(name, files)
    node.start()
    waiting.until(lambda: is_complete(node, name), 30, "the dataset", detail=node.said)
    plane.apply(dataset(name, source={"kind": "dir", "path": str(other)}))
    waiting.until(
        lambda: "settings file" in findings(node).get("intent-collision", ""), 30, "the finding"
    )
    assert (node.view(name) / "a").read_text() == "data of a"
    plane.kubectl("delete", "cds", name)
    waiting.until(lambda: "intent-collision" not in findings(node), 30, "the finding to clear")
    assert (node.view(name) / "a").read_text() == "data of a"  # the file's own stays


def test_agent_goes_on_without_an_api_server(
    plane: ControlPlane, node: agent.Agent, files: Path
) -> None:
    """Also when it starts without one."""
    name = unique("coco")
    plane.apply(dataset(name, source={"kind": "dir", "path": str(files)}))
    node.start()
    waiting.until(lambda: is_complete(node, name), 30, "the dataset", detail=node.said)
    server = node.settings["kubernetes"]["server"]
    node.stop()
    node.settings["kubernetes"]["server"] = "https://127.0.0.1:1"
    node.start()
    waiting.until(lambda: is_complete(node, name), 30, "the dataset", detail=node.said)
    waiting.until(lambda: "cluster-unreachable" in findings(node), 30, "the finding")
    node.stop()
    plane.kubectl("delete", "cds", name)  # while nobody looks
    node.settings["kubernetes"] |= {"server": server, "drop_after": "1s"}
    node.start()
    waiting.until(lambda: name not in names(node), 40, "the dataset to end", detail=node.said)
    waiting.until(lambda: not node.view(name).exists(), 40, "the view to go", detail=node.said)


def test_secret_is_read_by_name_and_is_no_file_of_the_state(
    plane: ControlPlane, node: agent.Agent
) -> None:
    plane.secret("ceph", admin="QVFBQUFBPT0=")
    name = unique("secret")
    source = {"kind": "cephfs", "monitors": ["127.0.0.1:1"], "snapshot": "v1", "client": "fuse"}
    plane.apply(
        dataset(
            name, source=source, freshness="snapshot", secretRef={"name": "ceph", "key": "admin"}
        )
    )
    node.start()
    secrets = intent.Secrets(node.socket.parent / "secrets", NAMESPACE)
    file = secrets.file(kinds.SecretRef(name="ceph", key="admin"))
    waiting.until(file.exists, 30, "the key", detail=node.said)
    assert file.read_text() == "QVFBQUFBPT0="
    assert file.stat().st_mode & 0o777 == 0o600
    waiting.until(lambda: name in names(node), 30, "the dataset")
    kept = b"".join(each.read_bytes() for each in node.state.rglob("*") if each.is_file())
    assert b"QVFBQUFBPT0=" not in kept
    assert "QVFBQUFBPT0=" not in node.said()
    plane.kubectl("delete", "cds", name)
    waiting.until(lambda: not file.exists(), 40, "the key to go")
