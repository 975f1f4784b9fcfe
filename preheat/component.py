"""Image preheating as the process sees it, and what operators may ask of it."""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from pathlib import Path

import structlog
from prometheus_client.core import Metric

import kit.errors
import kit.findings
import kit.room
from preheat import (
    audit,
    desired,
    faces,
    manifest,
    metrics,
    node,
    plan,
    reconciler,
    registry,
    settings,
    status,
)
from preheat.runtimes import base

log = structlog.get_logger("preheat")

# Longer than any call's deadline within one cycle taken together.
STANDS_AFTER_SECONDS = 300.0
FIXED = ("runtime", "socket", "crio", "hosts_dir")


def _box(section: settings.PreheatSettings, state_dir: Path) -> base.Runtime:
    """The adapter for the runtime in the settings: the one place where they are told apart."""
    if section.runtime == "crio":
        from preheat.runtimes import crio

        return crio.Crio(section.socket, section.crio.drop_in, state_dir / "preheat-crio.json")
    from preheat.runtimes import containerd  # grpc: 15 MB that only this room needs

    return containerd.Containerd(section.socket)


class Preheat:
    name = "preheat"

    def __init__(
        self,
        section: settings.PreheatSettings,
        *,
        state_dir: Path,
        reporter: kit.findings.Reporter,
    ) -> None:
        self._reporter = reporter
        self._original = section
        self.core = reconciler.Reconciler(
            _box(section, state_dir), _complete(section), registry.Registry(section.hosts_dir)
        )
        self._tasks: list[asyncio.Task[None]] = []

    # --- component --------------------------------------------------------------------------------

    async def start(self) -> None:
        """Never fails for a runtime that is down: it may start after the agent."""
        self._tasks = [
            asyncio.create_task(self.core.work(), name="preheat work"),
            asyncio.create_task(self.core.watch(), name="preheat watch"),
        ]

    async def reconcile(self, section: settings.PreheatSettings) -> Sequence[str]:
        refused = [
            name for name in FIXED if getattr(section, name) != getattr(self._original, name)
        ]
        kept = {name: getattr(self._original, name) for name in refused}
        section = _complete(section.model_copy(update=kept))
        if section != self.core.section:
            self._take_over(section)
        self._reporter.report(self.name, audit.findings(self.core, self._honours, self._rests))
        return refused

    def _take_over(self, section: settings.PreheatSettings) -> None:
        old = {each.ref: each for each in self.core.section.images}
        new_logins = section.credentials != self.core.section.credentials
        self.core.section = section
        self.core.limit.rate = section.bytes_per_second
        for each in section.images:
            if new_logins or old.get(each.ref) != each:
                self.core.failures.pop(each.ref, None)
                self.core.resolver.again(each.ref)
        self.core.wake()

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.core.stop()

    def health(self) -> kit.room.Health:
        ended = [task.get_name() for task in self._tasks if task.done()]
        stands = time.monotonic() - self.core.last_cycle > STANDS_AFTER_SECONDS
        reasons = [f"{name} has ended (a bug; see the log)" for name in ended]
        if stands:
            reasons.append("its work loop stands")
        if self.core.trouble:
            reasons.append(self.core.trouble)
        return kit.room.Health(
            alive=not ended and not stands, ready=not reasons, reasons=tuple(reasons)
        )

    def metrics(self) -> Iterable[Metric]:
        breaker = getattr(self.core.box, "breaker", None)
        trips = breaker.total if breaker is not None else 0
        return metrics.collect(self.core, trips, self._honours)

    @property
    def _honours(self) -> bool | None:
        return getattr(self.core.box, "honours_label", None)

    @property
    def _rests(self) -> float:
        breaker = getattr(self.core.box, "breaker", None)
        return 0.0 if breaker is None else float(breaker.rests)

    # --- what operators see and ask ---------------------------------------------------------------

    def images(self) -> Sequence[status.Status]:
        return faces.rows(self.core)

    def show(self, text: str) -> status.Status:
        """NotFoundError when nobody wants or pins the image."""
        ref = _reference(text)
        found = next((row for row in faces.rows(self.core) if row.ref == ref), None)
        if found is None:
            raise kit.errors.NotFoundError(
                f"image {ref}", "neither wanted nor pinned here", "see 'nodeagent image list'"
            )
        return found

    async def preheat(self, text: str, keep: str = "always") -> status.Status:
        """Bring an image here now, before what the settings want; pinned unless ``never``."""
        ref = _reference(text)
        async with self._asking():
            await self._drop_notes(ref)
            await self.core.box.begin(
                base.Hold(
                    id="",
                    role="pull",
                    ref=ref,
                    by="operator",
                    keep=keep,
                    expires=time.time() + self.core.section.partial_keep,
                )
            )
            self.core.failures.pop(ref, None)
            self.core.resolver.again(ref)
        return await self._after(ref)

    async def pin(self, text: str) -> status.Status:
        """Pin an image; when it is not here it is pulled first. RefusedError over the budget."""
        ref = _reference(text)
        async with self._asking():
            inventory = await self.core.box.inventory()
            target = next((r.target for r in inventory.records if r.name == ref), None)
            if target is not None:
                await self._fits(ref, target, inventory)
                await self._drop_notes(ref)
                hold = base.Hold(
                    id="", role="pin", ref=ref, by="operator", target=target, keep="always"
                )
                self.core.healer.remember(await self.core.box.pin(hold))
        if target is None:
            return await self.preheat(ref)
        return await self._after(ref)

    async def _fits(self, ref: str, target: manifest.Target, inventory: base.Inventory) -> None:
        core = self.core
        shape = await core.local.shape(target, inventory, core.section.platform)
        parts = await core.local.parts(shape, inventory) if shape is not None else {}
        want = plan.Wanted(ref, target.digest, (plan.OPERATOR, 0, 0.0), True, True, 0, 0, parts)
        seen = await node.look(core.section, inventory.images_path, 0)
        pinned = [pin for pin in core.view.pinned if pin.ref != ref]
        decided = plan.decide(seen, [want], pinned, 1, time.time())
        if ref not in decided.pins:
            why = next((skip.text for skip in decided.skips), decided.pause)
            raise kit.errors.RefusedError(
                f"image {ref}", f"cannot be pinned ({why})", "unpin another, or raise pin_budget"
            )

    async def unpin(self, text: str) -> status.Status | None:
        """Really let go: the pin, its mark, its partial bytes; the settings do not bring it back.

        The image itself stays until garbage collection takes it. Asked for again by ``preheat``
        or ``pin``. NotFoundError when there is nothing to let go of.
        """
        ref = _reference(text)
        async with self._asking():
            await self.core.halt(ref)
            inventory = await self.core.box.inventory()
            mine = [hold for hold in inventory.holds if hold.ref == ref and hold.role != "note"]
            want = self.core.view.wanted.get(ref)
            by_rule = want is not None and want.by != "operator"
            by_rule = by_rule or any(each.ref == ref for each in self.core.section.images)
            if not mine and not by_rule:
                raise kit.errors.NotFoundError(
                    f"image {ref}", "neither wanted nor pinned here", "see 'nodeagent image list'"
                )
            if by_rule or self.core.section.retain is not None:
                await self.core.note(ref, "operator", "released")
            for hold in mine:
                if hold.role == "pin":
                    await self.core.release(hold)
                else:
                    await self.core.box.end(hold)
        return await self._after(ref, must_be_there=False)

    async def pause(self, text: str) -> status.Status:
        """Stop pulling; every byte stays (for ``partial_keep``)."""
        ref = self.show(text).ref
        async with self._asking():
            await self.core.note(ref, "operator", "paused")
            await self.core.halt(ref)
        return await self._after(ref)

    async def resume(self, text: str) -> status.Status:
        """Go on after ``pause``, or try again at once after a failure."""
        ref = self.show(text).ref
        async with self._asking():
            await self._drop_notes(ref)
            self.core.failures.pop(ref, None)
            self.core.resolver.again(ref)
        return await self._after(ref)

    async def cancel(self, text: str) -> status.Status | None:
        """Stop pulling and give back the bytes; RefusedError when it is here already."""
        found = self.show(text)
        if found.state == "ready":
            raise kit.errors.RefusedError(
                f"image {found.ref}", "it is here already", "let go of it with 'image unpin'"
            )
        return await self.unpin(found.ref)

    async def _drop_notes(self, ref: str) -> None:
        inventory = await self.core.box.inventory()
        for hold in inventory.holds:
            if hold.role == "note" and hold.ref == ref:
                await self.core.box.end(hold)

    @contextlib.asynccontextmanager
    async def _asking(self) -> AsyncIterator[None]:
        """A request at work: alone, on a runtime that answers, its errors as the API's."""
        self._usable()
        async with self.core.lock:
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
                self.core.trouble = str(error)
                self.core.wake()
            remedy = error.remedy or "try again; see the runtime's log"
            raise kit.errors.SourceError(error.thing, error.cause, remedy) from error

    def _usable(self) -> None:
        if self.core.trouble:
            raise kit.errors.SourceError(
                "the container runtime", self.core.trouble, "see that it runs; nothing was changed"
            )

    async def _after(self, ref: str, must_be_there: bool = True) -> status.Status:
        """What is shown once the loop has taken the request in."""
        with self._translated():
            await self.core.cycle()
        want = self.core.view.wanted.get(ref)
        if want is None:
            want = desired.Request(ref, "operator", "never", released=not must_be_there)
        return dataclasses.replace(faces.row(self.core, want))


def _complete(section: settings.PreheatSettings) -> settings.PreheatSettings:
    if section.platform:
        return section
    return section.model_copy(update={"platform": node.default_platform()})


def _reference(text: str) -> str:
    try:
        return manifest.parse(text).text
    except ValueError as error:
        raise kit.errors.SettingsError("image", str(error), "name it as in the settings") from None
