"""One pull: under a lease, watched, limited, resumed; pinned before its lease goes.

What a pull leaves at each end: done - a pin or nothing of ours; cancelled or failed - its lease
with every byte so far (the next attempt goes on there); out of space - nothing at all, the lease
is given back at once; corrupt - the lease without the half-fetched layers.
"""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import structlog

from preheat import estimate, failure, limiter, manifest, registry, settings
from preheat.failure import Kind, PullError
from preheat.runtimes import base

log = structlog.get_logger("preheat")

POLL_SECONDS = 0.5
INGESTS_AT_ONCE = 2


@dataclass
class Progress:
    """What a running pull shows; bytes are compressed, as they are fetched."""

    phase: str = "fetching"  # fetching, unpacking, pinning
    bytes_total: int = 0
    bytes_done: int = 0
    layers: dict[str, tuple[int, int]] = field(default_factory=dict)  # digest -> done, total
    layers_unpacked: int = 0
    layers_total: int = 0
    started: float = field(default_factory=time.time)


@dataclass(frozen=True)
class Job:
    """What to pull. ``keep``: the pin rule as text; ``never`` pulls without pinning."""

    ref: manifest.Reference
    shape: manifest.Shape
    login: base.Login | None
    by: base.By
    keep: str


class _Foreign(Exception):
    """The runtime fetches this layer for somebody else; ours would be a second download."""


class Puller:
    """Carries out one job. ``run`` may be cancelled at any point."""

    def __init__(
        self,
        box: base.Runtime,
        client: registry.Registry,
        limit: limiter.Limiter,
        section: settings.PreheatSettings,
        job: Job,
    ) -> None:
        self._box = box
        self._client = client
        self._limit = limit
        self._section = section
        self.job = job
        self.progress = Progress(
            bytes_total=job.shape.bytes_total,
            layers={layer.digest: (0, layer.size) for layer in job.shape.layers},
            layers_total=len(job.shape.layers),
        )
        self._theirs: dict[str, int] = {}
        self._foreign: set[str] = set()
        self.fetched = 0  # bytes that this pull brought

    async def run(self) -> base.Hold | None:
        """The pin made, None with ``keep: never``. PullError with its class."""
        hold = await self._begin()
        try:
            await self._look()
            before = self.progress.bytes_done
            await self._ingest(hold)
            image_id = await self._pull(hold)
            self.fetched = max(0, self.progress.bytes_total - before)
            self.progress.phase = "pinning"
            pin = await self._pin(image_id)
        except base.RuntimeCallError as error:
            raise await self._after(failure.classify(self.job.ref.text, error), hold) from error
        except PullError as error:
            raise await self._after(error, hold) from error
        await self._end(hold)
        return pin

    async def _begin(self) -> base.Hold:
        hold = pull_hold(self.job, time.time() + self._section.partial_keep)
        try:
            return await self._box.begin(hold)
        except base.RuntimeCallError as error:
            raise failure.classify(self.job.ref.text, error) from error

    async def _end(self, hold: base.Hold) -> None:
        # The image is there and pinned; an old lease that stays ends by its expiry.
        try:
            await self._box.end(hold)
        except base.RuntimeCallError as error:
            log.warning("the lease of a finished pull stays for now", error=str(error))

    async def _after(self, error: PullError, hold: base.Hold) -> PullError:
        """Clean up what this class of failure must not leave behind."""
        with contextlib.suppress(base.RuntimeCallError):
            if error.kind is Kind.DISK:
                await self._box.end(hold)
                if hold.by == "operator":  # the request itself must outlive its bytes
                    await self._box.begin(dataclasses.replace(hold, created=0.0))
            elif error.kind is Kind.CORRUPT:
                digests = frozenset(layer.digest for layer in self.job.shape.layers)
                await self._box.drop_partials(digests)
        return error

    # --- fetching ---------------------------------------------------------------------------------

    async def _ingest(self, hold: base.Hold) -> None:
        """Under a rate limit, or where an earlier one left half of a layer: fetch it ourselves."""
        if not self._box.abilities.ingests:
            return
        inventory = await self._box.inventory()
        layers = [
            layer
            for layer in estimate.missing(self.job.shape, inventory)
            if self._limit.rate or self._begun(inventory, layer)
        ]
        if not layers:
            return
        watch = asyncio.create_task(self._keep_looking(), name="progress")
        slots = asyncio.Semaphore(INGESTS_AT_ONCE)
        try:
            async with asyncio.TaskGroup() as group:
                for layer in layers:
                    group.create_task(self._layer(layer, hold, slots))
        except* (PullError, base.RuntimeCallError) as errors:
            raise errors.exceptions[0] from None
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

    @staticmethod
    def _begun(inventory: base.Inventory, layer: manifest.Layer) -> bool:
        ingest = inventory.ingests.get(layer.digest)
        return ingest is not None and ingest.ours is not None

    async def _layer(
        self, layer: manifest.Layer, hold: base.Hold, slots: asyncio.Semaphore
    ) -> None:
        async with slots:
            ref = self.job.ref
            try:
                await self._box.write(
                    layer.digest,
                    layer.size,
                    lambda offset: self._source(layer, offset),
                    hold,
                    (ref.host, ref.path),
                )
            except _Foreign:
                await self._box.drop_partials(frozenset({layer.digest}), ours_only=True)

    async def _source(self, layer: manifest.Layer, offset: int) -> AsyncIterator[bytes]:
        stream = self._client.blob(self.job.ref, layer.digest, offset, self.job.login)
        async with contextlib.aclosing(stream):  # type: ignore[type-var]
            while True:
                try:
                    async with asyncio.timeout(self._section.stall_timeout):
                        chunk = await anext(stream)
                except StopAsyncIteration:
                    return
                except TimeoutError:
                    raise self._stalled() from None
                if layer.digest in self._foreign:
                    raise _Foreign
                await self._limit.take(len(chunk))
                yield chunk

    def _stalled(self) -> PullError:
        text = f"no byte for {self._section.stall_timeout:g} s"
        return PullError(self.job.ref.text, Kind.NETWORK, text)

    async def _pull(self, hold: base.Hold) -> str:
        """PullImage, watched: ended when it stalls, so that the next attempt takes over."""
        deadline = self._section.attempt_timeout
        pull = asyncio.create_task(
            self._box.pull(self.job.ref.text, self.job.login, hold, deadline), name="PullImage"
        )
        try:
            last, since = self.progress.bytes_done, time.monotonic()
            while not pull.done():
                await asyncio.wait({pull}, timeout=POLL_SECONDS)
                if pull.done():
                    break
                await self._look()
                now = time.monotonic()
                if self.progress.bytes_done != last or self.progress.phase != "fetching":
                    last, since = self.progress.bytes_done, now
                elif now - since > self._section.stall_timeout:
                    raise self._stalled()
            return await pull
        finally:
            if not pull.done():
                pull.cancel()
            await asyncio.gather(pull, return_exceptions=True)

    async def _keep_looking(self) -> None:
        while True:
            await self._look()
            await asyncio.sleep(POLL_SECONDS)

    async def _look(self) -> None:
        """Bring the progress up to date; what cannot be asked now is asked again soon."""
        try:
            states = await self._box.progress(self.job.shape.layers)
        except base.RuntimeCallError:
            return
        if not states:
            return
        progress = self.progress
        for layer in self.job.shape.layers:
            state = states[layer.digest]
            progress.layers[layer.digest] = (min(state.here, layer.size), layer.size)
            if state.theirs is not None:
                # Growing while we write the same layer ourselves: somebody waits for it.
                known = self._theirs.get(layer.digest, state.theirs)
                if state.theirs > known or state.theirs == layer.size:
                    self._foreign.add(layer.digest)
                self._theirs[layer.digest] = state.theirs
        here = sum(done for done, _ in progress.layers.values())
        everything = sum(total for _, total in progress.layers.values())
        documents = progress.bytes_total - sum(layer.size for layer in self.job.shape.layers)
        progress.layers_unpacked = sum(state.unpacked for state in states.values())
        progress.phase = "unpacking" if here == everything else "fetching"
        progress.bytes_done = min(
            progress.bytes_total, here + (documents if here == everything else 0)
        )

    # --- afterwards -------------------------------------------------------------------------------

    async def _pin(self, image_id: str) -> base.Hold | None:
        self.progress.bytes_done = self.progress.bytes_total
        if self.job.keep == "never":
            return None
        # A tag may have moved since it was looked up: pin what the runtime has for it now.
        inventory = await self._box.inventory()
        digest = inventory.digest_of(self.job.ref.text)
        target = next(
            (r.target for r in inventory.records if r.target.digest == digest), self.job.shape.top
        )
        return await self._box.pin(
            base.Hold(
                id="",
                role="pin",
                ref=self.job.ref.text,
                by=self.job.by,
                target=target,
                image_id=image_id if manifest.is_digest(image_id) else "",
                keep=self.job.keep,
            )
        )


def pull_hold(job: Job, expires: float) -> base.Hold:
    """The lease under which a pull runs; it also remembers who asked for what."""
    return base.Hold(
        id="", role="pull", ref=job.ref.text, by=job.by, keep=job.keep, expires=expires
    )
