"""Checks guarded devices, keeps the ledger, and grants and revokes leases.

One task per device, so what happens to one device happens in order. ``_check`` is one check from
start to end: probe the device, write down what was seen, and, where it is blank, ask every other
source and perhaps grant a lease. Decisions and the order of steps are those of ``lease``; this
module collects the facts and executes the steps. A check that fails is a refusal.
"""

import asyncio
import contextlib
import math
import random
import time
from collections.abc import Callable

import structlog

import kit.errors
from ceph.protocol import Extents
from kit import processes
from linux import blockdev
from volumes import settings
from volumes.guard import denials, holds, kernel, lease, pace, raw_block, steps
from volumes.guard.steps import Known, Turn
from volumes.ledger import store
from volumes.ledger.mirror import NOT_ASKED, Answer, Mirror
from volumes.ledger.statement import NO_CLUSTER, Statement
from volumes.ledger.witness import Witness
from volumes.probe import prober, signature_offsets
from volumes.probe.examine import Kind, Verdict

log = structlog.get_logger("volumes")

AGAIN_SECONDS = pace.FIRST_SECONDS  # least time between two checks of a device
LEASED_CHECK_SECONDS = 1.0  # between checks while a lease runs
RAW_CHECK_SECONDS = 300.0  # between checks of a raw block volume, beside those after mounts
NO_CHILD_SECONDS = 5.0  # until a check for which no child could be started is tried again
MOST_DEVICES = 1024
ALLOW_SECONDS = 30.0  # an operator's wait for a check that is running


class LeaseManager(steps.Executor):
    def __init__(
        self,
        wanted: settings.GuardSettings,
        leases: kernel.Kernel | None,
        ledger: store.LedgerStore,
        mirror: Mirror,
        errors: lease.ErrorLog,
        refused: denials.Denials,
        *,
        node: str,
        changed: Callable[[], None] = lambda: None,
        witness: Witness | None = None,
    ) -> None:
        super().__init__(wanted, leases, ledger, mirror, node, witness)
        self.errors = errors
        self.denials = refused
        self.prober = prober.Prober(wanted.probe_timeout)
        self.holds = holds.Holds()
        self.known: dict[str, Known] = {}
        self._changed = changed
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._again: dict[str, asyncio.Event] = {}
        self._identified: dict[str, blockdev.BlockDevice] = {}  # for the next check
        self._checking: set[str] = set()
        self._denied: set[str] = set()  # denied since their last check began
        self._timers: dict[str, asyncio.TimerHandle] = {}  # until the check of such a device
        self._chores: set[asyncio.Task[None]] = set()
        self.published = raw_block.PublishedDevice(raw_block.published(raw_block.host_table()))
        self.verdicts: dict[str, int] = {}

    # --- one task per device

    def schedule(self, name: str, device: blockdev.BlockDevice | None = None) -> None:
        """Check the device now, or once more after the check that is running.

        ``device``: what was attached a moment ago, where the caller has just identified it.
        """
        if name in self._tasks:
            self._again[name].set()
        elif len(self._tasks) < MOST_DEVICES:
            self._again[name] = asyncio.Event()
            self._tasks[name] = asyncio.create_task(self._work(name), name=f"lease {name}")
        else:
            return  # the next scan comes back to it
        if device is not None:
            self._identified[name] = device

    def denied(self, name: str, refused: blockdev.BlockDevice | None = None) -> None:
        """Somebody tried to write to the device: check it as soon as its pace allows. A check that
        is running began before that, so another one follows it.

        ``refused``: what was attached, unless the guard let him; it stays attached until its check.
        """
        self._denied.add(name)
        soon = name in self._checking or self._check_denied(name)
        if refused is not None and soon and not self._holds_data(refused):
            self.holds.begin(refused, self.settings.lease)

    def _holds_data(self, device: blockdev.BlockDevice) -> bool:
        """By what is known before a look: then no check permits its format."""
        known = self.known.get(device.name)
        here = known if known and known.device.attachment == device.attachment else None
        if here is not None and here.seen is not None and here.seen.has_content:
            return True
        said = self.ledger.knowledge(device.volume)
        return said is store.Knowledge.CONTENT

    def _check_denied(self, name: str) -> bool:
        """Whether a check follows now."""
        if name not in self._denied or name in self._timers:
            return False
        known, coming = self.known.get(name), self._identified.get(name)
        wait = 0.0
        if known is not None and (coming is None or coming.attachment == known.device.attachment):
            wait = known.pace.wait(time.monotonic())
        if wait > 0:
            loop = asyncio.get_running_loop()
            self._timers[name] = loop.call_later(wait, self._pace_allows, name)
            return False
        self.schedule(name)
        return True

    def _pace_allows(self, name: str) -> None:
        del self._timers[name]
        self.schedule(name)

    def _answered(self, name: str) -> None:
        """A check begins, which is the answer to all denials so far."""
        self._denied.discard(name)
        if (timer := self._timers.pop(name, None)) is not None:
            timer.cancel()

    def _waits_for_format(self, name: str) -> bool:
        """Whether it may be formatted now and has not been."""
        known = self.known.get(name)
        if known is None or known.seen is None or not _may_be_held(known, known.seen):
            return False
        try:
            return self._until(known.device) is not None
        except OSError:  # the program was detached
            return False

    def _note_pace(self, name: str) -> None:
        """A check of the device has ended."""
        if (known := self.known.get(name)) is not None:
            outcome = known.seen.verdict if known.seen is not None else None, bool(known.reasons)
            known.pace = known.pace.after(outcome, time.monotonic())

    async def _work(self, name: str) -> None:
        again = self._again[name]
        asked = True  # False: only to see what became of a lease
        try:
            while True:
                again.clear()
                self._answered(name)
                self._checking.add(name)
                wait, answered = await self._try_check(name, asked)
                self._checking.discard(name)
                self._note_pace(name)
                self._changed()
                if not (self._check_denied(name) or self._waits_for_format(name)):
                    self.holds.end(name)
                if again.is_set():
                    await asyncio.sleep(AGAIN_SECONDS)
                elif wait is None:
                    return
                else:
                    with contextlib.suppress(TimeoutError):  # wait_for can lose a cancel
                        async with asyncio.timeout(wait):
                            await again.wait()
                asked = again.is_set() or (asked and not answered)
        finally:
            self._checking.discard(name)
            del self._tasks[name], self._again[name]

    async def _try_check(self, name: str, asked: bool) -> tuple[float | None, bool]:
        """A check whose failure is a refusal. Seconds until the next one (None: when asked), and
        whether this one was made."""
        try:
            device = self._identified.pop(name, None) or blockdev.identify(name)
            if device is None or device.size == 0:
                self.forget(name)
                return None, True
            return await self._check(device, asked), True
        except processes.TooManyHangError as error:
            self._check_failed(name, error)
            return NO_CHILD_SECONDS * random.uniform(1.0, 2.0), False
        except (kit.errors.AgentError, OSError, TimeoutError) as error:
            self._check_failed(name, error)
            return None, True

    def _check_failed(self, name: str, error: Exception) -> None:
        reason = f"the decision failed: {error or type(error).__name__}"
        known = self.known.get(name)
        if known is None or known.reasons != (reason,):
            log.error("check of device failed", device=name, error=reason)
        if known is not None:
            known.reasons = (reason,)
        self.denials.decided(name, "", (reason,))

    def knows(self, name: str) -> bool:
        """Whether the device was checked, or is about to be."""
        return name in self.known or name in self._identified

    def replaced(self, known: Known) -> None:
        """Another medium is in the device. Nothing that was permitted before counts for it, even
        while a check of the one before still waits for an answer."""
        known.replaced = True
        self.holds.end(known.device.name)
        self.published.attached_anew(known.device.name)
        self._revoke(known.device.number)

    def forget(self, name: str) -> None:
        """The device was detached: revoke its lease."""
        self._identified.pop(name, None)
        self._answered(name)
        self.holds.end(name)
        self.published.attached_anew(name)
        known = self.known.pop(name, None)
        if known is not None:
            held = self._revoke(known.device.number)
            if held is not None and known.device.volume:
                chore = asyncio.create_task(self._detached(known, held.opens), name=f"close {name}")
                self._chores.add(chore)
                chore.add_done_callback(self._chores.discard)
        self.denials.forget(name)
        self._changed()

    async def _detached(self, known: Known, opens: int) -> None:
        entry = self._entry(known.device)
        try:
            steps = lease.detached(opens, entry.permitted > 0, raw_block.gave(entry.permitted_by))
            await self.carry_out(steps, Turn(known, entry))
        except (OSError, TimeoutError) as error:
            log.warning("unused permission stays open", volume=known.device.title, error=str(error))

    def revoke_unproven(self) -> None:
        """At adoption and at each scan: revoke leases that an earlier agent granted on numbers
        which other attachments have now, or none."""
        if self.leases is None:
            return
        numbers = {known.device.number for known in self.known.values()}
        try:
            for number, held in self.leases.leases().items():
                if number in numbers:
                    continue
                name = blockdev.name_of(number)
                device = blockdev.identify(name) if name else None
                if device is None or lease.met(held.diskseq, None, device.attachment):
                    log.warning("lease of another attachment revoked", device=name, number=number)
                    self._revoke(number)
        except OSError as error:
            log.error("leases cannot be read", error=str(error))
        else:
            self._beat()  # what is left may hold again

    async def close(self) -> None:
        for name in list(self._timers):
            self._answered(name)
        if self._beating is not None:
            self._beating.cancel()
        tasks = [*self._tasks.values(), *self._chores]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.holds.close()
        await self.prober.close()

    # --- one check

    async def _check(self, device: blockdev.BlockDevice, asked: bool) -> float | None:
        """Seconds until the next check, while there is a lease."""
        known = self._meet(device)
        async with known.order:
            return await self._check_known(known, asked)

    async def _check_known(self, known: Known, asked: bool) -> float | None:
        began = time.monotonic()
        device = known.device
        if (renew := await self._raw_block(known)) is not None:
            return renew
        known.seen = first = await self._probe(device)
        if not _may_be_held(known, first):
            self.holds.end(device.name)  # what follows may take longer than an unmap tries
        known.checked = time.monotonic()
        known.doubt = known.doubt.after(first, known.checked)
        if (first.type, first.uuid) == known.allowed_over and self._until(device) is not None:
            self._decided(known, ())  # what an operator permits to destroy is still there
            return LEASED_CHECK_SECONDS
        known.allowed_over = None
        if first.has_content or self._until(device) is None:
            known.allowed = False
        wait = await self._conclude(known, first)
        if known.doubt.wait is not None:
            wait = min(wait or math.inf, known.doubt.wait)
        reasons = lease.undisputed(
            first,
            leased=self._until(device) is not None,
            attached=self.leases is not None,
            asked=asked or device.name in self._denied,  # somebody tried since this look began
        )
        if reasons is None:
            evidence = await self._evidence(known, first)
            reasons = lease.refusals(evidence, self._policy())
            if not reasons:
                await self._grant(known, f"automatic on {self.node}")
                if known.lease_seconds is None:
                    known.lease_seconds = time.monotonic() - began
                wait = LEASED_CHECK_SECONDS
        self._decided(known, reasons)
        return wait

    def _meet(self, device: blockdev.BlockDevice) -> Known:
        """What is known of this attachment. A new one starts without a lease that is not its."""
        known = self.known.get(device.name)
        before = known.device.attachment if known is not None else None
        held = self._held(device)
        if lease.met(held.diskseq if held else None, before, device.attachment):
            self._revoke(device.number)
        if known is not None and device.driver not in lease.NEW_DISKS and not known.replaced:
            # Nobody heard of another medium before this check. A disk that stays keeps its node,
            # and with it the bind mounts that were made for the medium before. But nbd tells the
            # name of a medium a moment after its size.
            was = known.device
            named = not was.volume and was.diskseq == device.diskseq
            if not named and not lease.same_medium(was.attachment, device.attachment):
                self.replaced(known)
        if known is None or before != device.attachment:
            known = self.known[device.name] = Known(device, checked=time.monotonic())
        known.device = device
        return known

    async def _raw_block(self, known: Known) -> float | None:
        """A pod writes the device itself: there is no file system that mkfs could destroy. The
        permission lasts as long as the publication. Seconds until it must be renewed; None: it is
        not published."""
        device, held = known.device, self._held(known.device)
        by_publication = raw_block.gave(self._entry(device).permitted_by)
        if not (self.settings.raw_block and device.name in self.published):
            earlier = held is not None and (held.until == math.inf or by_publication)
            holds = earlier and self._until(device) is not None
            if holds and self.settings.raw_block and not (known.raw or self.published.whole):
                self._decided(known, ())
                return RAW_CHECK_SECONDS
            if known.raw or earlier:
                self._revoke(device.number)  # of the pod that is gone, maybe of an earlier agent
            known.raw = False
            return None
        known.raw = True
        seconds = math.inf
        if self.leases is not None:
            seconds = lease.raw_seconds(device.driver, self.leases.ends_with_disk)
            by = raw_block.BY + self.node
            turn = Turn(known, None, by=by, seconds=seconds, alone=True)
            renewed = held is not None and by_publication
            await self.carry_out(lease.RENEWING if renewed else lease.PUBLISHING, turn)
        self._decided(known, ())
        return min(seconds / 4, RAW_CHECK_SECONDS)

    async def _probe(self, device: blockdev.BlockDevice) -> Verdict:
        image = device.lowest.image
        # rbd-nbd does not say which cluster it shows: its devices count as one.
        group = (image.fsid if image is not None else "") or device.lowest.driver
        found = await self.prober.probe(device.path, device.encrypts, group)
        self.verdicts[found.verdict] = self.verdicts.get(found.verdict, 0) + 1
        return found

    async def _conclude(self, known: Known, seen: Verdict) -> float | None:
        """Write down what was seen, and end a lease that has served. Seconds until the next check,
        while there is a lease."""
        device = known.device
        blank = seen.verdict is Kind.BLANK_VERIFIED
        entry = self._entry(device)
        image = device.lowest.image
        if not blank and image is not None and device.volume:  # what other nodes have seen
            known.cluster = answer = await self.mirror.ask(image, part=device.part)
            there = answer.known
            # A clone carries its parent's entry until it has its own: it says what to expect, but
            # other content than the parent's is no change.
            if there is not None and (there.volume == device.volume or not seen.has_content):
                entry = store.merge(entry, there)
        turn = Turn(known, entry, seen)
        held = self._held(device)
        now = time.monotonic()
        expired = held is not None and now > held.until + 1.0
        steps = lease.conclude(
            has_content=seen.has_content,
            blank=blank,
            leased=held is not None,
            expired=expired,
            opens=held.opens if held else 0,
            permitted=entry.permitted > 0,
            earlier=bool(entry.earlier_by),
            by_pod=raw_block.gave(entry.permitted_by),
        )
        await self.carry_out(steps, turn)
        # Of a blank device the cluster is asked later: until then the last look's answer holds.
        before = known.missing if blank and turn.entry and not turn.entry.permitted else ""
        known.missing = steps.missing(known, turn.entry) or before
        if held is None or expired:
            return None
        return max(0.2, min(LEASED_CHECK_SECONDS, held.until - now + 1.1))

    async def _evidence(self, known: Known, first: Verdict) -> lease.Evidence:
        """Ask every source. The cluster answers after the first probe; the second probe and the
        device's identity come last."""
        device = known.device
        asked: asyncio.Task[Answer] | None = None
        told = asyncio.create_task(self._statement(device))
        image = device.lowest.image
        if image is not None:
            marks = signature_offsets.marks(device.size)
            places = tuple((first.start + at, length) for at, length in marks)
            extents = Extents(first.start, places)
            asked = asyncio.create_task(self.mirror.ask(image, extents, part=device.part))
        try:
            await asyncio.sleep(self.settings.settle)
            second = await self._probe(device)
            known.cluster = answer = await asked if asked is not None else NOT_ASKED
            known.witness = said = await told
        finally:
            for task in (asked, told):
                if task is not None and not task.done():
                    task.cancel()
        if answer.mirror is not store.Knowledge.UNKNOWN:
            entry = self._entry(device)
            there = answer.known
            known.missing = steps.missing(known, store.merge(entry, there) if there else entry)
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
            ledger=self.ledger.knowledge(device.volume),
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
        others = (_monitors(known.device) for known in self.known.values())
        fsid = image.fsid if image else ""
        return lease.Mapped(fsid, _monitors(device), frozenset[str]().union(*others))

    async def _statement(self, device: blockdev.BlockDevice) -> Statement:
        return NO_CLUSTER if self.witness is None else await self.witness.ask(device)

    def _policy(self) -> lease.LeasePolicy:
        quiet, require = self.settings.quiet, self.settings.require_extents
        if self.witness is None:
            return lease.LeasePolicy(quiet, require)
        asked = self.witness.settings
        return lease.LeasePolicy(quiet, require, asked.outage, asked.young)

    def _decided(self, known: Known, reasons: tuple[str, ...]) -> None:
        if known.reasons != reasons:
            log.info(
                "device decided",
                device=known.device.name, volume=known.device.title,
                verdict=str(known.seen), may_be_formatted=not reasons, reasons=reasons,
            )  # fmt: skip
        known.reasons = reasons
        self.denials.decided(known.device.name, str(known.seen), reasons)

    def mounts_changed(self, now: raw_block.Table, whole: bool = True) -> None:
        """Check the devices that kubelet published as raw block volumes, or no longer does."""
        names = self.published.update(now)
        if whole and not self.published.whole:
            names = frozenset(self.known)
        self.published.whole = whole
        for name in names & self.known.keys():
            self.schedule(name)

    # --- operators

    async def _grant(self, known: Known, by: str) -> None:
        self._holder()  # before anything is written down
        await self.carry_out(lease.GRANTING, Turn(known, None, by=by))
        device = known.device
        log.info("format permitted", device=device.name, volume=device.title, by=by)

    async def allow(self, path: str, volume: str, reason: str, by: str) -> blockdev.BlockDevice:
        """A lease whatever the device holds, after a check that is running: that one has seen the
        device as it was. NotFoundError, RefusedError, InUseError."""
        device = blockdev.by_path(path)
        if device.volume != volume:
            raise kit.errors.RefusedError(
                path,
                f"holds volume {device.volume or '(no name)'}, not {volume or '(empty)'}",
                "name the volume that 'nodeagent volume probe' shows",
            )
        if blockdev.in_use(device):
            raise kit.errors.InUseError(
                path, "is mounted, or another device is stacked on it", "unmount it first"
            )
        log.warning("format permitted by an operator", device=device.name, volume=volume, by=by,
                    reason=reason)  # fmt: skip
        known = self._meet(device)
        try:
            async with asyncio.timeout(ALLOW_SECONDS):
                await known.order.acquire()
        except TimeoutError:
            raise kit.errors.InUseError(
                path, f"a check of it has not ended for {ALLOW_SECONDS:.0f} s", "try again"
            ) from None
        try:
            seen = await self._probe(device)
            known.allowed_over = (seen.type, seen.uuid) if seen.has_content else None
            known.seen = seen
            await self._grant(known, f"{by}: {reason}")
            known.allowed = True
            self.holds.begin(device, self.settings.lease)  # ceph-csi would unmap it meanwhile
        finally:
            known.order.release()
        self.schedule(device.name)
        return device

    async def accept(self, volume: str, by: str) -> store.Entry:
        """An operator accepts that the volume holds other content than the ledger knew."""
        known = next((k for k in self.known.values() if k.device.volume == volume), None)
        if known is None or known.seen is None or not known.seen.has_content:
            raise kit.errors.RefusedError(
                f"volume {volume}", "is not attached here with readable content", "attach it"
            )
        seen = known.seen
        new = self._entry(known.device).saw(
            seen.type, seen.uuid, seen.label, time.time(), self.node
        )
        await self._save(new)
        await self._mirror(known, new)
        known.changed_from = ""
        log.warning("changed content accepted", volume=volume, by=by)
        self._changed()
        return new


def _monitors(device: blockdev.BlockDevice) -> frozenset[str]:
    """The addresses that its client was given when it was mapped."""
    client = device.lowest.client
    return frozenset(client.config.split(" ")[0].split(",")) if client else frozenset()


def _may_be_held(known: Known, seen: Verdict) -> bool:
    """Blank, or what an operator gave up, recognised or not."""
    if seen.has_content:
        return (seen.type, seen.uuid) == known.allowed_over
    return known.allowed or seen.verdict is Kind.BLANK_VERIFIED
