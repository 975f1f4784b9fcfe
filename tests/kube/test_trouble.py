"""Trouble where people look: Events and conditions of the Node."""

from pathlib import Path
from typing import Any

import pytest

from kit.findings import Finding, Severity
from kube import client, objects
from nodeagent.cluster import trouble
from tests.kube import agents
from tests.testbed import waiting
from tests.testbed.control_plane import ControlPlane, unique


def finding(rule: str, severity: Severity = Severity.CRITICAL, since: float = 0.0) -> Finding:
    return Finding(f"{rule}/x", rule, severity, "rbd0", f"{rule} happened", "look", since=since)


def conditions(**found: Finding) -> dict[str, tuple[bool, str]]:
    by_origin = {origin.replace("_", "."): [each] for origin, each in found.items()}
    return {e.type: (e.status, e.reason) for e in trouble.conditions(by_origin)}


def test_only_critical_findings_of_the_room_make_a_condition_true() -> None:
    well = {"StorageHazard": (False, "NoHazard"), "CacheDegraded": (False, "CacheWell")}
    assert conditions() == well
    assert conditions(volumes_guard=finding("odd", Severity.WARNING)) == well
    assert conditions(preheat=finding("runtime")) == well
    hazard = conditions(volumes_audit=finding("leaked-mount"))
    assert hazard == {**well, "StorageHazard": (True, "LeakedMount")}
    degraded = conditions(cache=finding("store-unusable"))
    assert degraded == {**well, "CacheDegraded": (True, "StoreUnusable")}


def test_event_for_what_appears_and_for_critical_that_cleared() -> None:
    found = {
        "a": finding("a"),
        "b": finding("b", Severity.WARNING),
        "i": finding("i", Severity.INFO),
    }
    first = trouble.events({}, found)
    assert [(each.reason, each.warning) for each in first] == [("A", True), ("B", True)]
    assert trouble.events(found, found) == []
    assert [each.reason for each in trouble.events(found, {})] == ["ACleared"]


@pytest.mark.real
async def test_events_count_up_and_never_flood(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = unique("gpu-events")
    uid = plane.node(name)["metadata"]["uid"]
    server = client.ApiServer(plane.account(unique("agent"), name))

    def there() -> list[dict[str, Any]]:
        field = f"involvedObject.name={name},source=nodeagent"
        found: list[dict[str, Any]] = plane.get(
            "events", "-n", "default", "--field-selector", field
        )["items"]
        return found

    try:
        made = objects.Events(server, name)
        assert await made.emit("LeakedMount", "rbd0 leaked", warning=True, uid=uid)
        assert not await made.emit("LeakedMount", "rbd0 leaked", warning=True, uid=uid)
        monkeypatch.setattr(objects, "AGAIN_SECONDS", 0.0)
        assert await made.emit("LeakedMount", "rbd0 leaked", warning=True, uid=uid)
        (one,) = there()
        assert (one["count"], one["type"], one["message"]) == (2, "Warning", "rbd0 leaked")
        assert "rbd0 leaked" in plane.kubectl("describe", "node", name)
        plane.kubectl(
            "delete", "event", "-n", "default", one["metadata"]["name"]
        )  # as after an hour
        assert await made.emit("LeakedMount", "rbd0 leaked", warning=True, uid=uid)
        assert [each["count"] for each in there()] == [1]
        sent = [await made.emit("Flood", f"number {i}", warning=True, uid=uid) for i in range(40)]
        assert sum(sent) <= objects.BURST
        assert len(there()) <= objects.BURST
        made = objects.Events(server, name)
        assert await made.emit("Long", "x" * 5000, warning=True, uid=uid)
    finally:
        await server.close()
        plane.kubectl("delete", "node", name, "--wait=false")


@pytest.mark.real
@pytest.mark.timeout(150)
def test_store_that_cannot_be_used_shows_on_the_node_and_others_conditions_stay(
    plane: ControlPlane, area: Path
) -> None:
    name = unique("gpu-sick")
    with agents.made(plane, area / "node", name) as node:
        others = [
            {"type": "Ready", "status": "True", "reason": "KubeletReady"},
            {"type": "KernelDeadlock", "status": "False", "reason": "KernelHasNoDeadlock"},
        ]
        plane.kubectl(
            "patch", "node", name, "--subresource=status", "--type=strategic",
            "-p", str({"status": {"conditions": others}}).replace("'", '"'),
        )  # fmt: skip
        blocked = area / "file"
        blocked.write_text("no directory")
        node.put_store(blocked / "store")
        node.start()

        def shown() -> dict[str, tuple[str, str]]:
            found = plane.get("node", name)["status"]["conditions"]
            return {each["type"]: (each["status"], each.get("reason", "")) for each in found}

        waiting.until(
            lambda: shown().get("CacheDegraded") == ("True", "StoreUnusable"),
            60, "the condition", detail=lambda: f"{shown()} {node.said()}",
        )  # fmt: skip
        assert shown()["StorageHazard"] == ("False", "NoHazard")
        assert shown()["Ready"] == ("True", "KubeletReady")
        assert shown()["KernelDeadlock"] == ("False", "KernelHasNoDeadlock")
        waiting.until(
            lambda: "StoreUnusable" in plane.kubectl("describe", "node", name), 60, "the Event"
        )
        waiting.until(
            lambda: plane.get("nst", name)["status"]["findingCounts"]["critical"] == 1,
            60, "the finding in NodeStorage",
        )  # fmt: skip
        blocked.unlink()
        waiting.until(
            lambda: shown()["CacheDegraded"] == ("False", "CacheWell"), 90, "it to clear",
            detail=lambda: f"{shown()} {node.said()[-2000:]}",
        )  # fmt: skip
