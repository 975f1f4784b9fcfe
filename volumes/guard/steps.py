"""Carries out the steps that ``lease`` lists: in the ledger, the image's metadata and the kernel.

One step after the other; a failure ends them there, and what was not granted stays refused.
"""

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import structlog

import kit.errors
import kit.tasks
from linux import blockdev
from volumes.guard import kernel, lease
from volumes.guard.lease import Step
from volumes.guard.pace import SILENT, Doubt, Pace
from volumes.ledger import store
from volumes.ledger.mirror import Answer, Mirror
from volumes.ledger.statement import Statement
from volumes.ledger.witness import Witness
from volumes.probe.examine import Verdict

log = structlog.get_logger("volumes")

SAVE_SECONDS = 10.0  # for an fsync of the ledger; the state directory's disk may hang


@dataclass
class Known:
    """What is known of one attached device.

    ``reasons``: why it may not be formatted; None: not decided; empty: it has a lease.
    """

    device: blockdev.BlockDevice
    seen: Verdict | None = None
    reasons: tuple[str, ...] | None = None
    checked: float = 0.0  # CLOCK_MONOTONIC
    raw: bool = False
    writer: int = 0  # the process that formats it now; 0: none
    freed_next: bool = False  # that one has ended, and the next look frees the lease
    overdue: kernel.KernelLease | None = None  # expired, and its writer is at work
    doubt: Doubt = field(default_factory=Doubt)
    pace: Pace = field(default_factory=Pace)
    allowed_over: tuple[str, str] | None = None  # type and UUID that an operator gave up
    allowed: bool = False  # an operator permitted it, and no other content was seen since
    replaced: bool = False  # another medium is in the device, and what follows from that was done
    changed_from: str = ""  # the ledger's content, when other content is there now
    missing: str = ""  # the ledger's content, when nothing recognisable is there now
    lease_seconds: float | None = None  # from first sight to lease
    mirrored: tuple[str, str, str, float] | None = None  # what the image's metadata holds of ours
    witness: Statement | None = None  # what its PersistentVolume said when it was last asked
    cluster: Answer | None = None  # what the image's cluster said when it was last asked
    order: asyncio.Lock = field(default_factory=asyncio.Lock)  # of checks and an operator's word


def missing(known: Known, entry: store.Entry | None) -> str:
    """The content that the ledger knows and that certainly cannot be seen."""
    seen = known.seen
    if entry is None or entry.permitted or seen is None or seen.has_content:
        return ""
    return entry.content if seen.verdict not in SILENT or known.doubt.agreed else ""


def with_cluster(here: store.Entry, there: store.Entry | None, seen: Verdict) -> store.Entry:
    """With what the image's metadata says. A clone carries its parent's entry until it has its own:
    it says what to expect, but other content than the parent's is no change."""
    if there is None or (there.volume != here.volume and seen.has_content):
        return here
    return store.merge(here, there)


@dataclass
class Turn:
    """Steps are carried out on this: a device, its ledger entry, and who asked for it."""

    known: Known
    entry: store.Entry | None  # None: nothing to write
    seen: Verdict | None = None
    by: str = ""
    seconds: float = 0.0  # of the lease, for GRANT
    by_pod: bool = False  # the lease is everybody's, and holds to its end without an agent, too
    over: kernel.KernelLease | None = None  # before; its writer has ended, or closed the device


def untouched(before: kernel.KernelLease | None, now: kernel.KernelLease | None) -> bool:
    """Whether nobody opened the device for writing since: what the probe saw is still there."""
    return before is not None and now is not None and now.opens == before.opens


class Executor:
    """``leases`` None: nothing is enforced, so nothing is granted."""

    def __init__(
        self,
        leases: kernel.Kernel | None,
        ledger: store.LedgerStore,
        mirror: Mirror,
        witness: Witness,
    ) -> None:
        self.leases = leases
        self.ledger = ledger
        self.mirror = mirror
        self.witness = witness
        self.granted = 0
        self.mirror_failures = 0
        self._writing = asyncio.Lock()
        self._beating: asyncio.TimerHandle | None = None

    @property
    def node(self) -> str:
        return self.witness.here.name

    async def carry_out(self, steps: Iterable[Step], turn: Turn) -> None:
        """Each step in order. RefusedError, OSError or TimeoutError from one ends it there."""
        begun: list[Step] = []
        try:
            await self._carry_out(steps, turn, begun)
        except (kit.errors.AgentError, OSError, TimeoutError):
            try:
                await self._carry_out(lease.broken_off(begun), turn, [])
            except (kit.errors.AgentError, OSError, TimeoutError) as error:
                title = turn.known.device.title
                log.warning("ungranted permission stays open", volume=title, error=str(error))
            raise

    async def _carry_out(self, steps: Iterable[Step], turn: Turn, begun: list[Step]) -> None:
        known, device = turn.known, turn.known.device
        for step in steps:
            begun.append(step)
            entry = turn.entry
            match step:
                case Step.RECORD_PERMISSION:
                    if device.volume:  # only an operator permits without a volume's name
                        turn.entry = self.entry(device).permit(turn.by, time.time())
                        await self.save(turn.entry)
                case Step.MIRROR:
                    if entry is not None and device.volume:
                        await self.mirror_entry(known, entry)
                case Step.CONFIRM:
                    again = blockdev.identify(device.name)
                    if again is None or again.attachment != device.attachment:
                        self.revoke(device.number)
                        raise kit.errors.RefusedError(
                            device.name, "another device was attached to it", "try it again"
                        )
                case Step.RESERVE:
                    # Who opened the device again keeps its lease, also one that has ended.
                    if turn.over is None or self._is_over(turn.over, device):
                        self.attached().reserve(device.number, device.diskseq)
                case Step.GRANT:
                    until = time.monotonic() + turn.seconds
                    grace = 0.0 if turn.by_pod else self.grace(device)
                    if turn.over is not None and self._is_over(turn.over, device):
                        # Before the grant: who comes after it has the lease.
                        self.attached().free(device.number)
                    self.attached().grant(device.number, until, device.diskseq, grace)
                    if turn.by_pod:
                        self.attached().free(device.number, everybodys=True)
                    self.beat()
                    self.granted += 1
                case Step.FREE:
                    self.attached().free(device.number)
                case Step.SHORTEN:
                    if (ends := self.until(device)) is not None:  # it was not revoked meanwhile
                        until = min(ends, time.monotonic() + lease.LINGER_SECONDS)
                        grace = self.grace(device)
                        self.attached().grant(device.number, until, device.diskseq, grace)
                case Step.REVOKE:
                    self.revoke(device.number)
                case Step.RECORD_CONTENT:
                    await self._record(turn)
                case Step.CLOSE_PERMISSION:
                    turn.entry = await self._closed(device, entry)

    def _is_over(self, before: kernel.KernelLease, device: blockdev.BlockDevice) -> bool:
        return not before.at_work or untouched(before, self.held(device))

    async def _closed(
        self, device: blockdev.BlockDevice, written: store.Entry | None
    ) -> store.Entry | None:
        """The entry without its last permission, in the ledger. None, and nothing is written, when
        the ledger says something else by now: another device may show the same volume."""
        async with self._writing:
            if written is None or self.entry(device) != written:
                return None
            closed = written.unused()
            await self._put(closed)
        return closed

    async def _record(self, turn: Turn) -> None:
        """Save the content seen. Other content than the ledger's is a finding instead, and the
        ledger keeps its entry until a person accepts the change."""
        known, current, seen = turn.known, turn.entry, turn.seen
        assert seen is not None
        if not known.device.volume or current is None:
            return
        differs = current.type and (current.type, current.uuid) != (seen.type, seen.uuid)
        if differs and not current.permitted:
            known.changed_from = current.content
            turn.entry = None
            return
        known.changed_from = ""
        new = replace(
            current.saw(seen.type, seen.uuid, seen.label, time.time(), self.node),
            title=known.device.title,
        )
        if self.ledger.needs(new):
            await self.save(new)
        turn.entry = new

    async def save(self, new: store.Entry) -> None:
        """Durable here when it returns. OSError or TimeoutError otherwise."""
        async with self._writing:
            await self._put(new)

    async def _put(self, new: store.Entry) -> None:
        """As ``save``, for who holds ``_writing``."""
        async with asyncio.timeout(SAVE_SECONDS):
            await kit.tasks.STATE.call(self.ledger.put, new)

    async def mirror_entry(self, known: Known, new: store.Entry) -> None:
        """Into the image's metadata, where credentials for its cluster are configured; content
        also onto its PersistentVolume, in a while."""
        self.witness.saw(known.device, new)
        image = known.device.lowest.image
        state = (new.type, new.uuid, new.label, new.permitted)
        if image is None or image.snapshot or known.mirrored == state:
            return
        try:
            if await self.mirror.write(image, new, known.device.part):
                known.mirrored = state
        except kit.errors.AgentError as error:
            self.mirror_failures += 1
            log.warning("ledger not mirrored", volume=known.device.title, error=str(error))

    def entry(self, device: blockdev.BlockDevice) -> store.Entry:
        found = self.ledger.get(device.volume)
        return found or store.Entry(volume=device.volume, title=device.title)

    def attached(self) -> kernel.Kernel:
        if self.leases is None:
            raise kit.errors.RefusedError(
                "a lease", "the guard is not attached", "see: nodeagent volume guard status"
            )
        return self.leases

    def grace(self, device: blockdev.BlockDevice) -> float:
        # The kernel ends the lease of a new disk's own number. A partition has another one.
        ends = self.attached().ends_with_disk and not device.parent
        return lease.grace_seconds(device.driver, ends)

    def beat(self) -> None:
        """Say that an agent is alive, as long as a lease needs one."""
        if self._beating is not None:
            self._beating.cancel()
            self._beating = None
        try:
            if self.leases is None or not any(x.grace for x in self.leases.leases().values()):
                return
            self.leases.beat()
        except OSError as error:
            log.warning("leases end early: no sign of life", error=str(error))
        loop = asyncio.get_running_loop()
        self._beating = loop.call_later(lease.BEAT_SECONDS, self.beat)

    def close(self) -> None:
        if self._beating is not None:
            self._beating.cancel()

    def revoke(self, number: blockdev.Number) -> kernel.KernelLease | None:
        return self.leases.revoke(number) if self.leases is not None else None

    def held(self, device: blockdev.BlockDevice) -> kernel.KernelLease | None:
        return self.leases.leases().get(device.number) if self.leases is not None else None

    def until(self, device: blockdev.BlockDevice) -> float | None:
        """Until when the kernel lets it be formatted; None when it does not now."""
        held = self.held(device)
        return held.until if held and held.until > time.monotonic() else None
