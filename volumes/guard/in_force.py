"""Keeps the kernel at what the settings and operators say, and proves by attempts that it is so.

What is attached stays attached when the agent stops.
"""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

import structlog

import kit.errors
from linux import blockdev
from volumes import settings
from volumes.guard import canary, kernel, override, own

log = structlog.get_logger("volumes")

UNPROVED_SECONDS = 60.0  # until the next attempt after one that told nothing
PROOF_SECONDS = 600.0  # at once when another program or mode is in the kernel


class InForce:
    """``guard``: None until its cgroup is found. ``present``: what the kernel has; None: nobody has
    looked. ``devices``: all devices of the node."""

    def __init__(
        self, wanted: settings.GuardSettings, state_dir: Path, devices: blockdev.Known
    ) -> None:
        self.settings = wanted
        self.guard: kernel.Kernel | None = None
        self.present: kernel.Present | None = None
        self.unsupported = ""  # why this kernel does not take the program
        self.proof = "unknown: not tried yet"
        self.proof_tried = False
        self.memory = override.Memory(state_dir)
        self.own = own.OwnDevices(state_dir)
        self.came_late = 0  # devices that were there before anything guarded them
        self._state_dir = state_dir
        self._devices = devices
        self._applied = False  # this agent's program and maps are in the kernel
        self._proved = -1e9
        self._majors: frozenset[int] = frozenset()
        self.parts: frozenset[kernel.Number] = frozenset()  # guarded, whatever their majors

    # --- the kernel

    def wanted_mode(self) -> kernel.Mode:
        return self.memory.mode(self.settings)

    def problems(self) -> list[str]:
        """Why the guard is not in force as wanted; empty: it is."""
        found = self.of_kernel()
        wanted = self.wanted_mode()
        expected = "enforced" if wanted is kernel.Mode.ENFORCE else "let through"
        proved = self.proof == expected or self.proof.startswith("unknown")
        if not self.unsupported and not proved:
            found.append(f"an attempt in the guarded cgroup was {self.proof}, not {expected}")
        return found

    def of_kernel(self) -> list[str]:
        """Why the kernel does not have what is wanted; no attempt proves it."""
        found = []
        wanted = self.wanted_mode()
        if self.unsupported and wanted is not kernel.Mode.OFF:
            found.append(f"the guard is not attached: {self.unsupported}")
        elif self.present is None or self.present.mode is not wanted:
            found.append(f"the guard is not in mode {wanted}")
        return found

    @property
    def looked(self) -> bool:
        """Whether it is known what is attached in the kernel, or why that cannot be known."""
        return self.present is not None or bool(self.unsupported)

    async def recall(self, wanted: settings.GuardSettings) -> settings.GuardSettings:
        """The settings that count from now on, by what operators and earlier settings said."""
        await self.memory.refresh(wanted, self._found_mode if self.present is None else None)
        self.settings = self.memory.in_force(wanted)
        return self.settings

    async def attach(self) -> kernel.Kernel | None:
        """Bring the kernel to the settings and an operator's override. None when nothing is
        attached then."""
        if self.present is None:  # what came while there was no agent
            self._majors = self._wanted().majors
            self.parts = self.stacked(await asyncio.to_thread(self._devices.all))
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
        if self.present is None:
            return None
        if (
            before is None
            or before.mode != self.present.mode
            or [p.id for p in before.programs] != [p.id for p in self.present.programs]
        ):
            self._proved = -1e9
            log.info(
                "format guard", mode=str(self.present.mode), attached=self.present.attached,
                programs=[p.id for p in self.present.programs], majors=sorted(self.present.majors),
            )  # fmt: skip
        guard = self.guard if self.present.attached else None
        program = self.present.programs[0].id if guard is not None else 0
        self.own.apply(guard, self.settings, program)
        return guard

    async def prove(self) -> None:
        """By an attempt, where one is due."""
        now = time.monotonic()
        again = PROOF_SECONDS if self.proof in canary.PROOFS else UNPROVED_SECONDS
        if self.guard is not None and now - self._proved >= again:
            self._proved = now
            root = kernel.is_root_cgroup(self.guard.cgroup)
            self.proof = await canary.prove(self.guard.cgroup, root, self._state_dir)
            self.proof_tried = True

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
        self.own.judged |= present.judges is not kernel.Mode.OFF or self.settings.scope != "ceph"
        if present.judges is not kernel.Mode.OFF and self.settings.scope == "ceph":
            own.off(guard)
        wanted = self._wanted(present)
        if not self._applied and not present.attached:
            self.came_late = sum(map(self.is_volume, self._devices.all()))
        if wanted.mode is kernel.Mode.OFF:
            return guard.apply(wanted) if present.attached else present
        if not self._applied or not present.attached or len(present.programs) != 1:
            return guard.apply(wanted)
        if not present.pinned:
            guard.repin()
        if not present.is_as(wanted):
            kernel.fill(guard.maps, wanted)
        return guard.read()

    def _wanted(self, present: kernel.Present | None = None) -> kernel.Wanted:
        """``present``: what the kernel has now."""
        new = kernel.wanted(self.settings, self.wanted_mode(), blockdev.majors(), self.parts)
        if self.memory.lost and present is not None:
            new = kernel.at_least(new, present)
        self._majors = new.majors
        return new

    # --- devices

    def is_volume(self, device: blockdev.BlockDevice) -> bool:
        return not device.parent and bool(device.size) and self.settings.examines(device)

    def is_guarded(self, device: blockdev.BlockDevice) -> bool:
        """By its driver, or because it lies on such a device."""
        return device.driver in self.settings.drivers or any(map(self.is_guarded, device.below))

    def whose(self, number: kernel.Number, name: str, device: blockdev.BlockDevice | None) -> str:
        """What the scope says of a device that only it judges; empty: it is guarded. None: it went
        already."""
        by_driver = number[0] in self._majors or number in self.parts
        by_driver = by_driver or (device is not None and self.is_guarded(device))
        return self.own.whose(name) if self.own.judged and not by_driver else ""

    def cover(self, device: blockdev.BlockDevice) -> None:
        """Guard the number of a driver that was loaded just now, of a partition with an extended
        major or of a device on top of a guarded one, before anybody can use it."""
        if (
            device.number[0] in self._majors
            or self.guard is None
            or "majors" not in self.guard.maps
        ):
            return
        self.parts |= self._of_its_own(device)
        new = self._wanted()
        with contextlib.suppress(OSError, kit.errors.RefusedError):
            self.guard.add(new.majors, new.devices)

    def _of_its_own(self, device: blockdev.BlockDevice) -> frozenset[kernel.Number]:
        """Its number, if it is guarded and its major says nothing about that."""
        with_parent = device.parent and blockdev.majors().get(device.number[0]) == "blkext"
        above = device.below and self.is_guarded(device)
        return frozenset({device.number}) if with_parent or above else frozenset()

    def stacked(self, there: Sequence[blockdev.BlockDevice]) -> frozenset[kernel.Number]:
        """The guarded numbers whose majors say nothing. Others that the kernel guards are released,
        but not a mapping that was made a moment ago: it does not show yet what it lies on."""
        found: set[kernel.Number] = set()
        young: set[kernel.Number] = set()
        for device in there:
            if self.is_guarded(device):
                found |= self._of_its_own(device)
            elif device.driver == "device-mapper" and not device.below:
                young.add(device.number)
        # While the last settings are lost, devices of drivers that they named look like others.
        if self.guard is not None and self.present is not None and not self.memory.lost:
            stale = self.present.devices - found - young - self.parts
            self.guard.release(stale)
        return frozenset(found)
