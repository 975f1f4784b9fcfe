"""Looks at guarded devices, keeps the ledger, and gives and ends leases.

The decision itself is lease.py's; here it is fed and carried out. One task per device at most.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import structlog

import kit.errors
import kit.findings
from linux import mountinfo
from volumes import devices, settings
from volumes.guard import denials, errorlog, layout, lease, rawblock
from volumes.ledger import cluster, entry, store
from volumes.probe import prober, verdict

log = structlog.get_logger("volumes")

SAVE_SECONDS = 10.0  # for an fsync of the ledger; the state directory's disk may hang
AGAIN_SECONDS = 0.3  # least time between two looks at a device
LINGER_SECONDS = lease.LINGER_SECONDS
LEASED_LOOK_SECONDS = 1.0  # while a lease runs: what has become of it
MOST_DEVICES = 1024


class Leases(Protocol):
    """Who holds leases: the kernel program, or the weaker fallback."""

    def grant(self, number: devices.Number, until: float) -> None: ...

    def revoke(self, number: devices.Number) -> layout.Lease | None: ...

    def leases(self) -> dict[devices.Number, layout.Lease]: ...


@dataclass
class Known:
    """What is known of one attached device. ``reasons`` None: not decided; empty: leased."""

    device: devices.BlockDevice
    seen: verdict.Verdict | None = None
    reasons: tuple[str, ...] | None = None
    looked: float = 0.0  # CLOCK_MONOTONIC
    raw: bool = False
    changed_from: str = ""  # the ledger's content, when another is there now
    missing: str = ""  # the ledger's content, when nothing recognisable is there now
    lease_seconds: float | None = None  # from first sight to lease
    mirrored: tuple[str, str, str, float] | None = None  # what the image's metadata has of us


class Judge:
    def __init__(
        self,
        wanted: settings.GuardSettings,
        leases: Leases | None,
        ledger: store.Store,
        clusters: cluster.Clusters,
        errors: errorlog.ErrorLog,
        refused: denials.Denials,
        *,
        node: str,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.settings = wanted
        self.leases = leases  # None: nothing is enforced, so nothing is given
        self.ledger = ledger
        self.clusters = clusters
        self.errors = errors
        self.denials = refused
        self.node = node
        self.prober = prober.Prober(wanted.probe_timeout)
        self.known: dict[str, Known] = {}
        self._changed = changed
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._again: dict[str, asyncio.Event] = {}
        self._chores: set[asyncio.Task[None]] = set()
        self._writing = asyncio.Lock()
        self.granted = 0
        self.mirror_failures = 0
        self.verdicts: dict[str, int] = {}

    # --- one task per device

    def consider(self, name: str) -> None:
        """Look at the device now, or once more when that is being done."""
        if name in self._tasks:
            self._again[name].set()
        elif len(self._tasks) < MOST_DEVICES:
            self._again[name] = asyncio.Event()
            self._tasks[name] = asyncio.create_task(self._work(name), name=f"judge {name}")

    async def _work(self, name: str) -> None:
        again = self._again[name]
        asked = True  # not only a look at what has become of a lease
        try:
            while True:
                again.clear()
                wait = await self._guarded_look(name, asked)
                self._changed()
                if again.is_set():
                    await asyncio.sleep(AGAIN_SECONDS)
                elif wait is None:
                    return
                else:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(again.wait(), wait)
                asked = again.is_set()
        finally:
            del self._tasks[name], self._again[name]

    async def _guarded_look(self, name: str, asked: bool) -> float | None:
        """A look whose failure is a refusal. Seconds until the next one; None: when asked."""
        try:
            return await self._look(name, asked)
        except (kit.errors.AgentError, OSError, TimeoutError, cluster.Failed) as error:
            reason = f"the decision failed: {error or type(error).__name__}"
            log.error("device could not be judged", device=name, error=reason)
            known = self.known.get(name)
            if known is not None:
                known.reasons = (reason,)
            self.denials.decided(name, "", (reason,))
            return None

    def forget(self, name: str) -> None:
        """The device was detached: its lease ends with it."""
        known = self.known.pop(name, None)
        if known is not None:
            held = self._revoke(known.device.number)
            if held is not None and held.opens == 0 and known.device.volume:
                # Nothing was written under it, and nothing can be any more.
                chore = asyncio.create_task(self._close_unused(known), name=f"close {name}")
                self._chores.add(chore)
                chore.add_done_callback(self._chores.discard)
        self.denials.forget(name)
        self._changed()

    async def _close_unused(self, known: Known) -> None:
        current = self.ledger.get(known.device.volume)
        if current is None or not current.permitted:
            return
        try:
            await self._save(current.unused())
            await self._mirror(known, current.unused())
        except (OSError, TimeoutError) as error:
            log.warning("unused permission stays open", volume=known.device.title, error=str(error))

    async def close(self) -> None:
        tasks = [*self._tasks.values(), *self._chores]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.prober.close()

    # --- one look

    async def _look(self, name: str, asked: bool) -> float | None:
        began = time.monotonic()
        device = devices.identify(name)
        if device is None or device.size == 0:
            self.forget(name)
            return None
        known = self._meet(device, began)
        if self.settings.raw_block and rawblock.published(device, rawblock.host_mounts()):
            return self._raw(known)
        known.raw = False
        known.seen = first = await self._probe(device)
        known.looked = time.monotonic()
        blank = first.verdict is verdict.Kind.BLANK_VERIFIED
        current = self._entry(device)
        if not blank:
            current = await self._merged(device, current)
        wait = await self._conclude(known, first, current)
        self._note_missing(known, current)
        if not blank:
            self._decided(known, (f"it is not blank: {first}",))
            return wait
        if self._until(device) is not None:
            self._decided(known, ())
            return wait
        if self.leases is None:
            self._decided(known, ("the guard is not attached",))
            return None
        if not asked:
            self._decided(known, ("its lease ran out; it is given again when it is asked for",))
            return wait
        return await self._decide(known, first, began)

    async def _decide(self, known: Known, first: verdict.Verdict, began: float) -> float | None:
        device = known.device
        evidence, answer = await self._evidence(device, first)
        if answer.known is not None:
            self._note_missing(known, entry.merge(self._entry(device), answer.known))
        reasons = lease.refusals(evidence, self._policy())
        if reasons:
            self._decided(known, reasons)
            return None
        await self._grant(known, f"automatic on {self.node}")
        if known.lease_seconds is None:
            known.lease_seconds = time.monotonic() - began
        self._decided(known, ())
        return LEASED_LOOK_SECONDS

    def _meet(self, device: devices.BlockDevice, now: float) -> Known:
        """What we know of this attachment; a new one begins with nothing, and without a lease."""
        known = self.known.get(device.name)
        if known is None or known.device.attachment != device.attachment:
            if known is not None:
                self._revoke(known.device.number)
            known = self.known[device.name] = Known(device, looked=now)
        known.device = device
        return known

    def _raw(self, known: Known) -> float | None:
        """Its pod writes the device itself; there is no file system that could be lost by mkfs."""
        known.raw = True
        if self.leases is not None:
            self.leases.grant(known.device.number, time.monotonic() + rawblock.HELD_SECONDS)
        self._decided(known, ())
        return rawblock.HELD_SECONDS / 4

    def _revoke(self, number: devices.Number) -> layout.Lease | None:
        return self.leases.revoke(number) if self.leases is not None else None

    def _held(self, device: devices.BlockDevice) -> layout.Lease | None:
        return self.leases.leases().get(device.number) if self.leases is not None else None

    async def _probe(self, device: devices.BlockDevice) -> verdict.Verdict:
        found = await self.prober.probe(device.path)
        self.verdicts[found.verdict] = self.verdicts.get(found.verdict, 0) + 1
        return found

    def _policy(self) -> lease.Policy:
        return lease.Policy(self.settings.quiet, self.settings.require_extents)

    def _until(self, device: devices.BlockDevice) -> float | None:
        """Until when the kernel lets it be formatted; None when it does not now."""
        held = self._held(device)
        return held.until if held and held.until > time.monotonic() else None

    def _decided(self, known: Known, reasons: tuple[str, ...]) -> None:
        if known.reasons != reasons:
            log.info(
                "device judged",
                device=known.device.name, volume=known.device.title,
                verdict=str(known.seen), may_be_formatted=not reasons, reasons=reasons,
            )  # fmt: skip
        known.reasons = reasons
        self.denials.decided(known.device.name, str(known.seen), reasons)

    async def _evidence(
        self, device: devices.BlockDevice, first: verdict.Verdict
    ) -> tuple[lease.Evidence, cluster.Answer]:
        """Ask every source. The answers are of after the first probe; the second comes last."""
        asked: asyncio.Task[cluster.Answer] | None = None
        if device.rbd is not None:
            asked = asyncio.create_task(self.clusters.look(device.rbd, extents=True))
        try:
            await asyncio.sleep(self.settings.settle)
            second = await self._probe(device)
            answer = await asked if asked is not None else cluster.NOT_ASKED
        finally:
            if asked is not None and not asked.done():
                asked.cancel()
        after = devices.identify(device.name)
        is_rbd = device.driver == "rbd"
        now = time.monotonic()
        evidence = lease.Evidence(
            is_rbd=is_rbd,
            before=device.attachment,
            after=after.attachment if after else None,
            first=first,
            second=second,
            ledger=self.ledger.knowledge(device.volume),
            mirror=answer.mirror,
            extents=answer.extents,
            quiet_for=self.errors.quiet_for(device.parent or device.name, is_rbd, now),
            read_only=after.read_only if after else None,
            in_use=_in_use(after) if after else None,
            snapshot=bool(device.rbd and device.rbd.snapshot),
            cluster_size=answer.size,
            why_unknown=answer.why,
        )
        return evidence, answer

    # --- the ledger

    async def _save(self, new: entry.Entry) -> None:
        """Durable here when it returns. OSError or TimeoutError otherwise."""
        async with self._writing:
            async with asyncio.timeout(SAVE_SECONDS):
                await asyncio.to_thread(self.ledger.put, new)

    async def _mirror(self, known: Known, new: entry.Entry) -> None:
        """Into the image's metadata, where there is a cluster to write to."""
        image = known.device.rbd
        state = (new.type, new.uuid, new.label, new.permitted)
        if image is None or image.snapshot or known.mirrored == state:
            return
        try:
            if await self.clusters.write(image, new):
                known.mirrored = state
        except cluster.Failed as error:
            self.mirror_failures += 1
            log.warning("ledger not mirrored", volume=known.device.title, error=str(error))

    def _entry(self, device: devices.BlockDevice) -> entry.Entry:
        found = self.ledger.get(device.volume)
        return found or entry.Entry(volume=device.volume, title=device.title)

    async def _merged(self, device: devices.BlockDevice, here: entry.Entry) -> entry.Entry:
        """With what other nodes have seen."""
        if device.rbd is None or not device.volume:
            return here
        answer = await self.clusters.look(device.rbd, extents=False)
        return entry.merge(here, answer.known) if answer.known else here

    async def _conclude(
        self, known: Known, seen: verdict.Verdict, current: entry.Entry
    ) -> float | None:
        """Write down what was seen, and end a lease that has done its work. Seconds until the next
        look, while there is a lease."""
        held = self._held(known.device)
        now = time.monotonic()
        expired = held is not None and now > held.until + 1.0
        steps = lease.conclude(
            has_content=seen.has_content,
            verdict_known=seen.verdict is verdict.Kind.BLANK_VERIFIED,
            leased=held is not None,
            expired=expired,
            opens=held.opens if held else 0,
            open_=current.permitted > 0,
        )
        for step in steps:
            current = await self._do(step, known, seen, current)
        if held is None or expired:
            return None
        return max(0.2, min(LEASED_LOOK_SECONDS, held.until - now + 1.1))

    async def _do(
        self, step: lease.Step, known: Known, seen: verdict.Verdict, current: entry.Entry
    ) -> entry.Entry:
        number = known.device.number
        match step:
            case lease.Step.RECORD_CONTENT:
                return await self._record(known, seen, current)
            case lease.Step.CLOSE_PERMISSION:
                current = current.unused()
                await self._save(current)
            case lease.Step.MIRROR:
                if known.device.volume and not known.changed_from:
                    await self._mirror(known, current)
            case lease.Step.SHORTEN:
                until = min(self._until(known.device) or 0.0, time.monotonic() + LINGER_SECONDS)
                if self.leases is not None:
                    self.leases.grant(number, until)
            case lease.Step.REVOKE:
                self._revoke(number)
        return current

    async def _record(
        self, known: Known, seen: verdict.Verdict, current: entry.Entry
    ) -> entry.Entry:
        """The content seen, unless it is not what the ledger remembers: that is a finding, and the
        ledger keeps what it knew until a person accepts the change."""
        if not known.device.volume:
            return current
        differs = current.type and (current.type, current.uuid) != (seen.type, seen.uuid)
        if differs and not current.permitted:
            known.changed_from = f"{current.type} {current.uuid}"
            return current
        known.changed_from = ""
        new = replace(
            current.saw(seen.type, seen.uuid, seen.label, time.time(), self.node),
            title=known.device.title,
        )
        if self.ledger.needs(new):
            await self._save(new)
        return new

    def _note_missing(self, known: Known, current: entry.Entry) -> None:
        """The ledger knows content, and it cannot be seen here."""
        assert known.seen is not None
        gone = bool(current.type) and not known.seen.has_content and not current.permitted
        known.missing = f"{current.type} {current.uuid}" if gone else ""

    # --- giving

    async def _grant(self, known: Known, by: str) -> None:
        """In the order of lease.GRANTING."""
        device = known.device
        if self.leases is None:
            raise kit.errors.RefusedError(device.name, "the guard is not attached", "attach it")
        if device.volume:  # without one, only an operator's word leads here
            permitted = self._entry(device).permit(by, time.time())
            await self._save(permitted)
            await self._mirror(known, permitted)
        again = devices.identify(device.name)
        if again is None or again.attachment != device.attachment:
            raise kit.errors.RefusedError(device.name, "was attached anew", "it is looked at again")
        self.leases.grant(device.number, time.monotonic() + self.settings.lease)
        self.granted += 1
        log.info("format permitted", device=device.name, volume=device.title, by=by,
                 seconds=self.settings.lease)  # fmt: skip

    async def allow(self, path: str, volume: str, reason: str, by: str) -> devices.BlockDevice:
        """An operator's word: a lease whatever the device holds. NotFoundError, RefusedError."""
        device = devices.by_path(path)
        if device.volume != volume:
            raise kit.errors.RefusedError(
                path,
                f"holds volume {device.volume or '(nothing names it)'}, not {volume or '(empty)'}",
                "look at it with 'nodeagent volume probe' and name the volume that it shows",
            )
        if _in_use(device):
            raise kit.errors.InUseError(path, "is mounted or held", "unmount it first")
        log.warning("format permitted by an operator", device=device.name, volume=volume, by=by,
                    reason=reason)  # fmt: skip
        await self._grant(self._meet(device, time.monotonic()), f"{by}: {reason}")
        self.consider(device.name)
        return device

    async def accept(self, volume: str, by: str) -> entry.Entry:
        """An operator accepts that the volume's content is another than the ledger knew."""
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


def _in_use(device: devices.BlockDevice) -> bool:
    """Mounted by any process (the kernel's own list per file system), or below another device."""
    if device.holders:
        return True
    if any(Path("/sys/fs", kind, device.name).exists() for kind in ("ext4", "xfs", "f2fs")):
        return True
    return any(mount.device == device.number for mount in mountinfo.read())
