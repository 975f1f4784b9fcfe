"""Writes this node's NodeStorage, and on one node of all the roll-up of every object.

What it costs the API server: a node writes only what changed, at most once in ``interval`` and else
every ``BEAT_SECONDS``. One agent, which holds a Lease, reads all NodeStorages by one watch and
writes the roll-ups; each such write goes to all agents' watches, so with more nodes it comes less
often.
"""

import asyncio
import contextlib
import random
import time
from typing import Any

import structlog

import kit.pause
import kit.units
from kube import client, objects, watching
from nodeagent.cluster import follow, intent, kinds, labels, rollup, storage, trouble
from nodeagent.state import State

log = structlog.get_logger("cluster")

BEAT_SECONDS = 600.0
ANSWER_SECONDS = 15.0
LEASE = "nodeagent-rollup"
LEASE_SECONDS = 30.0
NODES = "nodeagent.io/nodes"  # the leader's note: how many nodes there are
# Seconds for each node between two looks at the Lease by those that do not hold it (7,500 nodes: 25
# looks a second), and between two roll-ups (75 s).
LOOK_EACH = 0.04
MOST_NODES = 100_000  # that the note is believed: every agent may write it
ROLL_EACH = 0.01
MOST_AT_ONCE = 50  # roll-ups written in one round
ORIGIN = "agent.objects"


class Writer:
    """``writes``: of this node's object. ``rolls``: of roll-ups."""

    def __init__(self, follower: follow.Follower) -> None:
        self.writes = 0
        self.rolls = 0
        self._follower = follower
        self.server = client.ApiServer(follower.asked)
        self._interval = follower.asked.interval
        self._written: dict[str, Any] = {}
        self._epoch = 0
        self._beat = 0.0
        self._lease = objects.Lease(
            self.server, follower.namespace, LEASE, follower.name, LEASE_SECONDS
        )
        # What was written last, and the version of the object that it made.
        self._rolled: dict[intent.Key, tuple[str, dict[str, Any]]] = {}
        self._rolled_epoch = 0
        self._nodes = follow.node_storages(self.server)

    async def follow(self, state: State) -> None:
        """Never ends."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._report(state), name="NodeStorage")
                tasks.create_task(self._lead(), name="roll-up")
                labeller = labels.Labeller(self._follower, self.server, state)
                tasks.create_task(labeller.follow(), name="labels")
                if self._follower.asked.conditions:
                    teller = trouble.Teller(self._follower, self.server)
                    tasks.create_task(teller.follow(state), name="trouble")
        finally:
            await self.server.close()

    # --- this node's object

    async def _report(self, state: State) -> None:
        await client.repeat(
            lambda: self._write(state), self._interval, "NodeStorage cannot be written"
        )

    async def _write(self, state: State) -> None:
        follower = self._follower
        if not follower.synced:
            return
        known = storage.Objects(
            follower.verdicts,
            follower.leaving,
            follower.candidates,
            follower.requests.of,
            follower.observed,
        )
        state.findings.report(ORIGIN, storage.left_out(known.wanted))
        now = storage.status(state, known)
        epoch = follower.epoch
        if now == self._written and epoch == self._epoch and time.monotonic() < self._beat:
            return
        body = {"status": {**now, "written": kit.units.rfc3339(time.time())}}
        path = client.path_to(kinds.API, kinds.NODE_STORAGES, follower.name, "status")
        try:
            await self._patch(path, body, f"NodeStorage {follower.name}")
        except client.KubeError as error:
            if error.status != 404:
                raise
            await self._create()
            await self._patch(path, body, f"NodeStorage {follower.name}")
        self.writes += 1
        self._written, self._epoch = now, epoch
        self._beat = time.monotonic() + kit.pause.jittered(BEAT_SECONDS)

    async def _create(self) -> None:
        """It goes when the Node goes."""
        name = self._follower.name
        node = self._follower.node.objects.get(name)
        if node is None:
            raise client.KubeError(f"Node {name}", "there is no such node; see the setting node")
        owner = {"apiVersion": "v1", "kind": "Node", "name": name, "uid": node["uid"]}
        body = {
            "apiVersion": f"{kinds.GROUP}/{kinds.VERSION}",
            "kind": kinds.NODE_STORAGE,
            "metadata": {"name": name, "ownerReferences": [owner]},
        }
        await self.server.request(
            "POST", client.path_to(kinds.API, kinds.NODE_STORAGES), body,
            about=f"NodeStorage {name}", deadline=ANSWER_SECONDS,
        )  # fmt: skip

    async def _patch(self, path: str, body: dict[str, Any], about: str) -> dict[str, Any]:
        return await self.server.request(
            "PATCH", path, body, about=about, deadline=ANSWER_SECONDS, kind=client.MERGE_PATCH,
            largest=watching.LARGEST_LIST,
        )  # fmt: skip

    # --- the roll-up, on one node

    async def _lead(self) -> None:
        while True:
            try:
                if await self._lease.hold(self._lease.note):
                    log.info("this agent rolls up for all")
                    await self._roll()
                    log.info("another agent rolls up")
            except client.KubeError as error:
                log.info("the Lease of the roll-up cannot be asked for", why=str(error))
            nodes = kit.units.parse_count(str(self._lease.note.get(NODES, "")), MOST_NODES) or 0
            pause = max(self._interval, LOOK_EACH * nodes)
            await asyncio.sleep(pause * random.uniform(0.75, 1.25))

    async def _roll(self) -> None:
        """Until the Lease is lost."""
        self._rolled.clear()
        watch = self._nodes
        following = asyncio.create_task(watch.follow(), name="NodeStorages")
        due, began = 0.0, time.monotonic()
        try:
            while self._lease.held:
                with contextlib.suppress(client.KubeError):
                    await self._lease.hold({NODES: str(len(watch.objects))})
                if watch.synced and self._follower.synced and time.monotonic() >= due:
                    # After an hour without an API server all nodes are silent for a moment.
                    patient = time.monotonic() < began + rollup.SETTLE_SECONDS
                    await self._write_rolls(watch, patient)
                    pause = max(self._interval, ROLL_EACH * len(watch.objects))
                    due = time.monotonic() + pause
                await asyncio.sleep(min(self._interval, LEASE_SECONDS / 6))
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            watch.forget()

    async def _write_rolls(self, watch: watching.Watch[rollup.View], patient: bool) -> None:
        if self._rolled_epoch != self._follower.epoch:
            self._rolled.clear()
            self._rolled_epoch = self._follower.epoch
        left = MOST_AT_ONCE
        observed, now = self._follower.observed, time.time()
        for kind, watched in self._follower.watches.items():
            plural = next(each.plural for _, each in kinds.intents() if each.kind == kind)
            for asked in list(watched.objects.values()):
                await asyncio.sleep(0)  # with many nodes each takes a while, and others want a turn
                path = client.path_to(kinds.API, plural, asked.name)
                about = f"{kind} {asked.name}"
                try:
                    version, before = self._rolled.get(asked.key, ("", {}))
                    if version != asked.version:  # others wrote, or the watch is behind
                        found = await self.server.request(
                            "GET", path, about=about, deadline=ANSWER_SECONDS
                        )
                        version, before = _version(found), dict(found.get("status") or {})
                    made = rollup.of_object(
                        asked, before, watch.objects.values(), observed, now, patient=patient
                    )
                    if made != before:
                        if not left or not self._lease.held:
                            return
                        left -= 1
                        body = {"status": rollup.patch(before, made)}
                        version = _version(await self._patch(f"{path}/status", body, about))
                        self.rolls += 1
                    self._rolled[asked.key] = version, made
                except client.KubeError as error:
                    log.info("roll-up cannot be written", object=about, why=str(error))
                    if error.status not in (404, 409):
                        return


def _version(found: dict[str, Any]) -> str:
    return str((found.get("metadata") or {}).get("resourceVersion") or "")
