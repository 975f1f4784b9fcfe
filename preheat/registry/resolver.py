"""What the registry says about each requested image: digest, layers, sizes.

Lookups run in the background. The plan never waits for a registry: it takes the latest answer. An
answer is good for ``refresh``; after a failure the next lookup waits as its class says.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import structlog

import kit.errors
import kit.tasks
from preheat.image import manifest
from preheat.registry import client as registry
from preheat.registry import credentials, failure, schedule
from preheat.registry.failure import Kind, PullError
from preheat.runtimes import base

log = structlog.get_logger("preheat")

LOOKUPS_AT_ONCE = 4
# After so many lookups in a row that found the registry away or busy the runtime tries.
PATIENCE = 3


@dataclass
class Lookup:
    """The latest answer for one reference. It has no login: secrets are read at each use."""

    ref: manifest.Reference
    shape: manifest.Shape | None = None
    private: bool | None = None  # None: its own registry did not say
    has_login: bool = False
    mirrored: bool = False
    at: float = 0.0  # Unix time of the answer; 0 before the first
    here: str | None = None  # the digest that the node has for it; None: not looked yet
    moved_at: float = 0.0  # Unix time at which that changed; 0: not since we look
    failed: failure.PullFailure | None = None
    task: asyncio.Task[None] | None = None

    def saw_here(self, digest: str, now: float) -> bool:
        """Whether it is another digest than before. At first sight the registry is right."""
        moved = self.here not in (None, digest)
        if self.here != digest:
            self.here, self.moved_at = digest, now if moved else 0.0
        return moved

    @property
    def leaves_it_to_the_runtime(self) -> bool:
        """Whether the runtime may try what our lookup could not. It is no gate: the runtime knows
        more of registries. Only that there is no such image is believed at once; a registry that
        is away is asked by lookups first, which cost it less."""
        failed = self.failed
        if self.shape is not None or failed is None or failed.final:
            return False
        passing = failed.kind in (Kind.NETWORK, Kind.BUSY)
        return not passing or failed.attempts >= PATIENCE


class Resolver:
    """Holds one lookup for each requested reference."""

    def __init__(
        self,
        client: registry.Registry,
        logins: credentials.Credentials,
        turns: schedule.Schedule,
        changed: Callable[[], None],
    ) -> None:
        self.client = client
        self._logins = logins
        self.turns = turns
        self._changed = changed
        self._slots = asyncio.Semaphore(LOOKUPS_AT_ONCE)
        self._lookups: dict[str, Lookup] = {}
        self.failed = dict.fromkeys((kind.value for kind in Kind), 0)  # lookups by class

    def of(self, ref: str) -> Lookup | None:
        return self._lookups.get(ref)

    def digest(self, ref: str) -> str:
        """The digest that it had at the latest look-up; empty: not known."""
        lookup = self._lookups.get(ref)
        return lookup.shape.top.digest if lookup is not None and lookup.shape is not None else ""

    def request(self, refs: Mapping[str, bool]) -> None:
        """Keep answers for exactly these references; start the lookups that are due. True: an
        operator waits for it."""
        now = time.time()
        self.turns.want(refs, now)
        for gone in self._lookups.keys() - refs.keys():
            lookup = self._lookups.pop(gone)
            if lookup.task is not None:
                lookup.task.cancel()
        for ref in sorted(refs):
            lookup = self._lookups.setdefault(ref, Lookup(manifest.parse(ref)))
            if lookup.task is None and self.turn(lookup) <= now:
                lookup.task = asyncio.create_task(self._run(lookup), name=f"look up {ref}")

    def turn(self, lookup: Lookup) -> float:
        """Unix time of its next look-up; infinite when there is none."""
        fixed = lookup.ref.digest is not None and lookup.shape is not None
        return self.turns.lookup_at(lookup.ref.text, lookup.at, fixed=fixed, failed=lookup.failed)

    def again(self, ref: str) -> None:
        """Forget the failure and look up when its turn comes: now, once it was looked up."""
        lookup = self._lookups.get(ref)
        if lookup is not None:
            lookup.failed, lookup.at = None, 0.0

    def probe(self, ref: str) -> None:
        """Look up soon: after a failed pull this finds with less whether the registry is back."""
        lookup = self._lookups.get(ref)
        if lookup is not None and lookup.failed is None:
            lookup.at = 0.0

    def is_newer_here(self, ref: str, here: str) -> bool:
        """Whether the node's digest of a tag is newer than the registry's answer. Asks again.

        A kubelet that pulls a moved tag knows the registry's answer before the next lookup does.
        From then until that lookup the node's digest counts: it is what pods use.
        """
        lookup = self._lookups.get(ref)
        if lookup is None:
            return False
        moved = lookup.saw_here(here, time.time())
        other = bool(here) and lookup.shape is not None and lookup.shape.top.digest != here
        if moved and other:
            log.info("tag moved on the node", image=ref, digest=here)
            self.again(ref)
            self._changed()
        return other and lookup.moved_at > lookup.at

    async def close(self) -> None:
        await kit.tasks.end(*(each.task for each in self._lookups.values()))

    async def _run(self, lookup: Lookup) -> None:
        try:
            async with self._slots:
                await self._ask(lookup)
            if lookup.failed is not None:
                log.info("image lookup works again", image=lookup.ref.text)
            lookup.failed = None
            lookup.at = time.time()
            self.turns.answered(lookup.ref.text, lookup.at)
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
        self.failed[error.kind.value] += 1
        old = lookup.failed
        if old is None or old.message != str(error):
            log.warning(
                "image lookup failed", image=lookup.ref.text, kind=str(error.kind), error=str(error)
            )
        attempts = old.attempts + 1 if old is not None else 1
        lookup.failed = self.turns.failed(lookup.ref.text, error, attempts, time.time())
        if lookup.failed.retry_at is not None:
            wait = lookup.failed.retry_at - time.time()
            asyncio.get_running_loop().call_later(max(0.0, wait) + 0.01, self._changed)

    async def _ask(self, lookup: Lookup) -> None:
        section = self.turns.section
        ref, text = lookup.ref, lookup.ref.text
        old = lookup.shape.top.digest if lookup.shape is not None else ""
        lookup.mirrored = True  # unless its hosts.toml says otherwise
        found = await self.logins(ref)
        lookup.has_login = bool(found.logins)
        lookup.mirrored = await self.client.is_mirrored(ref)

        async def find(fresh: bool) -> credentials.Found:
            return await self.logins(ref, fresh=True) if fresh else found

        target, login = await credentials.attempt(
            find, lambda login: self.client.resolve(ref, login)
        )
        doubt = None
        if lookup.private is None or target.digest != old:
            shared = any(each.ref == text and each.share_private for each in section.images)
            if not shared:
                lookup.private, doubt = await self._is_private(lookup, login)
        lookup.shape = await self.client.shape(ref, target, section.platform, login)
        if doubt is not None:
            raise doubt  # so it is asked again soon

    async def _is_private(
        self, lookup: Lookup, login: base.Login | None
    ) -> tuple[bool | None, PullError | None]:
        """Whether ``lookup`` needs a login; the error when its registry does not say."""
        if login is None and not lookup.mirrored:
            return False, None  # its registry answered just now
        try:
            return not await self.client.is_public(lookup.ref), None
        except PullError as error:
            # Without a login no secret is used for it, as far as this node knows.
            return None, error if lookup.has_login else None

    async def logins(self, ref: manifest.Reference, *, fresh: bool = False) -> credentials.Found:
        """What is there now to pull ``ref`` with."""
        return await self._logins.find(ref, self.turns.section.credentials, fresh=fresh)
