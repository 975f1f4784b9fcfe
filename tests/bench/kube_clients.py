"""``python -m tests.bench.kube_clients FILE``: the clients of many agents in one process.

Each is the agent's own part in a cluster (``nodeagent.cluster``): its watches, its NodeStorage,
Lease, labels, conditions and Events, with connections, a token and a state directory of its own.
In place of the cache it has one that says that datasets fill. ``FILE`` (JSON): who, at what pace.

For each line of its input it prints a line: JSON with what was done since it began.
"""

import asyncio
import collections
import contextlib
import dataclasses
import json
import random
import sys
import time
import urllib.parse
from collections.abc import Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import structlog

import cache.room
from cache import room
from kube import client, watching
from nodeagent.cluster import labels, service, trouble, writing
from nodeagent.settings import ClusterSettings, Settings
from nodeagent.state import RunningRoom, State
from tests.kube import scaled

KINDS = ("leases", "nodes", "events", "nodestorages", "cacheddatasets", "imagesets", "secrets")
BYTES = 10**12  # of each dataset
requests: collections.Counter[str] = collections.Counter()
sent: collections.Counter[str] = collections.Counter()


def hurry(pace: float, nodes: float) -> None:
    """Everything that is a matter of time is ``pace`` times as fast, and what grows rarer with the
    number of nodes is as rare as if there were ``nodes`` times as many."""
    scaled.shorten(pace)
    shortest, longest = watching.WATCH_SECONDS
    watching.WATCH_SECONDS = (shortest / pace, longest / pace)
    writing.BEAT_SECONDS /= pace
    writing.LOOK_EACH *= nodes / pace
    writing.ROLL_EACH *= nodes / pace
    trouble.LOOK_SECONDS /= pace
    trouble.BEAT_SECONDS /= pace
    labels.LOOK_SECONDS /= pace


def count() -> None:
    """Note each request by what it is."""
    real = client.ApiServer._sent

    def counted(
        self: client.ApiServer, method: str, path: str, body: dict[str, Any] | None = None,
        kind: str = "",
    ) -> AbstractAsyncContextManager[Any]:  # fmt: skip
        requests[what(method, path)] += 1
        sent["bytes"] += 0 if body is None else len(json.dumps(body))
        return real(self, method, path, body, kind)

    setattr(client.ApiServer, "_sent", counted)  # noqa: B010


def what(method: str, path: str) -> str:
    place, _, query = path.partition("?")
    asked = dict(urllib.parse.parse_qsl(query))
    verb = method
    if "watch" in asked:
        verb = "stream" if "sendInitialEvents" in asked else "watch"
    elif asked.get("limit") == "1":
        verb = "compare"
    elif "limit" in asked or "resourceVersion" in asked:
        verb = "list"
    kind = next((part for part in place.split("/") if part in KINDS), "other")
    return f"{verb} {kind}"


class Filling:
    """Says of each dataset that it fills, in ``seconds``."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._begun: dict[str, float] = {}

    def want(self, names: Iterable[str]) -> None:
        for name in names:
            self._begun.setdefault(name, time.monotonic())

    def _percent(self, name: str) -> int:
        done = (time.monotonic() - self._begun[name]) / self._seconds
        return 100 if done >= 1 else int(done * 20) * 5

    def statuses(self) -> list[room.DatasetStatus]:
        found = []
        for name in sorted(self._begun):
            percent = self._percent(name)
            found.append(
                room.DatasetStatus(
                    name=name, state="complete" if percent == 100 else "filling",
                    generation="5d3ff7a3d2b1", served_by="store" if percent == 100 else "overlay",
                    bytes=BYTES, done_bytes=BYTES * percent // 100, percent=percent,
                )
            )  # fmt: skip
        return found

    def whole(self) -> Mapping[str, str]:
        return {name: "5d3ff7a3d2b1" for name in self._begun if self._percent(name) == 100}


def _room() -> Any:
    room = cache.room.ROOM
    assert room.report is not None and room.presence is not None
    return dataclasses.replace(
        room,
        report=dataclasses.replace(room.report, read=Filling.statuses),
        presence=dataclasses.replace(
            room.presence, read=Filling.whole, listen=lambda component, lost: None
        ),
    )


class Client:
    """One agent's part in the cluster."""

    def __init__(self, asked: Mapping[str, Any], fill_seconds: float) -> None:
        folder = Path(asked["folder"])
        folder.mkdir(parents=True)
        places = {"store": str(folder / "store"), "views": str(folder / "views")}
        self._base = Settings.model_validate(
            {
                "state_dir": str(folder), "admin": {"socket": str(folder / "admin.sock")},
                "cache": places, "kubernetes": asked["kubernetes"], "node": asked["node"],
            }
        )  # fmt: skip
        self._filling = Filling(fill_seconds)
        component: Any = self._filling
        self._state = State(self._base, running=[RunningRoom(_room(), component, started=True)])
        self._cluster = service.Cluster(
            ClusterSettings.model_validate(asked["kubernetes"]), self._base
        )

    async def follow(self, within: float) -> None:
        await asyncio.sleep(random.uniform(0, within))
        await self._cluster.follow(self._state, self._apply)

    async def _apply(self) -> None:
        made: Any = self._cluster.merged(self._base)
        self._state.settings = made
        self._filling.want(each.name for each in made.cache.datasets)

    def figures(self) -> tuple[bool, int, list[int]]:
        """Whether it is current, bytes of answers, lists of each kind."""
        follower, writer = self._cluster._follower, self._cluster._writer
        watches: list[watching.Watch[Any]] = [*follower.watches.values(), follower.node]
        current = follower.synced and not any(each.trouble for each in watches)
        received = follower.server.received + writer.server.received
        return current, received, [each.lists for each in watches]


async def _serve(clients: list[Client], within: float) -> None:
    tasks = [asyncio.create_task(each.follow(within)) for each in clients]
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while await reader.readline():
        figures = [each.figures() for each in clients]
        print(
            json.dumps(
                {
                    "clients": len(clients),
                    "current": sum(current for current, _, _ in figures),
                    "requests": requests,
                    "received": sum(received for _, received, _ in figures),
                    "sent": sent["bytes"],
                    "lists": [lists for _, _, lists in figures],
                }
            ),
            flush=True,
        )  # fmt: skip
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def main() -> None:
    asked = json.loads(Path(sys.argv[1]).read_text())
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    hurry(asked["pace"], asked["nodes"])
    count()
    with contextlib.suppress(KeyboardInterrupt):
        made = [Client(each, asked["fill"]) for each in asked["clients"]]
        asyncio.run(_serve(made, asked["within"]))


if __name__ == "__main__":
    main()
