"""The guard's shell: keeps the kernel at what the settings say and listens to everything that
makes a device worth a look: uevents, refused opens, the kernel's log, the clock."""

import asyncio
import contextlib
import dataclasses
import errno
import fnmatch
import os
import socket
import time
from pathlib import Path
from typing import Any

import structlog

import kit.errors
import kit.findings
from linux import bpf, kmsg, netlink
from volumes import devices, settings
from volumes.guard import (
    canary,
    denials,
    errorlog,
    fallback,
    judge,
    kernel,
    layout,
    override,
    report,
    switch,
)
from volumes.ledger import cluster, store

log = structlog.get_logger("volumes")

SCAN_SECONDS = 30.0  # the net under uevents
LOOK_AGAIN_SECONDS = 600.0  # has a volume's content changed behind our back
PROOF_SECONDS = 60.0


def node_name() -> str:
    """$NODE_NAME, as the downward API gives it, else the host's name."""
    return os.environ.get("NODE_NAME") or socket.gethostname()


class Keeper:
    """One per agent. Work happens on the event loop in short pieces; probes, clusters and the
    exec guard are processes of their own."""

    def __init__(
        self,
        wanted: settings.GuardSettings,
        *,
        state_dir: Path,
        reporter: kit.findings.Reporter,
    ) -> None:
        self.settings = wanted
        self.state_dir = state_dir
        self.reporter = reporter
        self.guard: kernel.Kernel | None = None
        self.present: kernel.Present | None = None
        self.unsupported = ""  # why this kernel does not take the program
        self.proof = "unknown: not tried yet"
        self.override: override.Override | None = None
        self.override_error = ""
        self.errors = errorlog.ErrorLog()
        self.denials = denials.Denials()
        self.ledger = store.Store(state_dir / "volumes" / "ledger")
        self.clusters = cluster.Clusters(wanted.clusters, wanted.cluster_timeout)
        self.judge = judge.Judge(
            wanted, None, self.ledger, self.clusters, self.errors, self.denials,
            node=node_name(), changed=self._report,
        )  # fmt: skip
        self.fallback: fallback.Fallback | None = None
        self._uevents: netlink.Uevents | None = None
        self._kmsg: kmsg.Kmsg | None = None
        self._ring: bpf.Ring | None = None
        self._ring_map = 0
        self._mount: int | None = None
        self._scanned = self._proved = -1e9
        self._majors: frozenset[int] = frozenset()
        self._guarded_parts: frozenset[layout.Number] = frozenset()

    # --- life

    async def start(self) -> None:
        """Adopt what is attached and begin to listen. HostError when the state directory cannot be
        used; a kernel that lacks something is a finding, not an error."""
        self.state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            await asyncio.to_thread(self.ledger.load)
        except OSError as error:
            raise kit.errors.HostError(
                f"ledger {self.ledger.folder}", str(error.strerror), "make it readable"
            ) from error
        self._listen()
        await self.judge.prober.warm()
        await self.apply(self.settings)

    def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            self._kmsg = kmsg.Kmsg()
            for record in self._kmsg.read(100_000):  # what the kernel still remembers
                self.errors.note(record.text, record.time)
            self.errors.readable = True
            loop.add_reader(self._kmsg.fd, self._on_kmsg)
        except OSError as error:
            log.warning("kernel log cannot be read: no automatic leases", error=str(error))
        try:
            self._uevents = netlink.Uevents()
            loop.add_reader(self._uevents.fd, self._on_uevent)
        except OSError as error:
            log.warning("no uevents: devices are found by scanning", error=str(error))

    async def stop(self) -> None:
        """What is attached stays attached; expiring leases expire by themselves."""
        loop = asyncio.get_running_loop()
        await self.judge.close()
        await self.clusters.close()
        if self.fallback is not None:
            await self.fallback.close()
        self._drop_ring()
        for source in (self._kmsg, self._uevents):
            if source is not None:
                loop.remove_reader(source.fd)
                source.close()
        self._kmsg = self._uevents = None
        if self._mount is not None:
            os.close(self._mount)
            self._mount = None
        if self.guard is not None:
            self.guard.close()

    # --- the kernel

    def wanted_mode(self) -> layout.Mode:
        return self.override.mode if self.override else layout.Mode(self.settings.mode)

    async def apply(self, new: settings.GuardSettings) -> None:
        """Bring the kernel to the settings and an operator's override; look at what is new."""
        self.settings = self.judge.settings = new
        self.judge.prober.deadline = new.probe_timeout
        try:
            self.override = override.load(self.state_dir)
            self.override_error = ""
        except kit.errors.HostError as error:
            self.override_error = str(error)  # the last one known stays in force
        await self._attach()
        now = time.monotonic()
        if now - self._scanned >= SCAN_SECONDS:
            self._scanned = now
            self._scan()
        if self.guard is not None and now - self._proved >= PROOF_SECONDS:
            self._proved = now
            self.proof = await asyncio.to_thread(
                canary.prove, self.guard.cgroup, kernel.is_root(self.guard.cgroup), self.state_dir
            )
        self._report()

    async def _attach(self) -> None:
        before = self.present
        try:
            if self.guard is None:
                self.guard = switch.handle(self.settings)
            self.present = await asyncio.to_thread(self._apply_now, self.guard)
            self.unsupported = ""
        except (kit.errors.HostError, kit.errors.InUseError, OSError) as error:
            if not self.unsupported:
                log.error("format guard is not in force", error=str(error))
            self.unsupported = str(error)
        attached = self.present is not None and self.present.attached and not self.unsupported
        self.judge.leases = self.guard if attached else None
        if attached:
            self._take_ring()
        else:
            self._drop_ring()
        await self._fall_back(attached)
        if self.present is not None and (before is None or before.mode != self.present.mode):
            self._proved = -1e9
            log.info(
                "format guard", mode=str(self.present.mode), attached=self.present.attached,
                programs=[p.id for p in self.present.programs], majors=sorted(self.present.majors),
            )  # fmt: skip

    def _apply_now(self, guard: kernel.Kernel) -> kernel.Present:
        """In a thread: reads and writes of the kernel, milliseconds."""
        wanted = self._wanted()
        present = guard.read()
        same = (present.mode, present.majors, present.devices, present.openers, present.words) == (
            *(wanted.mode, wanted.majors, wanted.devices, wanted.openers, wanted.words),
        )
        first = self.present is None  # an upgraded agent may bring another program
        if wanted.mode is layout.Mode.OFF:
            return guard.apply(wanted) if present.attached else present
        if first or not present.attached or len(present.programs) != 1:
            return guard.apply(wanted)
        if not same:
            guard.configure(wanted)
            return guard.read()
        return present

    def _wanted(self) -> kernel.Wanted:
        new = kernel.wanted(
            self.settings, self.wanted_mode(), devices.majors(), self._guarded_parts
        )
        self._majors = new.majors
        return new

    async def _fall_back(self, attached: bool) -> None:
        """Only where the kernel does not take the program."""
        needed = self.settings.fallback and self.wanted_mode() is not layout.Mode.OFF
        if attached or not needed or not self.unsupported:
            if self.fallback is not None:
                await self.fallback.close()
                self.fallback = None
            return
        if self.fallback is None:
            self.fallback = fallback.Fallback(
                self._on_fallback_denial, kernel.below_root(self.settings.cgroup)
            )
        self.judge.leases = self.fallback
        await self.fallback.apply(self.wanted_mode(), self._majors, list(self.judge.known.values()))

    # --- what is heard

    def _take_ring(self) -> None:
        assert self.guard is not None
        events = self.guard.maps["events"]
        if self._ring is not None and self._ring_map == events.info.id:
            return
        self._drop_ring()
        self._ring = bpf.Ring(events, self._on_event)
        self._ring_map = events.info.id
        asyncio.get_running_loop().add_reader(self._ring.fd, self._ring.consume)
        self._ring.consume()  # what came while no agent listened

    def _drop_ring(self) -> None:
        if self._ring is not None:
            asyncio.get_running_loop().remove_reader(self._ring.fd)
            self._ring.close()
            self._ring = None

    def _on_event(self, raw: bytes) -> None:
        event = layout.Event.unpack(raw)
        name = devices.name_of(event.number) or f"{event.number[0]}:{event.number[1]}"
        known = self.judge.known.get(name)
        device = known.device if known else devices.identify(name)
        if self._mount is None and self.guard is not None:
            with contextlib.suppress(OSError):
                self._mount = os.open(self.guard.cgroup, os.O_RDONLY | os.O_DIRECTORY)
        denial = denials.resolve(
            event,
            self._mount,
            name,
            device.volume if device else "",
            device.title if device else "",
        )
        undecided = known is None or known.reasons is None
        remembered = self.ledger.get(denial.volume)
        early = undecided and not (remembered and remembered.type)
        self._denied(dataclasses.replace(denial, early=early), device)

    def _denied(self, denial: denials.Denial, device: devices.BlockDevice | None) -> None:
        log.warning(
            "write open denied" if denial.denied else "write open would be denied",
            device=denial.device, program=denial.program, pid=denial.pid, pod=denial.pod,
            command=denial.command,
        )  # fmt: skip
        self.denials.add(denial)
        if device is not None and not device.parent and self._looked_at(device):
            self.judge.consider(denial.device)
        else:
            self.denials.decided(denial.device, "", ("it is not a device that is leased",))
            self._report()

    def _on_fallback_denial(self, denial: denials.Denial) -> None:
        self._denied(denial, devices.identify(denial.device))

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

    def _on_uevent(self) -> None:
        assert self._uevents is not None
        try:
            for event in self._uevents.read():
                if event.action == "remove":
                    if event.name in self.judge.known:
                        self.judge.forget(event.name)
                else:
                    self._seen(event.name)
        except netlink.Overflow:
            self._scanned = -1e9  # with the next reconcile
        except OSError as error:
            log.warning("uevents cannot be read", error=str(error))

    # --- devices

    def _looked_at(self, device: devices.BlockDevice) -> bool:
        return device.driver in self.settings.drivers and any(
            fnmatch.fnmatchcase(device.name, pattern) for pattern in self.settings.names
        )

    def _seen(self, name: str) -> None:
        """A device that was added or changed."""
        device = devices.identify(name)
        if device is None or device.driver not in self.settings.drivers:
            return
        self._cover(device)
        if device.parent or not self._looked_at(device):
            return
        if device.size == 0:
            if name in self.judge.known:
                self.judge.forget(name)
            return
        known = self.judge.known.get(name)
        if known is None or known.device.attachment != device.attachment:
            self.judge.consider(name)

    def _cover(self, device: devices.BlockDevice) -> None:
        """A driver that was loaded just now, or a partition with a major of others: guard its
        number before anybody can use it."""
        if (
            device.number[0] in self._majors
            or self.guard is None
            or "majors" not in self.guard.maps
        ):
            return
        if device.parent and devices.majors().get(device.number[0]) == "blkext":
            self._guarded_parts |= {device.number}
        with contextlib.suppress(OSError):
            self.guard.configure(self._wanted())

    def _scan(self) -> None:
        """Everything that is attached; looks again at what was not looked at for long."""
        now = time.monotonic()
        present = set(devices.every())
        for name in self.judge.known.keys() - present:
            self.judge.forget(name)
        parts = set()
        for name in present:
            self._seen(name)
            known = self.judge.known.get(name)
            if known is not None and now - known.looked >= LOOK_AGAIN_SECONDS:
                self.judge.consider(name)
            if name not in self.judge.known and (device := devices.identify(name)) is not None:
                parts |= {device.number} & self._guarded_parts
        self._guarded_parts = frozenset(parts)

    # --- what is said

    def driver_names(self) -> frozenset[str]:
        """Drivers that are loaded now."""
        return frozenset(devices.majors().values())

    def _report(self) -> None:
        self.reporter.report("volumes.guard", report.findings(self, time.time()))

    def status(self) -> dict[str, Any]:
        """As the admin API gives it."""
        return report.status(self)
