"""The guard's control loop: has the kernel kept at what the settings say, and hears of devices.

Four sources say that a device must be checked: uevents (attached, changed, detached), the guard
program's ring buffer (a write open was denied), a scan of all devices in case an event was lost
(at once when the kernel says so), and the clock (content may change unnoticed). Each ends in
``LeaseManager.schedule``. The kernel's log feeds the ``ErrorLog``. The controller itself decides
nothing about a device.

What is attached stays attached when the agent stops; expiring leases expire by themselves.
"""

import asyncio
import errno
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

import kit.errors
import kit.tasks
from ceph.settings import ClusterSettings
from linux import blockdev, kmsg, netlink
from volumes import settings
from volumes.guard import (
    in_force,
    kernel,
    lease,
    lease_manager,
    own,
    pace,
    rehearsal,
    reports,
    steps,
)
from volumes.ledger import store
from volumes.ledger.mirror import Mirror
from volumes.ledger.witness import Witness
from volumes.node.watch import NodeWatch

log = structlog.get_logger("volumes")

ROUND_SECONDS = 30.0  # between two looks at the clock, at the names of devices and at leases
SCAN_SECONDS = 600.0  # in case a uevent was lost without a word
LOAD_SECONDS = 30.0  # for the ledger's files, at the start; their disk may hang


class Controller:
    """One per agent. Works on the event loop in short pieces; probes and clusters are
    processes of their own. ``changed`` is called when the findings may have changed."""

    def __init__(
        self,
        wanted: settings.GuardSettings,
        clusters: Sequence[ClusterSettings],
        witness: Witness,
        *,
        state_dir: Path,
        changed: Callable[[], None] = lambda: None,
        node: NodeWatch | None = None,
    ) -> None:
        self.state_dir = state_dir
        self.errors = lease.ErrorLog()
        self._devices = blockdev.Known()
        self.in_force = in_force.InForce(wanted, state_dir, self._devices)
        ledger = store.LedgerStore(state_dir / "volumes" / "ledger")
        mirror = Mirror(clusters, wanted.cluster_timeout)
        self.executor = steps.Executor(None, ledger, mirror, witness)
        self.manager = lease_manager.LeaseManager(wanted, self.executor, self.errors, changed)
        self.rehearsal = rehearsal.Rehearsal(state_dir, self.manager.checks.prober)
        self.in_force.own.looked = self._looked_at_all
        self._reports = reports.Reports(
            self.manager, is_watched=self._is_watched, whose=self.in_force.whose,
            rehearsal=self.rehearsal, changed=changed,
        )  # fmt: skip
        self._changed = changed
        self.node = node or NodeWatch()
        self._kmsg: kmsg.Kmsg | None = None
        self._looked = self._scanned = -1e9
        self._names: list[str] = []  # of all devices, at the last scan

    # --- life

    async def start(self) -> None:
        """Adopt what is attached and begin to listen. HostError when the state directory cannot be
        used. What the kernel lacks is a finding, not an error."""
        try:
            async with asyncio.timeout(LOAD_SECONDS):
                await kit.tasks.STATE.call(self._load)
        except OSError as error:
            why = error.strerror or str(error) or f"its disk gave no answer in {LOAD_SECONDS:g}s"
            raise kit.errors.HostError(
                f"ledger {self.executor.ledger.folder}", why, "make it readable"
            ) from error
        self._follow_kernel_log()
        self.node.devices.append(self._on_devices)
        self.node.published.append(self.manager.mounts_changed)
        await self.node.start(self)
        await self.apply(self.in_force.settings)
        self.rehearsal.start()
        self.in_force.own.start()
        self.manager.holds.warm()
        await self.manager.checks.prober.warm()

    def _load(self) -> None:
        """Blocks on the state directory's disk."""
        self.state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.executor.ledger.load()

    def _follow_kernel_log(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            self._kmsg = kmsg.Kmsg()
            for record in self._kmsg.read(100_000):  # what the kernel's buffer still holds
                self.errors.note(record.text, record.time)
            self.errors.readable = True
            loop.add_reader(self._kmsg.fd, self._on_kmsg)
        except OSError as error:
            log.warning("kernel log cannot be read: no automatic leases", error=str(error))

    async def stop(self) -> None:
        loop = asyncio.get_running_loop()
        await self.in_force.own.stop()
        await self.manager.close()
        await self.executor.mirror.close()
        await self.executor.witness.close()
        self._reports.close()
        await self.node.stop(self)
        if self._kmsg is not None:
            loop.remove_reader(self._kmsg.fd)
            self._kmsg.close()
            self._kmsg = None
        if self.in_force.guard is not None:
            self.in_force.guard.close()
        await self.rehearsal.stop()

    async def apply(
        self, new: settings.GuardSettings, clusters: Sequence[ClusterSettings] | None = None
    ) -> None:
        """Bring the kernel to the settings and an operator's override; scan for devices."""
        if clusters is not None:
            await self.executor.mirror.apply(clusters, new.cluster_timeout)
        self.manager.checks.settings = new = await self.in_force.recall(new)
        self.manager.checks.prober.deadline = new.probe_timeout
        self._use(await self.in_force.attach())
        if not self.in_force.of_kernel():
            await self.in_force.memory.keep(new)
        now = time.monotonic()
        if now - self._looked >= ROUND_SECONDS or self._scanned < 0:
            self._looked = now
            await self._look()
        await self.in_force.prove()
        self._changed()

    def _use(self, guard: kernel.Kernel | None) -> None:
        """For leases and reports from now on."""
        adopted = guard is not None and self.executor.leases is not guard
        self.executor.leases = guard
        if adopted:
            self.manager.revoke_unproven()
        if guard is not None:
            self._reports.take(guard)
        else:
            self._reports.drop()

    # --- events

    def _on_kmsg(self) -> None:
        assert self._kmsg is not None
        now = time.monotonic()
        before = self._kmsg.lost
        try:
            records = self._kmsg.read()
        except OSError as error:
            if error.errno != errno.EINVAL:
                self.errors.readable = False
                asyncio.get_running_loop().remove_reader(self._kmsg.fd)
            return
        for record in records:
            self.errors.note(record.text, now)
        if self._kmsg.lost != before:
            self.errors.lost(now)

    def _on_devices(self, found: Sequence[netlink.Uevent] | None) -> None:
        self.in_force.own.heard()
        if found is None:
            self._scanned = -1e9  # with the next reconcile
        for event in found or ():
            self._heed(event.name, gone=event.action == "remove")

    # --- devices

    def _looked_at_all(self, seen: own.LastLook) -> None:
        wanted = self.in_force.settings
        if wanted.scope == "ceph":
            self.rehearsal.end()
        else:
            self.rehearsal.meet(seen.devices, seen.found, wanted.raw_block)

    def _is_watched(self, device: blockdev.BlockDevice) -> bool:
        return self.in_force.settings.examines(device)

    def _heed(self, name: str, *, gone: bool = False) -> None:
        """A device with which something is wrong hides no other, and is scanned for again."""
        try:
            if not gone:
                self._seen(name)
            elif self.manager.knows(name):
                self.manager.forget(name)
        except Exception:
            log.exception("a device was not heeded", device=name)
            self._scanned = -1e9

    def _seen(self, name: str) -> None:
        """A device was attached or changed, or was found by a scan."""
        device = blockdev.identify(name)
        if device is None or not self.in_force.is_guarded(device):
            return
        self.in_force.cover(device)
        if device.parent or not self._is_watched(device):
            return
        known = self.manager.known.get(name)
        if device.size == 0:
            if known is not None:
                self.manager.forget(name)
        elif known is None or known.device.attachment != device.attachment:
            if known is not None and not lease.same_medium(
                known.device.attachment, device.attachment
            ):
                self.manager.checks.replaced(known)
            self.manager.schedule(name, device)

    async def _look(self) -> None:
        """A scan where one is due, else only what the clock makes due."""
        now = time.monotonic()
        names = await asyncio.to_thread(blockdev.names)
        heard = self.node.hears_devices and names == self._names
        if not heard or now - self._scanned >= SCAN_SECONDS:
            self._scanned, self._names = now, names
            await self._scan()
        in_use = await asyncio.to_thread(blockdev.with_superblock)
        checked = {name: known.checked for name, known in self.manager.known.items()}
        for name in pace.due(checked, in_use, now, ROUND_SECONDS):
            self.manager.schedule(name)
        self.manager.revoke_unproven()

    async def _scan(self) -> None:
        """Schedule new devices, forget those that are gone. With hundreds of devices reading sysfs
        takes long, so a thread does it; what it found is old when it is used."""
        self.in_force.own.heard()  # no event may have told of what came
        before = self.in_force.parts
        there = await asyncio.to_thread(self._devices.all)
        names = {device.name for device in there}
        for name in self.manager.known.keys() - names:
            if blockdev.identify(name) is None:
                self.manager.forget(name)
        for device in there:
            known = self.manager.known.get(device.name)
            if known is None or known.device.attachment != device.attachment:
                self._heed(device.name)
        # What uevents added meanwhile stays.
        self.in_force.parts = self.in_force.stacked(there) | (self.in_force.parts - before)

    def driver_names(self) -> frozenset[str]:
        """Drivers that are loaded now."""
        return frozenset(blockdev.majors().values())
