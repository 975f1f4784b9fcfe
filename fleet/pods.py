"""The agent of one node, reached through its pod: commands of it, and its support bundle."""

import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import websocket

import kit.errors
import kit.files
import kit.units
from fleet import server, shapes

SELECTOR = "app.kubernetes.io/name=nodeagent"  # as the chart labels them
OWNER = {"apiVersion": "apps/v1", "kind": "DaemonSet", "controller": True}
CONTAINER = "nodeagent"
PROGRAM = "nodeagent"
LARGEST_BUNDLE = 64 * 2**20
SILENCE_SECONDS = 600.0  # a bundle says nothing before its end, and waits for each part that hangs
RESULT_CHANNEL = 3  # of the protocol of exec: how the command ended
LOOK_SECONDS = 0.5
LONGEST_SAID = 2000


def of_node(cluster: server.FleetServer, node: str, namespace: str | None) -> shapes.PodObject:
    """The agent's pod that runs there. NotFoundError, RefusedError.

    Who may make pods in one namespace can make one that looks like an agent's. So without
    ``namespace`` the pods of all nodes are asked for, and are to be in one namespace."""
    query = {"field_selector": f"spec.nodeName={node}"} if namespace else {}
    pages = cluster.pods(namespace, label_selector=SELECTOR, **query)
    agents = [pod for page in pages for pod in page if _of_daemon_set(pod)]
    places = sorted({pod.metadata.namespace for pod in agents})
    if len(places) > 1:
        said = kit.errors.some(places, between=", ")
        raise kit.errors.RefusedError(
            f"the agent of node {node}",
            f"pods that look like agents' are in several namespaces: {said}",
            "name that of the agents with -n NAMESPACE",
        )
    found = [pod for pod in agents if pod.spec.node_name == node]
    if not found:
        server.check_node(cluster, node)
        where = f"namespace {namespace}" if namespace else "any namespace"
        raise kit.errors.NotFoundError(
            f"node {node}",
            f"no pod of a DaemonSet with {SELECTOR} runs there in {where}",
            f"see the DaemonSet: kubectl get daemonset -A -l {SELECTOR}",
        )
    found.sort(key=lambda pod: (_ready(pod), pod.metadata.creation_timestamp))
    chosen = found[-1]  # during an update the old and the new one may be there
    if chosen.status.phase != "Running":
        meta = chosen.metadata
        raise kit.errors.RefusedError(
            f"the agent of node {node}",
            f"its {chosen.title} is {chosen.status.phase or 'not started'}",
            f"kubectl -n {meta.namespace} describe pod {meta.name}",
        )
    return chosen


def _of_daemon_set(pod: shapes.PodObject) -> bool:
    owned = any(OWNER.items() <= each.items() for each in pod.metadata.owner_references)
    return owned and any(each.name == CONTAINER for each in pod.spec.containers)


def _ready(pod: shapes.PodObject) -> tuple[bool, bool]:
    ready = any(each.type == "Ready" and each.status == "True" for each in pod.status.conditions)
    return pod.status.phase == "Running", ready


Sink = Callable[[bytes], object]


def run(
    cluster: server.FleetServer,
    pod: shapes.PodObject,
    words: Iterable[str],
    sinks: tuple[Sink, Sink],
    silence: float | None = None,
) -> int:
    """Run ``nodeagent WORDS`` in the agent's container; its exit code. ``sinks`` get what it
    writes to standard output and to standard error. ``silence``: seconds without
    a byte after which it is given up."""
    stream = cluster.opened(pod, CONTAINER, [PROGRAM, *words])
    stream._all = _Nothing()
    name = pod.title
    last = time.monotonic()
    try:
        open_still = True
        while open_still:
            stream.update(timeout=LOOK_SECONDS)
            open_still = stream.is_open()  # what came before its end is read below
            for read, sink in zip((stream.read_stdout, stream.read_stderr), sinks, strict=True):
                if data := read(timeout=0):
                    sink(data)
                    last = time.monotonic()
            if silence and time.monotonic() > last + silence:
                raise kit.errors.UnreachableError(name, f"said nothing for {silence:.0f} s", "")
        return _code(name, stream.read_channel(RESULT_CHANNEL))
    except (websocket.WebSocketException, OSError) as error:
        raise _ended(name, str(error)) from error
    finally:
        stream.close()


def _code(name: str, result: bytes) -> int:
    """The exit code. RefusedError where the command could not even be started."""
    try:
        found = msgspec.json.decode(result, type=shapes.ToldStatus)
    except msgspec.DecodeError as error:
        raise _ended(name, "no result") from error
    if found.status == "Success":
        return 0
    causes = (found.details.causes if found.details else None) or ()
    codes = [each.message for each in causes if each.reason == "ExitCode"]
    if codes and codes[0].isdecimal():
        return int(codes[0])
    raise kit.errors.RefusedError(
        name, f"the command could not be run: {' '.join(found.message.split())[:LONGEST_SAID]}", ""
    )


def _ended(name: str, why: str) -> kit.errors.UnreachableError:
    return kit.errors.UnreachableError(
        name, f"the connection ended before the command did ({why})", "try again"
    )


class _Nothing:
    """In place of the client's copy of all that a program says, which would grow with it."""

    def write(self, data: bytes) -> None:
        pass


def to_here(data: bytes, error: bool = False) -> None:
    """The agent's commands escape control characters of others themselves."""
    target = sys.stderr.buffer if error else sys.stdout.buffer
    target.write(data)
    target.flush()


def bundle(cluster: server.FleetServer, pod: shapes.PodObject, target: Path) -> tuple[int, str]:
    """The node's support bundle, written to ``target``, which its owner alone may read. Gives its
    size, and what the agent says beside it. Nothing stays when it fails."""
    size, said = 0, bytearray()
    with kit.files.new(target, "-o") as file:

        def out(data: bytes) -> None:
            nonlocal size
            size += len(data)
            if size > LARGEST_BUNDLE:
                most = kit.units.format_size(LARGEST_BUNDLE)
                raise kit.errors.RefusedError(str(target), f"the bundle is above {most}", "")
            file.write(data)

        def err(data: bytes) -> None:
            said.extend(data[: LONGEST_SAID - len(said)])

        words = ("support-bundle", "--file", "-")
        code = run(cluster, pod, words, (out, err), SILENCE_SECONDS)
        text = said.decode("utf-8", "replace").strip()
        if code or not size:
            raise kit.errors.RefusedError(
                pod.title, f"its support bundle failed (exit code {code}): {text}", ""
            )
    return size, text
