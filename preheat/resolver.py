"""What the registry says about each requested image: digest, layers, sizes.

Lookups run in the background. The plan never waits for a registry: it takes the latest answer. An
answer is good for ``refresh``; after a failure the next lookup waits as its class says.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import structlog
from cachetools import LRUCache

import kit.errors
from preheat import credentials, estimate, failure, manifest, registry, settings
from preheat.failure import Kind, PullError
from preheat.runtimes import base

log = structlog.get_logger("preheat")

LOOKUPS_AT_ONCE = 4
MOST_SIZES = 8192


@dataclass
class Lookup:
    """The latest answer for one reference. ``login`` is set when the pull needs it."""

    ref: manifest.Reference
    shape: manifest.Shape | None = None
    login: base.Login | None = None
    private: bool = False
    at: float = 0.0  # Unix time of the answer; 0 before the first
    digest_since: float = 0.0  # Unix time at which this digest was first seen
    failed: failure.Failure | None = None
    task: asyncio.Task[None] | None = None


class Resolver:
    """Holds one lookup for each requested reference."""

    def __init__(
        self,
        client: registry.Registry,
        logins: credentials.Credentials,
        changed: Callable[[], None],
    ) -> None:
        self._client = client
        self._logins = logins
        self._changed = changed
        self._slots = asyncio.Semaphore(LOOKUPS_AT_ONCE)
        self._lookups: dict[str, Lookup] = {}
        # Unpacked bytes of layers by their digest.
        self._sizes: LRUCache[str, int] = LRUCache(MOST_SIZES)

    def of(self, ref: str) -> Lookup | None:
        return self._lookups.get(ref)

    def request(self, refs: Iterable[str], section: settings.PreheatSettings) -> None:
        """Keep answers for exactly these references; start the lookups that are due."""
        refs = set(refs)
        for gone in set(self._lookups) - refs:
            lookup = self._lookups.pop(gone)
            if lookup.task is not None:
                lookup.task.cancel()
        now = time.time()
        for ref in sorted(refs):
            lookup = self._lookups.setdefault(ref, Lookup(manifest.parse(ref)))
            if lookup.task is None and self._due(lookup, section, now):
                lookup.task = asyncio.create_task(self._run(lookup, section), name=f"look up {ref}")

    @staticmethod
    def _due(lookup: Lookup, section: settings.PreheatSettings, now: float) -> bool:
        if lookup.failed is not None:
            return lookup.failed.retry_at is not None and now >= lookup.failed.retry_at
        fixed = lookup.ref.digest is not None and lookup.shape is not None
        return lookup.at == 0 or (not fixed and now >= lookup.at + section.refresh)

    def again(self, ref: str) -> None:
        """Forget the failure and look up at once."""
        lookup = self._lookups.get(ref)
        if lookup is not None:
            lookup.failed, lookup.at = None, 0.0

    async def close(self) -> None:
        tasks = [each.task for each in self._lookups.values() if each.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, lookup: Lookup, section: settings.PreheatSettings) -> None:
        try:
            async with self._slots:
                await self._ask(lookup, section)
            lookup.failed = None
            lookup.at = time.time()
        except PullError as error:
            self._failed(lookup, error)
        except kit.errors.AgentError as error:  # a credential source
            self._failed(lookup, PullError(lookup.ref.text, Kind.AUTH, str(error)))
        except Exception:  # a bug must not become a loop of requests
            log.exception("image lookup failed unexpectedly", image=lookup.ref.text)
            self._failed(lookup, PullError(lookup.ref.text, Kind.BAD_IMAGE, "see the agent's log"))
        finally:
            lookup.task = None
            self._changed()

    def _failed(self, lookup: Lookup, error: PullError) -> None:
        attempts = lookup.failed.attempts + 1 if lookup.failed is not None else 1
        lookup.failed = failure.after(error, attempts, time.time())
        if lookup.failed.retry_at is not None:
            wait = lookup.failed.retry_at - time.time()
            asyncio.get_running_loop().call_later(max(0.0, wait) + 0.01, self._changed)

    async def _ask(self, lookup: Lookup, section: settings.PreheatSettings) -> None:
        login = await self._logins.login(lookup.ref, section.credentials)
        # Without credentials first: an image that needs none is public, and the agent does not send
        # credentials that are not needed.
        try:
            target = await self._client.resolve(lookup.ref, None)
            lookup.login, lookup.private = None, False
        except PullError as error:
            if login is None or error.kind not in (Kind.AUTH, Kind.NOT_FOUND):
                raise
            target = await self._client.resolve(lookup.ref, login)
            lookup.login, lookup.private = login, True
        shape = await self._client.shape(lookup.ref, target, section.platform, lookup.login)
        for layer in shape.layers:
            if layer.digest not in self._sizes:
                self._sizes[layer.digest] = await self._size(lookup, layer)
        if lookup.shape is None or lookup.shape.top.digest != target.digest:
            lookup.digest_since = time.time()
        lookup.shape = shape

    async def _size(self, lookup: Lookup, layer: manifest.Layer) -> int:
        async def span(digest: str, first: int, last: int) -> bytes:
            return await self._client.span(lookup.ref, digest, first, last, lookup.login)

        return await estimate.unpacked_size(layer, span)

    def unpacked(self, shape: manifest.Shape) -> dict[str, int]:
        """Unpacked bytes by chain id, for the layers whose size is known."""
        sizes = {layer.chain_id: self._sizes.get(layer.digest) for layer in shape.layers}
        return {chain_id: size for chain_id, size in sizes.items() if size is not None}
