"""Which devices are checked and when, and what became of their leases.

One task per device, so what happens to one device happens in order. What a check is, ``checks``
says; its decision goes to the denials that wait for it.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable

import structlog

import kit.errors
import kit.tasks
from kit import processes
from linux import blockdev, procfs
from volumes import settings
from volumes.guard import checks, denials, holds, lease, pace, steps
from volumes.guard.kernel import KernelLease
from volumes.guard.steps import Known, Turn
from volumes.ledger import store
from volumes.node import raw_block

log = structlog.get_logger("volumes")

AGAIN_SECONDS = pace.FIRST_SECONDS  # least time between two checks of a device
NO_CHILD_SECONDS = 5.0  # until a check for which no child could be started is tried again
MOST_DEVICES = 1024
ALLOW_SECONDS = 50.0  # an operator's wait for a check that is running; the request has 55


class LeaseManager:
    """``executor`` has the ledger and the kernel's leases; ``changed`` is called after checks."""

    def __init__(
        self,
        wanted: settings.GuardSettings,
        executor: steps.Executor,
        errors: lease.ErrorLog,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.executor = executor
        self.denials = denials.Denials()
        self.holds = holds.Holds()
        self.known: dict[str, Known] = {}
        self.checks = checks.Checks(wanted, executor, errors, self.holds, self.known)
        self._changed = changed
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._again: dict[str, asyncio.Event] = {}
        self._identified: dict[str, blockdev.BlockDevice] = {}  # for the next check
        self._checking: set[str] = set()
        self._denied: set[str] = set()  # denied since their last check began
        self._timers: dict[str, asyncio.TimerHandle] = {}  # until the check of such a device
        self._chores: set[asyncio.Task[None]] = set()

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
            self.holds.begin(refused, self.checks.settings.lease)

    def _holds_data(self, device: blockdev.BlockDevice) -> bool:
        """By what is known before a look: then no check permits its format."""
        known = self.known.get(device.name)
        here = known if known and known.device.attachment == device.attachment else None
        if here is not None and here.seen is not None and here.seen.has_content:
            return True
        said = self.executor.ledger.knowledge(device.volume)
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
        if known is None or known.seen is None or not checks.may_be_held(known, known.seen):
            return False
        try:
            return self.executor.until(known.device) is not None
        except OSError:  # the program was detached
            return False

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
                if (known := self.known.get(name)) is not None:
                    verdict = known.seen.verdict if known.seen is not None else None
                    outcome = verdict, bool(known.reasons), known.writer
                    known.pace = known.pace.after(outcome, time.monotonic())
                self._changed()
                if not (self._check_denied(name) or self._waits_for_format(name)):
                    self.holds.end(name)
                if again.is_set():
                    await asyncio.sleep(AGAIN_SECONDS)
                elif wait is None:
                    return
                else:
                    await self.checks.rest(known, again, wait)
                # A denial may still wait for its look, or be left to it.
                waits = name in self._denied or name in self.denials.waiting
                asked = again.is_set() or waits or (asked and not answered)
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
            known = self.checks.meet(device)
            async with known.order:
                wait, reasons = await self.checks.check(
                    known, lambda: asked or name in self._denied
                )
                self._decided(known, reasons)
            return wait, True
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

    def forget(self, name: str) -> None:
        """The device was detached: revoke its lease."""
        self._identified.pop(name, None)
        self._answered(name)
        self.holds.end(name)
        self.checks.published.attached_anew(name)
        known = self.known.pop(name, None)
        if known is not None:
            held = self.executor.revoke(known.device.number)
            if held is not None and known.device.volume:
                chore = asyncio.create_task(self._detached(known, held.opens), name=f"close {name}")
                self._chores.add(chore)
                chore.add_done_callback(self._chores.discard)
        self.denials.forget(name)
        self._changed()

    async def _detached(self, known: Known, opens: int) -> None:
        entry = self.executor.entry(known.device)
        try:
            steps = lease.detached(opens, entry.permitted > 0, raw_block.gave(entry.permitted_by))
            await self.executor.carry_out(steps, Turn(known, entry))
        except (OSError, TimeoutError) as error:
            log.warning("unused permission stays open", volume=known.device.title, error=str(error))

    def revoke_unproven(self) -> None:
        """At adoption and at each scan: revoke leases that an earlier agent granted on numbers
        which other attachments have now, or none."""
        if self.executor.leases is None:
            return
        numbers = {known.device.number for known in self.known.values()}
        try:
            for number, held in self.executor.leases.leases().items():
                if number in numbers:
                    continue
                name = blockdev.name_of(number)
                device = blockdev.identify(name) if name else None
                if device is None or lease.met(held.diskseq, None, device.attachment):
                    log.warning("lease of another attachment revoked", device=name, number=number)
                    self.executor.revoke(number)
        except OSError as error:
            log.error("leases cannot be read", error=str(error))
        else:
            self.executor.beat()  # what is left may hold again

    async def close(self) -> None:
        for name in list(self._timers):
            self._answered(name)
        self.executor.close()
        await kit.tasks.end(*self._tasks.values(), *self._chores)
        await self.holds.close()
        await self.checks.prober.close()

    def _decided(self, known: Known, reasons: tuple[str, ...]) -> None:
        if known.reasons != reasons:
            log.info(
                "device decided",
                device=known.device.name, volume=known.device.title,
                verdict=str(known.seen), may_be_formatted=not reasons, reasons=reasons,
            )  # fmt: skip
        known.reasons = reasons
        if not known.freed_next:  # or the next look decides
            self.denials.decided(known.device.name, str(known.seen), reasons)

    def mounts_changed(self, now: raw_block.Table, whole: bool = True) -> None:
        """Check the devices that kubelet published as raw block volumes, or no longer does."""
        names = self.checks.published.update(now)
        if whole and not self.checks.published.whole:
            names = frozenset(self.known)
        self.checks.published.whole = whole
        for name in names & self.known.keys():
            self.schedule(name)

    # --- operators

    async def allow(self, path: str, volume: str, reason: str, by: str) -> blockdev.BlockDevice:
        """A lease whatever the device holds, after a check that is running: that one has seen the
        device as it was. NotFoundError, RefusedError, InUseError."""
        device = blockdev.by_path(path)
        if device.volume != volume:
            raise kit.errors.RefusedError(
                path,
                f"holds volume {device.volume or '(no name)'}, not {volume or '(empty)'}",
                f"name the volume that 'nodeagent volume probe {path}' shows",
            )
        if blockdev.in_use(device):
            raise kit.errors.InUseError(
                path, "is mounted, or another device is stacked on it", "unmount it first"
            )
        known = self.checks.meet(device)
        async with _alone(known):
            before = self.executor.held(device)
            _refuse(path, before, over=await self.checks.is_over(before, device.number))
            seen = await self.checks.probe(device)
            over = await self.checks.is_still_over(before, device)
            _refuse(path, before, over=over)
            log.warning("format permitted by an operator", device=device.name, volume=volume,
                        by=by, reason=reason)  # fmt: skip
            known.allowed_over = (seen.type, seen.uuid) if seen.has_content else None
            known.seen = seen
            await self.checks.grant(known, f"{by}: {reason}", over=before if over else None)
            known.allowed = True
            # ceph-csi would unmap it meanwhile.
            self.holds.begin(device, self.checks.settings.lease)
        self.schedule(device.name)
        return device

    async def accept(self, volume: str, by: str) -> store.Entry:
        """An operator accepts that the volume holds other content than the ledger knew."""
        known = next((k for k in self.known.values() if k.device.volume == volume), None)
        if known is None:
            raise kit.errors.RefusedError(f"volume {volume}", "is not attached here", "attach it")
        async with _alone(known):
            seen = await self.checks.probe(known.device)  # it may have changed since the last one
            if not seen.has_content:
                raise kit.errors.RefusedError(
                    f"volume {volume}", f"shows no content now ({seen.verdict})",
                    f"look at it: nodeagent volume probe {known.device.path}",
                )  # fmt: skip
            known.seen = seen
            new = self.executor.entry(known.device).saw(
                seen.type, seen.uuid, seen.label, time.time(), self.executor.node
            )
            await self.executor.save(new)
        await self.executor.mirror_entry(known, new)
        known.changed_from = ""
        log.warning("changed content accepted", volume=volume, by=by)
        self._changed()
        return new


def _refuse(path: str, before: KernelLease | None, *, over: bool) -> None:
    """RefusedError while a process formats."""
    at_work = before.at_work if before is not None and not over else 0
    sees, then = procfs.sees_host(), "then try again"
    if sees:
        then += f"; if it hangs, end it: kill {at_work}; if it does not end, its I/O hangs: "
        then += "mend the cluster or restart the node; never unmap with force"
    for why in lease.at_work(at_work, seen=sees):
        raise kit.errors.RefusedError(path, why, then)


@contextlib.asynccontextmanager
async def _alone(known: Known) -> AsyncIterator[None]:
    """Between two checks of a device. InUseError when one does not end."""
    try:
        async with asyncio.timeout(ALLOW_SECONDS):
            await known.order.acquire()
    except TimeoutError:
        raise kit.errors.InUseError(
            known.device.path, f"a check of it has not ended for {ALLOW_SECONDS:.0f} s", "try again"
        ) from None
    try:
        yield
    finally:
        known.order.release()
