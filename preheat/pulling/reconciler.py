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
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import structlog

import kit.errors
import kit.pause
import kit.tasks
from preheat import settings
from preheat.planning import desired, plan, stock
from preheat.planning.desired import Request
from preheat.pulling import durability, heal, pull
from preheat.registry import client as registry
from preheat.registry import credentials, estimate, resolver, schedule
from preheat.runtimes import base, containerd

log = structlog.get_logger("preheat")

# Changes that come together make one cycle.
SETTLE_SECONDS = 0.05
RECONNECT_FIRST, RECONNECT_LONGEST = 0.05, 5.0
DISK_KNOWN_SECONDS = 1.0


@dataclass(frozen=True)
class Snapshot:
    """What the last cycle saw and decided."""

    inventory: base.ImageInventory = field(default_factory=base.ImageInventory)
    requests: Mapping[str, Request] = field(default_factory=dict)
    pinned: tuple[plan.Pinned, ...] = ()
    decided: plan.Plan = field(default_factory=plan.Plan)
    node: plan.Node | None = None
    shared: tuple[estimate.Reuse, ...] = ()
    at: float = 0.0  # Unix time; 0 before the first cycle


class Reconciler:
    def __init__(
        self,
        runtime: containerd.Containerd,
        section: settings.PreheatSettings,
        client: registry.Registry,
        boot_file: Path,
    ) -> None:
        self.runtime = runtime
        self.section = section
        self.resolver = resolver.Resolver(
            client, credentials.Credentials(), schedule.Schedule(section), self.wake
        )
        self.local = estimate.LocalImages(runtime)
        self.healer = heal.Healer(runtime, self.pressed, section.heals_per_hour)
        self.pulls = pull.Pulls(runtime, self.resolver, self.healer, self.disk, self.wake)
        self.uses = stock.ImageUses(runtime)
        self.lock = asyncio.Lock()
        self.durability = durability.Durability(runtime, boot_file, self.wake, self.lock)
        # The policy is known before the first cycle.
        self.snapshot = Snapshot(requests=desired.gather(section, ()))
        self.trouble = "not connected yet"  # why the runtime cannot be used, or ""
        self.version = ""
        self.last_cycle = time.monotonic()
        self._wake = asyncio.Event()
        self._disk: tuple[float, plan.Node | None] = (0.0, None)  # monotonic time, answer

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
            wait = pull.CYCLE_SECONDS if not self.trouble else RECONNECT_LONGEST
            if await kit.tasks.until(self._wake, wait):
                await asyncio.sleep(SETTLE_SECONDS)

    async def watch(self) -> None:
        """Heal on each removal event, and compare everything after each gap in the events."""
        pauses = kit.pause.Backoff(RECONNECT_FIRST, RECONNECT_LONGEST)
        while True:
            try:
                await self.runtime.connect()
                gap = asyncio.create_task(self._after_gap(), name="resync")
                try:
                    async for change in self.runtime.changes():
                        pauses.reset()
                        if not await self.healer.changed(change):
                            self.wake()
                finally:
                    self.healer.sees(False)
                    await kit.tasks.end(gap)
            except kit.errors.AgentError as error:
                log.debug("event stream ended", error=str(error))
            await asyncio.sleep(pauses.next())

    async def _after_gap(self) -> None:
        """Heal what was removed during the gap: now, and again once the new stream surely runs."""
        for wait in (0.0, 0.5):
            await asyncio.sleep(wait)
            self.healer.sees(wait > 0)
            with contextlib.suppress(kit.errors.AgentError):
                async with self.lock:
                    moves = self.healer.moves
                    inventory = await self.runtime.inventory()
                    self.healer.learn(inventory, moves)
                    await self.healer.resync(inventory)
        self.wake()

    async def stop(self) -> None:
        """End our own work. Holds keep what pulls have fetched."""
        await self.resolver.close()
        await self.durability.stop()
        await self.pulls.stop()
        await self.runtime.close()

    # --- taking stock -----------------------------------------------------------------------------

    async def node(self, images_path: str, freeable: int = 0) -> plan.Node:
        """The images' disk and the kubelet's thresholds. Raises HostError, SettingsError."""
        return await asyncio.to_thread(stock.node, images_path, self.section, freeable)

    async def disk(self) -> plan.Node | None:
        """The images' disk as it was at most a second ago; None before the first cycle."""
        path = self.snapshot.inventory.images_path
        if path and time.monotonic() - self._disk[0] > DISK_KNOWN_SECONDS:
            self._disk = (time.monotonic(), await self.node(path))
        return self._disk[1] if path else None

    async def pressed(self) -> bool:
        node = await self.disk()
        return node is not None and node.pressed

    async def cycle(self) -> None:
        async with self.lock:
            section, moves = self.section, self.healer.moves
            inventory = await self.runtime.inventory()
            self.runtime.release_after = section.release_after
            with contextlib.suppress(base.BreakerOpenError):  # the rest of it waits
                if await self.runtime.tend(inventory) or await stock.end_lost(
                    self.runtime, inventory
                ):
                    inventory = await self.runtime.inventory()
            self.healer.learn(inventory, moves)
            with contextlib.suppress(base.BreakerOpenError):
                await self.healer.resync(inventory)
            inventory = await self.local.with_shapes(inventory, section.platform)
            inventory = await self.uses.note(inventory)
            requests = desired.gather(section, inventory.holds)
            requests |= desired.lingering(section, inventory, requests, time.time())
            requests |= desired.retained(section, inventory, requests)
            await self._keep_notes(inventory, requests)
            await self.durability.look(inventory)
            asked = {
                each.ref: each.by == "operator" and not inventory.served(each.ref)
                for each in requests.values()
                if each.is_looked_up
            }
            self.resolver.turns.section = section
            self.resolver.request(asked)
            self.pulls.keep(requests)
            requests = {
                ref: await self._measured(each, inventory) for ref, each in requests.items()
            }
            now = time.time()
            pinned = await stock.pinned(section, inventory, requests, self.local, now)
            self.healer.sizes = {d: shape.bytes_total for d, shape in inventory.shapes.items()}
            freeable = await self.local.freeable(inventory, [pin.parts for pin in pinned])
            node = await self.node(inventory.images_path, freeable)
            self._disk = (time.monotonic(), node)
            self.durability.tend(requests, inventory, self.resolver, node.pressed)
            known = [each for each in requests.values() if each.digest or each.measured]
            decided = plan.decide(node, known, pinned, section.concurrency, now)
            bases = frozenset(ref for ref, each in requests.items() if each.by != "retained")
            shared = await asyncio.to_thread(estimate.shared, inventory, bases)
            self.snapshot = Snapshot(*(inventory, requests, pinned, decided, node, shared, now))
            await self._act(self.snapshot)

    async def _keep_notes(
        self, inventory: base.ImageInventory, requests: Mapping[str, Request]
    ) -> None:
        """Note what the settings dropped just now, and end the notes that say nothing any more."""
        for note in desired.stale_notes(inventory, requests):
            await self.runtime.end(note)
        now = time.time()
        for note in desired.notes_ahead(inventory, now):
            # The use before it, too, or that would count when the clock is right again.
            used = inventory.last_used.get(note.digest)
            if used is not None:
                with contextlib.suppress(base.RuntimeCallError):
                    await self.runtime.content.note_use(note.digest, used)
            await self.runtime.end(note)
            if note.ref in requests:
                await self.runtime.begin(dataclasses.replace(note, created=now))
        for ref in desired.newly_dropped(inventory, requests):
            await self.note(ref, "policy", "dropped")
            log.warning("the settings dropped an image", image=ref, why=requests[ref].dropped_text)

    async def _measured(self, request: Request, inventory: base.ImageInventory) -> Request:
        """The request with what it costs here and now."""
        lookup = self.resolver.of(request.ref)
        here = inventory.digest_of(request.ref)
        looked_up = lookup.shape if lookup is not None else None
        shape = looked_up or inventory.shapes.get(here)
        unconfirmed = self.resolver.is_newer_here(request.ref, here) and here in inventory.shapes
        if unconfirmed:
            shape = inventory.shapes[here]
        last_used = inventory.last_used.get(here, 0.0)
        running = request.ref in self.pulls.running
        failed = self.pulls.failures.get(request.ref)
        served = bool(inventory.served(request.ref)) and (failed is None or not failed.spoils(here))
        if shape is None:
            self.pulls.look_for(request.ref, inventory, served, "does not list it")
            if not served and lookup is not None and lookup.leaves_it_to_the_runtime:
                blocked = "" if running else self._hurdle(request, "", lookup, inventory)
                least = base.NO_USE if failed is None else failed.least("", time.time())
                size = max(self.section.unknown_image, least.bytes)
                least = dataclasses.replace(least, bytes=size)
                return desired.untold(request, least, running, blocked)
            digest = here if served else ""
            return dataclasses.replace(request, digest=digest, last_used=last_used, present=served)
        digest = shape.top.digest
        doubted = self.durability.doubted(shape)
        spoilt = failed is not None and failed.spoils(digest)
        listed = inventory.has(request.ref, digest) and not spoilt
        present = listed and estimate.is_here(shape, inventory) and not doubted
        if not doubted:
            why = "some of its layers or documents are not there" if listed else "does not list it"
            self.pulls.look_for(request.ref, inventory, present, why)
        cost = estimate.cost(shape, inventory, await self.local.usages(shape, inventory))
        known = "" if lookup is None or lookup.shape is None else digest
        self.resolver.turns.measured(request.ref, known, cost.fetch, present, time.time())
        least = base.NO_USE if failed is None else failed.least(digest, time.time())
        blocked = ""
        if doubted and not running:
            blocked = durability.REASON
        elif not present and not running:
            costed = dataclasses.replace(request, fetch=cost.fetch)
            blocked = self._hurdle(costed, digest, lookup, inventory)
        return dataclasses.replace(
            request,
            digest=digest,
            last_used=last_used,
            present=present,
            unconfirmed=unconfirmed,
            measured=True,
            fetch=0 if present else cost.fetch,
            remote=estimate.remote_bytes(shape, inventory) if present else 0,
            unpack=0 if present else max(cost.unpack, least.bytes - cost.fetch),
            inodes=0 if present else least.inodes,
            parts=await self.local.parts(shape, inventory) if present else cost.parts,
            running=running,
            blocked=blocked,
        )

    def _hurdle(
        self,
        request: Request,
        digest: str,
        lookup: resolver.Lookup | None,
        inventory: base.ImageInventory,
    ) -> str:
        now, ref, turns = time.time(), request.ref, self.resolver.turns
        if ref in self.pulls.unseen:
            return "it was pulled just now; the next look at the runtime tells what came of it"
        facts = plan.Facts(
            request,
            digest,
            lookup,
            pull_at=turns.pull_at(ref, now, begun=bool(inventory.held("pull", ref))),
            failed=turns.standing(ref, self.pulls.failures.get(ref)),
            pins=tuple(p for p in inventory.held("pin", ref) if self.healer.restores(p, ref)),
            limited=self.section.bytes_per_second is not None,
        )
        return plan.hurdle(facts, now)

    # --- acting -----------------------------------------------------------------------------------

    async def _act(self, seen: Snapshot) -> None:
        """First everything that frees: an open breaker does not stop it."""
        holds = {hold.id: hold for hold in seen.inventory.holds}
        for release in seen.decided.releases:
            log.info("pin released", image=release.ref, why=release.text)
            if release.reason is plan.Reason.EXPIRED:
                await self._note_expired(holds.values(), holds[release.hold])
            await self.release(holds[release.hold])
        for ref in list(self.pulls.running) if seen.decided.pause else ():
            log.warning("pull paused", image=ref, why=seen.decided.pause)
            await self.pulls.halt(ref)
        await self._end_unrequested_pulls(seen)
        if seen.decided.pause and seen.decided.releases:
            # Garbage of unpinned images does not suffice: give back half-fetched images too.
            await self._give_back(seen.inventory)
        with contextlib.suppress(base.BreakerOpenError):
            for retained in seen.decided.retained:
                await self.runtime.begin(stock.as_retained(self.section, holds[retained]))
            for ref in seen.decided.pins:
                await self._pin_present(seen.requests[ref], seen.inventory)
        for ref in seen.decided.pulls:
            self.pulls.start(seen.requests[ref])

    async def _give_back(self, inventory: base.ImageInventory) -> None:
        for hold in inventory.held("pull"):
            if hold.by == "operator":  # the request stays, to be done once there is room
                with contextlib.suppress(base.BreakerOpenError):
                    await self.runtime.empty(hold)
            else:
                await self.runtime.end(hold)

    async def _end_unrequested_pulls(self, seen: Snapshot) -> None:
        """End the holds of pulls that nobody requests any more, or that are finished."""
        for hold in seen.inventory.held("pull"):
            if hold.ref in self.pulls.running:
                continue
            request = seen.requests.get(hold.ref)
            pinned = bool(seen.inventory.held("pin", hold.ref))
            if request is None or request.is_ended(seen.at) or (request.present and pinned):
                await self.runtime.end(hold)
            elif request.present and not request.pins:
                if request.by == "policy":
                    await self.note(request.ref, "policy", "done")
                await self.runtime.end(hold)

    async def note(self, ref: str, by: base.By, state: str) -> None:
        await self.runtime.begin(base.Hold("note", ref, by, state=state))

    async def _note_expired(self, holds: Iterable[base.Hold], pin: base.Hold) -> None:
        """Before the pin goes: without the note the next cycle would pin the image again."""
        note = base.Hold(
            "note", pin.ref, "policy", pin.target, state="expired", created=time.time()
        )
        for old in holds:
            if (old.role, old.ref, old.state) == (note.role, note.ref, note.state):
                await self.runtime.end(old)
        await self.runtime.begin(note)

    async def release(self, hold: base.Hold) -> None:
        self.healer.forget(hold)
        await self.runtime.unpin(hold)

    async def _pin_present(self, request: Request, inventory: base.ImageInventory) -> None:
        target = inventory.target_of(request.ref)
        if target is None:
            return
        hold = base.Hold("pin", request.ref, request.by, target, keep=request.keep)
        self.healer.remember(await self.runtime.pin(hold))
        log.info("image pinned", image=request.ref, by=request.by)
        self.wake()
