"""For kernels that do not take the guard program: two weaker means, each named as what it is.

Devices that hold something unreadable are flagged read-only (BLKROSET: the write fails, but any
privileged process can take the flag off), and the exec guard refuses known formatters by name.
"""

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import structlog

from linux import blockdev
from volumes.guard import kernel, lease_manager
from volumes.probe.examine import Kind

log = structlog.get_logger("volumes")

_SCRIPT = Path(__file__).with_name("exec_filter.py")
_FLAGGED_FOR = frozenset({Kind.UNREADABLE, Kind.TIMEOUT, Kind.UNKNOWN_CONTENT})
_RESTART_SECONDS = 10.0


class Fallback:
    """Leases kept here instead of in the kernel: they end with the agent."""

    def __init__(self, denied: Callable[[kernel.Event, None], None], cgroup: str) -> None:
        self._denied = denied
        self._cgroup = cgroup  # from the hierarchy's root; "/" for all processes
        self._leases: dict[kernel.Number, kernel.Lease] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._not_before = 0.0
        self._config: dict[str, Any] = {}
        self.flagged: dict[str, blockdev.BlockDevice] = {}
        self.exec_guard = False

    # --- as the judge sees leases

    def grant(self, number: kernel.Number, until: float, diskseq: int | None) -> None:
        # Opens are not counted, so each lease counts as used.
        self._leases[number] = kernel.Lease(until, 1, diskseq or 0)
        self._send()

    def revoke(self, number: kernel.Number) -> kernel.Lease | None:
        held = self._leases.pop(number, None)
        self._send()
        return held

    def leases(self) -> dict[kernel.Number, kernel.Lease]:
        return dict(self._leases)

    # --- the two means

    async def apply(
        self, mode: kernel.Mode, majors: frozenset[int], known: Iterable[lease_manager.Known]
    ) -> None:
        self._config = {
            "mode": str(mode),
            "majors": sorted(majors),
            "cgroup": self._cgroup,
        }
        await self._keep_running()
        self._send()
        if mode is kernel.Mode.ENFORCE:
            for each in known:
                self._flag(each)
        else:
            self._unflag_all()

    def _flag(self, known: lease_manager.Known) -> None:
        device = known.device
        flagged = self.flagged.get(device.name)
        doubtful = known.seen is not None and known.seen.verdict in _FLAGGED_FOR
        doubtful = doubtful or bool(known.missing)
        leased = device.number in self._leases
        with contextlib.suppress(OSError):
            if doubtful and not leased and not device.holders and flagged is None:
                if not device.read_only:  # what others made read-only is not ours to undo
                    blockdev.set_read_only(device.path, device.number)
                    self.flagged[device.name] = device
                    log.warning("device flagged read-only", device=device.name)
            elif flagged is not None and (leased or not doubtful):
                self._unflag(device.name)

    def _unflag(self, name: str) -> None:
        device = self.flagged.pop(name, None)
        now = blockdev.identify(name)
        if device is not None and now is not None and now.attachment == device.attachment:
            with contextlib.suppress(OSError):
                blockdev.set_read_only(device.path, device.number, False, claim=False)

    def _unflag_all(self) -> None:
        for name in list(self.flagged):
            self._unflag(name)

    async def _keep_running(self) -> None:
        if self._process is not None and self._process.returncode is None:
            return
        if time.monotonic() < self._not_before:
            return
        self._not_before = time.monotonic() + _RESTART_SECONDS
        self.exec_guard = False
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-S", "-E", str(_SCRIPT)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        self._reader = asyncio.create_task(self._listen(self._process), name="exec guard")

    async def _listen(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            told = json.loads(line)
            if "ready" in told:
                self.exec_guard = True
                continue
            number = (told["number"][0], told["number"][1])
            event = kernel.Event(
                time.monotonic(), 0, told["tid"], 0, number, told["denied"],
                Path(told["words"][0]).name, "", tuple(told["words"]),
            )  # fmt: skip
            self._denied(event, None)
        self.exec_guard = False

    def _send(self) -> None:
        if self._process is None or self._process.stdin is None or not self._config:
            return
        leases = {f"{n[0]}:{n[1]}": held.until for n, held in self._leases.items()}
        with contextlib.suppress(OSError, RuntimeError):
            self._process.stdin.write(
                json.dumps({**self._config, "leases": leases}).encode() + b"\n"
            )

    def status(self) -> dict[str, Any]:
        return {
            "exec_guard": "watches known formatters by name; ends with the agent"
            if self.exec_guard
            else "not running",
            "flagged_read_only": sorted(self.flagged),
        }

    async def close(self) -> None:
        self._unflag_all()
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
