"""Image preheating as the process sees it, and what operators may ask of it.

Each request of an operator is written into the runtime as a hold or a note, under the lock of the
work loop; the answer shows the image after the next cycle. So a request survives the agent.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from pathlib import Path

import structlog
from prometheus_client.core import Metric

import kit.errors
import kit.findings
import kit.room
import kit.tasks
from preheat import settings, status
from preheat.image import manifest
from preheat.planning import plan
from preheat.planning.desired import Request
from preheat.pulling import durability
from preheat.pulling.reconciler import Reconciler
from preheat.registry import client as registry
from preheat.registry import documents, hosts
from preheat.runtimes import base, containerd

log = structlog.get_logger("preheat")

# Longer than all calls of one cycle may take together.
HANGS_AFTER_SECONDS = 300.0
FIXED = ("socket", "hosts_dir")


class Preheat:
    name = "preheat"

    def __init__(
        self,
        section: settings.PreheatSettings,
        state_dir: Path,
        reporter: kit.findings.Reporter,
    ) -> None:
        self._reporter = reporter
        self._original = section
        self.reconciler = Reconciler(
            containerd.Containerd(section.socket),
            settings.complete(section),
            registry.Registry(
                hosts.roots(section.hosts_dir),
                documents.Documents(state_dir / documents.FOLDER),
            ),
            state_dir / durability.STATE,
        )
        self._tasks: list[asyncio.Task[None]] = []

    # --- component --------------------------------------------------------------------------------

    async def start(self) -> None:
        """Does not fail without a runtime: the runtime may start after the agent."""
        self._tasks = [
            asyncio.create_task(self.reconciler.work(), name="preheat work"),
            asyncio.create_task(self.reconciler.watch(), name="preheat watch"),
        ]

    async def reconcile(self, section: settings.PreheatSettings) -> Sequence[str]:
        refused = [
            name for name in FIXED if getattr(section, name) != getattr(self._original, name)
        ]
        kept = {name: getattr(self._original, name) for name in refused}
        section = settings.complete(section.model_copy(update=kept))
        if section != self.reconciler.section:
            self._take_over(section)
        self._reporter.report(self.name, status.findings(self.reconciler))
        return refused

    def _take_over(self, section: settings.PreheatSettings) -> None:
        old = {each.ref: each for each in self.reconciler.section.images}
        new_logins = section.credentials != self.reconciler.section.credentials
        self.reconciler.section = section
        self.reconciler.pulls.limit.rate = section.bytes_per_second
        for each in section.images:
            if new_logins or old.get(each.ref) != each:
                # On all nodes at once: each waits for its turn.
                self.reconciler.resolver.turns.anew(each.ref, time.time())
                self.reconciler.pulls.again(each.ref)
        self.reconciler.wake()

    async def stop(self) -> None:
        await kit.tasks.end(*self._tasks)
        await self.reconciler.stop()

    def health(self) -> kit.room.Health:
        ended = [task.get_name() for task in self._tasks if task.done()]
        hangs = time.monotonic() - self.reconciler.last_cycle > HANGS_AFTER_SECONDS
        reasons = [f"{name} has ended (a bug; see the log)" for name in ended]
        if hangs:
            reasons.append(f"its work loop made no progress for {HANGS_AFTER_SECONDS:.0f} s")
        if self.reconciler.trouble:
            reasons.append(self.reconciler.trouble)
        return kit.room.Health(
            alive=not ended and not hangs, ready=not reasons, reasons=tuple(reasons)
        )

    def metrics(self) -> Iterable[Metric]:
        return status.metrics(self.reconciler)

    # --- what operators see -----------------------------------------------------------------------

    def images(self) -> Sequence[status.Status]:
        return status.images(self.reconciler)

    def show(self, text: str) -> status.Status:
        """Raises NotFoundError when nobody requests or pins the image."""
        ref = _reference(text)
        found = next((row for row in self.images() if row.ref == ref), None)
        if found is None:
            raise _unknown(ref)
        return found

    # --- what operators ask -----------------------------------------------------------------------

    async def preheat(self, text: str, keep: str = "always") -> status.Status:
        """Pull an image before what the settings request, and pin it unless ``never``."""
        ref = _reference(text)
        async with self._asking():
            await self._drop_notes(ref)
            expires = time.time() + self.reconciler.section.partial_keep
            await self.reconciler.runtime.begin(
                base.Hold("pull", ref, "operator", keep=keep, expires=expires)
            )
            self.reconciler.pulls.hurry(ref)
        return await self._after(ref)

    async def pin(self, text: str) -> status.Status:
        """Pin an image, pulling it first if needed. Raises RefusedError over the pin budget."""
        ref = _reference(text)
        async with self._asking():
            inventory = await self.reconciler.runtime.inventory()
            target = inventory.target_of(ref) if inventory.served(ref) else None
            if target is not None:
                await self._check_budget(ref, target, inventory)
                await self._drop_notes(ref)
                hold = base.Hold("pin", ref, "operator", target, keep="always")
                self.reconciler.healer.remember(await self.reconciler.runtime.pin(hold))
        if target is None:
            return await self.preheat(ref)
        return await self._after(ref)

    async def _check_budget(
        self, ref: str, target: manifest.Target, inventory: base.ImageInventory
    ) -> None:
        local, section = self.reconciler.local, self.reconciler.section
        shape = await local.shape(target, inventory, section.platform)
        parts = await local.parts(shape, inventory) if shape is not None else {}
        request = Request(
            ref, "operator", digest=target.digest, present=True, measured=True, parts=parts
        )
        node = await self.reconciler.node(inventory.images_path)
        pinned = [pin for pin in self.reconciler.snapshot.pinned if pin.ref != ref]
        decided = plan.decide(node, [request], pinned, 1, time.time())
        if ref not in decided.pins:
            why = next((skip.text for skip in decided.skips), decided.pause)
            raise kit.errors.RefusedError(
                f"image {ref}", f"cannot be pinned ({why})", "unpin another, or raise pin_budget"
            )

    async def unpin(self, text: str) -> status.Status | None:
        """Delete the pin, its mark and partial bytes; the settings do not request it again.

        The image itself stays until garbage collection takes it. ``preheat`` and ``pin`` request it
        again. Raises NotFoundError when nobody requests or pins it.
        """
        ref = _reference(text)
        async with self._asking():
            await self.reconciler.pulls.halt(ref)
            inventory = await self.reconciler.runtime.inventory()
            pins, pulls = inventory.held("pin", ref), inventory.held("pull", ref)
            request = self.reconciler.snapshot.requests.get(ref)
            section = self.reconciler.section
            by_rule = request is not None and request.by != "operator"
            by_rule = by_rule or any(each.ref == ref for each in section.images)
            if not pins and not pulls and not by_rule:
                raise _unknown(ref)
            if by_rule or section.retain is not None:
                await self.reconciler.note(ref, "operator", "released")
            for hold in pins:
                await self.reconciler.release(hold)
            for hold in pulls:
                await self.reconciler.runtime.end(hold)
        return await self._after(ref, requested=False)

    async def pause(self, text: str) -> status.Status:
        """Stop pulling; every byte stays for ``PreheatSettings.partial_keep``."""
        ref = self.show(text).ref
        async with self._asking():
            await self.reconciler.note(ref, "operator", "paused")
            await self.reconciler.pulls.halt(ref)
        return await self._after(ref)

    async def resume(self, text: str) -> status.Status:
        """Continue after ``pause``, or retry at once after a failure."""
        ref = self.show(text).ref
        async with self._asking():
            await self._drop_notes(ref, "paused")
            self.reconciler.pulls.hurry(ref)
        return await self._after(ref)

    async def cancel(self, text: str) -> status.Status | None:
        """Stop pulling and delete the bytes. Raises RefusedError when the image is ready."""
        found = self.show(text)
        if found.state in status.PRESENT:
            raise kit.errors.RefusedError(
                f"image {found.ref}",
                "it is already on the node",
                f"release it with 'nodeagent image unpin {found.ref}'",
            )
        return await self.unpin(found.ref)

    async def _drop_notes(self, ref: str, *states: str) -> None:
        """Those of these states; without any all, as for an image that nobody asked for before."""
        inventory = await self.reconciler.runtime.inventory()
        for hold in inventory.held("note", ref):
            if not states or hold.state in states:
                await self.reconciler.runtime.end(hold)

    @contextlib.asynccontextmanager
    async def _asking(self) -> AsyncIterator[None]:
        """Run a request under the lock, translating runtime errors."""
        if self.reconciler.trouble:
            raise kit.errors.SourceError(
                "the container runtime",
                self.reconciler.trouble,
                "check that it runs; nothing was changed",
            )
        async with self.reconciler.lock:
            with self._translated():
                yield

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except base.InvalidCallError as error:
            raise kit.errors.SettingsError(error.thing, error.cause, error.remedy) from error
        except base.RuntimeCallError as error:
            if isinstance(error, base.RuntimeGoneError):
                self.reconciler.trouble = str(error)
                self.reconciler.wake()
            remedy = error.remedy or "try again; see the runtime's log"
            raise kit.errors.SourceError(error.thing, error.cause, remedy) from error

    async def _after(self, ref: str, requested: bool = True) -> status.Status:
        """The image after a cycle that has seen the request."""
        with self._translated():
            await self.reconciler.cycle()
        request = self.reconciler.snapshot.requests.get(ref)
        if request is None:
            request = Request(ref, "operator", "never", released=not requested)
        return status.image(self.reconciler, request)


def _unknown(ref: str) -> kit.errors.NotFoundError:
    return kit.errors.NotFoundError(
        f"image {ref}", "nobody requests or pins it on this node", "see 'nodeagent image list'"
    )


def _reference(text: str) -> str:
    try:
        return manifest.parse(text).text
    except ValueError as error:
        raise kit.errors.SettingsError("image", str(error), "name it as in the settings") from None
