"""For kernels that do not take the guard program: two weaker means, each reported as what it is.

Devices with unreadable or unknown content are flagged read-only (BLKROSET: a write fails, but any
privileged process can take the flag off), unless they are mounted, where the flag would hit their
user. And the exec filter, a child process, refuses known formatters by name. Leases are kept here
instead of in the kernel, and end with the agent.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import structlog

import kit.errors
import kit.line_worker
from linux import blockdev
from volumes.guard import exec_filter, kernel, steps
from volumes.probe.examine import Kind

log = structlog.get_logger("volumes")

_FLAGGED_FOR = frozenset({Kind.UNREADABLE, Kind.TIMEOUT, Kind.UNKNOWN_CONTENT})
_RESTART_SECONDS = 10.0
_SILENCE_SECONDS = 60.0  # the child reports after each of its scans, every 10 s


class Fallback:
    """``denied`` is called with each refusal. ``cgroup``: from the hierarchy's root."""

    def __init__(self, denied: Callable[[kernel.Event, None], None], cgroup: str) -> None:
        self._denied = denied
        self._cgroup = cgroup
        self._mode = kernel.Mode.OFF
        self._majors: frozenset[int] = frozenset()
        self._leases: dict[kernel.Number, kernel.Lease] = {}
        self._changed = asyncio.Event()
        self._worker = kit.line_worker.Worker(
            "volumes.guard.exec_filter:main", exec_filter.Report, about="the exec filter"
        )
        self._tasks: list[asyncio.Task[None]] = []
        self.flagged: dict[str, blockdev.BlockDevice] = {}
        self.exec_guard = False

    # --- leases, as the kernel keeps them elsewhere

    def reserve(self, number: kernel.Number, diskseq: int | None) -> None:
        pass

    def grant(self, number: kernel.Number, until: float, diskseq: int | None) -> None:
        # Opens are not counted, so each lease counts as used.
        self._leases[number] = kernel.Lease(until, 1, diskseq or 0)
        self._changed.set()

    def revoke(self, number: kernel.Number) -> kernel.Lease | None:
        self._changed.set()
        return self._leases.pop(number, None)

    def leases(self) -> dict[kernel.Number, kernel.Lease]:
        return dict(self._leases)

    @property
    def ends_with_disk(self) -> bool:
        return False

    # --- read-only flags

    async def apply(
        self, mode: kernel.Mode, majors: frozenset[int], known: Iterable[steps.Known]
    ) -> None:
        self._mode, self._majors = mode, majors
        self._changed.set()
        if not self._tasks:
            self._tasks = [
                asyncio.create_task(self._listen(), name="exec filter"),
                asyncio.create_task(self._send(), name="exec filter settings"),
            ]
        if mode is kernel.Mode.ENFORCE:
            for each in known:
                self._flag(each)
        else:
            self._unflag_all()

    def _flag(self, known: steps.Known) -> None:
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

    # --- the exec filter

    def _config(self) -> exec_filter.Config:
        leases = tuple(exec_filter.Lease(n, held.until) for n, held in self._leases.items())
        return exec_filter.Config(
            str(self._mode), tuple(sorted(self._majors)), self._cgroup, leases
        )

    async def _send(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self._worker.send(self._config())

    async def _listen(self) -> None:
        while True:
            try:
                async for report in self._worker.listen(self._config(), _SILENCE_SECONDS):
                    self.exec_guard = True
                    if report.refusal is not None:
                        self._denied(_event(report.refusal), None)
            except (
                kit.errors.AgentError,
                OSError,
                ValueError,
                kit.line_worker.ChildError,
            ) as error:
                log.warning("exec filter ended", error=str(error))
            self.exec_guard = False
            await asyncio.sleep(_RESTART_SECONDS)

    def status(self) -> dict[str, Any]:
        return {
            "exec_guard": "watches known formatters by name; ends with the agent"
            if self.exec_guard
            else "not running",
            "flagged_read_only": sorted(self.flagged),
        }

    async def close(self) -> None:
        self._unflag_all()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._worker.close()


def _event(refusal: exec_filter.Refusal) -> kernel.Event:
    return kernel.Event(
        time=time.monotonic(),
        cgroup=0,
        pid=refusal.tid,
        parent_pid=0,
        number=refusal.number,
        denied=refusal.denied,
        program=Path(refusal.words[0]).name,
        parent="",
        arguments=refusal.words,
    )
