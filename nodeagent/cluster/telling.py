"""Writes Events and conditions of this node's Node, as findings come and go."""

import asyncio
import random
import time
from typing import Any

import structlog

import kit.findings
import kit.pause
from kube import client, events, nodes
from nodeagent.cluster import follow, trouble
from nodeagent.state import State

log = structlog.get_logger("cluster")

LOOK_SECONDS = 5.0
BEAT_SECONDS = 3600.0  # an unchanged condition is written again, in case somebody took it away
ANSWER_SECONDS = 10.0
MOST_PENDING = 50


class Teller:
    """``server`` belongs to whoever made it."""

    def __init__(self, follower: follow.Follower, server: client.ApiServer) -> None:
        self.events = events.Events(server, follower.name)
        self._follower = follower
        self._server = server
        self._told: dict[str, kit.findings.Finding] = {}
        self._pending: list[trouble.Event] = []
        self._epoch = 0
        self._conditions: dict[str, tuple[trouble.Condition, float]] = {}

    async def follow(self, state: State) -> None:
        """Never ends."""
        pauses = client.Pauses(LOOK_SECONDS)
        while True:
            pause = LOOK_SECONDS * random.uniform(1.0, 1.25)
            try:
                node = self._follower.node.objects.get(self._follower.name)
                if node is not None:
                    await self._tell(state, node)
                pauses.reset()
            except client.KubeError as error:
                if not pauses.attempts:
                    log.warning("trouble cannot be told to the cluster", why=str(error))
                pause = pauses.after(error)
            await asyncio.sleep(pause)

    async def _tell(self, state: State, node: dict[str, Any]) -> None:
        if self._epoch != self._follower.epoch:
            self._conditions.clear()
            self._epoch = self._follower.epoch
        for each in trouble.conditions(state.findings.by_origin()):
            known, due = self._conditions.get(each.type, (None, 0.0))
            if known == each and time.monotonic() < due:
                continue
            await self._write(each, node)
            due = time.monotonic() + kit.pause.jittered(BEAT_SECONDS)
            self._conditions[each.type] = each, due
        now = {each.id: each for each in state.findings.current()}
        self._pending += trouble.events(self._told, now)
        self._told = now
        del self._pending[:-MOST_PENDING]
        while self._pending:
            each_event = self._pending[0]
            await self.events.emit(
                each_event.reason, each_event.message, warning=each_event.warning, uid=node["uid"]
            )
            del self._pending[0]

    async def _write(self, each: trouble.Condition, node: dict[str, Any]) -> None:
        name = self._follower.name
        found = await self._server.request(
            "GET", client.path_to(nodes.NODES, name), about=f"Node {name}",
            deadline=ANSWER_SECONDS, largest=client.LARGEST_ANSWER * 4,
        )  # fmt: skip
        there = (found.get("status") or {}).get("conditions") or []
        before = next((one for one in there if one.get("type") == each.type), None)
        await nodes.set_condition(
            self._server, name, before, type=each.type, status=each.status, reason=each.reason,
            message=each.message, deadline=ANSWER_SECONDS,
        )  # fmt: skip
