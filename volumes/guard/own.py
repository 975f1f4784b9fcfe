"""Keeps the kernel's table of the node's own devices, and has it judge all others (``scope``).

A disk that appears is judged from its first moment, whoever knows of it: it is not in the table. So
the table is what must be right. A number gets its place in it *before* the devices are read and
counts *after* that; a disk that gets the number in between takes the place away (guard.bpf.c).

Writes to devices that are judged only because of the scope are reported, and none is refused: no
automatic lease knows their volumes yet. So is a loop device or an array on one of ``drivers``: what
the guard refuses is no matter of the scope (``in_force``).
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

import kit.child
import kit.errors
import kit.pause
import kit.tasks
from linux import stack
from volumes import settings
from volumes.guard import kernel, record, scope

log = structlog.get_logger("volumes")

READ_SECONDS = 10.0  # for all devices, and for a file of the state directory
FIRST_SECONDS = 60.0  # for the first look, which reads what each process has open
# After a boot: what uses the node's disks may start later than an agent, and the file is for ever.
BOOT_SECONDS = 600.0
ROUND_SECONDS = 300.0  # between two looks when no device is heard of
SETTLE_SECONDS = 2.0  # devices come in crowds, and a look at a thousand takes a third of a second


@dataclass(frozen=True)
class LastLook:
    """The last look. ``problem``: why it is not in the kernel; empty: it is, or none was made."""

    devices: tuple[stack.StackedDevice, ...] = ()
    found: Mapping[str, scope.Judgement] = field(default_factory=dict)
    problem: str = ""


class OwnDevices:
    """``writes``: whether it writes down what is own. A command at boot or in a container may see
    too little of the node, and nothing is judged before an agent saw all of it. ``looked``: called
    after a look that is in the kernel. Until ``BOOT_SECONDS`` after a boot each look finds it anew.
    """

    def __init__(self, state_dir: Path, writes: bool = True) -> None:
        self.seen = LastLook()
        self.judged = False  # the kernel had a scope: its reports may come later than its end
        self.looked: Callable[[LastLook], None] = lambda _: None
        self._writes = writes
        self._state_dir = state_dir
        self._known: dict[str, str] | None = None  # what was own at the first attach
        self._wanted = settings.GuardSettings()
        self._guard: kernel.Kernel | None = None
        self._program = 0  # whose tables were filled
        self._lock = asyncio.Lock()
        self._heard = asyncio.Event()
        self._due = True  # the kernel does not have what these settings want, as far as is known
        self._follows: asyncio.Task[None] | None = None

    def apply(
        self, guard: kernel.Kernel | None, wanted: settings.GuardSettings, program: int
    ) -> None:
        """The next look brings it to the kernel. ``program``: its id there."""
        before = self._guard, self._wanted, self._program
        self._guard, self._wanted, self._program = guard, wanted, program
        if before != (guard, wanted, program):
            self._due = True
            self._heard.set()

    def whose(self, name: str) -> str:
        """Of a device that the kernel judged because of the scope, and why."""
        new = scope.Judgement(scope.Whose.UNPROVEN, scope.Why.NEW)
        found = self.seen.found.get(name, new)
        # What was own went, or the kernel would not have judged it.
        return str(new if found.whose is scope.Whose.OWN else found)

    def start(self) -> None:
        self._follows = asyncio.create_task(self._follow(), name="own devices")

    def heard(self) -> None:
        """A device came, changed or went."""
        self._heard.set()

    async def stop(self) -> None:
        await kit.tasks.end(self._follows)
        self._follows = None

    async def _follow(self) -> None:
        failed = kit.pause.Backoff()
        while True:
            await kit.tasks.until(self._heard, ROUND_SECONDS)
            self._heard.clear()
            if self._due or self._wanted.scope != "ceph":
                await self.look()
            if self.seen.problem:  # it may have taken all its time
                self._heard.set()
                await asyncio.sleep(failed.next())
            else:
                failed.reset()
                await asyncio.sleep(SETTLE_SECONDS)

    async def look(self) -> None:
        """Read all devices, decide, and bring it to the kernel. After a failure the table stays as
        it is: what was proved own is own until another disk has its number."""
        async with self._lock:
            self._due = False
            try:
                self.seen = await self._look()
                self.looked(self.seen)
            except Exception as error:  # the guard of the drivers goes on, whatever it is
                known = isinstance(error, kit.errors.AgentError | OSError | RuntimeError)
                problem = str(error) if known else repr(error)
                if problem != self.seen.problem:
                    text = "devices of the scope are not judged"
                    log.error(text, error=problem, exc_info=not known)
                self.seen = LastLook(self.seen.devices, self.seen.found, problem)
                self._due = True

    async def _look(self) -> LastLook:
        guard, wanted = self._guard, self._wanted
        if guard is None:
            return LastLook()
        if wanted.scope == "ceph":
            await asyncio.to_thread(off, guard)
            return LastLook()
        if not guard.ends_with_disk:
            await asyncio.to_thread(off, guard)
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
        if known is None and not self._writes:
            return LastLook()
        seconds = FIRST_SECONDS if known is None else READ_SECONDS
        text = await kit.child.call(stack.encoded, "/", known is None, deadline=seconds)
        seen = stack.decoded(text)
        if known is None:
            known = await asyncio.to_thread(scope.first, seen, wanted)
            if time.clock_gettime(time.CLOCK_BOOTTIME) >= BOOT_SECONDS:
                await kit.child.call(
                    record.write_own, str(self._state_dir), known, deadline=READ_SECONDS
                )
                log.info("the node's own devices were written down", devices=len(known))
                self._known = known
        else:
            self._known = known
        # In a thread: a thousand disks and many patterns take more than a second.
        found = await asyncio.to_thread(scope.decide, seen, wanted, known)
        if self._wanted.scope != "ceph":  # it may have been switched off meanwhile
            await asyncio.to_thread(guard.judge, kernel.Mode.DRY_RUN, table(seen, found))
        return LastLook(seen.devices, found)


def off(guard: kernel.Kernel) -> None:
    """An earlier program judges nothing by a scope."""
    with contextlib.suppress(kit.errors.RefusedError, KeyError):
        guard.judge(kernel.Mode.OFF, {})


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
