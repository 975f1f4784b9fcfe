"""What the store's disk keeps free: the settings' share, and no less than the kubelet wants free.

Below its thresholds the kubelet evicts pods, whoever filled the disk. Which of them count depends
on the file system that the store lies on: ``nodefs`` where the kubelet's own directory is,
``imagefs`` where the images are. A directory that cannot be seen may be there, so it counts.
"""

import asyncio
from collections.abc import Callable, Iterable

import structlog

import kit.child
import kit.errors
import kit.tasks
from cache.fill import space
from cache.fill.protocol import Least
from cache.settings import CacheSettings
from cache.store import disk, probe
from cache.store.subset import Amount
from kit.findings import Finding, Severity
from kube import kubelet
from kube.settings import KubeletSettings

log = structlog.get_logger("reserve")

STORE_SECONDS = 30.0  # to look where the store lies: its disk may hang
LOOK_SECONDS = 60.0  # between two looks at the kubelet's file
# Of a threshold, on top of it: the kubelet looks every 10 s, and others write meanwhile.
MARGIN = 1 / 8
LEFT = 1 / 64  # of the disk: room that others leave, for which what lacked some is filled again
LASTS_SECONDS = 60.0


def least(found: kubelet.Thresholds, *, nodefs: bool, imagefs: bool) -> Least:
    """What is to stay free. Pure. ``nodefs``, ``imagefs``: the store lies on that file system."""
    free = [*(found.nodefs_free if nodefs else ()), *(found.free if imagefs else ())]
    inodes = [*(found.nodefs_inodes if nodefs else ()), *(found.inodes if imagefs else ())]
    share, size = _most(free)
    inodes_share, number = _most(inodes)
    return Least(share, size, inodes_share, number)


def _most(limits: Iterable[kubelet.Limit]) -> tuple[float, int]:
    """The largest share and amount, with the margin."""
    share = amount = 0.0
    for each in limits:
        share, amount = max(share, each.share), max(amount, each.amount)
    return min(1.0, share * (1 + MARGIN)), int(amount * (1 + MARGIN))


class Others:
    """What other files take of the store's disk. They come and go: room counts once it lasts."""

    def __init__(self) -> None:
        self._most = 0  # bytes that they took since they left room
        self._since: float | None = None

    def left_room(self, now: float, takes: int, size: int) -> bool:
        """Whether they have left a part of the disk of ``size`` bytes, since this was told last."""
        self._most = max(self._most, takes)
        if self._most - takes < size * LEFT:
            self._since = None
            return False
        self._since = now if self._since is None else self._since
        if now - self._since < LASTS_SECONDS:
            return False
        self._most, self._since = takes, None
        return True


class Reserve:
    """Follows the kubelet's thresholds. ``changed`` is called when they are others."""

    def __init__(self, settings: CacheSettings, changed: Callable[[], None]) -> None:
        self.settings = settings
        self.least = Least()
        self.others = Others()
        self.trouble = ""  # why the thresholds are not known
        self._changed = changed
        self._wake = asyncio.Event()

    def take(self, settings: CacheSettings) -> None:
        self.settings = settings
        self._wake.set()

    async def follow(self) -> None:
        """Runs until it is cancelled."""
        while True:
            self._wake.clear()
            await self.look()
            await kit.tasks.until(self._wake, LOOK_SECONDS)

    async def look(self) -> None:
        """Take what the kubelet says now. While it says nothing, what it said last counts."""
        section, store = self.settings.this_node.kubelet, str(self.settings.store)
        found = Least()
        if section.config is not None:
            try:
                limits = await asyncio.to_thread(kubelet.thresholds, section)
                found = await _least_of(limits, section, store)
            except (kit.errors.AgentError, OSError, RuntimeError) as error:
                self._note(str(error) or repr(error))
                return
            self._note("")
        if found != self.least:
            log.info("reserve follows the kubelet", least=str(found))
            self.least = found
            self._changed()

    def _note(self, trouble: str) -> None:
        if trouble != self.trouble:
            self.trouble = trouble
            if trouble:
                log.warning("thresholds of the kubelet are not known", why=trouble)
            self._changed()

    def short(self, seen: probe.Seen) -> Amount:
        """What the disk lacks, as it was last seen."""
        return space.short(seen, self.settings.reserve, self.least)

    def findings(self) -> Iterable[Finding]:
        if self.trouble and self.settings.this_node.kubelet.config:
            yield Finding(
                "reserve-unknown", "reserve-unknown", Severity.WARNING, "kubelet.config",
                f"the kubelet's thresholds are not known: {self.trouble}",
                "what it said last counts, or cache.reserve alone; correct the file",
            )  # fmt: skip


async def _least_of(limits: kubelet.Thresholds, section: KubeletSettings, store: str) -> Least:
    """AgentError, OSError or RuntimeError when it cannot be seen where the store lies."""
    folders = [str(section.root_dir), str(section.image_dir)]
    nodefs, imagefs = await kit.child.call(disk.shares_disk, store, folders, deadline=STORE_SECONDS)
    return least(limits, nodefs=nodefs, imagefs=imagefs)
