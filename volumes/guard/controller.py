"""The guard's control loop: keeps the kernel at what the settings say, and hears of devices.

Four sources say that a device must be checked: uevents (attached, changed, detached), the guard
program's ring buffer (a write open was denied), a scan of all devices in case an event was lost
(at once when the kernel says so), and the clock (content may change unnoticed). Each ends in
``LeaseManager.schedule``. The kernel's log feeds the ``ErrorLog``. The controller itself decides
nothing about a device.

What is attached stays attached when the agent stops; expiring leases expire by themselves.
"""

import asyncio
import contextlib
import errno
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

import kit.errors
import kit.threads
from ceph.settings import ClusterSettings
from linux import blockdev, kmsg, netlink
from volumes import settings
from volumes.guard import (
    canary,
    kernel,
    lease,
    lease_manager,
    override,
    pace,
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
UNPROVED_SECONDS = 60.0  # until the next attempt after one that told nothing
PROOF_SECONDS = 600.0  # at once when another program or mode is in the kernel
LOAD_SECONDS = 30.0  # for the ledger's files, at the start; their disk may hang


class Controller:
    """One per agent. Works on the event loop in short pieces; probes and clusters are
    processes of their own. ``changed`` is called when the findings may have changed."""

    def __init__(
        self,
        wanted: settings.GuardSettings,
        clusters: Sequence[ClusterSettings],
        *,
        state_dir: Path,
        changed: Callable[[], None] = lambda: None,
        witness: Witness | None = None,
        node: NodeWatch | None = None,
    ) -> None:
        self.settings = wanted
        self.state_dir = state_dir
        self.guard: kernel.Kernel | None = None
        self.present: kernel.Present | None = None
        self.unsupported = ""  # why this kernel does not take the program
        self.proof = "unknown: not tried yet"
        self.proof_tried = False
        self.memory = override.Memory(state_dir)
        self.errors = lease.ErrorLog()
        self._devices = blockdev.Known()
        ledger = store.LedgerStore(state_dir / "volumes" / "ledger")
        mirror = Mirror(clusters, wanted.cluster_timeout)
        here = "this node" if witness is None else witness.here.name
        self.executor = steps.Executor(None, ledger, mirror, here, witness)
        self.manager = lease_manager.LeaseManager(wanted, self.executor, self.errors, changed)
        self._reports = reports.Reports(
            self.manager, ledger, is_watched=self._is_watched, changed=changed
        )
        self.came_late = 0  # devices that were there before anything guarded them
        self._applied = False  # this agent's program and maps are in the kernel
        self._changed = changed
        self.node = node or NodeWatch()
        self._kmsg: kmsg.Kmsg | None = None
        self._looked = self._scanned = self._proved = -1e9
        self._names: list[str] = []  # of all devices, at the last scan
        self._majors: frozenset[int] = frozenset()
        self._guarded_parts: frozenset[kernel.Number] = frozenset()

    # --- life

    async def start(self) -> None:
        """Adopt what is attached and begin to listen. HostError when the state directory cannot be
        used. What the kernel lacks is a finding, not an error."""
        try:
            async with asyncio.timeout(LOAD_SECONDS):
                await kit.threads.STATE.call(self._load)
        except OSError as error:
            why = error.strerror or str(error) or f"its disk gave no answer in {LOAD_SECONDS:g}s"
            raise kit.errors.HostError(
                f"ledger {self.executor.ledger.folder}", why, "make it readable"
            ) from error
        self._follow_kernel_log()
        self.node.devices.append(self._on_devices)
        self.node.published.append(self.manager.mounts_changed)
        await self.node.start(self)
        await self.apply(self.settings)
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
        await self.manager.close()
        await self.executor.mirror.close()
        if self.executor.witness is not None:
            await self.executor.witness.close()
        self._reports.close()
        await self.node.stop(self)
        if self._kmsg is not None:
            loop.remove_reader(self._kmsg.fd)
            self._kmsg.close()
            self._kmsg = None
        if self.guard is not None:
            self.guard.close()

    # --- the kernel

    def wanted_mode(self) -> kernel.Mode:
        return self.memory.mode(self.settings)

    def problems(self) -> list[str]:
        """Why the guard is not in force as wanted; empty: it is."""
        found = self._of_kernel()
        wanted = self.wanted_mode()
        expected = "enforced" if wanted is kernel.Mode.ENFORCE else "let through"
        proved = self.proof == expected or self.proof.startswith("unknown")
        if not self.unsupported and not proved:
            found.append(f"an attempt in the guarded cgroup was {self.proof}, not {expected}")
        return found

    def _of_kernel(self) -> list[str]:
        """Why the kernel does not have what is wanted; no attempt proves it."""
        found = []
        wanted = self.wanted_mode()
        if self.unsupported and wanted is not kernel.Mode.OFF:
            found.append(f"the guard is not attached: {self.unsupported}")
        elif self.present is None or self.present.mode is not wanted:
            found.append(f"the guard is not in mode {wanted}")
        return found

    async def apply(
        self, new: settings.GuardSettings, clusters: Sequence[ClusterSettings] | None = None
    ) -> None:
        """Bring the kernel to the settings and an operator's override; scan for devices."""
        if clusters is not None:
            await self.executor.mirror.apply(clusters, new.cluster_timeout)
        await self.memory.refresh(new, self._found_mode if self.present is None else None)
        self.settings = self.manager.checks.settings = new = self.memory.in_force(new)
        self.manager.checks.prober.deadline = new.probe_timeout
        if self.present is None:  # what came while there was no agent
            self._majors = self._wanted().majors
            there = await asyncio.to_thread(self._devices.all)
            self._guarded_parts = self._stacked(there)
        await self._attach()
        if not self._of_kernel():
            await self.memory.keep(new)
        now = time.monotonic()
        if now - self._looked >= ROUND_SECONDS or self._scanned < 0:
            self._looked = now
            await self._look()
        again = PROOF_SECONDS if self.proof in canary.PROOFS else UNPROVED_SECONDS
        if self.guard is not None and now - self._proved >= again:
            self._proved = now
            root = kernel.is_root_cgroup(self.guard.cgroup)
            self.proof = await canary.prove(self.guard.cgroup, root, self.state_dir)
            self.proof_tried = True
        self._changed()

    @property
    def looked(self) -> bool:
        """Whether it is known what is attached in the kernel, or why that cannot be known."""
        return self.present is not None or bool(self.unsupported)

    async def _attach(self) -> None:
        before = self.present
        try:
            if self.guard is None:
                self.guard = override.handle(self.settings)
            self.present = await asyncio.to_thread(self._apply_now, self.guard)
            self.unsupported, self._applied = "", True
        except (kit.errors.HostError, kit.errors.InUseError, OSError) as error:
            if not self.unsupported:
                log.error("format guard is not in force", error=str(error))
            self.unsupported = str(error)
            self.present = await self._what_is_left()
        attached = self.present is not None and self.present.attached
        adopted = attached and self.executor.leases is not self.guard
        self.executor.leases = self.guard if attached else None
        if adopted:
            self.manager.revoke_unproven()
        if attached and self.guard is not None:
            self._reports.take(self.guard)
        else:
            self._reports.drop()
        if self.present is not None and (
            before is None
            or before.mode != self.present.mode
            or [p.id for p in before.programs] != [p.id for p in self.present.programs]
        ):
            self._proved = -1e9
            log.info(
                "format guard", mode=str(self.present.mode), attached=self.present.attached,
                programs=[p.id for p in self.present.programs], majors=sorted(self.present.majors),
            )  # fmt: skip

    async def _found_mode(self) -> kernel.Mode:
        """What an earlier agent left attached."""
        left = None
        with contextlib.suppress(kit.errors.HostError):
            self.guard = self.guard or override.handle(self.memory.in_force(self.settings))
            left = await self._what_is_left()
        return left.mode if left is not None else kernel.Mode.OFF

    async def _what_is_left(self) -> kernel.Present | None:
        """After a failure: an earlier program that is still attached keeps guarding."""
        if self.guard is None:
            return None
        try:
            return await asyncio.to_thread(self.guard.read)
        except (kit.errors.HostError, kit.errors.InUseError, OSError):
            return self.present

    def _apply_now(self, guard: kernel.Kernel) -> kernel.Present:
        """In a thread: reads and writes of the kernel, milliseconds."""
        present = guard.read()
        wanted = self._wanted(present)
        if not self._applied and not present.attached:
            self.came_late = sum(map(self._is_volume, self._devices.all()))
        if wanted.mode is kernel.Mode.OFF:
            return guard.apply(wanted) if present.attached else present
        if not self._applied or not present.attached or len(present.programs) != 1:
            return guard.apply(wanted)
        if not present.pinned:
            guard.repin()
        if not present.is_as(wanted):
            guard.configure(wanted)
        return guard.read()

    def _wanted(self, present: kernel.Present | None = None) -> kernel.Wanted:
        """``present``: what the kernel has now."""
        new = kernel.wanted(
            self.settings, self.wanted_mode(), blockdev.majors(), self._guarded_parts
        )
        if self.memory.lost and present is not None:
            new = kernel.at_least(new, present)
        self._majors = new.majors
        return new

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
        if found is None:
            self._scanned = -1e9  # with the next reconcile
        for event in found or ():
            if event.action != "remove":
                self._seen(event.name)
            elif self.manager.knows(event.name):
                self.manager.forget(event.name)

    # --- devices

    def _is_volume(self, device: blockdev.BlockDevice) -> bool:
        return not device.parent and bool(device.size) and self._is_watched(device)

    def _is_watched(self, device: blockdev.BlockDevice) -> bool:
        return self.settings.examines(device.lowest.driver, device.lowest.name)

    def _is_guarded(self, device: blockdev.BlockDevice) -> bool:
        """By its driver, or because it lies on such a device."""
        return device.driver in self.settings.drivers or any(map(self._is_guarded, device.below))

    def _seen(self, name: str) -> blockdev.BlockDevice | None:
        """A device was attached or changed, or was found by a scan."""
        device = blockdev.identify(name)
        if device is None or not self._is_guarded(device):
            return device
        self._cover(device)
        if device.parent or not self._is_watched(device):
            return device
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
        return device

    def _cover(self, device: blockdev.BlockDevice) -> None:
        """Guard the number of a driver that was loaded just now, of a partition with an extended
        major or of a device on top of a guarded one, before anybody can use it."""
        if (
            device.number[0] in self._majors
            or self.guard is None
            or "majors" not in self.guard.maps
        ):
            return
        self._guarded_parts |= self._of_its_own(device)
        new = self._wanted()
        with contextlib.suppress(OSError, kit.errors.RefusedError):
            self.guard.add(new.majors, new.devices)

    def _of_its_own(self, device: blockdev.BlockDevice) -> frozenset[kernel.Number]:
        """Its number, if it is guarded and its major says nothing about that."""
        with_parent = device.parent and blockdev.majors().get(device.number[0]) == "blkext"
        above = device.below and self._is_guarded(device)
        return frozenset({device.number}) if with_parent or above else frozenset()

    def _stacked(self, there: Sequence[blockdev.BlockDevice]) -> frozenset[kernel.Number]:
        """The guarded numbers whose majors say nothing. Others that the kernel guards are released,
        but not a mapping that was made a moment ago: it does not show yet what it lies on."""
        found: set[kernel.Number] = set()
        young: set[kernel.Number] = set()
        for device in there:
            if self._is_guarded(device):
                found |= self._of_its_own(device)
            elif device.driver == "device-mapper" and not device.below:
                young.add(device.number)
        # While the last settings are lost, devices of drivers that they named look like others.
        if self.guard is not None and self.present is not None and not self.memory.lost:
            stale = self.present.devices - found - young - self._guarded_parts
            self.guard.release(stale)
        return frozenset(found)

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
        before = self._guarded_parts
        there = await asyncio.to_thread(self._devices.all)
        names = {device.name for device in there}
        for name in self.manager.known.keys() - names:
            if blockdev.identify(name) is None:
                self.manager.forget(name)
        for device in there:
            known = self.manager.known.get(device.name)
            if known is None or known.device.attachment != device.attachment:
                self._seen(device.name)
        # What uevents added meanwhile stays.
        self._guarded_parts = self._stacked(there) | (self._guarded_parts - before)

    def driver_names(self) -> frozenset[str]:
        """Drivers that are loaded now."""
        return frozenset(blockdev.majors().values())
