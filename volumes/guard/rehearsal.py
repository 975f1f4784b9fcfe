"""What the guard would have done with each write that it only reports because of the scope.

An operator asks for it before he lets the guard refuse such writes, so it outlives agents. Whether
a device would have got a lease depends on what it held *before* the write: each device that the
scope judges is probed when it appears, and again after a write.

Writes to blank devices are one row of a program, for a node has thousands; all others are a row of
a device and a program.
"""

import asyncio
import dataclasses
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import structlog

import kit.child
import kit.errors
import kit.formats
import kit.tasks
from linux import blockdev, stack
from volumes.guard import lease, record, scope
from volumes.guard.denials import Denial, Denials
from volumes.probe import prober
from volumes.probe.examine import Kind, Verdict

log = structlog.get_logger("volumes")

MOST_ROWS = 256  # the one that was added to longest ago goes
MOST_PROBES = 2  # of such devices at a time: nobody waits for one
AGAIN_SECONDS = 5.0  # from a write until its device is probed again: a formatter has ended
SAVE_SECONDS = 60.0  # between two writes of the file
WRITE_SECONDS = 10.0  # for one; the state directory's disk may hang


class Would(StrEnum):
    """``LEASE``: refuse the first try, and permit the next one: the device was proven blank.
    ``REFUSE``: it held something, or could not be read. ``LOOK``: nobody knows what it held, for
    the write came before the first look. The first try is refused, and a look decides."""

    LEASE = "lease"
    REFUSE = "refuse"
    LOOK = "look"


@dataclass(frozen=True)
class Row:
    """``title``: what tells the device apart where its name does not, as the setting ``own`` takes
    it. ``first``, ``last``: Unix seconds. Of several writes ``pod``, ``command`` and, of blank
    devices, ``device``, ``title`` and ``whose`` are those of the last one."""

    would: Would
    device: str
    title: str
    whose: str
    held: str  # what the probe before the write found
    program: str
    command: str
    pod: str
    first: float
    last: float
    times: int = 1

    @property
    def key(self) -> tuple[str, ...]:
        """Equal for writes of one row."""
        if self.would is Would.LEASE:
            return self.would, self.program
        return self.would, self.title or self.device, self.whose, self.held, self.program


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


@dataclass
class Rows:
    """The newest rows, and how many went because there were more."""

    since: float  # Unix seconds
    lost: int = 0
    kept: OrderedDict[tuple[str, ...], Row] = dataclasses.field(default_factory=OrderedDict)

    def add(self, new: Row) -> None:
        before = self.kept.pop(new.key, None)
        if before is not None:
            new = dataclasses.replace(new, first=before.first, times=before.times + new.times)
        self.kept[new.key] = new
        if len(self.kept) > MOST_ROWS:
            self.kept.popitem(last=False)
            self.lost += 1

    def as_json(self) -> dict[str, Any]:
        rows = [dataclasses.asdict(each) for each in self.kept.values()]
        return {"since": self.since, "lost": self.lost, "rows": rows}


def of_json(fields: Mapping[str, Any]) -> Rows:
    """Raises whatever a wrong shape leads to."""
    found = Rows(float(fields["since"]), int(fields["lost"]))
    for each in fields["rows"]:
        found.add(Row(**{**each, "would": Would(each["would"])}))
    return found


def load(state_dir: str) -> dict[str, Any] | None:
    """What the file says; None without it, or when it is damaged: then it is set aside. HostError
    when a newer agent wrote it."""
    found = kit.formats.read(record.rehearsal_file(Path(state_dir)), record.FORMAT, of_json)
    return found.as_json() if isinstance(found, Rows) else None


class Rehearsal:
    """``denials``: of such writes, apart from those of what the guard refuses: many of these never
    push out one of those. ``rows`` None: there was no scope since this agent began, or the file is
    not read yet."""

    def __init__(self, state_dir: Path, probing: prober.Prober) -> None:
        self.denials = Denials()
        self.rows: Rows | None = None
        self._state_dir = state_dir
        self._prober = probing
        self._held: dict[str, tuple[lease.Attachment, Verdict]] = {}
        self._titles: dict[str, str] = {}
        self._slots = asyncio.Semaphore(MOST_PROBES)
        self._probes: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._saves: asyncio.Task[None] | None = None
        self._due: set[str] = set()  # written to a moment ago: probed soon
        self._writers: dict[str, tuple[lease.Attachment | None, int]] = {}  # the last one's pid
        self._early: list[Row] = []  # before the file was read
        self._problem = ""

    def start(self) -> None:
        self._saves = asyncio.create_task(self._save(), name="rehearsal of the scope")

    async def stop(self) -> None:
        await kit.tasks.end(self._saves, *self._probes.values())
        if self._changed.is_set():
            await self._write()

    def meet(
        self, devices: tuple[stack.StackedDevice, ...], found: Mapping[str, scope.Judgement]
    ) -> None:
        """The devices of the node and whose they are, by a look: probe those that are new. What
        others lie on is left alone: a path of a multipath device may not answer."""
        below = {lower for device in devices for lower in device.below if not device.partition}
        judged = {
            device.name
            for device in devices
            if device.size and device.name not in below
            and found[device.name].whose is not scope.Whose.OWN
            and found[device.name].why is not scope.Why.DRIVER  # of those the guard keeps a state
        }  # fmt: skip
        for name in self._held.keys() - judged:
            del self._held[name]
        for name in judged - self._probes.keys():
            self._look(name)
        self._titles = {device.name: title(device) for device in devices}
        for name in self._writers.keys() - self._titles.keys():
            del self._writers[name]
        if self.rows is None:
            self._changed.set()  # it begins now, or goes on

    def _look(self, name: str, after: float = 0.0) -> None:
        task = asyncio.create_task(self._probe(name, after), name=f"rehearsal {name}")
        self._probes[name] = task
        task.add_done_callback(lambda _: self._ended(name, task))

    def _ended(self, name: str, task: asyncio.Task[None]) -> None:
        if self._probes.get(name) is task:
            del self._probes[name]

    async def _probe(self, name: str, after: float) -> None:
        if after:
            self._due.add(name)
            try:
                await asyncio.sleep(after)
            finally:
                self._due.discard(name)
        async with self._slots:
            device = await asyncio.to_thread(blockdev.identify, name)
            before = self._held.get(name)
            if device is None or (not after and before and before[0] == device.attachment):
                return
            try:
                seen = await self._prober.probe(device.path, device.encrypts, "scope")
            except kit.errors.AgentError as error:  # too many hang: nothing is known of the device
                log.debug("device of the scope is not looked at", device=name, why=str(error))
                return
            self._held[name] = device.attachment, seen

    def wrote(self, denial: Denial, device: blockdev.BlockDevice | None) -> None:
        """A write was reported because of the scope. ``device``: None: it went already."""
        self.denials.add(denial)
        self.denials.decided(denial.device, "", (denial.whose,))
        writer = device.attachment if device else None, denial.pid
        if self._writers.get(denial.device) == writer:
            return  # a formatter opens it again and again, and would have been refused once
        self._writers[denial.device] = writer
        at, seen = self._held.get(denial.device, (None, None))
        known = device is not None and at == device.attachment
        new = row(denial, self._titles.get(denial.device, ""), seen if known else None)
        if self.rows is None:
            self._early.append(new)
            del self._early[:-MOST_ROWS]
        else:
            self.rows.add(new)
        self._changed.set()
        if new.would is Would.LEASE:
            del self._held[denial.device]  # not blank any more
        if device is not None and denial.device not in self._due:
            # What a probe that runs now finds may be of before.
            if (running := self._probes.pop(denial.device, None)) is not None:
                running.cancel()
            self._look(denial.device, AGAIN_SECONDS)

    async def _save(self) -> None:
        while True:
            await self._changed.wait()
            await self._write()
            await asyncio.sleep(SAVE_SECONDS)

    async def _write(self) -> None:
        self._changed.clear()
        try:
            if self.rows is None:
                folder = str(self._state_dir)
                found = await kit.child.call(load, folder, deadline=WRITE_SECONDS)
                self.rows = of_json(found) if found else Rows(time.time())
            for each in self._early:
                self.rows.add(each)
            self._early = []
            await kit.child.call(
                record.write_rehearsal, str(self._state_dir), self.rows.as_json(),
                deadline=WRITE_SECONDS,
            )  # fmt: skip
        except (kit.errors.AgentError, OSError, RuntimeError) as error:
            if str(error) != self._problem:
                log.warning("rehearsal of the scope is not written down", error=str(error))
            self._problem = str(error)
            self._changed.set()
        else:
            self._problem = ""

    def describe(self) -> dict[str, Any]:
        """As JSON: what the file has, or will have; ``probed``: of which devices it is known what
        they hold."""
        return (self.rows or Rows(time.time())).as_json() | {"probed": sorted(self._held)}
