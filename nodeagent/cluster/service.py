"""The agent's part in a cluster. Its trouble is never the trouble of a room."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable

import structlog
from prometheus_client.core import Metric

import kit.findings
from kit.metrics import counter, gauge
from kit.pause import Backoff
from nodeagent.cluster import follow, writing
from nodeagent.settings import ClusterSettings, Settings
from nodeagent.state import State

log = structlog.get_logger("cluster")

ORIGIN = "agent.cluster"


class Cluster:
    """Follows objects, writes this node's and, where it is elected, what all nodes say together."""

    def __init__(self, asked: ClusterSettings, settings: Settings) -> None:
        self._follower = follow.Follower(asked, settings)
        self._writer = writing.Writer(self._follower)

    def merged(self, settings: Settings) -> Settings:
        return self._follower.merged(settings)

    def metrics(self) -> Iterable[Metric]:
        follower, writer = self._follower, self._writer
        servers = {"objects": follower.server, "reports": writer.server}
        requests = {part: each.requests for part, each in servers.items()}
        yield counter("cluster_requests", "Requests to the API server.", requests, "part")
        received = {part: each.received for part, each in servers.items()}
        text = "Bytes from the API server."
        yield counter("cluster_received_bytes", text, received, "part")
        lists = {kind: each.lists for kind, each in follower.watches.items()}
        yield counter("cluster_lists", "How often all objects were listed.", lists, "kind")
        yield gauge("cluster_synced", "1: the agent knows all objects.", float(follower.synced))
        writes = {"node": writer.writes, "rollup": writer.rolls}
        text = "Writes of NodeStorage (node) and of objects' status (rollup)."
        yield counter("cluster_writes", text, writes, "what")

    async def follow(self, state: State, apply: Callable[[], Awaitable[None]]) -> None:
        """Never ends. ``apply`` is called when ``merged`` may give something else."""
        state.metrics.append(self.metrics)
        backoff = Backoff(5.0, 300.0)
        while True:
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._follower.follow(state, apply))
                    tasks.create_task(self._writer.follow(state))
            except* Exception as errors:
                # A bug here must not end an agent whose rooms work.
                log.exception("the cluster's part failed")
                found = kit.findings.Finding(
                    id="cluster-part-failed",
                    rule="cluster-part-failed",
                    severity=kit.findings.Severity.WARNING,
                    subject="Kubernetes API",
                    message=f"objects of the cluster are not followed: {errors.exceptions[0]!r}",
                    advice="it is tried again by itself; report it with the agent's log",
                )
                state.findings.report(ORIGIN, [found])
            await asyncio.sleep(backoff.next())
            state.findings.report(ORIGIN, [])
