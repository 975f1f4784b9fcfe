"""Asking the clusters now and then, each in a child process with a deadline."""

import asyncio
import random
from collections.abc import Callable

import structlog

import kit.child
import kit.errors
from linux import netlink
from volumes.audit.settings import AuditSettings, ClusterSettings, host_of
from volumes.inventory import ceph, cluster, model

log = structlog.get_logger("audit.clusters")

# New mappings are asked about soon, but a burst of them makes one question. The time between is
# drawn: a job that starts on a thousand nodes maps everywhere at one moment.
SOON_SECONDS = (5.0, 30.0)


class Clusters:
    """The latest word of each cluster: a view, or why there is none.

    Invariant: a cluster that does not answer has no view; what it said before is not called true.
    """

    def __init__(self, changed: Callable[[], None]) -> None:
        self.views: dict[str, cluster.ClusterView | str] = {}
        self.paths: tuple[cluster.NetworkPath, ...] = ()
        self.watched_by: dict[tuple[str, str, str, str], str] = {}
        self.asked = 0
        self.failed = 0
        self._changed = changed
        self._images: frozenset[tuple[str, str, str]] = frozenset()
        self._wake = asyncio.Event()

    def want(self, inventory: model.Inventory) -> None:
        """Take note of what is mapped; new images are asked about soon."""
        images = frozenset(
            (device.image.pool, device.image.namespace, device.image.name)
            for device in inventory.devices
            if device.image is not None
        )
        if images - self._images:
            self._wake.set()
        self._images = images

    def ask_soon(self) -> None:
        """For troubles that only a second look can tell from passing ones."""
        self._wake.set()

    async def ask(self, settings: AuditSettings) -> None:
        """All clusters once."""
        names = {each.name for each in settings.clusters}
        self.views = {name: view for name, view in self.views.items() if name in names}
        await asyncio.gather(
            *(self._ask_one(each, settings.cluster_timeout) for each in settings.clusters)
        )
        self.paths = tuple(
            path
            for each in settings.clusters
            for path in _paths(each, self.views.get(each.name, ""))
        )
        self._changed()

    async def _ask_one(self, settings: ClusterSettings, deadline: float) -> None:
        self.asked += 1
        try:
            answer = await kit.child.call(
                ceph.look,
                settings.name,
                list(settings.monitors),
                str(settings.conf or ""),
                settings.user,
                str(settings.secret_file or ""),
                [list(image) for image in sorted(self._images)],
                max(1.0, deadline * 0.4),
                deadline=deadline,
            )
            view = model.from_json(cluster.ClusterView, answer)
        except (kit.errors.AgentError, OSError, RuntimeError) as error:
            self.failed += 1
            view = str(error)[:500]
        before = self.views.get(settings.name)
        if isinstance(view, str) and not isinstance(before, str):
            log.warning("cluster does not answer", cluster=settings.name, cause=view)
        self.views[settings.name] = view
        if isinstance(view, cluster.ClusterView):
            self._remember(view)

    def _remember(self, view: cluster.ClusterView) -> None:
        """Bounded by what is mapped here."""
        now = {
            (view.name, *image.key): image.watchers[0].address
            for image in view.images
            if len(image.watchers) == 1
        }
        asked = {(view.name, *image.key) for image in view.images}
        kept = {k: a for k, a in self.watched_by.items() if k[0] != view.name or k in asked}
        self.watched_by = kept | now

    async def run(self, settings: Callable[[], AuditSettings]) -> None:
        """Until cancelled."""
        while True:
            now = settings()
            if now.clusters:
                await self.ask(now)
            wait = now.cluster_interval * random.uniform(0.9, 1.1)  # nodes must not ask together
            try:
                async with asyncio.timeout(wait):
                    await self._wake.wait()
                await asyncio.sleep(soon(now.cluster_interval))
            except TimeoutError:
                pass  # it is time
            self._wake.clear()


def addresses(settings: ClusterSettings, view: cluster.ClusterView | str) -> list[str]:
    """Numeric addresses of the monitors: from the settings, and what the cluster says itself.

    Names are left out: resolving one could hang.
    """
    told = () if isinstance(view, str) else (*view.monitors_v2, *view.monitors_v1)
    hosts = [host_of(monitor) for monitor in (*settings.monitors, *told)]
    return [host for host in dict.fromkeys(hosts) if host is not None]


def soon(interval: float) -> float:
    """Seconds from a reason to ask to the question; never longer than ``interval``."""
    least, most = (min(seconds, interval) for seconds in SOON_SECONDS)
    return random.uniform(least, most)


def _paths(settings: ClusterSettings, view: cluster.ClusterView | str) -> list[cluster.NetworkPath]:
    found = []
    for host in addresses(settings, view):
        try:
            path = netlink.path_to(host)
        except OSError:
            continue  # no route: the cluster's own rule says so
        found.append(
            cluster.NetworkPath(settings.name, host, path.mtu, path.interface, path.interface_mtu)
        )
    return found
