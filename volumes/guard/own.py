"""Keeps the kernel's table of the node's own devices, and has it judge all others (``scope``).

A disk that appears is judged from its first moment, whoever knows of it: it is not in the table. So
the table is what must be right. A number gets its place in it *before* the devices are read and
counts *after* that; a disk that gets the number in between takes the place away (guard.bpf.c).

Writes to devices that are judged only because of the scope are reported, and none is refused: no
automatic lease knows their volumes yet. What is made of a device of ``drivers`` is guarded like it.
"""

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

import kit.child
import kit.errors
import kit.tasks
from linux import stack
from volumes import settings
from volumes.guard import kernel, record, scope

log = structlog.get_logger("volumes")

READ_SECONDS = 10.0  # for all devices, and for a file of the state directory
ROUND_SECONDS = 300.0  # between two looks when no device is heard of
SETTLE_SECONDS = 0.2  # devices come in crowds


@dataclass(frozen=True)
class LastLook:
    """The last look. ``problem``: why it is not in the kernel; empty: it is."""

    devices: tuple[stack.StackedDevice, ...] = ()
    found: Mapping[str, scope.Judgement] = field(default_factory=dict)
    problem: str = ""


class OwnDevices:
    """``above``: the guarded devices that are made of those of the drivers."""

    def __init__(self, state_dir: Path) -> None:
        self.seen = LastLook()
        self.above: frozenset[kernel.Number] = frozenset()
        self._state_dir = state_dir
        self._known: dict[str, str] | None = None  # what was own at the first attach
        self._wanted = settings.GuardSettings()
        self._guard: kernel.Kernel | None = None
        self._program = 0  # whose tables were filled
        self._lock = asyncio.Lock()
        self._heard = asyncio.Event()
        self._follows: asyncio.Task[None] | None = None

    async def apply(
        self, guard: kernel.Kernel | None, wanted: settings.GuardSettings, program: int
    ) -> None:
        """In the kernel when it returns, or ``seen`` says why not. ``program``: its id there."""
        before = self._guard, self._wanted, self._program
        self._guard, self._wanted, self._program = guard, wanted, program
        if before != (guard, wanted, program) or self.seen.problem:
            await self.look()

    def whose(self, name: str) -> str:
        """Of a device that is judged because of the scope, and why; empty: it is not."""
        new = scope.Judgement(scope.Whose.UNPROVEN, scope.Why.NEW)
        found = self.seen.found.get(name, new)
        by_driver = self._wanted.scope == "ceph" or found.why is scope.Why.DRIVER
        return "" if by_driver else str(found)

    def start(self) -> None:
        self._follows = asyncio.create_task(self._follow(), name="own devices")

    def heard(self) -> None:
        """A device came, changed or went."""
        self._heard.set()

    async def stop(self) -> None:
        await kit.tasks.end(self._follows)
        self._follows = None

    async def _follow(self) -> None:
        while True:
            await kit.tasks.until(self._heard, ROUND_SECONDS)
            self._heard.clear()
            if self._wanted.scope != "ceph":
                await self.look()
            await asyncio.sleep(SETTLE_SECONDS)

    async def look(self) -> None:
        """Read all devices, decide, and bring it to the kernel. After a failure the table stays as
        it is: what was proved own is own until another disk has its number."""
        async with self._lock:
            try:
                self.seen = await self._look()
            except (kit.errors.AgentError, OSError, RuntimeError, ValueError) as error:
                if str(error) != self.seen.problem:
                    log.error("devices of the scope are not judged", error=str(error))
                self.seen = LastLook(self.seen.devices, self.seen.found, str(error))

    async def _look(self) -> LastLook:
        guard, wanted = self._guard, self._wanted
        if guard is None:
            return LastLook()
        if wanted.scope == "ceph":
            await asyncio.to_thread(self._off, guard)
            return LastLook()
        if not guard.ends_with_disk:
            await asyncio.to_thread(self._off, guard)
            raise kit.errors.HostError(
                f"volumes.guard.scope {wanted.scope}",
                f"the kernel does not say when a number passes to a new disk ({guard.no_watch})",
                "mount the host's bpf file system where volumes.guard.pins lies; the kernel needs "
                "CONFIG_BPF_EVENTS",
            )
        await asyncio.to_thread(_reserve, guard)
        known = self._known
        if known is None:
            known = await kit.child.call(
                record.read_own, str(self._state_dir), deadline=READ_SECONDS
            )
        text = await kit.child.call(stack.encoded, "/", known is None, deadline=READ_SECONDS)
        seen = stack.decoded(text)
        if known is None:
            known = scope.first(seen, wanted)
            await kit.child.call(
                record.write_own, str(self._state_dir), known, deadline=READ_SECONDS
            )
            log.info("the node's own devices were written down", devices=len(known))
        self._known = known
        found = scope.decide(seen, wanted, known)
        await asyncio.to_thread(self._bring, guard, seen, found)
        return LastLook(seen.devices, found)

    def _bring(
        self, guard: kernel.Kernel, seen: stack.Stack, found: Mapping[str, scope.Judgement]
    ) -> None:
        before = self.above
        self.above = frozenset(
            device.number
            for device in seen.devices
            if found[device.name].why is scope.Why.DRIVER
            and device.driver not in self._wanted.drivers
        )
        guard.add((), self.above)
        guard.release(before - self.above)
        guard.judge(kernel.Mode.DRY_RUN, table(seen, found))

    def _off(self, guard: kernel.Kernel) -> None:
        """An earlier program judges nothing by a scope."""
        before, self.above = self.above, frozenset()
        with contextlib.suppress(kit.errors.RefusedError, KeyError):
            guard.judge(kernel.Mode.OFF, {})
            guard.release(before)


def _reserve(guard: kernel.Kernel) -> None:
    guard.reserve_own(number for _, number in stack.numbers())


def table(
    seen: stack.Stack, found: Mapping[str, scope.Judgement]
) -> dict[kernel.Number, kernel.Number]:
    """The numbers of the node's own devices, each with that of its disk."""
    numbers = {device.name: device.number for device in seen.devices}
    return {
        device.number: numbers.get(device.below[0], device.number)
        if device.partition
        else device.number
        for device in seen.devices
        if found[device.name].whose is scope.Whose.OWN
    }


def describe(seen: LastLook, wanted: settings.GuardSettings) -> dict[str, Any]:
    """As JSON: each device with a medium, and why it is judged or not."""
    told: dict[str, dict[str, str]] = {str(whose): {} for whose in scope.Whose}
    for device in seen.devices:
        judged = seen.found[device.name]
        if device.size:
            why = f"{judged.why} ({judged.of})" if judged.of else str(judged.why)
            told[str(judged.whose)][device.name] = why
    return {"scope": wanted.scope, "problem": seen.problem, **told}
