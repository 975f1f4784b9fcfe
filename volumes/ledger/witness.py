"""The PersistentVolume as a second witness: what Kubernetes knows of a volume's content.

The ledger of one node knows nothing of what another node saw, and not every cluster gives the agent
credentials for the images' metadata. A volume's PersistentVolume is seen by every node. So the
first content that is seen on a volume is marked there, and a volume that is marked gets no
automatic lease, however blank it reads.

``Witness`` asks and marks. What its answer means for a lease is decided in ``statement``.
An API server that does not answer is UNKNOWN, with the time since this volume was first asked about
in vain. Requests are counted against a limit for each minute, of which marks and
questions about forgotten volumes may use half.
"""

import asyncio
import collections
import datetime
import json
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import cachetools
import structlog

import kit.errors
import kit.pause
import kit.tasks
from kube import client, objects
from kube.client import KubeError
from kube.settings import ThisNode
from linux import blockdev
from volumes.ledger import statement
from volumes.ledger.statement import NO_CLUSTER, Statement
from volumes.ledger.store import Entry, Knowledge
from volumes.settings import WitnessSettings

log = structlog.get_logger("volumes")

FRESH_SECONDS = 5.0  # for which an answer about a lease is used again: mkfs is tried in bursts
MARK_AGAIN_SECONDS = 60.0  # least time between two attempts to mark; doubled up to the next
MARK_LATEST_SECONDS = 1800.0
SPREAD_SECONDS = 600.0  # over which content that was known before is compared with its mark
TROUBLE_SECONDS = 3600.0  # for which a question without an answer is shown
MOST_VOLUMES = 4096  # of which something is remembered


@dataclass(frozen=True)
class VolumeClaim:
    """What kubelet's records say about a device. ``name``: the PersistentVolume's, if there."""

    driver: str
    handle: str
    name: str = ""


AnswerT = TypeVar("AnswerT")
Find = Callable[[blockdev.BlockDevice], Awaitable[VolumeClaim | None]]  # OSError or AgentError


def _budget(per_minute: int) -> kit.pause.Bucket:
    """Requests of this minute; some of them are kept for decisions about leases."""
    return kit.pause.Bucket(per_minute / 60, per_minute)


class TooOftenError(Exception):
    """The limit of this minute is reached."""


@dataclass
class _Mark:
    """One that is to be written. ``due``: CLOCK_MONOTONIC."""

    device: blockdev.BlockDevice
    entry: Entry
    due: float
    pauses: kit.pause.Backoff


class Witness:
    """``find`` says which volume lies on a device; ``here``: whose cluster is asked."""

    def __init__(self, wanted: WitnessSettings, here: ThisNode, find: Find) -> None:
        self.settings = wanted
        self.here = here
        self._find = find
        self._claims: cachetools.LRUCache[str, VolumeClaim] = cachetools.LRUCache(MOST_VOLUMES)
        self._names: cachetools.LRUCache[VolumeClaim, str] = cachetools.LRUCache(MOST_VOLUMES)
        self._said: cachetools.TTLCache[str, Statement] = cachetools.TTLCache(
            MOST_VOLUMES, FRESH_SECONDS
        )
        self._since: cachetools.LRUCache[str, float] = cachetools.LRUCache(MOST_VOLUMES)
        self._marked: cachetools.LRUCache[str, tuple[str, str]] = cachetools.LRUCache(MOST_VOLUMES)
        self._marks: collections.OrderedDict[str, _Mark] = collections.OrderedDict()
        self._wake = asyncio.Event()
        self._worker: asyncio.Task[None] | None = None
        self._volumes: objects.PersistentVolumes | None = None
        self._budget = _budget(wanted.per_minute)
        self._trouble = "", 0.0  # why the last question had no answer, and when
        self.mark_trouble = ""  # why the last mark could not be written
        self.counts = dict.fromkeys(("asked", "failed", "limited", "marked"), 0)

    @property
    def is_configured(self) -> bool:
        return self.settings.enabled and self.here.cluster.is_configured

    @property
    def trouble(self) -> str:
        """Why the last question had no answer; empty when it had one, or was long ago."""
        why, when = self._trouble
        return why if time.monotonic() - when < TROUBLE_SECONDS else ""

    async def apply(self, wanted: WitnessSettings, here: ThisNode) -> None:
        """Ask with these settings from now on."""
        if (wanted, here) == (self.settings, self.here):
            return
        self.settings, self.here = wanted, here
        self._budget = _budget(wanted.per_minute)
        self._said.clear()
        self._trouble, self.mark_trouble = ("", 0.0), ""
        await self._disconnect()

    async def close(self) -> None:
        await kit.tasks.end(self._worker)
        self._worker = None
        await self._disconnect()

    async def _disconnect(self) -> None:
        former, self._volumes = self._volumes, None
        if former is not None:
            await former.server.close()

    # --- asking

    async def ask(self, device: blockdev.BlockDevice) -> Statement:
        """What its PersistentVolume says; takes a few times ``timeout`` at most."""
        volume = device.volume
        if not self.is_configured or not volume:
            return NO_CLUSTER
        if (said := self._said.get(volume)) is not None:
            return said
        try:
            found = await self._persistent_volume(device, keep=0)
        except TooOftenError:
            text = f"the API server was asked {self.settings.per_minute} times in this minute"
            return Statement(Knowledge.UNKNOWN, text=text)
        except (kit.errors.AgentError, OSError) as error:
            since = self._since.setdefault(volume, time.monotonic())
            silent = time.monotonic() - since
            return Statement(Knowledge.UNKNOWN, text=str(error), silent_for=silent)
        self._since.pop(volume, None)
        if found is None:
            return Statement(Knowledge.NOT_ASKED, text="no record names a PersistentVolume")
        said = self._said[volume] = statement.read(found, device.part, time.time())
        return said

    async def _persistent_volume(
        self, device: blockdev.BlockDevice, keep: float
    ) -> objects.PersistentVolume | None:
        """None: no record, and no VolumeAttachment, names one. AgentError, OSError."""
        claim = await self._claim(device)
        if claim is None:
            return None
        try:
            name = claim.name or self._names.get(claim) or await self._attached(claim, keep)
            if not name:
                return None
            self._names[claim] = name
            found = await self._request(lambda: self._cluster().persistent_volume(name), keep)
        except KubeError as error:
            if not self.trouble:
                log.warning("the API server cannot be asked", error=str(error))
            self._trouble = str(error), time.monotonic()
            raise
        self._trouble = "", 0.0
        if (found.driver, found.handle) != (claim.driver, claim.handle):
            self._names.pop(claim, None)
            raise KubeError(
                f"PersistentVolume {name}", f"is of volume {found.handle}, not {claim.handle}"
            )
        return found

    async def _claim(self, device: blockdev.BlockDevice) -> VolumeClaim | None:
        """kubelet removes its record when a stage fails, and the mapping may stay: what a volume
        was once recorded as is remembered."""
        lowest = device.lowest
        known = self._claims.get(lowest.volume)
        if known is not None and known.name:
            return known
        found = await self._find(lowest) or known
        if found is not None:
            self._claims[lowest.volume] = found
        return found

    async def _attached(self, claim: VolumeClaim, keep: float) -> str:
        """Before the first publish only the attachment names it. Empty for drivers that the cluster
        does not attach."""
        try:
            return await self._request(
                lambda: self._cluster().attached(claim.driver, claim.handle, self.here.name), keep
            )
        except KubeError as error:
            if error.status != 404:
                raise
            return ""

    async def _request(self, ask: Callable[[], Awaitable[AnswerT]], keep: float) -> AnswerT:
        if not self._budget.take(keep=keep):
            self.counts["limited"] += 1
            raise TooOftenError
        self.counts["asked"] += 1
        try:
            answer = await ask()
        except KubeError as error:
            if error.status not in (404, 409):
                self.counts["failed"] += 1
            raise
        return answer

    def _cluster(self) -> objects.PersistentVolumes:
        if self._volumes is None:
            server = client.ApiServer(self.here.cluster)
            self._volumes = objects.PersistentVolumes(server, self.settings.timeout)
        return self._volumes

    async def attached_here(self, device: blockdev.BlockDevice) -> str:
        """What the cluster says that claims the device's volume for this node; empty: nothing, or
        the volume is not one that kubelet staged while this agent ran. AgentError: not known."""
        claim = self._claims.get(device.lowest.volume)
        name = await self._attachment(claim, 0) if self.is_configured and claim is not None else ""
        return f"the cluster has {name} attached to this node" if name else ""

    async def is_attached(self, driver: str, handle: str) -> bool:
        """Whether the cluster has a volume attached to this node. AgentError: not known."""
        if not self.is_configured:
            raise KubeError("VolumeAttachment", "no cluster is configured")
        keep = self.settings.per_minute / 2
        return bool(await self._attachment(VolumeClaim(driver, handle), keep))

    async def _attachment(self, claim: VolumeClaim, keep: float) -> str:
        try:
            return await self._attached(claim, keep)
        except TooOftenError:
            raise KubeError("VolumeAttachment", "asked too often in this minute") from None

    async def taint(self, wanted: bool) -> None:
        """Put the taint of a repair on this node, or take it away. KubeError."""
        if not self.is_configured:
            raise KubeError(f"Node {self.here.name}", "no cluster is configured")
        cluster = self._cluster()
        await objects.taint(
            cluster.server, self.here.name, wanted=wanted, deadline=cluster.deadline
        )

    # --- marking

    def saw(self, device: blockdev.BlockDevice, entry: Entry) -> None:
        """Content was seen on the device: mark its PersistentVolume soon. Never blocks."""
        volume, image = device.volume, device.lowest.image
        if not self.is_configured or not entry.type or (image is not None and image.snapshot):
            return
        if self._marked.get(volume) == (entry.type, entry.uuid):
            return
        if volume in self._marks:
            self._marks[volume].device, self._marks[volume].entry = device, entry
        elif len(self._marks) < MOST_VOLUMES:  # the next check of a device comes back to it
            # After a rollout every node looks at volumes that were marked long ago.
            known = entry.first_seen < entry.last_seen
            later = random.uniform(0, SPREAD_SECONDS) if known else 0.0
            pauses = kit.pause.Backoff(2 * MARK_AGAIN_SECONDS, MARK_LATEST_SECONDS)
            self._marks[volume] = _Mark(device, entry, time.monotonic() + later, pauses)
        self._wake.set()
        if self._worker is None:
            self._worker = asyncio.create_task(self._mark_all(), name="marks")

    async def _mark_all(self) -> None:
        """One after the other, as long as there are any; the next ``saw`` starts it again."""
        while True:
            self._wake.clear()
            now = time.monotonic()
            due = min(self._marks.values(), key=lambda m: m.due, default=None)
            if due is None or due.due > now:
                await kit.tasks.until(self._wake, None if due is None else due.due - now)
                continue
            try:
                done = await self._mark(due.device, due.entry)
            except TooOftenError:
                due.due = now + 60.0 / self.settings.per_minute + random.random()
                continue
            except (kit.errors.AgentError, OSError) as error:
                refused = isinstance(error, KubeError) and error.status == 403
                self.mark_trouble = str(error)
                pause = kit.pause.jittered(MARK_LATEST_SECONDS) if refused else due.pauses.next()
                due.due = now + pause
                continue
            self.mark_trouble = ""
            volume = due.device.volume
            if self._marks.get(volume) is due:
                del self._marks[volume]
            if done:
                self._marked[volume] = due.entry.type, due.entry.uuid

    async def _mark(self, device: blockdev.BlockDevice, entry: Entry) -> bool:
        """False when the volume has no PersistentVolume that anything names."""
        keep = self.settings.per_minute / 2
        found = await self._persistent_volume(device, keep)
        if found is None:
            return False
        key = statement.annotation(device.part)
        if not statement.is_stale(found.annotations.get(key), entry):
            return True
        seen = datetime.datetime.fromtimestamp(entry.last_seen, datetime.UTC)
        mark = {
            "type": entry.type, "uuid": entry.uuid, "volume": entry.volume,
            "seen": seen.isoformat(timespec="seconds"), "node": self.here.name,
        }  # fmt: skip
        value = json.dumps(mark)
        await self._request(lambda: self._cluster().annotate(found, key, value), keep)
        self._said.pop(device.volume, None)
        self.counts["marked"] += 1
        log.info("PersistentVolume marked", name=found.name, volume=entry.title, key=key)
        return True

    def status(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "configured": self.is_configured,
            "trouble": self.trouble,
            "mark_trouble": self.mark_trouble,
            "waiting_marks": len(self._marks),
            **self.counts,
        }
