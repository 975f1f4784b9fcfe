"""Asks the configured clusters at intervals, each in a child process with a deadline.

New mappings are asked about soon. The wait before that is random, because a job that starts on a
thousand nodes maps its images everywhere at the same moment.
"""

import asyncio
import ipaddress
import random
from collections.abc import Callable

import structlog

import kit.child
import kit.errors
from linux import netlink
from volumes.audit.inventory import ceph, cluster, model
from volumes.audit.settings import AuditSettings, ClusterSettings
from volumes.audit.types import NetworkPath

log = structlog.get_logger("audit.clusters")

_SOON_SECONDS = (5.0, 30.0)  # between a reason to ask and asking
_ANSWER_SHARE = 0.4  # of the deadline, for each command to a cluster


class Poller:
    """The latest view of each cluster, or why there is none.

    Invariant: a cluster that does not answer has no view; its earlier answers no longer count.
    """

    def __init__(self, changed: Callable[[], None]) -> None:
        self.views: dict[str, cluster.ClusterView | str] = {}
        self.paths: tuple[NetworkPath, ...] = ()
        self.watched_by: dict[tuple[str, str, str, str], str] = {}  # see types.Scene
        self._changed = changed
        self._images: frozenset[tuple[str, str, str]] = frozenset()
        self._wake = asyncio.Event()

    def want(self, inventory: model.Inventory) -> None:
        """Take over which images are mapped; new ones are asked about soon."""
        images = frozenset(
            (device.image.pool, device.image.namespace, device.image.name)
            for device in inventory.devices
            if device.image is not None
        )
        if images - self._images:
            self._wake.set()
        self._images = images

    def ask_soon(self) -> None:
        """For troubles that only a second view distinguishes from passing ones."""
        self._wake.set()

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
                pass  # the interval has passed
            self._wake.clear()

    async def ask(self, settings: AuditSettings) -> None:
        """Ask every cluster once."""
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
        view: cluster.ClusterView | str
        try:
            answer = await kit.child.call(
                ceph.look,
                settings.name,
                list(settings.monitors),
                str(settings.conf or ""),
                settings.user,
                str(settings.secret_file or ""),
                [list(image) for image in sorted(self._images)],
                max(1.0, deadline * _ANSWER_SHARE),
                deadline=deadline,
            )
            view = ceph.view(answer)
        except (kit.errors.AgentError, OSError, RuntimeError) as error:
            view = str(error)[:500]
        before = self.views.get(settings.name)
        if isinstance(view, str) and not isinstance(before, str):
            log.warning("cluster does not answer", cluster=settings.name, cause=view)
        self.views[settings.name] = view
        if isinstance(view, cluster.ClusterView):
            self._remember(view)

    def _remember(self, view: cluster.ClusterView) -> None:
        """The only watcher of each image. Bounded by what is mapped here."""
        now = {
            (view.name, *image.key): image.watchers[0].address
            for image in view.images
            if len(image.watchers) == 1
        }
        asked = {(view.name, *image.key) for image in view.images}
        kept = {k: a for k, a in self.watched_by.items() if k[0] != view.name or k in asked}
        self.watched_by = kept | now


def soon(interval: float) -> float:
    """Seconds between a reason to ask and asking: random, at most ``interval``."""
    least, most = (min(seconds, interval) for seconds in _SOON_SECONDS)
    return random.uniform(least, most)


def addresses(settings: ClusterSettings, view: cluster.ClusterView | str) -> list[str]:
    """Numeric addresses of the monitors, from the settings and from the cluster itself.

    Names are left out: resolving one could hang.
    """
    named = () if isinstance(view, str) else (*view.monitors_v2, *view.monitors_v1)
    hosts = [_host(monitor) for monitor in (*settings.monitors, *named)]
    return [host for host in dict.fromkeys(hosts) if host is not None]


def _host(monitor: str) -> str | None:
    """The address in ``10.0.0.1:6789`` or ``[v2:10.0.0.1:3300/0,v1:...]``; None for a name."""
    first = monitor.strip("[]").split(",")[0].removeprefix("v2:").removeprefix("v1:")
    host = first.split("/")[0].rpartition(":")[0].strip("[]")
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return None


def _paths(settings: ClusterSettings, view: cluster.ClusterView | str) -> list[NetworkPath]:
    found = []
    for host in addresses(settings, view):
        try:
            path = netlink.path_to(host)
        except OSError:
            continue  # no route: the rules about the cluster report it
        found.append(NetworkPath(settings.name, host, path.mtu, path.interface, path.interface_mtu))
    return found
