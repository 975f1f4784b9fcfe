"""The running volumes room: the format guard and the audit."""

import asyncio
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from prometheus_client.core import Metric

import kit.child
import kit.errors
import kit.findings
import kit.room
from linux import blockdev
from volumes import metrics, settings
from volumes.audit import service
from volumes.audit.inventory import records
from volumes.audit.types import GuardView, LedgerMismatch
from volumes.guard import controller, kernel, override, status
from volumes.ledger.store import Entry
from volumes.ledger.witness import VolumeClaim, Witness
from volumes.node import watch
from volumes.probe.examine import Kind

_REPORT_SECONDS = 0.2
_ALIVE_SECONDS = 120.0  # a reconcile takes milliseconds; a loop that stands still so long is dead
_RECORDS_SECONDS = 5.0  # those of 500 volumes on LUKS take up to 0.2 s of CPU
# What the guard was built from; a change needs a restart.
_FIXED = ("cgroup", "pins")


class Volumes:
    name = "volumes"

    def __init__(
        self,
        wanted: settings.VolumesSettings,
        state_dir: Path,
        reporter: kit.findings.Reporter,
    ) -> None:
        self._settings = wanted
        self._state_dir = state_dir
        self._reporter = reporter
        self._found: list[kit.findings.Finding] = []  # the guard's
        self.witness = Witness(wanted.kubernetes, wanted.this_node, self._claim)
        node = watch.NodeWatch()
        self.guard = controller.Controller(
            wanted.guard, wanted.clusters, self.witness,
            state_dir=state_dir, changed=self._guard_changed, node=node,
        )  # fmt: skip
        self.audit = service.Audit(
            wanted, self.witness, node, state_dir=state_dir, reporter=reporter,
            guard=lambda: guard_view(self.guard),
        )  # fmt: skip
        self._advanced = time.monotonic()
        self._reported = -1e9  # time.monotonic()
        self._report_due: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        await self.guard.start()
        await self.audit.start()

    async def reconcile(self, wanted: settings.VolumesSettings) -> Sequence[str]:
        before = self._settings.guard
        # Not those that are the same: what the file leaves out must still look left out.
        changed = [n for n in _FIXED if getattr(wanted.guard, n) != getattr(before, n)]
        keep = {name: getattr(before, name) for name in changed}
        refused = [f"guard.{name}" for name in changed]
        self._settings = wanted.model_copy(update={"guard": wanted.guard.model_copy(update=keep)})
        await self.witness.apply(wanted.kubernetes, wanted.this_node)
        await self.guard.apply(self._settings.guard, wanted.clusters)
        in_force = self.guard.in_force.settings  # the file may have lost its drivers
        refused += await self.audit.reconcile(wanted.model_copy(update={"guard": in_force}))
        self._advanced = time.monotonic()
        return refused

    async def stop(self) -> None:
        await self.audit.stop()
        await self.guard.stop()
        if self._report_due is not None:
            self._report_due.cancel()

    def health(self) -> kit.room.Health:
        reasons = self.guard.in_force.problems()
        audit = self.audit.health()
        reasons += audit.reasons
        alive = audit.alive and time.monotonic() - self._advanced < _ALIVE_SECONDS
        return kit.room.Health(alive=alive, ready=not reasons, reasons=tuple(reasons))

    def metrics(self) -> Iterable[Metric]:
        yield from metrics.of_guard(self.guard, self._found)
        yield from metrics.of_audit(self.audit)

    async def _claim(self, device: blockdev.BlockDevice) -> VolumeClaim | None:
        """Which volume of Kubernetes the device is, by the records of this moment."""
        try:
            found = await kit.child.call(
                records.on_device, device.name, str(self._settings.this_node.kubelet.root_dir),
                deadline=_RECORDS_SECONDS,
            )  # fmt: skip
        except RuntimeError as error:
            raise kit.errors.HostError("kubelet's records", str(error), "") from error
        return VolumeClaim(*found) if found else None

    def _guard_changed(self) -> None:
        """Report now, or soon: under a flood of denials it changes thousands of times a second."""
        if self._report_due is None:
            wait = self._reported + _REPORT_SECONDS - time.monotonic()
            self._report_due = asyncio.get_running_loop().call_later(
                max(0.0, wait), self._report_guard
            )

    def _report_guard(self) -> None:
        self._reported, self._report_due = time.monotonic(), None
        self._found = status.findings(self.guard, time.time())
        self._reporter.report("volumes.guard", self._found)

    # --- what the status page and the admin API ask for

    @property
    def guard_findings(self) -> Sequence[kit.findings.Finding]:
        return tuple(self._found)

    def guard_status(self) -> dict[str, Any]:
        noted = self.guard.in_force.memory.noted
        return status.describe(self.guard) | {"operator_log": list(noted)}

    async def set_mode(self, mode: str, by: str, reason: str) -> dict[str, Any]:
        """``mode``: ``settings`` or a mode. It is in the kernel when this returns, whatever the
        state directory's disk does; ``warnings`` of the answer say what could not be written."""
        guard = self.guard.in_force.settings  # the file may have lost where it is attached
        return await self._acted(await override.set_mode(guard, self._state_dir, mode, by, reason))

    async def detach(self, by: str, reason: str) -> dict[str, Any]:
        guard = self.guard.in_force.settings
        return await self._acted(await override.detach(guard, self._state_dir, by, reason))

    async def _acted(self, done: override.Done) -> dict[str, Any]:
        """Nothing attached: the mode is remembered, and apply attaches the guard."""
        if not done.kept:
            self.guard.in_force.memory.hold(done.override)
        await self.guard.apply(self._settings.guard)
        return self.guard_status() | {"warnings": list(done.warnings)}

    async def probe(self, path: str) -> dict[str, Any]:
        """The verdict on any block device, with what the ledger knows of its volume."""
        device = await asyncio.to_thread(blockdev.by_path, path)
        # By its own name: whoever gave ``path`` may have it lead elsewhere by now.
        found = await self.guard.manager.checks.prober.probe(device.path, device.encrypts)
        return status.describe_probe(device, found, self.guard.executor.ledger.get(device.volume))

    async def accept(self, volume: str, by: str) -> Entry:
        await self._note("accept", by, "", volume=volume)
        return await self.guard.manager.accept(volume, by)

    async def allow_format(self, path: str, volume: str, reason: str, by: str) -> dict[str, Any]:
        if not reason.strip():
            raise kit.errors.RefusedError("allow-format", "no reason is given", "say why")
        await self._note("allow-format", by, reason, device=path, volume=volume)
        device = await self.guard.manager.allow(path, volume, reason, by)
        seconds = self.guard.manager.checks.settings.lease  # of the file, or the last that had one
        return {"device": device.path, "volume": device.volume, "seconds": seconds}

    async def _note(self, action: str, by: str, reason: str, **fields: Any) -> None:
        """An action that cannot be written down is not done."""
        line = await override.note(self._state_dir, action, by, reason, **fields)
        self.guard.in_force.memory.add(line)


def guard_view(guard: controller.Controller) -> GuardView:
    """What the audit's rules ask of the guard."""
    reasons, mode = guard.in_force.problems(), guard.in_force.wanted_mode()
    only_reports = mode is kernel.Mode.DRY_RUN and not reasons
    if mode is not kernel.Mode.ENFORCE:
        reasons.insert(0, f"its mode is {mode}")
    known = list(guard.manager.known.values())
    return GuardView(
        enforcing=not reasons,
        only_reports=only_reports,
        reasons=tuple(reasons),
        mismatches=tuple(
            LedgerMismatch(
                device=each.device.name,
                image=each.device.volume,
                expected=each.changed_from or each.missing,
                seen=str(each.seen),
            )
            for each in known
            # What cannot be read is a finding of the guard: nothing says that it is other content.
            if each.changed_from or (each.missing and not each.doubt.looks)
        ),
        unreadable=tuple(
            each.device.name
            for each in known
            if each.seen is not None
            and each.seen.verdict is Kind.UNREADABLE
            and each.doubt.agreed
            and not each.raw  # its pod may write to it
        ),
        verdicts={each.device.name: str(each.seen.verdict) for each in known if each.seen},
    )
