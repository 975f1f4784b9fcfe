"""Labels of this Node: what is whole on it, so that pods can be scheduled to data.

A room awaits ``Labeller.lost`` before something stops being whole: the label is gone first. New
labels wait a little, because everybody who watches Nodes gets each write.
"""

import asyncio
import random
import re
import time
from collections.abc import Mapping

import structlog

import kit.findings
from kube import client, objects
from nodeagent.cluster import follow, kinds
from nodeagent.state import State

log = structlog.get_logger("cluster")

LOOK_SECONDS = 2.0
# How long a room waits for a label to go. Without an API server nobody schedules either.
LOST_SECONDS = 10.0
LONGEST_VALUE = 63
ORIGIN = "agent.labels"


def value(text: str) -> str:
    """``text`` as the API server takes it for a label's value."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", text)[:LONGEST_VALUE].strip("-_.")


def chosen(there: Mapping[str, str], whole: Mapping[str, str], most: int) -> dict[str, str]:
    """Of ``whole`` as many as the Node may have. Those that it has stay; then by name."""
    ordered = sorted(whole, key=lambda key: (key not in there, key))
    return {key: value(whole[key]) for key in ordered[:most]}


def changes(there: Mapping[str, str], wanted: Mapping[str, str]) -> dict[str, str | None]:
    """The labels to write; None: to take away. ``there`` holds only keys that are ours."""
    made: dict[str, str | None] = {key: None for key in there if key not in wanted}
    made |= {key: text for key, text in wanted.items() if there.get(key) != text}
    return made


class Labeller:
    """``server`` belongs to whoever made it."""

    def __init__(self, follower: follow.Follower, server: client.ApiServer, state: State) -> None:
        self._follower = follower
        self._server = server
        self._asked = follower.asked
        self._lock = asyncio.Lock()
        self._state = state
        # What this agent may have written since the watch spoke last: its answer may be lost.
        self._written: set[str] = set()
        self._due = 0.0  # when labels may be added again

    async def follow(self) -> None:
        """Never ends."""
        problem = "labels of the Node cannot be written"
        await client.repeat(self._step, LOOK_SECONDS, problem, self._failed)

    async def _step(self) -> None:
        # Again and again: a room may have a new component, and that new datasets.
        for running in self._state.running:
            if running.room.presence is not None:
                running.room.presence.listen(running.component, self.lost)
        await self._write(add=time.monotonic() >= self._due)

    def _failed(self, error: client.KubeError) -> None:
        if error.status in client.REFUSALS:  # else nobody has to do anything about it
            self._state.findings.report(ORIGIN, [_refused(self._follower.name, error)])

    async def lost(self) -> None:
        """Take the labels away of what is not whole any more. At most LOST_SECONDS."""
        try:
            async with asyncio.timeout(LOST_SECONDS):
                await self._write(add=False)
        except (TimeoutError, client.KubeError) as error:
            why = str(error) or f"no answer within {LOST_SECONDS:g}s"
            log.warning("labels of the Node may say too much for a while", why=why)

    async def _write(self, *, add: bool) -> None:
        """``add``: also labels that are not there yet."""
        async with self._lock:
            node = self._follower.node.objects.get(self._follower.name)
            whole = self._whole()
            if node is None or whole is None:
                return
            ours = kinds.label_prefixes()
            there = {k: v for k, v in node["labels"].items() if k.startswith(ours)}
            wanted = chosen(there, whole, self._asked.labels)
            made = changes(there, wanted)
            made |= {key: None for key in self._written if key not in wanted}
            if not add:
                made = {key: text for key, text in made.items() if text is None}
            if made:
                self._written |= {key for key, text in made.items() if text is not None}
                name = self._follower.name
                await objects.label(self._server, name, made)
                self._written -= {key for key, text in made.items() if text is None}
                self._due = time.monotonic() + self._asked.interval * random.uniform(1.0, 1.25)
            self._report(len(whole) - len(wanted))

    def _whole(self) -> dict[str, str] | None:
        """By the label's key; None while a room has not looked at what it has."""
        found: dict[str, str] = {}
        for running in self._state.running:
            presence = running.room.presence
            if presence is None:
                continue
            if not running.started:
                return None
            for name, version in presence.read(running.component).items():
                found[kinds.label_prefix(presence) + name] = version
        return found

    def _report(self, left: int) -> None:
        found = []
        if left > 0 and self._asked.labels:
            found.append(
                kit.findings.Finding(
                    id="label-limit",
                    rule="label-limit",
                    severity=kit.findings.Severity.INFO,
                    subject=f"Node {self._follower.name}",
                    message=f"{left} complete datasets have no label: no pod is scheduled to them",
                    advice="raise kubernetes.labels, or keep fewer datasets on a node",
                )
            )
        self._state.findings.report(ORIGIN, found)


def _refused(node: str, error: client.KubeError) -> kit.findings.Finding:
    return kit.findings.Finding(
        id="label-refused",
        rule="label-refused",
        severity=kit.findings.Severity.WARNING,
        subject=f"Node {node}",
        message=f"its labels do not say which datasets are complete: {error}",
        advice="the agent's account needs to patch nodes (docs/security.md); kubernetes.labels: 0 "
        "turns them off",
    )
