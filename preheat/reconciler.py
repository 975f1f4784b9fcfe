"""The work loop: take stock, ask the plan, do what it says. Everything that waits is elsewhere.

One cycle holds ``lock``; so does each request of an operator. Pulls are tasks of their own. All
that must outlive the agent is in the runtime's leases: a new engine finds it there.
"""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Mapping

import structlog

import kit.errors
from preheat import (
    credentials,
    desired,
    estimate,
    failure,
    heal,
    limiter,
    local,
    manifest,
    node,
    plan,
    pull,
    registry,
    resolver,
    settings,
    view,
)
from preheat.failure import Kind, PullError
from preheat.runtimes import base

log = structlog.get_logger("preheat")

CYCLE_SECONDS = 15.0
# Changes that come together make one cycle.
SETTLE_SECONDS = 0.05
USE_NOTED_EVERY = 600.0
RECONNECT_FIRST, RECONNECT_LONGEST = 0.05, 5.0


class Reconciler:
    def __init__(
        self,
        box: base.Runtime,
        section: settings.PreheatSettings,
        client: registry.Registry,
    ) -> None:
        self.box = box
        self.section = section
        self.client = client
        self.limit = limiter.Limiter(section.bytes_per_second)
        self.logins = credentials.Credentials()
        self.resolver = resolver.Resolver(client, self.logins, self.wake)
        self.local = local.Local(box)
        self.healer = heal.Healer(box, self.pressed, section.heal.per_hour)
        self.totals = view.Totals()
        # Before the first look at the runtime, the policy is known all the same.
        self.view = view.View(wanted=desired.gather(section, ()))
        self.running: dict[str, view.Running] = {}
        self.failures: dict[str, failure.Failure] = {}
        self.failed: dict[str, int] = {kind.value: 0 for kind in Kind}
        self.trouble = "not connected yet"  # why the runtime cannot be used, or ""
        self.version = ""
        self.last_cycle = time.monotonic()
        self._wake = asyncio.Event()
        self.lock = asyncio.Lock()
        self._used: set[str] = set()
        self._pressed = (0.0, False)

    # --- tasks ------------------------------------------------------------------------------------

    def wake(self) -> None:
        self._wake.set()

    async def work(self) -> None:
        """Cycles for ever: when woken, and every CYCLE_SECONDS."""
        while True:
            self._wake.clear()
            try:
                if self.trouble:
                    self.version = await self.box.connect()
                    log.info("container runtime answers", version=self.version)
                    self.trouble = ""
                await self.cycle()
            except base.RuntimeCallError as error:
                if not self.trouble and isinstance(error, base.RuntimeGoneError):
                    log.error("container runtime does not answer", error=str(error))
                self.trouble = str(error)
            except kit.errors.AgentError as error:
                if self.trouble != str(error):
                    log.error("preheating rests", error=str(error))
                self.trouble = str(error)
            self.last_cycle = time.monotonic()
            wait = CYCLE_SECONDS if not self.trouble else RECONNECT_LONGEST
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._wake.wait()
                    await asyncio.sleep(SETTLE_SECONDS)

    async def watch(self) -> None:
        """Heal on each removal; a full look after every gap in the events."""
        wait = RECONNECT_FIRST
        while self.box.abilities.watches:
            try:
                await self.box.connect()
                gap = asyncio.create_task(self._after_gap(), name="resync")
                try:
                    async for name in self.box.removals():
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
        """Events of the gap are lost: look at everything, now and once the stream surely runs."""
        for wait in (0.0, 0.5):
            await asyncio.sleep(wait)
            with contextlib.suppress(kit.errors.AgentError):
                async with self.lock:
                    inventory = await self.box.inventory()
                    self.healer.learn(inventory.holds)
                    await self.healer.resync(inventory)
        self.wake()

    async def stop(self) -> None:
        """End our own work; leases keep what pulls have fetched."""
        await self.resolver.close()
        tasks = [each.task for each in self.running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.client.close()
        await self.box.close()

    # --- one cycle --------------------------------------------------------------------------------

    async def pressed(self) -> bool:
        """Whether the disk is under pressure; at most a second old."""
        at, answer = self._pressed
        if time.monotonic() - at > 1.0:
            path = self.view.inventory.images_path
            if not path:
                return False
            answer = (await node.look(self.section, path, 0)).pressed
            self._pressed = (time.monotonic(), answer)
        return answer

    async def cycle(self) -> None:
        async with self.lock:
            await self._cycle()

    async def _cycle(self) -> None:
        section = self.section
        inventory = await self.box.inventory()
        self.healer.per_hour = section.heal.per_hour
        self.healer.learn(inventory.holds)
        await self.healer.resync(inventory)
        shapes = await self._shapes(inventory)
        inventory = await self._note_uses(inventory, shapes)
        wanted = desired.gather(section, inventory.holds)
        for ref, want in desired.retained(section, inventory, shapes, wanted).items():
            wanted[ref] = want
        for note in desired.stale_notes(inventory, wanted):
            await self.box.end(note)
        self.resolver.want([r for r, w in wanted.items() if w.by != "retained"], section)
        self.failures = {ref: each for ref, each in self.failures.items() if ref in wanted}
        rows = {ref: await self._row(want, inventory, shapes) for ref, want in wanted.items()}
        pinned = await self._pinned(inventory, shapes, wanted)
        state = await node.look(
            section, inventory.images_path, await self._freeable(inventory, shapes, pinned)
        )
        self._pressed = (time.monotonic(), state.pressed)
        known = [row for row in rows.values() if row.digest]
        decided = plan.decide(state, known, pinned, section.concurrency, time.time())
        self.view = view.View(
            inventory, wanted, rows, tuple(pinned), shapes, decided, state, time.time()
        )
        await self._act(decided, inventory, wanted)
        self.totals.cycles += 1

    async def _shapes(self, inventory: base.Inventory) -> dict[str, manifest.Shape]:
        found: dict[str, manifest.Shape] = {}
        targets = [record.target for record in inventory.records]
        targets += [hold.target for hold in inventory.holds if hold.target is not None]
        for target in targets:
            if target.digest not in found:
                shape = await self.local.shape(target, inventory, self.section.platform)
                if shape is not None:
                    found[target.digest] = shape
        return found

    async def _row(
        self,
        want: desired.Request,
        inventory: base.Inventory,
        shapes: Mapping[str, manifest.Shape],
    ) -> plan.Wanted:
        """A want with what it costs here and now."""
        look = self.resolver.of(want.ref)
        here = inventory.digest_of(want.ref)
        shape = look.shape if look is not None else None
        if shape is None and here is not None:
            shape = shapes.get(here)
        running = self.running.get(want.ref)
        rank = want.rank(inventory.last_used.get(here or "", 0.0))
        if shape is None:
            return plan.Wanted(want.ref, here or "", rank, False, here is not None, 0, 0, {})
        digest = shape.top.digest
        told = self.box.abilities.estimates
        present = inventory.names(want.ref, digest) and (
            not told or estimate.is_here(shape, inventory)
        )
        usages = await self.local.usages(shape, inventory)
        cost = estimate.cost(shape, inventory, self.resolver.unpacked(shape) | usages)
        parts = await self.local.parts(shape, inventory) if present and told else cost.parts
        return plan.Wanted(
            ref=want.ref,
            digest=digest,
            rank=rank,
            keep=want.keep != "never" and not want.released,
            present=present,
            fetch=0 if present else cost.fetch,
            unpack=0 if present else cost.unpack,
            parts=parts,
            running=running is not None,
            blocked="" if present or running else self._blocked(want, digest, look, inventory),
        )

    def _blocked(
        self,
        want: desired.Request,
        digest: str,
        look: resolver.Lookup | None,
        inventory: base.Inventory,
    ) -> str:
        """Why this image may not be pulled now; '' when it may."""
        now = time.time()
        failed = self.failures.get(want.ref)
        begun = any(h.role == "pull" and h.ref == want.ref for h in inventory.holds)
        if want.released:
            return "released by an operator; ask for it again with 'nodeagent image preheat'"
        if want.paused:
            return "paused by an operator"
        if want.done:
            return "was pulled once and removed since; 'pin: never' does not fetch it again"
        if self.box.abilities.watches and any(
            h.role == "pin" and h.ref == want.ref and h.target and h.target.digest == digest
            for h in inventory.holds
        ):
            # Not by a pull: that would go around the limit of heals.
            return "removed from the runtime although pinned; healing rests"
        if look is None or look.shape is None:
            return "the registry is being asked"
        if look.private and not want.share_private:
            return desired.PRIVATE
        if failed is not None and (failed.retry_at is None or failed.retry_at > now):
            return failed.message
        if want.by == "policy":
            minute = time.gmtime(now).tm_hour * 60 + time.gmtime(now).tm_min
            if not settings.in_window(self.section.windows, minute):
                return "outside the time windows"
            turn = node.turn(node.name(self.section), want.ref, self.section.spread)
            if not begun and now < look.digest_since + turn:
                left = look.digest_since + turn - now
                return f"its turn comes in {left:.0f} s (spread)"
        return ""

    async def _pinned(
        self,
        inventory: base.Inventory,
        shapes: Mapping[str, manifest.Shape],
        wanted: Mapping[str, desired.Request],
    ) -> list[plan.Pinned]:
        found = []
        for hold in inventory.holds:
            if hold.role != "pin" or hold.target is None:
                continue
            shape = shapes.get(hold.target.digest)
            parts: Mapping[str, int] = {}
            if shape is not None:
                parts = await self.local.parts(shape, inventory)
            elif not self.box.abilities.estimates:
                parts = self._looked_up_parts(hold)
            want = wanted.get(hold.ref)
            self.healer.sizes[hold.id] = shape.bytes_total if shape is not None else 0
            used = max(inventory.last_used.get(hold.target.digest, 0.0), hold.created)
            source = want or desired.Request(hold.ref, hold.by, hold.keep)
            seconds = desired.keep_seconds(source.keep)
            if want is None and hold.by == "retained" and self.section.retain is not None:
                seconds = self.section.retain.duration
            found.append(
                plan.Pinned(
                    hold=hold.id,
                    ref=hold.ref,
                    digest=hold.target.digest,
                    rank=source.rank(used),
                    parts=parts,
                    in_use=hold.image_id in inventory.in_use,
                    expires=None if seconds is None else used + seconds,
                    wanted=self._still_wanted(hold, want),
                )
            )
        return found

    def _looked_up_parts(self, hold: base.Hold) -> Mapping[str, int]:
        """For a runtime that does not say what its images keep: as the registry describes it."""
        look = self.resolver.of(hold.ref)
        if look is None or look.shape is None:
            return {}
        return estimate.cost(look.shape, base.Inventory(), self.resolver.unpacked(look.shape)).parts

    def _still_wanted(self, hold: base.Hold, want: desired.Request | None) -> bool:
        if want is not None:
            return not want.released and want.keep != "never"
        return hold.by == "retained" and self.section.retain is not None

    async def _freeable(
        self,
        inventory: base.Inventory,
        shapes: Mapping[str, manifest.Shape],
        pinned: list[plan.Pinned],
    ) -> int:
        """Bytes of images that garbage collection may take: neither pinned nor in use."""
        every = [await self.local.parts(shape, inventory) for shape in shapes.values()]
        kept = [pin.parts for pin in pinned]
        used = [shape for shape in shapes.values() if shape.image_id in inventory.in_use]
        kept += [await self.local.parts(shape, inventory) for shape in used]
        return max(0, estimate.union(every) - estimate.union(kept))

    # --- acting -----------------------------------------------------------------------------------

    async def _act(
        self,
        decided: plan.Plan,
        inventory: base.Inventory,
        wanted: Mapping[str, desired.Request],
    ) -> None:
        holds = {hold.id: hold for hold in inventory.holds}
        for release in decided.releases:
            log.info("pin released", image=release.ref, why=release.text)
            await self.release(holds[release.hold])
        for ref in decided.pins:
            await self._pin_present(wanted[ref], inventory)
        for ref in list(self.running) if decided.pause else ():
            log.warning("pull paused", image=ref, why=decided.pause)
            await self.halt(ref)
        for ref in decided.pulls:
            self._start(wanted[ref])
        await self._end_unwanted_pulls(inventory, wanted)
        if decided.pause and decided.releases:
            # Unpinned images do not suffice: half-fetched ones give their bytes back as well.
            await self._give_back(inventory)

    async def _give_back(self, inventory: base.Inventory) -> None:
        for hold in inventory.holds:
            if hold.role == "pull":
                await self.box.end(hold)
                if hold.by == "operator":  # what was asked for is done once there is room
                    await self.box.begin(hold)

    async def _end_unwanted_pulls(
        self, inventory: base.Inventory, wanted: Mapping[str, desired.Request]
    ) -> None:
        """Half-fetched images that the settings no longer name, and leases of finished pulls."""
        rows = self.view.rows
        for hold in inventory.holds:
            if hold.role != "pull" or hold.ref in self.running:
                continue
            want, row = wanted.get(hold.ref), rows.get(hold.ref)
            finished = row is not None and row.present and not row.keep
            pinned = any(h.role == "pin" and h.ref == hold.ref for h in inventory.holds)
            if want is None or want.released or (row is not None and row.present and pinned):
                await self.box.end(hold)
            elif finished:
                await self._finish_unpinned(want)
                await self.box.end(hold)

    async def _finish_unpinned(self, want: desired.Request) -> None:
        if want.by == "policy":
            await self.note(want.ref, "policy", "done")

    async def note(self, ref: str, by: base.By, state: str) -> None:
        await self.box.begin(base.Hold(id="", role="note", ref=ref, by=by, state=state))

    async def release(self, hold: base.Hold) -> None:
        self.healer.forget(hold)
        await self.box.unpin(hold)

    async def _pin_present(self, want: desired.Request, inventory: base.Inventory) -> None:
        target = next((r.target for r in inventory.records if r.name == want.ref), None)
        if target is None:
            return
        hold = base.Hold(id="", role="pin", ref=want.ref, by=want.by, target=target, keep=want.keep)
        self.healer.remember(await self.box.pin(hold))
        log.info("image pinned", image=want.ref, by=want.by)
        self.wake()

    def _start(self, want: desired.Request) -> None:
        look = self.resolver.of(want.ref)
        assert look is not None and look.shape is not None
        job = pull.Job(look.ref, look.shape, look.login, want.by, want.keep)
        puller = pull.Puller(self.box, self.client, self.limit, self.section, job)
        task = asyncio.create_task(self._run(want, puller), name=f"pull {want.ref}")
        here = max(0, look.shape.bytes_total - self.view.rows[want.ref].fetch)
        self.running[want.ref] = view.Running(puller, task, here)
        log.info("pull begins", image=want.ref, bytes=look.shape.bytes_total)

    async def _run(self, want: desired.Request, puller: pull.Puller) -> None:
        ref = want.ref
        try:
            pin = await puller.run()
            if pin is not None:
                self.healer.remember(pin)
            elif want.by == "policy":
                with contextlib.suppress(base.RuntimeCallError):
                    await self.note(ref, "policy", "done")
            self.failures.pop(ref, None)
            self.totals.pulls += 1
            self.totals.fetched_bytes += puller.fetched
            log.info("pull done", image=ref, fetched=puller.fetched, pinned=pin is not None)
        except PullError as error:
            known = self.failures.get(ref)
            attempts = known.attempts + 1 if known is not None else 1
            self.failures[ref] = failure.after(error, attempts, time.time())
            self.failed[error.kind.value] += 1
            log.warning("pull failed", image=ref, kind=str(error.kind), error=str(error))
            if error.kind in (Kind.NOT_FOUND, Kind.AUTH):
                self.resolver.again(ref)  # the tag or the login may have changed
        except Exception as error:  # a bug must not become a loop of pulls
            log.exception("pull failed unexpectedly", image=ref)
            unexpected = PullError(ref, Kind.BAD_IMAGE, f"{type(error).__name__}, see the log")
            self.failures[ref] = failure.after(unexpected, 1, time.time())
            self.failed[Kind.BAD_IMAGE.value] += 1
        finally:
            self.running.pop(ref, None)
            self._later(ref)
            self.wake()

    def _later(self, ref: str) -> None:
        """A retry that is due sooner than the next cycle wakes the loop at its time."""
        failed = self.failures.get(ref)
        if failed is not None and failed.retry_at is not None:
            wait = failed.retry_at - time.time()
            if 0 < wait < CYCLE_SECONDS:
                asyncio.get_running_loop().call_later(wait + 0.01, self.wake)

    async def _note_uses(
        self, inventory: base.Inventory, shapes: Mapping[str, manifest.Shape]
    ) -> base.Inventory:
        """Remember uses in the runtime: at the first sight, now and then, and when the last ends.

        The inventory as it is with them: what is used, or was a cycle ago, was last used now.
        """
        now = time.time()
        using = set()
        ours = {h.target.digest for h in inventory.holds if h.role == "pin" and h.target}
        for digest, shape in shapes.items():
            if shape.image_id in inventory.in_use:
                using.add(digest)
                if digest not in self._used and digest in ours:
                    self.totals.used_bytes += shape.bytes_total
        for digest in (using | self._used) & set(shapes):
            ended = digest not in using
            if ended or now - inventory.last_used.get(digest, 0.0) > USE_NOTED_EVERY:
                with contextlib.suppress(base.RuntimeCallError):
                    await self.box.note_use(digest, now)
        fresh = dict.fromkeys((using | self._used) & set(shapes), now)
        self._used = using
        return dataclasses.replace(inventory, last_used=dict(inventory.last_used) | fresh)

    async def halt(self, ref: str) -> None:
        """End a running pull of ``ref``; its lease keeps the bytes."""
        running = self.running.get(ref)
        if running is not None:
            running.task.cancel()
            await asyncio.gather(running.task, return_exceptions=True)
