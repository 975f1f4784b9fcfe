"""An agent process that has the login of a pod on a node of the API server of the tests."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.testbed import agent
from tests.testbed.control_plane import NAMESPACE, ControlPlane, unique


@contextlib.contextmanager
def made(
    plane: ControlPlane, folder: Path, node: str, labels: dict[str, str] | None = None, **more: Any
) -> Iterator[agent.Agent]:
    """Not started. Its node, and the object of its node, go with it, and all datasets."""
    plane.node(node, **(labels or {}))
    login = plane.account(unique("agent"), node)
    found = agent.Agent(folder)
    found.settings["node"] = node
    found.settings["kubernetes"] = {
        "server": login.server,
        "ca_file": str(login.ca_file),
        "token_file": str(login.token_file),
        "namespace": NAMESPACE,
        "interval": "1s",
        **more,
    }
    try:
        yield found
    finally:
        found.end()
        plane.kubectl("delete", "cacheddatasets", "--all", "--wait=false")
        plane.kubectl("delete", "node", node, "--ignore-not-found", "--wait=false")
        plane.kubectl("delete", "nodestorage", node, "--ignore-not-found", "--wait=false")


@contextlib.contextmanager
def several(
    plane: ControlPlane, folder: Path, pool: str, nodes: Sequence[str]
) -> Iterator[list[agent.Agent]]:
    """One on each of ``nodes``, which have the label ``pool``. None is started."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(made(plane, folder / node, node, {"pool": pool})) for node in nodes
        ]
