"""For kernels that do not take the guard program: two weaker means, each reported as what it is.

Devices that two looks found doubtful are flagged read-only (BLKROSET: a write fails, but any
privileged process can take the flag off), unless they are mounted, stacked on or given to a pod,
where the flag would hit their user. The flags are on disk, and a later agent takes them back. And
the exec filter, a child process, refuses known formatters by name. Both in mode enforce only.
Leases are kept here instead of in the kernel, and end with the agent.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import structlog

import kit.child
import kit.errors
import kit.files
import kit.formats
import kit.line_worker
from linux import blockdev
from volumes import disk
from volumes.guard import events, exec_filter, kernel, steps
from volumes.probe.examine import Kind

log = structlog.get_logger("volumes")

_FLAG_SECONDS = 5.0
_SAVE_SECONDS = 5.0  # for the list of flags; its disk may hang
_RESTART_SECONDS = 10.0
_SILENCE_SECONDS = 60.0  # the child reports after each of its scans, every 10 s


def is_doubtful(known: steps.Known) -> bool:
    """Whether a format would most likely destroy data, and nobody has a right to write."""
    if known.raw or known.seen is None:
        return False
    silent = known.doubt.agreed and known.seen.verdict is not Kind.NO_MEDIA
    return silent or known.seen.verdict is Kind.UNKNOWN_CONTENT or bool(known.missing)


class Flags:
    """Which devices this node's agents have flagged read-only: written down before the flag is set.
    The calls that can hang run in a child."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.attachments: dict[str, int | None] = {}  # device name -> DISKSEQ
        self.unknown = ""  # why it is not known which ones an earlier agent has flagged

    def read(self) -> None:
        """What an earlier agent has flagged. Blocks."""
        found = kit.formats.read(self.file, None, _flagged)
        if isinstance(found, kit.formats.Damage):
            self.unknown = str(found)
            log.error("read-only flags of an earlier agent are not known", error=str(found))
        elif found is not None:
            self.attachments = found

    async def set(self, device: blockdev.BlockDevice) -> None:
        # What others made read-only is not ours to undo.
        if device.name in self.attachments or device.read_only or device.stacked:
            return
        self.attachments[device.name] = device.diskseq
        try:
            await self._save()
            await self._call(device, True)
        except (kit.errors.AgentError, kit.line_worker.ChildError, OSError) as error:
            log.info("device not flagged", device=device.name, why=str(error))  # it is in use
            del self.attachments[device.name]
            with contextlib.suppress(OSError):  # listed and not flagged harms nobody
                await self._save()
        else:
            log.warning("device flagged read-only", device=device.name)

    async def take_back(self, name: str) -> None:
        """OSError leaves it for the next time."""
        device = blockdev.identify(name)
        with contextlib.suppress(kit.errors.AgentError, kit.line_worker.ChildError, OSError):
            if device is not None and device.diskseq == self.attachments[name]:
                await self._call(device, False)
            del self.attachments[name]
            await self._save()

    async def clear(self) -> None:
        for name in list(self.attachments):
            await self.take_back(name)

    async def _call(self, device: blockdev.BlockDevice, flag: bool) -> None:
        await kit.child.call(
            _set_flag, device.path, list(device.number), flag, deadline=_FLAG_SECONDS
        )

    async def _save(self) -> None:
        """OSError or TimeoutError: it may not be on disk."""
        text = json.dumps(self.attachments).encode()
        async with asyncio.timeout(_SAVE_SECONDS):
            await disk.STATE.call(kit.files.save, self.file, text)


def _flagged(value: Any) -> dict[str, int | None]:
    if any(not isinstance(each, int | None) for each in value.values()):
        raise ValueError("a DISKSEQ is no number")
    return dict(value)


def _set_flag(path: str, number: list[int], flag: bool) -> None:
    """In a child. Only a device that nobody has mounted or claimed is flagged."""
    blockdev.set_read_only(path, (number[0], number[1]), flag, claim=flag)


class Fallback:
    """``denied`` is called with each refusal. ``cgroup``: from the hierarchy's root."""

    def __init__(
        self, denied: Callable[[events.Event, None], None], cgroup: str, flags: Flags
    ) -> None:
        self._denied = denied
        self._cgroup = cgroup
        self._majors: frozenset[int] = frozenset()
        self._leases: dict[kernel.Number, kernel.Lease] = {}
        self._changed = asyncio.Event()
        self._worker = kit.line_worker.Worker(
            "volumes.guard.exec_filter:main", exec_filter.Report, about="the exec filter"
        )
        self._tasks: list[asyncio.Task[None]] = []
        self.flags = flags
        self.exec_guard = False
        self.undecided = 0  # executions that were let through because nothing answered in time

    # --- leases, as the kernel keeps them elsewhere

    def reserve(self, number: kernel.Number, diskseq: int | None) -> None:
        pass

    def grant(
        self, number: kernel.Number, until: float, diskseq: int | None, grace: float = 0.0
    ) -> None:
        # Opens are not counted, so each lease counts as used. All of it ends with the agent.
        self._leases[number] = kernel.Lease(until, 1, diskseq or 0)
        self._changed.set()

    def beat(self) -> None:
        pass

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
        self._majors = majors
        self._changed.set()
        if mode is not kernel.Mode.ENFORCE:
            await self._end_filter()
            await self.flags.clear()
            return
        if not self._tasks:
            self._tasks = [
                asyncio.create_task(self._listen(), name="exec filter"),
                asyncio.create_task(self._send(), name="exec filter settings"),
            ]
        by_name = {each.device.name: each for each in known}
        for each in by_name.values():
            if is_doubtful(each) and each.device.number not in self._leases:
                await self.flags.set(each.device)
        for name in list(self.flags.attachments):
            found = by_name.get(name)
            if found is None or not is_doubtful(found) or found.device.number in self._leases:
                await self.flags.take_back(name)

    # --- the exec filter

    def _config(self) -> exec_filter.Config:
        leases = tuple(exec_filter.Lease(n, held.until) for n, held in self._leases.items())
        return exec_filter.Config(tuple(sorted(self._majors)), self._cgroup, leases)

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
                    if report.undecided:
                        self.undecided += report.undecided
                        log.warning("exec filter: no decision in time", times=report.undecided)
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
            "let_through_undecided": self.undecided,
            "flagged_read_only": sorted(self.flags.attachments),
        }

    async def close(self) -> None:
        """The flags stay: the next agent takes them back, or keeps them."""
        await self._end_filter()

    async def _end_filter(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        self.exec_guard = False
        await self._worker.close()


def _event(refusal: exec_filter.Refusal) -> events.Event:
    return events.Event(
        time=time.monotonic(),
        cgroup=0,
        pid=refusal.tid,
        parent_pid=0,
        number=refusal.number,
        denied=True,
        program=Path(refusal.words[0]).name,
        parent="",
        arguments=refusal.words,
    )
