"""What agents write: their own node's object and nothing else, the roll-up, the election."""

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from kube import client, objects
from nodeagent.cluster import kinds
from tests.kube import agents
from tests.kube.test_crds import dataset
from tests.testbed import agent, waiting
from tests.testbed.control_plane import NAMESPACE, ControlPlane, unique

pytestmark = [pytest.mark.real, pytest.mark.timeout(150)]


@pytest.fixture
async def servers(plane: ControlPlane) -> AsyncIterator[dict[str, client.ApiServer]]:
    """Two agents' logins, by their nodes."""
    found = {}
    for node in ("gpu-a", "gpu-b"):
        plane.node(node)
        found[node] = client.ApiServer(plane.account(unique("agent"), node))
    try:
        yield found
    finally:
        for node, server in found.items():
            await server.close()
            plane.kubectl("delete", "node", node, "--wait=false")


async def ask(
    server: client.ApiServer, method: str, path: str, body: dict[str, Any] | None = None,
    kind: str = client.MERGE_PATCH,
) -> str:  # fmt: skip
    """Why it was refused; nothing when it was done."""
    try:
        kind = kind if method == "PATCH" else "application/json"
        await server.request(method, path, body, about=path, deadline=waiting.limit(60), kind=kind)
    except client.KubeError as error:
        return str(error)
    return ""


def storage(node: str) -> dict[str, Any]:
    return {
        "apiVersion": "nodeagent.io/v1alpha1", "kind": "NodeStorage", "metadata": {"name": node},
    }  # fmt: skip


def conditions(kind: str) -> dict[str, Any]:
    return {"status": {"conditions": [{"type": kind, "status": "True"}]}}


async def test_no_agent_writes_another_nodes_objects(
    plane: ControlPlane, servers: dict[str, client.ApiServer]
) -> None:
    mine, other = servers["gpu-a"], servers["gpu-b"]
    path = f"{kinds.API}/{kinds.NODE_STORAGES}"
    why = "writes no object of another node"
    await waiting.until_async(
        lambda: ask(mine, "POST", f"{path}?dryRun=All", storage("gpu-b")), 30, "the policy"
    )
    assert why in await ask(mine, "POST", path, storage("gpu-b"))
    for node, server in servers.items():
        assert await ask(server, "POST", path, storage(node)) == ""
    status = {"status": {"observed": "x"}}
    assert await ask(mine, "PATCH", f"{path}/gpu-a/status", status) == ""
    assert why in await ask(mine, "PATCH", f"{path}/gpu-b/status", status)
    assert why in await ask(other, "PATCH", f"{path}/gpu-a/status", status)
    assert "403" in await ask(mine, "DELETE", f"{path}/gpu-a")
    assert "403" in await ask(mine, "PATCH", f"{path}/gpu-a", {"metadata": {"labels": {"a": "b"}}})


async def test_agent_writes_two_conditions_of_its_node_and_nothing_else_of_it(
    plane: ControlPlane, servers: dict[str, client.ApiServer]
) -> None:
    mine = servers["gpu-a"]
    merge = "application/strategic-merge-patch+json"

    async def patch(node: str, body: dict[str, Any]) -> str:
        return await ask(mine, "PATCH", f"/api/v1/nodes/{node}/status", body, merge)

    await waiting.until_async(lambda: patch("gpu-b", conditions("StorageHazard")), 30, "the policy")
    for kind in ("StorageHazard", "CacheDegraded"):
        assert await patch("gpu-a", conditions(kind)) == ""
    assert "writes no object of another node" in await patch("gpu-b", conditions("StorageHazard"))
    assert "no others" in await patch("gpu-a", conditions("Ready"))
    assert "nothing of its node" in await patch("gpu-a", {"status": {"capacity": {"x/gpu": "8"}}})
    assert "403" in await ask(mine, "GET", f"/api/v1/namespaces/{NAMESPACE}/secrets")
    assert "403" in await ask(mine, "GET", f"/api/v1/namespaces/{NAMESPACE}/secrets/other")


async def written(plane: ControlPlane, name: str) -> bool:
    """Whether an administrator can write the status."""
    done = plane._kubectl(
        "patch", "cacheddataset", name, "--subresource=status", "--type=merge",
        "-p", '{"status": {"chosen": ["gpu-a"]}}',
    )  # fmt: skip
    return done.returncode == 0


async def test_only_whoever_holds_the_lease_writes_what_all_nodes_say(
    plane: ControlPlane, servers: dict[str, client.ApiServer]
) -> None:
    """A node that is broken into could else empty the others by a wrong status.chosen."""
    name = unique("coco")
    plane.apply(dataset(name, nodeSelector={"pool": "none"}))
    status = f"{kinds.API}/cacheddatasets/{name}/status"
    wrong = {"status": {"chosen": ["evil"]}}
    mine = objects.Lease(servers["gpu-a"], NAMESPACE, "nodeagent-rollup", "gpu-a", 6.0)
    await waiting.until_async(lambda: mine.hold({}), 60, "the Lease")  # an agent before had it

    async def may(node: str) -> bool:
        await mine.hold({})
        why = await ask(servers[node], "PATCH", status, wrong)
        assert why == "" or "only while its node holds the Lease" in why
        return why == ""

    async def refused() -> bool:
        return not await may("gpu-b")

    await waiting.until_async(lambda: may("gpu-a"), 30, "the holder to write")
    await waiting.until_async(refused, 30, "the policy")
    other = objects.Lease(servers["gpu-b"], NAMESPACE, "nodeagent-rollup", "gpu-a", 6.0)
    with pytest.raises(client.KubeError, match="in the name of its own node"):
        await other.hold({})  # in another's name
    another = {
        "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
        "metadata": {"name": unique("lease")}, "spec": {"holderIdentity": "gpu-b"},
    }  # fmt: skip
    leases = f"{objects.LEASES}/{NAMESPACE}/leases"
    why = await ask(servers["gpu-b"], "POST", leases, another)
    assert "the agent takes the Lease nodeagent-rollup" in why
    # Where it is gone, everybody may write: so no agent deletes it.
    assert "cannot delete" in await ask(servers["gpu-b"], "DELETE", f"{leases}/nodeagent-rollup")
    plane.kubectl("delete", "lease", "nodeagent-rollup", "-n", NAMESPACE)
    await waiting.until_async(lambda: written(plane, name), 30, "an administrator to write")
    plane.kubectl("delete", "cacheddataset", name)


async def test_agent_writes_events_about_its_own_node_alone(
    plane: ControlPlane, servers: dict[str, client.ApiServer]
) -> None:
    for node, why in (("gpu-a", ""), ("gpu-b", "writes Events about its own node")):
        event = {
            "apiVersion": "v1", "kind": "Event",
            "metadata": {"name": unique("event"), "namespace": "default"},
            "involvedObject": {"kind": "Node", "name": node}, "reason": "Test", "message": "m",
        }  # fmt: skip
        path = "/api/v1/namespaces/default/events"
        refusal = await ask(servers["gpu-a"], "POST", path, event)
        assert why in refusal and bool(why) == bool(refusal), refusal


async def test_one_of_two_holds_the_lease_and_the_other_follows(
    servers: dict[str, client.ApiServer],
) -> None:
    first, second = (
        objects.Lease(server, NAMESPACE, "nodeagent-rollup", node, 6.0)
        for node, server in servers.items()
    )

    async def hold(lease: objects.Lease) -> bool:
        return await lease.hold({"nodeagent.io/nodes": "2"})

    await waiting.until_async(lambda: hold(first), 60, "the Lease")  # an agent before had it
    assert first.held
    assert not await hold(second)
    assert second.note == {"nodeagent.io/nodes": "2"}
    assert await hold(first)
    await waiting.until_async(lambda: hold(second), 30, "the other to take it")
    assert second.held and not first.held
    assert not await hold(first)


@pytest.fixture
def pair(plane: ControlPlane, area: Path) -> Iterator[list[agent.Agent]]:
    with agents.several(plane, area, "two", ("gpu-1", "gpu-2")) as both:
        yield both


def test_kubectl_waits_for_a_dataset_and_shows_how_far_it_is(
    plane: ControlPlane, pair: list[agent.Agent], area: Path
) -> None:
    files = area / "files"
    files.mkdir()
    (files / "a").write_bytes(b"x" * 3_000_000)
    name = unique("coco")
    for each in pair:
        each.start()
    source = {"kind": "dir", "path": str(files)}
    plane.apply(dataset(name, source=source, nodeSelector={"pool": "two"}))
    plane.kubectl(
        "wait", "--for=condition=Ready", f"cacheddataset/{name}", "--timeout=240s", seconds=250
    )
    for each in pair:
        assert (each.view(name) / "a").stat().st_size == 3_000_000
    shown = plane.kubectl("get", "cacheddatasets", name).splitlines()
    assert shown[0].split() == ["NAME", "READY", "PERCENT", "SIZE", "STATUS", "AGE"]
    assert shown[1].split()[:6] == [name, "2/2", "100", "2.9", "MiB", "Complete"]

    # All of it is there a moment before its fill has ended.
    waiting.until(
        lambda: all(
            each["state"] == "complete"
            for node in ("gpu-1", "gpu-2")
            for each in plane.get("nst", node)["status"]["datasets"]
        ),
        60, "the fills to end",
    )  # fmt: skip
    found = {each["metadata"]["name"]: each for each in plane.get("nodestorages")["items"]}
    for node in ("gpu-1", "gpu-2"):
        status = found[node]["status"]
        (entry,) = [each for each in status["datasets"] if each["name"] == name]
        assert (entry["state"], entry["percent"], entry["bytes"]) == ("complete", 100, 3_000_000)
        # Nothing of what the agent sends is unknown to the schema.
        assert set(kinds.NodeStatus().model_dump(by_alias=True)) <= set(status)
        assert found[node]["metadata"]["ownerReferences"][0]["kind"] == "Node"
    columns = plane.kubectl("get", "nst", "gpu-1").splitlines()
    assert columns[0].split()[:4] == ["NAME", "GUARD", "DATASETS", "IMAGES"]
    assert columns[1].split()[:2] == ["gpu-1", "1/1"]

    before = {node: found[node]["metadata"]["resourceVersion"] for node in ("gpu-1", "gpu-2")}
    (files / "b").write_text("no part of a frozen dataset")
    plane.kubectl("patch", "cds", name, "--type=merge", "-p", '{"spec": {"priority": 1}}')
    waiting.until(
        lambda: plane.get("cds", name)["status"]["observedGeneration"] == 2, 60, "the new spec"
    )
    waiting.until(lambda: plane.get("cds", name)["status"]["ready"] == "2/2", 60, "all nodes again")
    for node, version in before.items():
        assert plane.get("nst", node)["metadata"]["resourceVersion"] != version

    plane.kubectl("delete", "cds", name)
    waiting.until(
        lambda: not [
            each for each in plane.get("nst", "gpu-1")["status"]["objects"] if each["name"] == name
        ],
        60, "the object to go", detail=lambda: json.dumps(plane.get("nst", "gpu-1")),
    )  # fmt: skip


def test_object_of_a_node_goes_with_the_node(plane: ControlPlane, area: Path) -> None:
    with agents.made(plane, area / "gone", "gpu-gone") as node:
        node.start()
        waiting.until(
            lambda: "gpu-gone" in plane.kubectl("get", "nst", "-o", "name"), 60, "its object"
        )
        node.stop()
        plane.kubectl("delete", "node", "gpu-gone")
        waiting.until(
            lambda: "gpu-gone" not in plane.kubectl("get", "nst", "-o", "name"),
            60, "its object to go",
        )  # fmt: skip
