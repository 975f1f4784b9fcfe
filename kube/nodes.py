"""What the agent writes to its Node: a taint while a volume is repaired, conditions, labels."""

import datetime
from collections.abc import Mapping
from typing import Any

from kube import client

STRATEGIC_MERGE_PATCH = "application/strategic-merge-patch+json"
NODES = "/api/v1/nodes"
TAINT = {"key": "nodeagent.io/volume-repair", "effect": "NoSchedule"}


async def taint(server: client.ApiServer, node: str, *, wanted: bool, deadline: float) -> None:
    """Put it on the node, or take it away; others stay. KubeError, also (409) when somebody wrote
    to the node since it was read."""
    about, path = f"Node {node}", client.path_to(NODES, node)
    found = await server.request("GET", path, about=about, deadline=deadline)
    try:
        version = found["metadata"]["resourceVersion"]
        taints: list[dict[str, Any]] = found["spec"].get("taints") or []
        others = [each for each in taints if each["key"] != TAINT["key"]]
    except (LookupError, TypeError, AttributeError):
        raise client.KubeError(about, "the answer is not understood") from None
    if (len(others) < len(taints)) is wanted:
        return
    body = {
        "metadata": {"resourceVersion": version},
        "spec": {"taints": [*others, TAINT] if wanted else others},
    }
    await server.request(
        "PATCH", path, body, about=about, deadline=deadline, kind=client.MERGE_PATCH
    )


async def label(
    server: client.ApiServer, node: str, labels: Mapping[str, str | None], *, deadline: float
) -> None:
    """Write these labels, None: take it away; all others stay. KubeError."""
    await server.request(
        "PATCH", client.path_to(NODES, node), {"metadata": {"labels": dict(labels)}},
        about=f"Node {node}", deadline=deadline, kind=client.MERGE_PATCH,
        largest=client.LARGEST_ANSWER * 4,
    )  # fmt: skip


async def set_condition(
    server: client.ApiServer,
    node: str,
    before: dict[str, Any] | None,
    *,
    type: str,
    status: bool,
    reason: str,
    message: str,
    deadline: float,
) -> None:
    """Write one condition; the others stay. ``before``: as it was. KubeError."""
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    word = str(status)
    changed = before is None or before.get("status") != word
    body = {
        "type": type, "status": word, "reason": reason, "message": message,
        "lastHeartbeatTime": now,
        "lastTransitionTime": now if changed or before is None else before["lastTransitionTime"],
    }  # fmt: skip
    await server.request(
        "PATCH", client.path_to(NODES, node, "status"), {"status": {"conditions": [body]}},
        about=f"Node {node}", deadline=deadline, kind=STRATEGIC_MERGE_PATCH,
        largest=client.LARGEST_ANSWER * 4,
    )  # fmt: skip
