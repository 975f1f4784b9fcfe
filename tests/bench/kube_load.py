"""What agents cost a real API server: the clients of 200 of them, scaled to 7,500 nodes.

The clients are the agent's own code (``kube_clients``), in a few processes. All that is a matter of
time goes five times as fast, so that five minutes of a cluster take one: 200 clients ask as much as
1,000 nodes do. What depends on the number of nodes (looks at the Lease, roll-ups) is as rare as
with 7,500.

Seconds in the results are those of a cluster. Bytes are those of bodies, unpacked.
"""

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kube import client
from tests.bench import agent, harness
from tests.kube import agents, planes
from tests.testbed import waiting
from tests.testbed.control_plane import NAMESPACE, ControlPlane

NODES = 7500
PACE = 5.0
POOL = "load"
SERVERS = ("kube-apiserver", "etcd")


def run(place: harness.Workplace) -> harness.Results:
    with running(place) as (fleet, room):
        yield from fleet.begin()
        yield from fleet.changes(place)
        yield from fleet.restart(place)
        yield from memory(fleet.plane, room)


class Fleet:
    """Processes of clients, asked by a line each."""

    def __init__(self, plane: ControlPlane, processes: Sequence[subprocess.Popen[str]]) -> None:
        self.plane = plane
        self._processes = processes
        self.clients = 0

    def figures(self) -> dict[str, Any]:
        """The sums of all."""
        found: dict[str, Any] = {"requests": {}, "lists": []}
        for each in self._processes:
            assert each.stdin is not None and each.stdout is not None
            each.stdin.write("\n")
            each.stdin.flush()
        for each in self._processes:
            assert each.stdout is not None
            one = json.loads(each.stdout.readline())
            for name in ("clients", "current", "received", "sent"):
                found[name] = found.get(name, 0) + one[name]
            for what, number in one["requests"].items():
                found["requests"][what] = found["requests"].get(what, 0) + number
            found["lists"] += one["lists"]
        return found

    def until_current(self, seconds: float) -> None:
        waiting.until(
            lambda: self.figures()["current"] == self.clients, seconds, "all clients to be current",
            pause=0.5, detail=self.figures,
        )  # fmt: skip

    # The bounds are what docs/capacity.md promises of each.

    def begin(self) -> harness.Results:
        def act() -> None:
            self.until_current(120)
            waiting.until(self._all_written, 120, "all NodeStorages", pause=0.5)

        nothing: dict[str, Any] = {"requests": {}, "lists": [], "received": 0, "sent": 0}
        yield from self._phase("start", act, nothing, 2000.0)

    def changes(self, place: harness.Workplace) -> harness.Results:
        names = [f"set-{n}" for n in range(place.size(10, 2))]

        def steady() -> None:
            time.sleep(place.size(300.0, 5.0) / PACE)

        def rollout() -> None:
            self.plane.apply(*(_dataset(name) for name in names))
            self._until_ready(names, 1)

        def change() -> None:
            self.plane.apply(*(_dataset(name, priority=7) for name in names))
            self._until_ready(names, 2)

        yield from self._phase("rest", steady, None, 150.0)
        yield from self._phase("rollout", rollout, None, 1000.0)
        yield from self._phase("change", change, None, 1500.0)

    def restart(self, place: harness.Workplace) -> harness.Results:
        def act() -> None:
            self.plane.stop()
            time.sleep(place.size(50.0, 2.0) / PACE)
            self.plane.come_back()
            self.until_current(120)

        yield from self._phase("restart", act, None, 1500.0)

    def _phase(
        self, name: str, act: Any, before: dict[str, Any] | None, bound: float
    ) -> harness.Results:
        if before is None:
            before = self.figures()
        restarts = name == "restart"
        costs = [(0.0, 0.0)] * 2 if restarts else [self.plane.cost(each) for each in SERVERS]
        began = time.monotonic()
        act()
        took = time.monotonic() - began
        now = self.figures()
        after = [self.plane.cost(each) for each in SERVERS]
        kinds = {
            what: (number - before["requests"].get(what, 0)) / self.clients
            for what, number in now["requests"].items()
        }
        each = sum(kinds.values())
        lasted = took * PACE
        most = sorted(kinds.items(), key=lambda item: -item[1])
        parts = ", ".join(f"{what} {number:.2f}" for what, number in most if number >= 0.005)
        yield (
            f"{name}_requests",
            harness.at_most(
                [each * NODES / lasted], bound, "requests/s",
                f"in {lasted:,.0f} s; a node: {each:.2f}, of these {parts}",
            ),
        )  # fmt: skip
        received, sent = ((now[x] - before[x]) / self.clients for x in ("received", "sent"))
        yield (
            f"{name}_bytes",
            harness.at_most(
                [received * NODES / lasted / 1e6], 100.0, "MB/s",
                f"a node: {received / 1e3:,.1f} kB from the server, {sent / 1e3:,.1f} kB to it",
            ),
        )  # fmt: skip
        lists = [
            number - old
            for mine, earlier in zip(
                now["lists"], before["lists"] or [[0, 0, 0]] * len(now["lists"]), strict=True
            )
            for number, old in zip(mine, earlier, strict=True)
        ]
        allowed = 1 + int(lasted / 30)
        yield (
            f"{name}_lists",
            harness.at_most(
                [max(lists)], allowed + 0.5, "lists",
                f"mean {sum(lists) / len(lists):.2f}; one in 30 s is allowed",
            ),
        )  # fmt: skip
        (api, etcd), (api_was, etcd_was) = ([cost for cost, _ in each] for each in (after, costs))
        scale = NODES / (self.clients * PACE)
        yield (
            f"{name}_server",
            harness.at_most(
                [(api - api_was) / took * scale], 32.0, "cores",
                f"here {(api - api_was) / took:.2f} cores, etcd {(etcd - etcd_was) / took:.2f}; "
                f"memory {after[0][1]:,.0f} MiB, etcd {after[1][1]:,.0f} MiB",
            ),
        )  # fmt: skip

    def _all_written(self) -> bool:
        said = self.plane._ask("get", "nst", "-o", "json")
        found = json.loads(said)["items"] if said else []
        return sum("written" in (each.get("status") or {}) for each in found) >= self.clients

    def _until_ready(self, names: Sequence[str], generation: int) -> None:
        def there() -> bool:
            said = self.plane._ask("get", "cds", "-o", "json")  # nothing when it is too busy
            items = json.loads(said)["items"] if said else []
            found = {each["metadata"]["name"]: each for each in items}
            return all(
                name in found and _is_ready(found[name], generation, self.clients) for name in names
            )

        waiting.until(
            there, 120, "all datasets to be ready", pause=0.5,
            detail=lambda: self.plane.kubectl("get", "cds"),
        )  # fmt: skip


def _is_ready(thing: dict[str, Any], generation: int, nodes: int) -> bool:
    status = thing.get("status") or {}
    ready = [each["status"] for each in status.get("conditions", ()) if each["type"] == "Ready"]
    return (
        ready == ["True"]
        and thing["metadata"]["generation"] == status["observedGeneration"] == generation
        and status["nodes"]["ready"] == nodes
    )


def _dataset(name: str, **more: Any) -> dict[str, Any]:
    spec = {
        "freshness": "frozen", "nodeSelector": {"pool": POOL},
        "source": {"kind": "dir", "path": f"/mnt/{name}"},
    }  # fmt: skip
    return {
        "apiVersion": "nodeagent.io/v1alpha1", "kind": "CachedDataset",
        "metadata": {"name": name}, "spec": spec | more,
    }  # fmt: skip


@contextlib.contextmanager
def running(place: harness.Workplace) -> Iterator[tuple[Fleet, Path]]:
    with (
        place.room("kube") as room,
        planes.with_kinds(room / "plane") as plane,
        _fleet(plane, room, place) as fleet,
    ):
        yield fleet, room


@contextlib.contextmanager
def _fleet(plane: ControlPlane, room: Path, place: harness.Workplace) -> Iterator[Fleet]:
    count, processes = place.size(200, 3), place.size(4, 1)
    names = [f"load-{number:03}" for number in range(count)]
    plane.kubectl("create", "-f", "-", given=_objects(names), seconds=300)
    tokens = asyncio.run(_tokens(plane, room, names))
    clients = [
        {
            "folder": str(room / name),
            "node": name,
            "kubernetes": {
                "server": f"https://127.0.0.1:{plane.api_port}",
                "ca_file": str((plane.pki / "ca.crt").absolute()),
                "token_file": str(tokens[name]),
                "namespace": NAMESPACE,
                "interval": f"{max(1.0, 10 / PACE):g}s",
            },
        }
        for name in names
    ]
    with contextlib.ExitStack() as stack:
        started = []
        for number in range(processes):
            file = room / f"clients-{number}.json"
            asked = {
                "pace": PACE, "nodes": place.size(NODES, 100) / count,
                "fill": place.size(200.0, 5.0) / PACE, "within": place.size(100.0, 1.0) / PACE,
                "clients": clients[number::processes],
            }  # fmt: skip
            file.write_text(json.dumps(asked))
            log = stack.enter_context((room / f"clients-{number}.log").open("wb"))
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.bench.kube_clients", str(file)],
                cwd=harness.ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                text=True,
            )  # fmt: skip
            stack.enter_context(process)
            stack.callback(process.kill)
            started.append(process)
        made = Fleet(plane, started)
        made.clients = count
        yield made


def _objects(names: Sequence[str]) -> str:
    """Nodes that no kubelet keeps, and the pod of an agent on each."""
    items: list[dict[str, Any]] = []
    for name in names:
        labels = {"kubernetes.io/hostname": name, "pool": POOL}
        items.append(
            {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}}
        )
        spec = {
            "nodeName": name, "serviceAccountName": "nodeagent",
            "automountServiceAccountToken": False,
            "tolerations": [{"operator": "Exists"}],  # nobody keeps its node ready
            "containers": [{"name": "agent", "image": "nodeagent:test"}],
        }  # fmt: skip
        metadata = {"name": name, "namespace": NAMESPACE}
        items.append({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": items})


async def _tokens(plane: ControlPlane, room: Path, names: Sequence[str]) -> dict[str, Path]:
    """A file with the token of each agent, bound to its pod."""
    server = client.ApiServer(plane.admin)
    path = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/nodeagent/token"

    async def token(name: str) -> Path:
        bound = {"kind": "Pod", "apiVersion": "v1", "name": name}
        found = await server.request(
            "POST", path,
            {
                "apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest",
                "spec": {"expirationSeconds": 7200, "boundObjectRef": bound, "audiences": []},
            },
            about=f"token of {name}", deadline=waiting.limit(120),
        )  # fmt: skip
        file = room / f"token-{name}"
        file.write_text(found["status"]["token"])
        return file.absolute()

    try:
        return dict(zip(names, await asyncio.gather(*map(token, names)), strict=True))
    finally:
        await server.close()


def memory(plane: ControlPlane, room: Path) -> harness.Results:
    """Of a whole agent that follows the cluster, and of one that does not."""
    with agents.made(plane, room / "whole", "whole") as made:
        known = made.settings.pop("kubernetes")
        made.start()
        without = agent.memory(made)
        made.end()
        made.settings["kubernetes"] = known
        made.start()
        waiting.until(
            lambda: "nodeagent_cluster_synced 1.0" in made.get("/metrics"), 60, "it to be current"
        )
        waiting.until(
            lambda: plane._ask("get", "nst", "whole", "-o", "name"), 60, "its NodeStorage"
        )
        used = agent.memory(made)
    note = f"{without:.0f} MiB without it; all of the process tree, the room 'cache'"
    yield "agent_memory", harness.at_most([used], 130.0, "MiB with the client", note)


GROUPS = {"load": run}
