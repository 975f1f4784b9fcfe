"""What the guard would have done with each write that it only reports because of the scope.

An operator asks for it before he lets the guard refuse such writes, so it outlives agents. Whether
a device would have got a lease depends on what it held *before* the write. So devices that the
scope judges are probed when they appear. What was found blank counts for a while, and until the
first write to that attachment: what follows that, nobody reports.

Writes that a lease or a look would have let pass are one row of a program, for a node has thousands
of new volumes; those that would have been refused are a row of a device and a program.
"""

import asyncio
import dataclasses
import functools
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

import kit.child
import kit.errors
import kit.tasks
from linux import blockdev, stack
from volumes.guard import lease, record, rehearsal_rows, scope
from volumes.guard.denials import Denial, Denials
from volumes.guard.rehearsal_rows import MOST_ROWS, Row, Rows, Would
from volumes.probe import prober
from volumes.probe.examine import Kind, Verdict

log = structlog.get_logger("volumes")

OLD_SECONDS = 30 * 86400.0  # a row goes so long after its last write
MOST_PROBES = 2  # of such devices at a time: nobody waits for one
BLANK_SECONDS = 600.0  # for which a device that was blank is taken to be so
WRITTEN_SECONDS = 5.0  # from a write until its device is probed: many formatters have ended
AGAIN_SECONDS = 240.0  # until a device that was blank, or gave no answer, is probed again
SAME_SECONDS = 60.0  # in which a program's opens of a device are one write: formatters open often
READ_SECONDS = 5.0  # for the first read of a device
SAVE_SECONDS = 60.0  # between two writes of the file
WRITE_SECONDS = 10.0  # for one; the state directory's disk may hang
LAST_SECONDS = 2.0  # for the one at the end


def title(device: stack.StackedDevice) -> str:
    links = [link.replace("/", ":", 1) for link in device.links]
    return device.mapping or device.backing or next(iter(links), "") or device.model


def row(denial: Denial, title: str, held: Verdict | None) -> Row:
    """``held``: what the device held before; None: nobody had looked."""
    would = Would.REFUSE
    if held is None:
        would = Would.LOOK
    elif held.verdict is Kind.BLANK_VERIFIED:
        would = Would.LEASE
    return Row(
        would, denial.device, title, denial.whose, str(held or ""), denial.program,
        denial.command, denial.pod, denial.at, denial.at, denial.count,
    )  # fmt: skip


@dataclass(frozen=True)
class KnownContent:
    """What an attachment held. ``at``: CLOCK_MONOTONIC of the probe's begin."""

    attachment: lease.Attachment
    verdict: Verdict
    at: float

    def held(self, now: float) -> Verdict | None:
        """None: too long ago."""
        blank = self.verdict.verdict is Kind.BLANK_VERIFIED
        return None if blank and now - self.at > BLANK_SECONDS else self.verdict

    def is_due(self, now: float) -> bool:
        """What is there stays there; what was not may come without a word."""
        lasts = self.verdict.has_content or self.verdict.verdict is Kind.UNKNOWN_CONTENT
        return not lasts and now - self.at > AGAIN_SECONDS


@dataclass(frozen=True)
class LastWrite:
    """The last write to a device. ``at``: CLOCK_MONOTONIC."""

    attachment: lease.Attachment | None
    program: str
    pid: int
    at: float

    def goes_on(self, later: "LastWrite") -> bool:
        """Whether the later one is the same write."""
        same = dataclasses.replace(later, at=self.at) == self
        return same and later.at - self.at <= SAME_SECONDS


class Rehearsal:
    """``denials``: of such writes, apart from those of what the guard refuses: many of these never
    push out one of those. ``rows`` None: the file is not read yet."""

    def __init__(self, state_dir: Path, probing: prober.Prober) -> None:
        self.denials = Denials()
        self.rows: Rows | None = None
        self.problem = "the file of an earlier agent is not read yet"
        self._state_dir = state_dir
        self._prober = probing
        self._seen: dict[str, KnownContent] = {}
        self._writers: dict[str, LastWrite] = {}
        self._titles: dict[str, str] = {}
        self._raw: frozenset[str] = frozenset()  # names of published raw block volumes
        self._slots = asyncio.Semaphore(MOST_PROBES)
        self._probes: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._saves: asyncio.Task[None] | None = None
        self._early: list[Row] = []  # before the file was read

    def start(self) -> None:
        self._saves = asyncio.create_task(self._save(), name="rehearsal of the scope")

    async def stop(self) -> None:
        await kit.tasks.end(self._saves, *self._probes.values())
        if self._changed.is_set():
            await self._write(LAST_SECONDS)

    def end(self) -> None:
        """There is no scope any more: what is written from now on, nobody reports."""
        self._seen.clear()
        for task in self._probes.values():
            task.cancel()

    def meet(
        self,
        devices: tuple[stack.StackedDevice, ...],
        found: Mapping[str, scope.Judgement],
        raw_block: bool,
    ) -> None:
        """The devices of the node and whose they are, by a look: probe those that are new. What
        others lie on is left alone: a path of a multipath device may not answer. ``raw_block``: the
        guard permits writes to published raw block volumes."""
        below = {lower for device in devices for lower in device.below if not device.partition}
        self._raw = frozenset(
            name for name, judged in found.items()
            if raw_block and judged.why is scope.Why.KUBELET and scope.RAW_BLOCK in judged.of
        )  # fmt: skip
        judged = {
            device.name
            for device in devices
            if device.size and device.name not in below | self._raw
            and found[device.name].whose is not scope.Whose.OWN
            and found[device.name].why is not scope.Why.DRIVER  # of those the guard keeps a state
        }  # fmt: skip
        for name in self._seen.keys() - judged:
            del self._seen[name]
        for name in judged - self._probes.keys():
            self._look(name)
        self._titles = {device.name: title(device) for device in devices}
        for name in self._writers.keys() - self._titles.keys():
            del self._writers[name]
        if self.rows is not None:
            own = {
                (device.name, title(device)) for device in devices
                if found[device.name].whose is scope.Whose.OWN
            }  # fmt: skip
            self.rows.drop(own, time.time() - OLD_SECONDS)
            if not self.rows.since:
                self.rows.since = time.time()
                self._changed.set()

    def _look(self, name: str, after: float = 0.0) -> None:
        task = asyncio.create_task(self._probe(name, after), name=f"rehearsal {name}")
        self._probes[name] = task
        task.add_done_callback(functools.partial(self._ended, name))

    def _ended(self, name: str, _: asyncio.Task[None]) -> None:
        del self._probes[name]

    async def _probe(self, name: str, after: float) -> None:
        await asyncio.sleep(after)
        async with self._slots:
            device = await asyncio.to_thread(blockdev.identify, name)
            before, now = self._seen.get(name), time.monotonic()
            if device is None:
                return
            if before and before.attachment == device.attachment and not before.is_due(now):
                return
            try:
                await kit.child.call(rehearsal_rows.try_read, device.path, deadline=READ_SECONDS)
                verdict = await self._prober.probe(device.path, device.encrypts, "scope")
            except kit.child.DeadlineError:
                verdict = Verdict(Kind.TIMEOUT, device.path, where="no answer")
            except OSError as error:
                verdict = Verdict(Kind.UNREADABLE, device.path, "device", errno=error.errno or 5)
            except (kit.errors.AgentError, RuntimeError) as error:  # says nothing of the device
                log.debug("device of the scope is not looked at", device=name, why=str(error))
                return
            writer = self._writers.get(name)
            if writer is None or writer.attachment != device.attachment or writer.at < now:
                self._seen[name] = KnownContent(device.attachment, verdict, now)

    def wrote(self, denial: Denial, device: blockdev.BlockDevice | None) -> None:
        """A write was reported because of the scope. ``device``: None: it went already."""
        if denial.device in self._raw:
            return  # the guard would permit it
        self.denials.add(denial)
        self.denials.decided(denial.device, "", (denial.whose,))
        name, now = denial.device, time.monotonic()
        attachment = device.attachment if device is not None else None
        last, seen = self._writers.get(name), self._seen.get(name)
        new = LastWrite(attachment, denial.program, denial.pid, now)
        self._writers[name] = new
        if last is not None and last.goes_on(new):
            return
        held = seen.held(now) if seen is not None and seen.attachment == attachment else None
        written = last is not None and last.attachment == attachment
        if held is not None and held.verdict is Kind.BLANK_VERIFIED:
            del self._seen[name]  # not any more
            held = None if written else held
        if device is not None and name not in self._probes:
            self._look(name, WRITTEN_SECONDS)
        added = row(denial, self._titles.get(name, ""), held)
        if self.rows is None:
            self._early.append(added)
            del self._early[:-MOST_ROWS]
        else:
            self.rows.add(added)
        self._changed.set()

    async def _save(self) -> None:
        while True:
            if self.rows is not None:
                await self._changed.wait()
            await self._write(WRITE_SECONDS)
            await asyncio.sleep(SAVE_SECONDS)

    async def _write(self, seconds: float) -> None:
        folder, pending = str(self._state_dir), self._changed.is_set()
        try:
            if self.rows is None:
                found = await kit.child.call(rehearsal_rows.load, folder, deadline=seconds)
                self.rows = rehearsal_rows.of_json(found) if found else Rows(0.0)
            for each in self._early:
                self.rows.since = self.rows.since or each.first
                self.rows.add(each)
            self._early = []
            if pending:
                self._changed.clear()
                told = self.rows.as_json()
                await kit.child.call(record.write_rehearsal, folder, told, deadline=seconds)
        except (kit.errors.AgentError, OSError, RuntimeError) as error:
            if str(error) != self.problem:
                log.warning("rehearsal of the scope is not written down", error=str(error))
            self.problem = str(error)
        except asyncio.CancelledError:
            self._keep(pending)
            raise
        else:
            self.problem, pending = "", False
        self._keep(pending)

    def _keep(self, pending: bool) -> None:
        """What is not written yet is written later."""
        if pending:
            self._changed.set()

    def describe(self) -> dict[str, Any]:
        """As JSON: what the file has, or will have; ``problem``: why that may not be all;
        ``probed``: of which devices it is known what they hold."""
        rows = self.rows
        if rows is None:
            rows = Rows(0.0)
            for each in self._early:
                rows.add(each)
        return rows.as_json() | {"problem": self.problem, "probed": sorted(self._seen)}
