"""What the registry says about each wanted image: digest, layers, size. Asked in the background.

The plan never waits for a registry: it takes the latest answer. An answer is good until
``refresh``; a failure is asked again after the wait of its class.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import structlog

import kit.errors
from preheat import credentials, estimate, failure, manifest, registry, settings
from preheat.failure import Kind, PullError
from preheat.runtimes import base

log = structlog.get_logger("preheat")

LOOKS_AT_ONCE = 4
MOST_SIZES = 8192


@dataclass
class Lookup:
    """The latest answer for one reference. ``login`` is set when the pull needs it."""

    ref: manifest.Reference
    target: manifest.Target | None = None
    shape: manifest.Shape | None = None
    login: base.Login | None = None
    private: bool = False
    at: float = 0.0  # Unix time of the answer; 0: none yet
    first_seen: float = field(default_factory=time.time)
    digest_since: float = 0.0  # Unix time at which this digest was first seen
    failed: failure.Failure | None = None
    task: asyncio.Task[None] | None = None


class Resolver:
    """Bounded by the number of wanted images (settings limit it) and of requests."""

    def __init__(
        self,
        client: registry.Registry,
        logins: credentials.Credentials,
        changed: Callable[[], None],
    ) -> None:
        self._client = client
        self._logins = logins
        self._changed = changed
        self._slots = asyncio.Semaphore(LOOKS_AT_ONCE)
        self._lookups: dict[str, Lookup] = {}
        # Unpacked size of layers that are not here, by their digest.
        self._sizes: OrderedDict[str, tuple[int, bool]] = OrderedDict()

    def of(self, ref: str) -> Lookup | None:
        return self._lookups.get(ref)

    def want(self, refs: Iterable[str], section: settings.PreheatSettings) -> None:
        """Keep answers for exactly these; start what is due."""
        refs = set(refs)
        for gone in set(self._lookups) - refs:
            look = self._lookups.pop(gone)
            if look.task is not None:
                look.task.cancel()
        now = time.time()
        for ref in sorted(refs):
            look = self._lookups.setdefault(ref, Lookup(manifest.parse(ref)))
            if look.task is None and self._due(look, section, now):
                look.task = asyncio.create_task(self._run(look, section), name=f"look at {ref}")

    @staticmethod
    def _due(look: Lookup, section: settings.PreheatSettings, now: float) -> bool:
        if look.failed is not None:
            return look.failed.retry_at is not None and now >= look.failed.retry_at
        fixed = look.ref.digest is not None and look.shape is not None
        return look.at == 0 or (not fixed and now >= look.at + section.refresh)

    def again(self, ref: str) -> None:
        """Somebody asked: forget failures and look at once."""
        look = self._lookups.get(ref)
        if look is not None:
            look.failed, look.at = None, 0.0

    async def close(self) -> None:
        tasks = [look.task for look in self._lookups.values() if look.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, look: Lookup, section: settings.PreheatSettings) -> None:
        try:
            async with self._slots:
                await self._ask(look, section)
            look.failed = None
            look.at = time.time()
        except PullError as error:
            self._failed(look, error)
        except kit.errors.AgentError as error:  # a credential source
            self._failed(look, PullError(look.ref.text, Kind.AUTH, str(error)))
        except Exception:  # a bug must not become a loop of requests
            log.exception("looking at an image failed", image=look.ref.text)
            self._failed(look, PullError(look.ref.text, Kind.BAD_IMAGE, "see the agent's log"))
        finally:
            look.task = None
            self._changed()

    def _failed(self, look: Lookup, error: PullError) -> None:
        attempts = look.failed.attempts + 1 if look.failed is not None else 1
        look.failed = failure.after(error, attempts, time.time())
        if look.failed.retry_at is not None:
            wait = look.failed.retry_at - time.time()
            asyncio.get_running_loop().call_later(max(0.0, wait) + 0.01, self._changed)

    async def _ask(self, look: Lookup, section: settings.PreheatSettings) -> None:
        login = await self._logins.login(look.ref, section.credentials)
        # Without credentials first: what can be had without them is not private, and credentials
        # that are not needed are not sent.
        try:
            target = await self._client.resolve(look.ref, None)
            look.login, look.private = None, False
        except PullError as error:
            if login is None or error.kind not in (Kind.AUTH, Kind.NOT_FOUND):
                raise
            target = await self._client.resolve(look.ref, login)
            look.login, look.private = login, True
        wanted = section.platform
        shape = await self._client.shape(look.ref, target, wanted, look.login)
        for layer in shape.layers:
            await self._size(look, layer)
        if look.target is None or look.target.digest != target.digest:
            look.digest_since = time.time()
        look.target, look.shape = target, shape

    async def _size(self, look: Lookup, layer: manifest.Layer) -> None:
        if layer.digest in self._sizes:
            return

        async def span(digest: str, first: int, last: int) -> bytes:
            return await self._client.span(look.ref, digest, first, last, look.login)

        self._sizes[layer.digest] = await estimate.unpacked_size(layer, span)
        while len(self._sizes) > MOST_SIZES:
            self._sizes.popitem(last=False)

    def unpacked(self, shape: manifest.Shape) -> dict[str, tuple[int, bool]]:
        """Sizes by chain id, as far as they are known."""
        return {
            layer.chain_id: self._sizes[layer.digest]
            for layer in shape.layers
            if layer.digest in self._sizes
        }
