"""The volumes room as the process sees it: the format guard, and beside it the audit."""

import asyncio
import dataclasses
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from prometheus_client.core import Metric

import kit.errors
import kit.findings
import kit.room
from volumes import devices, settings
from volumes.audit import joint
from volumes.guard import journal, keeper, report, switch
from volumes.ledger import entry
from volumes.probe import verdict

_ALIVE_SECONDS = 120.0  # a reconcile takes milliseconds; a loop that stands this long is dead
# Bound to what was made of them at the start.
_FIXED = ("cgroup", "pins", "object_file", "clusters", "cluster_timeout")


class Volumes:
    name = "volumes"

    def __init__(
        self,
        wanted: settings.VolumesSettings,
        *,
        state_dir: Path,
        reporter: kit.findings.Reporter,
    ) -> None:
        self._settings = wanted
        self._state_dir = state_dir
        self.guard = keeper.Keeper(wanted.guard, state_dir=state_dir, reporter=reporter)
        self.audit = joint.build(wanted, self.guard, state_dir, reporter)
        self._advanced = time.monotonic()

    async def start(self) -> None:
        await self.guard.start()
        await joint.start(self.audit)

    async def reconcile(self, wanted: settings.VolumesSettings) -> Sequence[str]:
        before = self._settings.guard
        refused = [f"guard.{n}" for n in _FIXED if getattr(wanted.guard, n) != getattr(before, n)]
        keep = {name: getattr(before, name) for name in _FIXED}
        self._settings = wanted.model_copy(update={"guard": wanted.guard.model_copy(update=keep)})
        await self.guard.apply(self._settings.guard)
        refused += await joint.reconcile(self.audit, self._settings)
        self._advanced = time.monotonic()
        return refused

    async def stop(self) -> None:
        await joint.stop(self.audit)
        await self.guard.stop()

    def health(self) -> kit.room.Health:
        reasons = report.reasons(self.guard) + joint.reasons(self.audit)
        return kit.room.Health(
            alive=time.monotonic() - self._advanced < _ALIVE_SECONDS and joint.alive(self.audit),
            ready=not reasons,
            reasons=tuple(reasons),
        )

    def metrics(self) -> Iterable[Metric]:
        yield from report.metrics(self.guard)
        yield from joint.metrics(self.audit)

    # --- what the admin API asks for

    def guard_status(self) -> dict[str, Any]:
        return self.guard.status() | {"operator_log": journal.last(self._state_dir)}

    async def set_mode(self, mode: str, by: str, reason: str) -> dict[str, Any]:
        """``settings`` or a mode; in the kernel when it returns."""
        await self._note("set-mode", by, reason, mode=mode)
        guard = self._settings.guard
        try:
            await asyncio.to_thread(switch.set_mode, guard, self._state_dir, mode, by, reason)
        except kit.errors.RefusedError:
            pass  # nothing attached: remembered, and the next lines attach it
        await self.guard.apply(guard)
        return self.guard_status()

    async def detach(self, by: str, reason: str) -> dict[str, Any]:
        guard = self._settings.guard
        await asyncio.to_thread(switch.detach, guard, self._state_dir, by, reason)
        await self._note("detach", by, reason)
        await self.guard.apply(guard)
        return self.guard_status()

    async def probe(self, path: str) -> dict[str, Any]:
        """The verdict on any block device, with what the ledger knows of its volume."""
        device = await asyncio.to_thread(devices.by_path, path)
        found = await self.guard.judge.prober.probe(path)
        return describe_probe(device, found, self.guard.ledger.get(device.volume))

    def ledger(self) -> list[dict[str, Any]]:
        return [dataclasses.asdict(each) for each in self.guard.ledger.entries()]

    async def accept(self, volume: str, by: str) -> dict[str, Any]:
        await self._note("accept", by, "", volume=volume)
        return dataclasses.asdict(await self.guard.judge.accept(volume, by))

    async def allow_format(self, path: str, volume: str, reason: str, by: str) -> dict[str, Any]:
        if not reason.strip():
            raise kit.errors.RefusedError("allow-format", "no reason is given", "say why")
        await self._note("allow-format", by, reason, device=path, volume=volume)
        device = await self.guard.judge.allow(path, volume, reason, by)
        seconds = self._settings.guard.lease
        return {"device": device.path, "volume": device.volume, "seconds": seconds}

    async def _note(self, action: str, by: str, reason: str, **fields: Any) -> None:
        try:
            await asyncio.to_thread(journal.append, self._state_dir, action, by, reason, **fields)
        except OSError as error:
            raise kit.errors.HostError(
                str(journal.path(self._state_dir)), str(error.strerror), "make it writable"
            ) from error


def describe_probe(
    device: devices.BlockDevice, found: verdict.Verdict, known: entry.Entry | None
) -> dict[str, Any]:
    """A probe's answer as JSON."""
    return {
        **found.as_json(),
        "device": device.path,
        "driver": device.driver,
        "volume": device.volume,
        "title": device.title,
        "ledger": None if known is None else dataclasses.asdict(known),
    }
