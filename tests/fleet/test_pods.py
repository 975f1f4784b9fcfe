"""Which pod gets a command, and how the command ended, by what the API server says."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

import kit.errors
from fleet import pods, shapes


@pytest.mark.parametrize(
    ("result", "code"),
    [
        (b'{"metadata": {}, "status": "Success"}', 0),
        (
            (
                b'{"status": "Failure", "reason": "NonZeroExitCode", "message": "exit code 13", '
                b'"details": {"causes": [{"reason": "ExitCode", "message": "13"}]}}'
            ),
            13,
        ),
    ],
)
def test_exit_codes(result: bytes, code: int) -> None:
    assert pods._code("pod a/b", result) == code


@pytest.mark.parametrize(
    ("result", "error", "words"),
    [
        (b"", kit.errors.UnreachableError, "pod a/b: the connection ended before the command did"),
        (b"boom", kit.errors.UnreachableError, "the connection ended before the command did"),
        (
            (
                b'{"status": "Failure", "reason": "InternalError", "message": "not\\nfound", '
                b'"details": {"causes": [{"message": "not found"}]}}'
            ),
            kit.errors.RefusedError,
            "pod a/b: the command could not be run: not found",
        ),
    ],
    ids=["cut off", "no JSON", "not started"],
)
def test_a_command_that_did_not_run(result: bytes, error: type[Exception], words: str) -> None:
    with pytest.raises(error) as raised:
        pods._code("pod a/b", result)
    assert str(raised.value).startswith(words) or words in str(raised.value)


class Cluster:
    """Pods as an API server would list them."""

    def __init__(self, *listed: shapes.PodObject) -> None:
        self._listed = listed

    def pods(self, namespace: str | None, **query: str) -> Iterator[list[shapes.PodObject]]:
        _, _, node = query.get("field_selector", "").partition("spec.nodeName=")
        yield [
            each
            for each in self._listed
            if namespace in (None, each.metadata.namespace) and node in ("", each.spec.node_name)
        ]

    def kinds(self, plural: str, shape: type[shapes.Named]) -> Iterator[list[shapes.Named]]:
        yield [shape(shapes.Meta(name="n1")), shape(shapes.Meta(name="n2"))]


DAEMON_SET = {"kind": "DaemonSet", "controller": True, "apiVersion": "apps/v1"}


def pod(name: str, namespace: str = "nodeagent", node: str = "n1", **owner: Any) -> Any:
    made = {
        "metadata": {
            "name": name, "namespace": namespace, "ownerReferences": [{**DAEMON_SET, **owner}]
        },
        "spec": {"nodeName": node, "containers": [{"name": "nodeagent"}]},
        "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]},
    }  # fmt: skip
    return msgspec.convert(made, shapes.PodObject)


AGENT, OTHER_NODES = pod("agent"), pod("agent-2", node="n2")


@pytest.mark.parametrize(
    ("listed", "namespace", "chosen", "words"),
    [
        ([AGENT, OTHER_NODES], None, "agent", ""),
        ([AGENT, pod("z", "eve", controller=False)], None, "agent", ""),
        ([AGENT, pod("z", kind="ReplicaSet")], None, "agent", ""),
        ([AGENT, pod("z", apiVersion="eve.example/v1")], None, "agent", ""),
        ([AGENT, pod("z", "eve")], None, "", "in several namespaces: eve, nodeagent"),
        ([AGENT, pod("z", "eve")], "nodeagent", "agent", ""),
        # No agent on the node that is meant, so that only the stranger's is there.
        ([OTHER_NODES, pod("z", "eve")], None, "", "in several namespaces: eve, nodeagent"),
        ([pod("z", "eve", controller=False)], None, "", "no pod of a DaemonSet with app.k"),
        ([OTHER_NODES], None, "", "no pod of a DaemonSet with app.k"),
    ],
    ids=[
        "ours alone", "a pod of nobody", "a pod of a ReplicaSet", "a kind of that name",
        "two on the node", "the namespace named", "one, and not ours", "none", "another node's",
    ],
)  # fmt: skip
def test_only_a_daemon_sets_pod_of_the_one_namespace_gets_a_command(
    listed: list[shapes.PodObject], namespace: str | None, chosen: str, words: str
) -> None:
    cluster: Any = Cluster(*listed)
    if chosen:
        assert pods.of_node(cluster, "n1", namespace).metadata.name == chosen
        return
    with pytest.raises(kit.errors.AgentError) as raised:
        pods.of_node(cluster, "n1", namespace)
    assert words in str(raised.value)
    if "several" in words:
        assert "-n NAMESPACE" in str(raised.value)
