"""Asks the configured clusters about their state at intervals, and the kernel about the way there.

New mappings are asked about soon. The wait before that is random, because a job that starts on a
thousand nodes maps its images everywhere at the same moment. So is every other wait: after a power
cut, and after a roll-out of a new agent, all nodes start together.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import kit.errors
import kit.tasks
from ceph import client, monitors, protocol
from linux import netlink
from volumes.audit.inventory.model import Inventory
from volumes.audit.types import NetworkPath
from volumes.settings import AuditSettings, ClusterSettings

_SOON_SECONDS = (5.0, 30.0)  # between a reason to ask and asking
_FIRST_SECONDS = 90.0  # less than audit-blind waits
_ANSWER_SHARE = 0.4  # of the deadline, for each command to a cluster
_LONGEST_ERROR = 500


Clusters = Callable[[], tuple[ClusterSettings, ...]]


@dataclass(frozen=True)
class Wide:
    """What was said of the whole cluster, and when (CLOCK_MONOTONIC). ``spread``: this node's own
    share of the interval until it asks again, so that nodes that asked together do not go on so."""

    view: protocol.ClusterView
    asked: float
    spread: float = field(default_factory=lambda: random.uniform(0.8, 1.2))

    def is_due(self, now: float, interval: float) -> bool:
        return now >= self.asked + interval * self.spread


class Poller:
    """The latest view of each cluster, or why there is none.

    Invariant: a cluster that does not answer has no view; its earlier answers no longer count.
    """

    def __init__(self, changed: Callable[[], None]) -> None:
        self.views: dict[str, protocol.ClusterView | str] = {}
        self.paths: tuple[NetworkPath, ...] = ()
        self.watched_by: dict[tuple[str, str, str, str], str] = {}  # see types.Scene
        self._changed = changed
        self._wide: dict[tuple[ClusterSettings, float], Wide] = {}
        self._clients: dict[tuple[ClusterSettings, float], client.ClusterClient] = {}
        self._images: frozenset[protocol.ImageName] = frozenset()
        self._wake = asyncio.Event()

    def want(self, inventory: Inventory) -> None:
        """Take over which images are mapped; new ones are asked about soon."""
        images = frozenset(
            protocol.ImageName(*device.image.key) for device in inventory.devices if device.image
        )
        if images - self._images:
            self._wake.set()
        self._images = images

    def ask_soon(self) -> None:
        """For troubles that only a second view distinguishes from passing ones."""
        self._wake.set()

    async def run(self, settings: Callable[[], AuditSettings], clusters: Clusters) -> None:
        """Until cancelled. Both arguments are called before each question."""
        try:
            await asyncio.sleep(first(settings().cluster_interval))
            while True:
                now = settings()
                self._wake.clear()  # what came until now is part of this question
                if clusters() or self._clients:
                    await self.ask(clusters(), now.cluster_timeout, now.cluster_wide_interval)
                if await kit.tasks.until(self._wake, pause(now.cluster_interval)):
                    await asyncio.sleep(soon(now.cluster_interval))
        finally:
            await self._keep((), 0.0)

    async def ask(
        self, clusters: tuple[ClusterSettings, ...], deadline: float, wide_interval: float = 0.0
    ) -> None:
        """Ask every cluster once, at most ``deadline`` seconds; what is the same for every node not
        more often than every ``wide_interval`` seconds."""
        await self._keep(clusters, deadline)
        await asyncio.gather(*(self._ask_one(each, deadline, wide_interval) for each in clusters))
        self.paths = tuple(
            path for each in clusters for path in _paths(each, self.views.get(each.name, ""))
        )
        self._changed()

    async def _keep(self, clusters: tuple[ClusterSettings, ...], deadline: float) -> None:
        """Forget clusters that are not configured, or not with these settings."""
        names = {each.name for each in clusters}
        self.views = {name: view for name, view in self.views.items() if name in names}
        for key in self._clients.keys() - {(each, deadline) for each in clusters}:
            self._wide.pop(key, None)
            await self._clients.pop(key).close()

    async def _ask_one(
        self, settings: ClusterSettings, deadline: float, wide_interval: float
    ) -> None:
        patience = max(1.0, deadline * _ANSWER_SHARE)
        key = settings, deadline
        if key not in self._clients:
            self._clients[key] = client.ClusterClient(settings, deadline, patience=patience)
        before = self._wide.get(key)
        wide = before is None or before.is_due(time.monotonic(), wide_interval)
        try:
            view = await self._clients[key].view(sorted(self._images), wide=wide)
        except kit.errors.AgentError as error:
            self.views[settings.name] = str(error)[:_LONGEST_ERROR]
            return
        if wide or before is None:
            self._wide[key] = Wide(view, time.monotonic())
        else:
            view = view.with_wide_of(before.view)
        self.views[settings.name] = view
        self._remember(view)

    def _remember(self, view: protocol.ClusterView) -> None:
        """The only watcher of each image. Bounded by what is mapped here."""
        now = {
            (view.name, *image.key): image.watchers[0].address
            for image in view.images
            if len(image.watchers) == 1
        }
        asked = {(view.name, *image.key) for image in view.images}
        kept = {k: a for k, a in self.watched_by.items() if k[0] != view.name or k in asked}
        self.watched_by = kept | now


def first(interval: float) -> float:
    """Seconds from the agent's start to the first question."""
    return random.uniform(0.0, min(interval, _FIRST_SECONDS))


def pause(interval: float) -> float:
    """Seconds from one question to the next."""
    return interval * random.uniform(0.9, 1.1)


def soon(interval: float) -> float:
    """Seconds between a reason to ask and asking: random, at most ``interval``."""
    least, most = (min(seconds, interval) for seconds in _SOON_SECONDS)
    return random.uniform(least, most)


def addresses(settings: ClusterSettings, view: protocol.ClusterView | str) -> list[str]:
    """Numeric addresses of the monitors, from the settings and from the cluster itself."""
    named = () if isinstance(view, str) else (*view.monitors_v2, *view.monitors_v1)
    return monitors.numeric_hosts((*settings.monitors, *named))


def _paths(settings: ClusterSettings, view: protocol.ClusterView | str) -> list[NetworkPath]:
    found = []
    for host in addresses(settings, view):
        with contextlib.suppress(OSError):  # no route: the rules about the cluster report it
            path = netlink.path_to(host)
            found.append(
                NetworkPath(settings.name, host, path.mtu, path.interface, path.interface_mtu)
            )
    return found
