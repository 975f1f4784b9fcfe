"""One check of a device, from start to end: probe it, write down what was seen, and, where it is
blank, ask every other source and perhaps grant a lease.

Decisions and the order of steps are those of ``lease``; this module collects the facts. A check
that fails is a refusal.
"""

import asyncio
import math
import time
from collections.abc import Callable

import structlog

import kit.errors
import kit.tasks
from ceph.protocol import Extents
from linux import blockdev, procfs
from volumes import settings
from volumes.guard import kernel, lease
from volumes.guard.holds import Holds
from volumes.guard.kernel import KernelLease
from volumes.guard.steps import Executor, Known, Turn, missing, untouched, with_cluster
from volumes.ledger import store
from volumes.ledger.mirror import NOT_ASKED, Answer
from volumes.node import raw_block
from volumes.probe import prober
from volumes.probe.examine import Kind, Verdict, marks_from

log = structlog.get_logger("volumes")

LEASED_CHECK_SECONDS = 1.0  # between checks while a lease runs
# Between checks while the writer of an expired lease is at work: each reads the device.
OVERDUE_CHECK_SECONDS, LONGEST_OVERDUE_SECONDS = 10.0, 300.0
RAW_CHECK_SECONDS = 300.0  # between checks of a raw block volume, beside those after mounts


class Checks:
    """``known``: every device, of which one is checked. ``holds``: ended where a look says no."""

    def __init__(
        self,
        wanted: settings.GuardSettings,
        executor: Executor,
        errors: lease.ErrorLog,
        holds: Holds,
        known: dict[str, Known],
    ) -> None:
        self.settings = wanted
        self.executor = executor
        self.writing = kernel.writing
        self.prober = prober.Prober(wanted.probe_timeout)
        self.published = raw_block.PublishedDevice(raw_block.published(raw_block.host_table()))
        self.verdicts: dict[str, int] = {}
        self.errors = errors
        self._holds = holds
        self._known = known

    def meet(self, device: blockdev.BlockDevice) -> Known:
        """What is known of this attachment. A new one starts without a lease that is not its."""
        known = self._known.get(device.name)
        before = known.device.attachment if known is not None else None
        held = self.executor.held(device)
        if lease.met(held.diskseq if held else None, before, device.attachment):
            self.executor.revoke(device.number)
        if known is not None and device.driver not in lease.NEW_DISKS and not known.replaced:
            # Nobody heard of another medium before this check. A disk that stays keeps its node,
            # and with it the bind mounts that were made for the medium before. But nbd tells the
            # name of a medium a moment after its size.
            was = known.device
            named = not was.volume and was.diskseq == device.diskseq
            if not named and not lease.same_medium(was.attachment, device.attachment):
                self.replaced(known)
        if known is None or before != device.attachment:
            known = self._known[device.name] = Known(device, checked=time.monotonic())
        known.device = device
        return known

    def replaced(self, known: Known) -> None:
        """Another medium is in the device. Nothing that was permitted before counts for it, even
        while a check of the one before still waits for an answer."""
        known.replaced = True
        self._holds.end(known.device.name)
        self.published.attached_anew(known.device.name)
        self.executor.revoke(known.device.number)

    async def check(
        self, known: Known, asked: Callable[[], bool]
    ) -> tuple[float | None, tuple[str, ...]]:
        """Seconds until the next check, None while there is no lease; and the reasons against a
        format. ``asked``: whether somebody wants to write; asked after the first look."""
        began = time.monotonic()
        known.writer, known.freed_next, known.overdue = 0, False, None
        device, executor = known.device, self.executor
        if (renew := await self._raw_block(known)) is not None:
            return renew, ()
        before = executor.held(device)
        over = await self.is_over(before, device.number)
        known.seen = first = await self.probe(device)
        if not may_be_held(known, first):
            self._holds.end(device.name)  # what follows may take longer than an unmap tries
        over = over and await self.is_still_over(before, device)
        known.checked = time.monotonic()
        known.doubt = known.doubt.after(first, known.checked)
        if (first.type, first.uuid) == known.allowed_over and executor.until(device) is not None:
            if over:
                await executor.carry_out((lease.Step.FREE,), Turn(known, None))
            # What an operator permits to destroy is still there.
            return LEASED_CHECK_SECONDS, self._writer(known)
        known.allowed_over = None
        if first.has_content or executor.until(device) is None:
            known.allowed = False
        wait = await self._conclude(known, first, before, over=over)
        if known.doubt.wait is not None:
            wait = min(wait or math.inf, known.doubt.wait)
        reasons = lease.undisputed(
            first,
            leased=executor.until(device) is not None,
            attached=executor.leases is not None,
            asked=asked(),
            writer=self._writer(known),
        )
        if reasons is None:
            evidence = await self._evidence(known, first)
            wanted, witness = self.settings, executor.witness.settings
            policy = lease.LeasePolicy(
                wanted.quiet, wanted.require_extents, witness.outage, witness.young
            )
            reasons = lease.refusals(evidence, policy)
            if not reasons:
                await self.grant(known, f"automatic on {executor.node}")
                if known.lease_seconds is None:
                    known.lease_seconds = time.monotonic() - began
                wait = LEASED_CHECK_SECONDS
        return wait, reasons

    async def _raw_block(self, known: Known) -> float | None:
        """A pod writes the device itself: there is no file system that mkfs could destroy. The
        permission lasts as long as the publication. Seconds until it must be renewed; None: it is
        not published."""
        device, held = known.device, self.executor.held(known.device)
        by_publication = raw_block.gave(self.executor.entry(device).permitted_by)
        if not (self.settings.raw_block and device.name in self.published):
            earlier = held is not None and (held.until == math.inf or by_publication)
            holds = earlier and self.executor.until(device) is not None
            if holds and self.settings.raw_block and not (known.raw or self.published.whole):
                return RAW_CHECK_SECONDS
            if known.raw or earlier:
                # Of the pod that is gone, maybe of an earlier agent.
                self.executor.revoke(device.number)
            known.raw = False
            return None
        known.raw = True
        seconds = math.inf
        if self.executor.leases is not None:
            seconds = lease.raw_seconds(device.driver, self.executor.leases.ends_with_disk)
            by = raw_block.BY + self.executor.node
            turn = Turn(known, None, by=by, seconds=seconds, by_pod=True)
            renewed = held is not None and by_publication
            await self.executor.carry_out(lease.RENEWING if renewed else lease.PUBLISHING, turn)
        return min(seconds / 4, RAW_CHECK_SECONDS)

    async def probe(self, device: blockdev.BlockDevice) -> Verdict:
        image = device.lowest.image
        # rbd-nbd does not say which cluster it shows: its devices count as one.
        group = (image.fsid if image is not None else "") or device.lowest.driver
        found = await self.prober.probe(device.path, device.encrypts, group)
        self.verdicts[found.verdict] = self.verdicts.get(found.verdict, 0) + 1
        return found

    def _writer(self, known: Known) -> tuple[str, ...]:
        """Note who formats. The reasons against a format by another process than the lease's."""
        held = self.executor.held(known.device)
        known.writer = held.at_work if held is not None else 0
        pid = held.writer.pid if held is not None and held.writer is not None else 0
        if held is not None and pid and held.until > time.monotonic() and not known.writer:
            known.freed_next = known.seen is not None and may_be_held(known, known.seen)
            return lease.at_work(pid, ended=True)
        return lease.at_work(known.writer, seen=procfs.sees_host())

    async def is_over(self, held: KernelLease | None, number: blockdev.Number) -> bool:
        """Whether the lease's writer has ended, or has the device no longer open for writing, as
        one that only asked whether it may. In doubt neither."""
        if held is None or held.writer is None or held.is_everybodys:
            return False
        if not held.at_work:
            return True
        if not procfs.sees_host():
            return False
        try:
            return held.writer not in await self.writing(number)
        except (kit.errors.AgentError, OSError, RuntimeError):
            return False  # without CONFIG_BPF_EVENTS always, which ``Kernel.no_watch`` says, too

    async def is_still_over(self, before: KernelLease | None, device: blockdev.BlockDevice) -> bool:
        """The same once more, after the probe, for ``before`` that. Who was about to open the
        device, or moved it to another descriptor, was perhaps not seen."""
        over = await self.is_over(before, device.number)
        ended = before is not None and not before.at_work
        return over and (ended or untouched(before, self.executor.held(device)))

    async def rest(self, known: Known | None, again: asyncio.Event, wait: float) -> None:
        """Until the next look, which comes at once when the writer of an expired lease ends."""
        until = time.monotonic() + wait
        if known is not None and known.overdue is not None:
            while (left := until - time.monotonic()) > 0 and known.overdue.at_work:
                if await kit.tasks.until(again, min(left, LEASED_CHECK_SECONDS)):
                    return
            return
        await kit.tasks.until(again, max(0.0, until - time.monotonic()))

    async def _conclude(
        self, known: Known, seen: Verdict, before: KernelLease | None, *, over: bool
    ) -> float | None:
        """Write down what was seen, and end a lease that has served. Seconds until the next check,
        while there is a lease. ``before``: the probe. ``over``: see ``lease.conclude``."""
        device = known.device
        blank = seen.verdict is Kind.BLANK_VERIFIED
        entry = self.executor.entry(device)
        image = device.lowest.image
        if not blank and image is not None and device.volume:  # what other nodes have seen
            known.cluster = answer = await self.executor.mirror.ask(image, part=device.part)
            entry = with_cluster(entry, answer.known, seen)
        turn = Turn(known, entry, seen)
        held = self.executor.held(device)  # not from before the cluster's answer: it takes a while
        over = over and untouched(before, held)
        now = time.monotonic()
        expired = held is not None and now > held.until + 1.0
        writing = held is not None and held.at_work > 0
        steps = lease.conclude(
            has_content=seen.has_content,
            blank=blank,
            leased=held is not None,
            expired=expired,
            opens=held.opens if held else 0,
            permitted=entry.permitted > 0,
            earlier=bool(entry.earlier_by),
            by_pod=raw_block.gave(entry.permitted_by),
            over=over,
            writing=writing,
            everybodys=held is not None and held.is_everybodys,
            allowed=known.allowed,
        )
        await self.executor.carry_out(steps, turn)
        # Of a blank device the cluster is asked later: until then the last look's answer holds.
        last = known.missing if blank and turn.entry and not turn.entry.permitted else ""
        known.missing = missing(known, turn.entry) or last
        if held is None or expired:
            if held is None or not writing or over or seen.has_content:
                return None
            known.overdue = held
            # As long as it is overdue: the pause doubles.
            return max(OVERDUE_CHECK_SECONDS, min(now - held.until, LONGEST_OVERDUE_SECONDS))
        return max(0.2, min(LEASED_CHECK_SECONDS, held.until - now + 1.1))

    async def _evidence(self, known: Known, first: Verdict) -> lease.Evidence:
        """Ask every source. The cluster answers after the first probe; the second probe and the
        device's identity come last."""
        device = known.device
        asked: asyncio.Task[Answer] | None = None
        told = asyncio.create_task(self.executor.witness.ask(device))
        image = device.lowest.image
        if image is not None:
            extents = Extents(first.start, marks_from(first.start, device.size))
            asked = asyncio.create_task(self.executor.mirror.ask(image, extents, part=device.part))
        try:
            await asyncio.sleep(self.settings.settle)
            second = await self.probe(device)
            known.cluster = answer = await asked if asked is not None else NOT_ASKED
            known.witness = said = await told
        finally:
            for task in (asked, told):
                if task is not None and not task.done():
                    task.cancel()
        if answer.mirror is not store.Knowledge.UNKNOWN:
            entry = self.executor.entry(device)
            there = answer.known
            known.missing = missing(known, store.merge(entry, there) if there else entry)
        after = blockdev.identify(device.name)
        is_rbd = device.lowest.driver == "rbd"
        now = time.monotonic()
        names = {each.parent or each.name for each in (device, device.lowest)}
        mapped = self._mapped(device) if is_rbd else None
        quiet = [self.errors.quiet_for(name, mapped, now) for name in names]
        return lease.Evidence(
            is_rbd=is_rbd,
            before=device.attachment,
            after=after.attachment if after else None,
            first=first,
            second=second,
            ledger=self.executor.ledger.knowledge(device.volume),
            mirror=answer.mirror,
            extents=answer.extents,
            quiet_for=None if None in quiet else min(each for each in quiet if each is not None),
            read_only=after.read_only if after else None,
            in_use=blockdev.in_use(after) if after else None,
            snapshot=bool(image and image.snapshot),
            cluster_size=None if answer.size is None else answer.size - first.start,
            why_unknown=answer.why,
            witness=said,
        )

    def _mapped(self, device: blockdev.BlockDevice) -> lease.Mapped:
        image = device.lowest.image
        others = (_monitors(known.device) for known in self._known.values())
        fsid = image.fsid if image else ""
        return lease.Mapped(fsid, _monitors(device), frozenset[str]().union(*others))

    async def grant(self, known: Known, by: str, *, over: KernelLease | None = None) -> None:
        """``over``: see ``Turn``."""
        self.executor.attached()  # before anything is written down
        turn = Turn(known, None, by=by, seconds=self.settings.lease, over=over)
        await self.executor.carry_out(lease.GRANTING, turn)
        device = known.device
        log.info("format permitted", device=device.name, volume=device.title, by=by)


def _monitors(device: blockdev.BlockDevice) -> frozenset[str]:
    """The addresses that its client was given when it was mapped."""
    client = device.lowest.client
    return frozenset(client.config.split(" ")[0].split(",")) if client else frozenset()


def may_be_held(known: Known, seen: Verdict) -> bool:
    """Blank, or what an operator gave up, recognised or not."""
    if seen.has_content:
        return (seen.type, seen.uuid) == known.allowed_over
    return known.allowed or seen.verdict is Kind.BLANK_VERIFIED
