"""The work loop: take stock, make the plan, carry it out.

One cycle reads the runtime's inventory, gathers the requests, adds to each what it costs here, asks
the pure planner and does what it says. A cycle runs every ``CYCLE_SECONDS`` and whenever something
changed (a lookup came back, a pull ended, an operator asked). Nothing in a cycle waits for a
registry: lookups (``resolver``) and pulls (``pull``) are tasks of their own.

One cycle holds ``lock``, and so does each request of an operator. All that must outlive the agent
is in the runtime's holds, where the next agent finds it.
"""

import asyncio
import contextlib
import dataclasses
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import structlog

import kit.errors
from preheat import (
    credentials,
    desired,
    estimate,
    failure,
    heal,
    manifest,
    plan,
    pull,
    registry,
    resolver,
    settings,
)
from preheat.desired import Request
from preheat.failure import Kind, PullError
from preheat.runtimes import base

log = structlog.get_logger("preheat")

CYCLE_SECONDS = 15.0
# Changes that come together make one cycle.
SETTLE_SECONDS = 0.05
USE_NOTED_EVERY = 600.0
RECONNECT_FIRST, RECONNECT_LONGEST = 0.05, 5.0
PRESSURE_KNOWN_SECONDS = 1.0


@dataclass
class Totals:
    """Counters since the start of the agent."""

    pulls: int = 0
    fetched_bytes: int = 0
    used_bytes: int = 0  # of images pinned by us that containers then used
    failed: dict[str, int] = field(default_factory=lambda: {kind.value: 0 for kind in Kind})


@dataclass(frozen=True)
class Snapshot:
    """What the last cycle saw and decided."""

    inventory: base.Inventory = field(default_factory=base.Inventory)
    requests: Mapping[str, Request] = field(default_factory=dict)
    pinned: tuple[plan.Pinned, ...] = ()
    shapes: Mapping[str, manifest.Shape] = field(default_factory=dict)  # by top digest
    decided: plan.Plan = field(default_factory=plan.Plan)
    node: plan.Node | None = None
    at: float = 0.0  # Unix time; 0 before the first cycle


class Reconciler:
    def __init__(
        self,
        runtime: base.Runtime,
        section: settings.PreheatSettings,
        client: registry.Registry,
    ) -> None:
        self.runtime = runtime
        self.section = section
        self.client = client
        self.limit = pull.Limiter(section.bytes_per_second)
        self._writers = pull.Writers()
        self.resolver = resolver.Resolver(client, credentials.Credentials(), self.wake)
        self.local = estimate.LocalImages(runtime)
        self.healer = heal.Healer(runtime, self.pressed, section.heal.per_hour)
        self.totals = Totals()
        # The policy is known before the first cycle.
        self.snapshot = Snapshot(requests=desired.gather(section, ()))
        self.running: dict[str, pull.Running] = {}
        self.failures: dict[str, failure.Failure] = {}
        self.trouble = "not connected yet"  # why the runtime cannot be used, or ""
        self.version = ""
        self.last_cycle = time.monotonic()
        self.lock = asyncio.Lock()
        self._wake = asyncio.Event()
        self._used: set[str] = set()  # top digests in use at the last cycle
        self._pressed = (0.0, False)  # monotonic time, answer

    # --- tasks ------------------------------------------------------------------------------------

    def wake(self) -> None:
        self._wake.set()

    async def work(self) -> None:
        """Run cycles for ever."""
        while True:
            self._wake.clear()
            try:
                if self.trouble:
                    self.version = await self.runtime.connect()
                    log.info("container runtime answers", version=self.version)
                    self.trouble = ""
                await self.cycle()
            except base.RuntimeCallError as error:
                if not self.trouble and isinstance(error, base.RuntimeGoneError):
                    log.error("container runtime does not answer", error=str(error))
                self.trouble = str(error)
            except kit.errors.AgentError as error:
                if self.trouble != str(error):
                    log.error("preheating stopped", error=str(error))
                self.trouble = str(error)
            self.last_cycle = time.monotonic()
            wait = CYCLE_SECONDS if not self.trouble else RECONNECT_LONGEST
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._wake.wait()
                    await asyncio.sleep(SETTLE_SECONDS)

    async def watch(self) -> None:
        """Heal on each removal event, and compare everything after each gap in the events."""
        wait = RECONNECT_FIRST
        while self.runtime.abilities.watches:
            try:
                await self.runtime.connect()
                gap = asyncio.create_task(self._after_gap(), name="resync")
                try:
                    async for name in self.runtime.removals():
                        wait = RECONNECT_FIRST
                        if not await self.healer.removed(name):
                            self.wake()
                finally:
                    gap.cancel()
                    await asyncio.gather(gap, return_exceptions=True)
            except kit.errors.AgentError as error:
                log.debug("event stream ended", error=str(error))
            await asyncio.sleep(wait)
            wait = min(wait * 2, RECONNECT_LONGEST)

    async def _after_gap(self) -> None:
        """Heal what was removed during the gap: now, and again once the new stream surely runs."""
        for wait in (0.0, 0.5):
            await asyncio.sleep(wait)
            with contextlib.suppress(kit.errors.AgentError):
                async with self.lock:
                    inventory = await self.runtime.inventory()
                    self.healer.learn(inventory.holds)
                    await self.healer.resync(inventory)
        self.wake()

    async def stop(self) -> None:
        """End our own work. Holds keep what pulls have fetched."""
        await self.resolver.close()
        tasks = [each.task for each in self.running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.client.close()
        await self.runtime.close()

    # --- taking stock -----------------------------------------------------------------------------

    async def node(self, images_path: str, freeable: int = 0) -> plan.Node:
        """The images' disk and the kubelet's thresholds. Raises HostError, SettingsError."""
        path = images_path or "/"
        try:
            found = await asyncio.to_thread(os.statvfs, Path(path))
        except OSError as error:
            raise kit.errors.HostError(
                f"the container runtime's image directory {path}",
                f"cannot be read ({error.strerror})",
                "mount the host's directory at the same path in the agent's pod (read-only)",
            ) from error
        kubelet = await asyncio.to_thread(settings.thresholds, self.section.kubelet)
        return plan.Node(
            capacity=found.f_blocks * found.f_frsize,
            # Blocks reserved for root count as used, as the kubelet counts them.
            free=found.f_bavail * found.f_frsize,
            gc_high=kubelet.gc_high,
            gc_low=min(kubelet.gc_low, kubelet.gc_high),
            eviction_free=kubelet.eviction_free,
            pin_budget=self.section.pin_budget,
            freeable=freeable,
        )

    async def pressed(self) -> bool:
        """Whether the disk is under pressure; the answer is at most a second old."""
        at, answer = self._pressed
        path = self.snapshot.inventory.images_path
        if path and time.monotonic() - at > PRESSURE_KNOWN_SECONDS:
            answer = (await self.node(path)).pressed
            self._pressed = (time.monotonic(), answer)
        return bool(path) and answer

    async def cycle(self) -> None:
        async with self.lock:
            section = self.section
            inventory = await self.runtime.inventory()
            self.healer.per_hour = section.heal.per_hour
            self.healer.learn(inventory.holds)
            await self.healer.resync(inventory)
            shapes = await self.local.shapes(inventory, section.platform)
            inventory = await self._note_uses(inventory, shapes)
            requests = desired.gather(section, inventory.holds)
            requests |= desired.retained(section, inventory, shapes, requests)
            for note in desired.stale_notes(inventory, requests):
                await self.runtime.end(note)
            self.resolver.request((r.ref for r in requests.values() if r.by != "retained"), section)
            self.failures = {ref: each for ref, each in self.failures.items() if ref in requests}
            requests = {
                ref: await self._measured(each, inventory, shapes) for ref, each in requests.items()
            }
            pinned = await self._pinned(inventory, shapes, requests)
            freeable = await self.local.freeable(shapes, inventory, [pin.parts for pin in pinned])
            node = await self.node(inventory.images_path, freeable)
            self._pressed = (time.monotonic(), node.pressed)
            known = [each for each in requests.values() if each.digest]
            decided = plan.decide(node, known, pinned, section.concurrency, time.time())
            self.snapshot = Snapshot(
                inventory, requests, tuple(pinned), shapes, decided, node, time.time()
            )
            await self._act(self.snapshot)

    async def _note_uses(
        self, inventory: base.Inventory, shapes: Mapping[str, manifest.Shape]
    ) -> base.Inventory:
        """Store uses in the runtime: at first sight, now and then, and when the last one ends.

        Returns the inventory with them: what is in use, or was a cycle ago, was last used now.
        """
        now = time.time()
        using = {d for d, shape in shapes.items() if shape.image_id in inventory.in_use}
        ours = {hold.target.digest for hold in inventory.held("pin") if hold.target}
        self.totals.used_bytes += sum(
            shapes[digest].bytes_total for digest in (using - self._used) & ours
        )
        noted = (using | self._used) & set(shapes)
        for digest in noted:
            ended = digest not in using
            if ended or now - inventory.last_used.get(digest, 0.0) > USE_NOTED_EVERY:
                with contextlib.suppress(base.RuntimeCallError):
                    await self.runtime.note_use(digest, now)
        self._used = using
        last_used = dict(inventory.last_used) | dict.fromkeys(noted, now)
        return dataclasses.replace(inventory, last_used=last_used)

    async def _measured(
        self,
        request: Request,
        inventory: base.Inventory,
        shapes: Mapping[str, manifest.Shape],
    ) -> Request:
        """The request with what it costs here and now."""
        lookup = self.resolver.of(request.ref)
        here = inventory.digest_of(request.ref)
        shape = (lookup.shape if lookup is not None else None) or shapes.get(here)
        last_used = inventory.last_used.get(here, 0.0)
        if shape is None:
            return dataclasses.replace(
                request, digest=here, last_used=last_used, present=bool(here)
            )
        digest = shape.top.digest
        estimates = self.runtime.abilities.estimates
        present = inventory.has(request.ref, digest) and (
            not estimates or estimate.is_here(shape, inventory)
        )
        usages = await self.local.usages(shape, inventory)
        cost = estimate.cost(shape, inventory, self.resolver.unpacked(shape) | usages)
        parts = cost.parts
        if present and estimates:
            parts = await self.local.parts(shape, inventory)
        running = request.ref in self.running
        return dataclasses.replace(
            request,
            digest=digest,
            last_used=last_used,
            present=present,
            measured=True,
            fetch=0 if present else cost.fetch,
            unpack=0 if present else cost.unpack,
            parts=parts,
            running=running,
            blocked="" if present or running else self._blocked(request, digest, lookup, inventory),
        )

    def _blocked(
        self,
        request: Request,
        digest: str,
        lookup: resolver.Lookup | None,
        inventory: base.Inventory,
    ) -> str:
        """Why this image must not be pulled now; empty when it may."""
        now = time.time()
        failed = self.failures.get(request.ref)
        if request.released:
            return "released by an operator; 'nodeagent image preheat' requests it again"
        if request.paused:
            return "paused by an operator"
        if request.is_over:
            return "its time since the last use is over; it is requested again when it is used"
        if request.done:
            return "was pulled once and removed since; 'pin: never' does not fetch it again"
        if self.runtime.abilities.watches and any(
            hold.target and hold.target.digest == digest
            for hold in inventory.held("pin", request.ref)
        ):
            # A pull would bypass the limit of heals.
            return "removed from the runtime although pinned; waiting for the next heal"
        if lookup is None or lookup.shape is None:
            return "the registry lookup is in progress"
        if lookup.private and not request.share_private:
            return desired.PRIVATE
        if failed is not None and (failed.retry_at is None or failed.retry_at > now):
            return failed.message
        if request.by == "policy":
            minute = time.gmtime(now).tm_hour * 60 + time.gmtime(now).tm_min
            if not settings.in_window(self.section.windows, minute):
                return "outside the time windows"
            left = lookup.digest_since + settings.turn(self.section, request.ref) - now
            if left > 0 and not inventory.held("pull", request.ref):
                return f"its turn comes in {left:.0f} s (spread)"
        return ""

    async def _pinned(
        self,
        inventory: base.Inventory,
        shapes: Mapping[str, manifest.Shape],
        requests: Mapping[str, Request],
    ) -> list[plan.Pinned]:
        found = []
        for hold in inventory.held("pin"):
            if hold.target is None:
                continue
            shape = shapes.get(hold.target.digest)
            lookup = self.resolver.of(hold.ref)
            looked_up = lookup.shape if lookup is not None else None
            parts: Mapping[str, int] = {}
            if shape is not None:
                parts = await self.local.parts(shape, inventory)
            elif looked_up is not None and not self.runtime.abilities.estimates:
                unpacked = self.resolver.unpacked(looked_up)
                parts = estimate.cost(looked_up, base.Inventory(), unpacked).parts
            self.healer.sizes[hold.id] = shape.bytes_total if shape is not None else 0
            used = max(inventory.last_used.get(hold.target.digest, 0.0), hold.created)
            request = requests.get(hold.ref)
            source = request or Request(hold.ref, hold.by, hold.keep)
            keep = desired.keep_seconds(source.keep)
            requested = request is not None and request.keep != "never" and not request.released
            if request is None and hold.by == "retained" and self.section.retain is not None:
                keep, requested = self.section.retain.duration, True
            found.append(
                plan.Pinned(
                    hold=hold.id,
                    ref=hold.ref,
                    digest=hold.target.digest,
                    rank=dataclasses.replace(source, last_used=used).rank,
                    parts=parts,
                    in_use=hold.image_id in inventory.in_use,
                    expires=None if keep is None else used + keep,
                    requested=requested,
                )
            )
        return found

    # --- acting -----------------------------------------------------------------------------------

    async def _act(self, seen: Snapshot) -> None:
        holds = {hold.id: hold for hold in seen.inventory.holds}
        for release in seen.decided.releases:
            log.info("pin released", image=release.ref, why=release.text)
            if release.reason is plan.Reason.EXPIRED:
                await self._note_expired(holds.values(), holds[release.hold])
            await self.release(holds[release.hold])
        for ref in seen.decided.pins:
            await self._pin_present(seen.requests[ref], seen.inventory)
        for ref in list(self.running) if seen.decided.pause else ():
            log.warning("pull paused", image=ref, why=seen.decided.pause)
            await self.halt(ref)
        for ref in seen.decided.pulls:
            self._start(seen.requests[ref])
        await self._end_unrequested_pulls(seen)
        if seen.decided.pause and seen.decided.releases:
            # Garbage of unpinned images does not suffice: give back half-fetched images too.
            await self._give_back(seen.inventory)

    async def _give_back(self, inventory: base.Inventory) -> None:
        for hold in inventory.held("pull"):
            await self.runtime.end(hold)
            if hold.by == "operator":  # the request stays, to be done once there is room
                await self.runtime.begin(hold)

    async def _end_unrequested_pulls(self, seen: Snapshot) -> None:
        """End the holds of pulls that nobody requests any more, or that are finished."""
        for hold in seen.inventory.held("pull"):
            if hold.ref in self.running:
                continue
            request = seen.requests.get(hold.ref)
            pinned = bool(seen.inventory.held("pin", hold.ref))
            if request is None or request.released or (request.present and pinned):
                await self.runtime.end(hold)
            elif request.present and not request.pins:
                if request.by == "policy":
                    await self.note(request.ref, "policy", "done")
                await self.runtime.end(hold)

    async def note(self, ref: str, by: base.By, state: str) -> None:
        await self.runtime.begin(base.Hold(id="", role="note", ref=ref, by=by, state=state))

    async def _note_expired(self, holds: Iterable[base.Hold], pin: base.Hold) -> None:
        """Before the pin goes: without the note the next cycle would pin the image again."""
        note = base.Hold(
            *("", "note", pin.ref, "policy", pin.target), state="expired", created=time.time()
        )
        for old in holds:
            if (old.role, old.ref, old.state) == (note.role, note.ref, note.state):
                await self.runtime.end(old)
        await self.runtime.begin(note)

    async def release(self, hold: base.Hold) -> None:
        self.healer.forget(hold)
        await self.runtime.unpin(hold)

    async def _pin_present(self, request: Request, inventory: base.Inventory) -> None:
        target = inventory.target_of(request.ref)
        if target is None:
            return
        hold = base.Hold("", "pin", request.ref, request.by, target, keep=request.keep)
        self.healer.remember(await self.runtime.pin(hold))
        log.info("image pinned", image=request.ref, by=request.by)
        self.wake()

    def _start(self, request: Request) -> None:
        lookup = self.resolver.of(request.ref)
        assert lookup is not None
        puller = pull.Puller(
            *(self.runtime, self.client, self.limit, self._writers, self.section, request, lookup)
        )
        task = asyncio.create_task(self._run(request, puller), name=f"pull {request.ref}")
        self.running[request.ref] = pull.Running(puller.progress, task)
        log.info("pull started", image=request.ref, bytes=puller.progress.bytes_total)

    async def _run(self, request: Request, puller: pull.Puller) -> None:
        ref = request.ref
        try:
            pin = await puller.run()
            if pin is not None:
                self.healer.remember(pin)
            elif request.by == "policy":
                with contextlib.suppress(base.RuntimeCallError):
                    await self.note(ref, "policy", "done")
            self.failures.pop(ref, None)
            self.totals.pulls += 1
            self.totals.fetched_bytes += puller.fetched
            log.info("pull done", image=ref, fetched=puller.fetched, pinned=pin is not None)
        except PullError as error:
            known = self.failures.get(ref)
            self._failed(ref, error, known.attempts + 1 if known is not None else 1)
            log.warning("pull failed", image=ref, kind=str(error.kind), error=str(error))
            if error.kind in (Kind.NOT_FOUND, Kind.AUTH):
                self.resolver.again(ref)  # the tag or the login may have changed
        except Exception as error:  # a bug must not become a loop of pulls
            log.exception("pull failed unexpectedly", image=ref)
            text = f"{type(error).__name__}, see the agent's log"
            self._failed(ref, PullError(ref, Kind.BAD_IMAGE, text), 1)
        finally:
            self.running.pop(ref, None)
            self._wake_for_retry(ref)
            self.wake()

    def _failed(self, ref: str, error: PullError, attempts: int) -> None:
        self.failures[ref] = failure.after(error, attempts, time.time())
        self.totals.failed[error.kind.value] += 1

    def _wake_for_retry(self, ref: str) -> None:
        """Wake the loop for a retry that is due before the next cycle."""
        failed = self.failures.get(ref)
        if failed is not None and failed.retry_at is not None:
            wait = failed.retry_at - time.time()
            if 0 < wait < CYCLE_SECONDS:
                asyncio.get_running_loop().call_later(wait + 0.01, self.wake)

    async def halt(self, ref: str) -> None:
        """Cancel a running pull; its hold keeps the bytes."""
        running = self.running.get(ref)
        if running is not None:
            running.task.cancel()
            await asyncio.gather(running.task, return_exceptions=True)
