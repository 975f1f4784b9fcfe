"""Pulls: each under a containerd lease, watched, limited, resumable; pinned before its lease ends.

The runtime downloads and unpacks. Under a rate limit the agent fetches layers itself and writes
them into the runtime's store first; so it does with those that it had begun.

What a pull leaves: when done, a pin or nothing; when cancelled or failed, its hold with every byte
so far, from which the next attempt continues; when out of space, nothing (the hold is ended at
once); when corrupt, the hold without the half-fetched layer that is.
"""

import asyncio
import contextlib
import dataclasses
import math
import re
import time
from collections import Counter
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
)
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import structlog

import kit.errors
import kit.tasks
from kit.pause import Bucket
from preheat import settings
from preheat.image import manifest
from preheat.planning import desired, plan
from preheat.pulling import heal
from preheat.registry import client as registry
from preheat.registry import credentials, estimate, failure, resolver
from preheat.registry.failure import Kind, PullError
from preheat.runtimes import base, containerd

log = structlog.get_logger("preheat")

CYCLE_SECONDS = 15.0  # of the loop (preheat.pulling.reconciler)
POLL_SECONDS = 0.5
INGESTS_AT_ONCE = 2
# After so many failed pulls of an image look-ups find out when the registry is back.
PROBED_AFTER = 3
# Of the time that a lease has: so long the agent writes below it before it is renewed.
LAP = 0.25
# A download may be this far ahead of the limit: smooth at low rates, no burst at high ones.
BURST_SECONDS = 0.25
_NAMED = re.compile(r"(layer-)?(sha256:[0-9a-f]{64})")


class PullProgress:
    """What a running pull shows; bytes are compressed, as they are fetched.

    ``shape``: None when only the runtime knows what it pulls. ``fetch``: bytes that the node lacks.
    """

    def __init__(self, shape: manifest.Shape | None, fetch: int) -> None:
        self._shape = shape
        self.bytes_total = 0 if shape is None else shape.bytes_total
        self.began_with = max(0, self.bytes_total - fetch)
        self.bytes_done = 0
        self.phase = "fetching"  # fetching, unpacking, pinning
        layers = () if shape is None else shape.layers
        self.layers = {layer.digest: (0, layer.size) for layer in layers}  # done, total
        self.layers_unpacked = 0
        self.started = time.time()
        self.seen: dict[str, int] = {}  # bytes of layers that nobody told us of
        self.foreign: set[str] = set()  # layers that the runtime fetches for somebody else
        self.mounted = 0  # bytes of layers that count as here and were not fetched
        self._theirs: dict[str, int] = {}

    def note_ingests(self, ingests: Mapping[str, base.Ingest]) -> None:
        """Without a lookup the layers are those that the runtime is seen to fetch."""
        for digest, ingest in ingests.items():
            self.seen[digest] = max(self.seen.get(digest, 0), ingest.offset)
        self.bytes_done = sum(self.seen.values())
        self.phase = "unpacking" if self.seen and not ingests else "fetching"

    def note_layers(self, states: Mapping[str, base.LayerState]) -> None:
        assert self._shape is not None
        for layer in self._shape.layers:
            state = states[layer.digest]
            self.layers[layer.digest] = (min(state.here, layer.size), layer.size)
            if state.theirs is not None:
                # It grows while we write the same layer: somebody waits for it.
                known = self._theirs.get(layer.digest, state.theirs)
                if state.theirs > known or state.theirs == layer.size:
                    self.foreign.add(layer.digest)
                self._theirs[layer.digest] = state.theirs
        self.mounted = sum(s.size for s in self._shape.layers if states[s.digest].remote)
        here = sum(done for done, _ in self.layers.values())
        complete = here == sum(total for _, total in self.layers.values())
        documents = self.bytes_total - sum(layer.size for layer in self._shape.layers)
        self.layers_unpacked = sum(state.unpacked for state in states.values())
        self.phase = "unpacking" if complete else "fetching"
        self.bytes_done = min(self.bytes_total, here + (documents if complete else 0))

    def pulled(self) -> None:
        self.bytes_done = max(self.bytes_total, self.bytes_done)
        self.phase = "pinning"


class Limiter:
    """A limit in bytes per second that all downloads of the agent share. ``rate`` may change."""

    def __init__(self, rate: float | None = None, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock
        self._bucket: Bucket | None = None
        self.rate = rate

    @property
    def rate(self) -> float | None:
        return self._bucket.rate if self._bucket else None

    @rate.setter
    def rate(self, rate: float | None) -> None:
        if rate != self.rate:
            self._bucket = Bucket(rate, rate * BURST_SECONDS, self._clock) if rate else None

    async def take(self, size: int) -> None:
        """Wait until ``size`` bytes may flow."""
        if self._bucket and (wait := self._bucket.owe(size)):
            await asyncio.sleep(wait)


class Writers:
    """One writer for each layer over all pulls: images share layers, and a second one would only
    meet the runtime's lock."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._demand: Counter[str] = Counter()

    def of(self, digest: str) -> asyncio.Lock:
        return self._locks.setdefault(digest, asyncio.Lock())

    @contextlib.contextmanager
    def demand(self, layers: Iterable[manifest.Layer]) -> Iterator[None]:
        """A pull wants these layers while the block runs."""
        digests = {layer.digest for layer in layers}
        self._demand.update(digests)
        try:
            yield
        finally:
            self._demand.subtract(digests)
            self._demand = +self._demand  # without those that nobody wants

    def by_demand(self, layers: Iterable[manifest.Layer]) -> list[manifest.Layer]:
        """Those that more pulls wait for come first."""
        return sorted(layers, key=lambda layer: -self._demand[layer.digest])


def spoilt(text: str, layers: Collection[str]) -> set[str]:
    """The writes that the text of an error says are corrupt, among those of ``layers``. Others are
    right, and may be somebody else's who waits for them; so may one of the runtime's (``layer-``)
    when our own write of that layer failed."""
    found = set()
    for kind, digest in _NAMED.findall(text):
        if digest in layers:
            found |= {f"{kind}{digest}" if kind else "", f"{base.OWN_PREFIX}{digest}"}
    return found - {""}


class _Foreign(Exception):
    """The runtime fetches this layer for somebody else; ours would be a second download."""


class Footprint:
    """What one pull takes of the disk itself: what it fetched, and what is unpacked below its hold.
    What others write meanwhile says nothing of its image."""

    def __init__(self, pulls: "Pulls", request: desired.Request, *, told: bool) -> None:
        self._pulls, self._request = pulls, request
        self._told = told  # a pull without a lookup sees what others fetch, too
        self._hold: base.Hold | None = None
        self._before: frozenset[str] = frozenset()  # unpacked by earlier attempts
        self._most = 0
        self._inodes = 0  # when others alone would not have made them scarce

    @property
    def took(self) -> base.DiskUse:
        """Of each only what is more than was planned for; else 0."""
        return base.DiskUse(self._most if self._most > self._request.need else 0, self._inodes)

    async def begin(self, hold: base.Hold) -> None:
        self._hold = None  # nothing is measured without what was there before
        with contextlib.suppress(base.RuntimeCallError):
            self._before = await self._pulls.runtime.unpacked(hold)
            self._hold = hold

    async def check(self, fetched: int) -> None:
        """Raises PullError at the kubelet's threshold, if this pull took more than was planned.
        When others filled the disk, the work loop pauses it, and its bytes stay."""
        with contextlib.suppress(kit.errors.AgentError):
            node = await self._pulls.disk()
            if node is not None and node.lacks_inodes:
                inodes = (await self._unpacked()).inodes
                self._inodes = inodes if node.inodes_room + inodes > 0 else 0
            elif node is not None and node.pressed:
                await self.measure(fetched)
        if self.took != base.NO_USE:
            limit = "threshold of inodes" if self._inodes else "threshold"
            text = f"it brought the disk to the kubelet's {limit}, with more than was planned for"
            raise PullError(self._request.ref, Kind.DISK, text)

    async def measure(self, fetched: int) -> None:
        """The most counts: a runtime removes what it could not unpack."""
        if self._hold is not None:
            taken = (fetched if self._told else 0) + (await self._unpacked()).bytes
            self._most = max(self._most, taken)

    async def _unpacked(self) -> base.DiskUse:
        """What was unpacked below the hold since this pull began."""
        total = base.NO_USE
        if self._hold is None:
            return total
        with contextlib.suppress(base.RuntimeCallError):
            for name in await self._pulls.runtime.unpacked(self._hold) - self._before:
                with base.allowing("NOT_FOUND"):  # it has another name once it is unpacked
                    usage = await self._pulls.runtime.layers.usage(name)
                    total = base.DiskUse(total.bytes + usage.bytes, total.inodes + usage.inodes)
        return total


class Puller:
    """Pulls one requested image as its lookup describes it. ``run`` may be cancelled anywhere."""

    def __init__(self, pulls: "Pulls", request: desired.Request) -> None:
        lookup = pulls.lookups.of(request.ref)
        assert lookup is not None
        self._pulls = pulls
        self._runtime, self._section = pulls.runtime, pulls.section
        self._request = request
        self._ref = lookup.ref
        self._shape = lookup.shape  # the lookup changes when the tag moves, this pull does not
        # What is not known to be public is pulled without login unless it may be shared.
        self._secret = request.share_private or lookup.private is not None
        self._layers = () if self._shape is None else self._shape.layers
        failed = lookup.failed
        self._unreadable = failed is not None and failed.kind is Kind.BAD_IMAGE
        self.progress = PullProgress(self._shape, request.fetch)
        self._before: int | None = None  # bytes that were here when it began to fetch
        self.stalled = False
        self.footprint = Footprint(pulls, request, told=self._shape is not None)

    async def run(self) -> base.Hold | None:
        """The pin, or None with ``keep: never``. Raises PullError."""
        hold = await self._begin()
        try:
            await self._update_progress()
            self._before = self.progress.bytes_done
            await self.footprint.begin(hold)
            with self._pulls.writers.demand(self._layers):
                await self._ingest(hold)
                image_id = await self._pull(hold)
            await self._update_progress()
            self.progress.pulled()
            pin = await self._pin(image_id)
        except base.RuntimeCallError as error:
            found = failure.classify(self._ref.text, error, self._unreadable)
            raise await self._clean_up(found, hold) from error
        except PullError as error:
            raise await self._clean_up(error, hold) from error
        await self._end(hold)
        return pin

    @property
    def digest(self) -> str:
        """Of the image that it pulls; empty: only the runtime knows."""
        return self._shape.top.digest if self._shape is not None else ""

    @property
    def moved(self) -> bool:
        """Whether this attempt brought bytes that stay."""
        return self.progress.bytes_done > (self._before or 0)

    @property
    def fetched(self) -> int:
        """Bytes that it brought; an attempt that failed or was cancelled has fetched, too."""
        if self._before is None:
            return 0
        return max(0, self.progress.bytes_done - self.progress.mounted - self._before)

    async def _begin(self) -> base.Hold:
        hold = base.Hold(
            "pull",
            self._ref.text,
            self._request.by,
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
        await self._update_progress()
        with contextlib.suppress(base.RuntimeCallError):
            if error.kind is Kind.DISK:
                await self.footprint.measure(self.fetched)
                await self._runtime.end(hold)
                if hold.by == "operator":  # an operator's request must outlive its bytes
                    await self._runtime.begin(dataclasses.replace(hold, created=0.0))
            elif error.kind is Kind.CORRUPT:
                layers = self.progress.layers.keys() | self.progress.seen.keys()
                for write in spoilt(error.cause, layers):
                    await self._runtime.content.abort(write)
        return error

    # --- fetching ---------------------------------------------------------------------------------

    async def _ingest(self, hold: base.Hold) -> None:
        """Fetch layers ourselves, in laps: nobody can renew a lease below which something is
        written. The next lap continues where the last one stopped."""
        while True:
            lap = asyncio.timeout(LAP * self._section.partial_keep)
            try:
                async with lap:
                    return await self._fetch(hold)
            except TimeoutError:
                if not lap.expired():
                    raise
                await self._begin()

    async def _fetch(self, hold: base.Hold) -> None:
        """Those under a limit, and those begun so."""
        if self._shape is None or not self._runtime.layers.unpacks:
            return
        inventory = await self._runtime.inventory()
        layers = [
            layer
            for layer in estimate.missing(self._shape, inventory)
            if self._pulls.limit.rate
            or inventory.ingests.get(layer.digest, base.Ingest()).ours is not None
        ]
        if not layers:
            return
        watch = asyncio.create_task(self._keep_progress(), name="progress")
        slots = asyncio.Semaphore(INGESTS_AT_ONCE)
        try:
            async with asyncio.TaskGroup() as group:
                for layer in self._pulls.writers.by_demand(layers):
                    group.create_task(self._layer(layer, hold, slots))
        except* (PullError, base.RuntimeCallError) as errors:
            raise errors.exceptions[0] from None
        finally:
            await kit.tasks.end(watch)

    async def _layer(
        self, layer: manifest.Layer, hold: base.Hold, slots: asyncio.Semaphore
    ) -> None:
        async with slots, self._pulls.writers.of(layer.digest):
            try:
                await self._runtime.content.write(
                    layer.digest,
                    layer.size,
                    lambda offset: self._source(layer, offset),
                    hold,
                    self._ref,
                )
            except _Foreign:
                await self._runtime.content.abort(f"{base.OWN_PREFIX}{layer.digest}")

    async def _find(self, fresh: bool) -> credentials.Found:
        """The logins of this moment: a pull takes hours, and logins expire."""
        if not self._secret:
            return credentials.Found()
        return await self._pulls.lookups.logins(self._ref, fresh=fresh)

    async def _source(self, layer: manifest.Layer, offset: int) -> AsyncIterator[bytes]:
        async def start(
            login: base.Login | None,
        ) -> tuple[AsyncGenerator[bytes, None], bytes | None]:
            stream = self._pulls.client.blob(self._ref, layer.digest, offset, login)
            return stream, await self._next(stream)

        (stream, chunk), _ = await credentials.attempt(self._find, start)
        async with contextlib.aclosing(stream):
            while chunk is not None:
                if layer.digest in self.progress.foreign:
                    raise _Foreign
                # An empty chunk is one that the registry sent although it is here already.
                await self._pulls.limit.take(len(chunk) or registry.CHUNK)
                yield chunk
                chunk = await self._next(stream)

    async def _next(self, stream: AsyncGenerator[bytes, None]) -> bytes | None:
        """The next chunk; None at the end. Raises PullError when none comes."""
        try:
            async with asyncio.timeout(self._section.stall_timeout):
                return await anext(stream, None)
        except TimeoutError:
            raise self._stalled() from None

    def _stalled(self) -> PullError:
        self.stalled = True
        text = f"no progress for {self._section.stall_timeout:g} s"
        return PullError(self._ref.text, Kind.NETWORK, text)

    async def _pull(self, hold: base.Hold) -> str:
        """The image id. A login that is no longer good is replaced, with all bytes kept."""

        async def ask(login: base.Login | None) -> str:
            try:
                return await self._attempt(hold, login)
            except base.RuntimeCallError as error:
                raise failure.classify(self._ref.text, error, self._unreadable) from error

        image_id, _ = await credentials.attempt(self._find, ask)
        return image_id

    async def _attempt(self, hold: base.Hold, login: base.Login | None) -> str:
        """PullImage; cancelled when it makes no progress, so that a new attempt can begin."""
        deadline = self._section.attempt_timeout
        pull = asyncio.create_task(
            self._runtime.cri.pull(self._ref.text, login, hold.id, deadline), name="PullImage"
        )
        try:
            last, since = await self._pulls.flowing(self.progress), time.monotonic()
            while not pull.done():
                await asyncio.wait({pull}, timeout=POLL_SECONDS)
                if pull.done():
                    break
                await self._update_progress()
                await self.footprint.check(self.fetched)
                now, flowing = time.monotonic(), await self._pulls.flowing(self.progress)
                if flowing != last or self.progress.phase != "fetching":
                    last, since = flowing, now
                elif now - since > self._section.stall_timeout:
                    raise self._stalled()
            return await pull
        finally:
            await kit.tasks.end(pull)

    async def _keep_progress(self) -> None:
        while True:
            await self._update_progress()
            await asyncio.sleep(POLL_SECONDS)

    async def _update_progress(self) -> None:
        """A runtime that does not answer is asked again soon."""
        try:
            if self._shape is None:
                self.progress.note_ingests(await self._runtime.content.ingests())
            else:
                self.progress.note_layers(await self._runtime.progress(self._layers))
        except base.RuntimeCallError:
            return

    # --- afterwards -------------------------------------------------------------------------------

    async def _pin(self, image_id: str) -> base.Hold | None:
        if self._request.keep == "never":
            return None
        # The tag may have moved since the lookup: pin what the runtime has for it now.
        target = (await self._runtime.inventory()).target_of(self._ref.text)
        if target is None and self._shape is not None:
            target = self._shape.top
        if target is None:
            text = "the runtime does not list what it pulled"
            raise PullError(self._ref.text, Kind.RUNTIME, text)
        return await self._runtime.pin(
            base.Hold(
                "pin",
                self._ref.text,
                self._request.by,
                target,
                image_id=image_id if manifest.is_digest(image_id) else "",
                keep=self._request.keep,
            )
        )


@dataclass
class Totals:
    """Counters since the start of the agent."""

    pulls: int = 0
    fetched_bytes: int = 0
    failed: dict[str, int] = field(default_factory=lambda: {kind.value: 0 for kind in Kind})


@dataclass(frozen=True)
class Running:
    """A pull in progress."""

    progress: PullProgress
    task: asyncio.Task[None]


class Pulls:
    """The pulls in progress, and how those before them ended."""

    def __init__(
        self,
        runtime: containerd.Containerd,
        lookups: resolver.Resolver,
        healer: heal.Healer,
        disk: Callable[[], Awaitable[plan.Node | None]],
        wake: Callable[[], None],
    ) -> None:
        self.runtime = runtime
        self.client = lookups.client
        self.disk = disk
        self.lookups = lookups
        self.limit = Limiter(self.section.bytes_per_second)
        self.writers = Writers()
        self.totals = Totals()
        self.running: dict[str, Running] = {}
        self.failures: dict[str, failure.PullFailure] = {}
        # Those that ended well, and were not yet seen as an image; monotonic times of their ends.
        self.unseen: dict[str, float] = {}
        self._healer = healer
        self._wake = wake

    @property
    def section(self) -> settings.PreheatSettings:
        return self.lookups.turns.section

    async def flowing(self, progress: PullProgress) -> tuple[int, Mapping[str, int]]:
        """What grows while a pull makes progress: the tag may have moved since its lookup, then the
        runtime fetches layers that no pull of ours knows."""
        known = set(progress.layers)
        known.update(*(each.progress.layers for each in self.running.values()))
        found: Mapping[str, base.Ingest] = {}
        with contextlib.suppress(base.RuntimeCallError):
            found = await self.runtime.content.ingests()
        moving = {digest: each.offset for digest, each in found.items() if digest not in known}
        return progress.bytes_done, moving

    def keep(self, refs: Collection[str]) -> None:
        """Forget what is not requested any more, and failures of what a tag named before."""
        self.failures = {
            ref: each
            for ref, each in self.failures.items()
            if ref in refs and each.concerns(self.lookups.digest(ref))
        }
        self.unseen = {ref: at for ref, at in self.unseen.items() if ref in refs}

    def look_for(self, ref: str, inventory: base.ImageInventory, present: bool, why: str) -> None:
        """A pull that ended well and brought no image waits like one that failed: else the next
        would follow at once, for ever."""
        known = self.failures.get(ref)
        if present:
            self.unseen.pop(ref, None)
            if known is not None and known.kind is Kind.INCOMPLETE:
                del self.failures[ref]
        elif ref not in self.running and self.unseen.get(ref, math.inf) < inventory.asked:
            del self.unseen[ref]
            attempts = known.attempts + 1 if known is not None else 1
            error = PullError(
                ref, Kind.INCOMPLETE, f"the runtime says that it pulled it, but {why}"
            )
            log.warning("pull brought no image", image=ref, error=str(error))
            self._failed(ref, error, attempts, self.lookups.digest(ref))
            self._wake_for_retry(ref)

    def again(self, ref: str) -> None:
        """Forget how it failed, and look it up when its turn comes."""
        self.failures.pop(ref, None)
        self.lookups.again(ref)

    def hurry(self, ref: str) -> None:
        """An operator asks for it: nothing waits for its turn."""
        self.lookups.turns.hurry(ref)
        self.again(ref)

    def start(self, request: desired.Request) -> None:
        puller = Puller(self, request)
        task = asyncio.create_task(self._run(request, puller), name=f"pull {request.ref}")
        self.running[request.ref] = Running(puller.progress, task)
        log.info("pull started", image=request.ref, bytes=puller.progress.bytes_total)

    async def _run(self, request: desired.Request, puller: Puller) -> None:
        ref = request.ref
        try:
            pin = await puller.run()
            if pin is not None:
                self._healer.remember(pin)
            elif request.by == "policy":
                with contextlib.suppress(base.RuntimeCallError):
                    await self.runtime.begin(base.Hold("note", ref, "policy", state="done"))
            known = self.failures.get(ref)
            if known is not None and known.kind is not Kind.INCOMPLETE:  # that is not known yet
                del self.failures[ref]
            self.unseen[ref] = time.monotonic()
            self.lookups.turns.answered(ref, time.time())
            self.totals.pulls += 1
            log.info("pull done", image=ref, fetched=puller.fetched, pinned=pin is not None)
        except PullError as error:
            known = self.failures.get(ref)
            # Waits grow while nothing comes; a registry that breaks off brings something each time.
            moved = error.kind is Kind.NETWORK and puller.moved
            attempts = 1 if known is None or moved else known.attempts + 1
            self._failed(ref, error, attempts, puller.digest, puller.footprint.took)
            log.warning("pull failed", image=ref, kind=str(error.kind), error=str(error))
            again = error.kind is Kind.NETWORK and self.failures[ref].attempts >= PROBED_AFTER
            # The tag or the login may have changed.
            if again or puller.stalled or error.kind in (Kind.NOT_FOUND, Kind.AUTH):
                self.lookups.probe(ref)
        except Exception as error:  # a bug must not become a loop of pulls
            log.exception("pull failed unexpectedly", image=ref)
            text = f"{type(error).__name__}, see the agent's log"
            self._failed(ref, PullError(ref, Kind.BAD_IMAGE, text, final=True), 1, puller.digest)
        finally:
            self.totals.fetched_bytes += puller.fetched
            self.running.pop(ref, None)
            self._wake_for_retry(ref)
            self._wake()

    def _failed(
        self,
        ref: str,
        error: PullError,
        attempts: int,
        digest: str,
        took: base.DiskUse = base.NO_USE,
    ) -> None:
        found = self.lookups.turns.failed(ref, error, attempts, time.time(), pull=True)
        self.failures[ref] = dataclasses.replace(found, digest=digest, took=took)
        self.totals.failed[error.kind.value] += 1

    def _wake_for_retry(self, ref: str) -> None:
        """Wake the loop for a retry that is due before the next cycle."""
        failed = self.failures.get(ref)
        if failed is not None and failed.retry_at is not None:
            wait = failed.retry_at - time.time()
            if 0 < wait < CYCLE_SECONDS:
                asyncio.get_running_loop().call_later(wait + 0.01, self._wake)

    async def halt(self, ref: str) -> None:
        """Cancel a running pull; its hold keeps the bytes."""
        if ref in self.running:
            await kit.tasks.end(self.running[ref].task)

    async def stop(self) -> None:
        await kit.tasks.end(*(each.task for each in self.running.values()))
        await self.client.close()
