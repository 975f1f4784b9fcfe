"""One pull: under a containerd lease, watched, limited, resumable; pinned before its lease ends.

The runtime downloads and unpacks. Under a rate limit, or where the agent had begun a layer under
one, the agent fetches layers itself and writes them into the runtime's store first.

What a pull leaves: when done, a pin or nothing; when cancelled or failed, its hold with every byte
so far, from which the next attempt continues; when out of space, nothing (the hold is ended at
once); when corrupt, the hold without the half-fetched layers.
"""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import structlog

from preheat import desired, estimate, failure, manifest, registry, resolver, settings
from preheat.failure import Kind, PullError
from preheat.runtimes import base

log = structlog.get_logger("preheat")

POLL_SECONDS = 0.5
INGESTS_AT_ONCE = 2
# A download may be this far ahead of the limit: smooth at low rates, no burst at high ones.
BURST_SECONDS = 0.25


class Limiter:
    """A limit in bytes per second that all downloads of the agent share. ``rate`` may change."""

    def __init__(
        self, rate: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.rate = rate
        self._clock = clock
        self._paid_until = 0.0

    async def take(self, size: int) -> None:
        """Wait until ``size`` bytes may flow."""
        if not self.rate:
            return
        now = self._clock()
        self._paid_until = max(self._paid_until, now - BURST_SECONDS) + size / self.rate
        wait = self._paid_until - now
        if wait > 0:
            await asyncio.sleep(wait)


@dataclass
class Progress:
    """What a running pull shows; bytes are compressed, as they are fetched."""

    began_with: int  # bytes that the node had when the pull started
    bytes_total: int
    bytes_done: int = 0
    phase: str = "fetching"  # fetching, unpacking, pinning
    layers: dict[str, tuple[int, int]] = field(default_factory=dict)  # digest -> done, total
    layers_unpacked: int = 0
    started: float = field(default_factory=time.time)


class Writers:
    """One writer for each layer over all pulls: images share layers, and a second one would only
    meet the runtime's lock."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def of(self, digest: str) -> asyncio.Lock:
        return self._locks.setdefault(digest, asyncio.Lock())


class _Foreign(Exception):
    """The runtime fetches this layer for somebody else; ours would be a second download."""


class Puller:
    """Pulls one requested image as its lookup describes it. ``run`` may be cancelled anywhere."""

    def __init__(
        self,
        runtime: base.Runtime,
        client: registry.Registry,
        limit: Limiter,
        writers: Writers,
        section: settings.PreheatSettings,
        request: desired.Request,
        lookup: resolver.Lookup,
    ) -> None:
        assert lookup.shape is not None
        self._runtime = runtime
        self._client = client
        self._limit = limit
        self._writers = writers
        self._section = section
        self._request = request
        self._ref = lookup.ref
        self._shape = lookup.shape  # the lookup changes when the tag moves, this pull does not
        self._login = lookup.login
        total = self._shape.bytes_total
        self.progress = Progress(
            began_with=max(0, total - request.fetch),
            bytes_total=total,
            layers={layer.digest: (0, layer.size) for layer in self._shape.layers},
        )
        self._theirs: dict[str, int] = {}
        self._foreign: set[str] = set()
        self.fetched = 0  # bytes that this pull brought

    async def run(self) -> base.Hold | None:
        """The pin, or None with ``keep: never``. Raises PullError."""
        hold = await self._begin()
        try:
            await self._update_progress()
            before = self.progress.bytes_done
            await self._ingest(hold)
            image_id = await self._pull(hold)
            self.fetched = max(0, self.progress.bytes_total - before)
            self.progress.phase = "pinning"
            pin = await self._pin(image_id)
        except base.RuntimeCallError as error:
            raise await self._clean_up(failure.classify(self._ref.text, error), hold) from error
        except PullError as error:
            raise await self._clean_up(error, hold) from error
        await self._end(hold)
        return pin

    async def _begin(self) -> base.Hold:
        hold = base.Hold(
            id="",
            role="pull",
            ref=self._ref.text,
            by=self._request.by,
            keep=self._request.keep,
            expires=time.time() + self._section.partial_keep,
        )
        try:
            return await self._runtime.begin(hold)
        except base.RuntimeCallError as error:
            raise failure.classify(self._ref.text, error) from error

    async def _end(self, hold: base.Hold) -> None:
        # The image is complete and pinned; a lease that stays now ends by its expiry.
        try:
            await self._runtime.end(hold)
        except base.RuntimeCallError as error:
            log.warning("containerd lease of a finished pull not deleted", error=str(error))

    async def _clean_up(self, error: PullError, hold: base.Hold) -> PullError:
        """Remove what this class of failure must not leave behind."""
        with contextlib.suppress(base.RuntimeCallError):
            if error.kind is Kind.DISK:
                await self._runtime.end(hold)
                if hold.by == "operator":  # an operator's request must outlive its bytes
                    await self._runtime.begin(dataclasses.replace(hold, created=0.0))
            elif error.kind is Kind.CORRUPT:
                digests = frozenset(layer.digest for layer in self._shape.layers)
                await self._runtime.drop_partials(digests)
        return error

    # --- fetching ---------------------------------------------------------------------------------

    async def _ingest(self, hold: base.Hold) -> None:
        """Fetch layers ourselves, under a rate limit or where we had begun one."""
        if not self._runtime.abilities.ingests:
            return
        inventory = await self._runtime.inventory()
        layers = [
            layer
            for layer in estimate.missing(self._shape, inventory)
            if self._limit.rate
            or inventory.ingests.get(layer.digest, base.Ingest()).ours is not None
        ]
        if not layers:
            return
        watch = asyncio.create_task(self._keep_progress(), name="progress")
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

    async def _layer(
        self, layer: manifest.Layer, hold: base.Hold, slots: asyncio.Semaphore
    ) -> None:
        async with slots, self._writers.of(layer.digest):
            try:
                await self._runtime.write(
                    layer.digest,
                    layer.size,
                    lambda offset: self._source(layer, offset),
                    hold,
                    (self._ref.host, self._ref.path),
                )
            except _Foreign:
                await self._runtime.drop_partials(frozenset({layer.digest}), ours_only=True)

    async def _source(self, layer: manifest.Layer, offset: int) -> AsyncIterator[bytes]:
        stream = self._client.blob(self._ref, layer.digest, offset, self._login)
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
        text = f"no progress for {self._section.stall_timeout:g} s"
        return PullError(self._ref.text, Kind.NETWORK, text)

    async def _pull(self, hold: base.Hold) -> str:
        """PullImage; cancelled when it makes no progress, so that a new attempt can begin."""
        deadline = self._section.attempt_timeout
        pull = asyncio.create_task(
            self._runtime.pull(self._ref.text, self._login, hold, deadline), name="PullImage"
        )
        try:
            last, since = self.progress.bytes_done, time.monotonic()
            while not pull.done():
                await asyncio.wait({pull}, timeout=POLL_SECONDS)
                if pull.done():
                    break
                await self._update_progress()
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

    async def _keep_progress(self) -> None:
        while True:
            await self._update_progress()
            await asyncio.sleep(POLL_SECONDS)

    async def _update_progress(self) -> None:
        """A runtime that does not answer is asked again soon."""
        try:
            states = await self._runtime.progress(self._shape.layers)
        except base.RuntimeCallError:
            return
        if not states:
            return
        progress = self.progress
        for layer in self._shape.layers:
            state = states[layer.digest]
            progress.layers[layer.digest] = (min(state.here, layer.size), layer.size)
            if state.theirs is not None:
                # It grows while we write the same layer: somebody waits for it.
                known = self._theirs.get(layer.digest, state.theirs)
                if state.theirs > known or state.theirs == layer.size:
                    self._foreign.add(layer.digest)
                self._theirs[layer.digest] = state.theirs
        here = sum(done for done, _ in progress.layers.values())
        everything = sum(total for _, total in progress.layers.values())
        complete = here == everything
        documents = progress.bytes_total - sum(layer.size for layer in self._shape.layers)
        progress.layers_unpacked = sum(state.unpacked for state in states.values())
        progress.phase = "unpacking" if complete else "fetching"
        progress.bytes_done = min(progress.bytes_total, here + (documents if complete else 0))

    # --- afterwards -------------------------------------------------------------------------------

    async def _pin(self, image_id: str) -> base.Hold | None:
        self.progress.bytes_done = self.progress.bytes_total
        if self._request.keep == "never":
            return None
        # The tag may have moved since the lookup: pin what the runtime has for it now.
        inventory = await self._runtime.inventory()
        return await self._runtime.pin(
            base.Hold(
                id="",
                role="pin",
                ref=self._ref.text,
                by=self._request.by,
                target=inventory.target_of(self._ref.text) or self._shape.top,
                image_id=image_id if manifest.is_digest(image_id) else "",
                keep=self._request.keep,
            )
        )


@dataclass(frozen=True)
class Running:
    """A pull in progress."""

    progress: Progress
    task: asyncio.Task[None]
