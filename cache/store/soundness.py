"""What the agent remembers of the store's troubles (``cache.store.trust``), for all datasets."""

import asyncio
import dataclasses
from pathlib import Path

import structlog

import kit.child
import kit.errors
import kit.formats
from cache.store import generations, trust
from linux import procfs

log = structlog.get_logger("store")

SAVE_SECONDS = 15.0
RETRY_SECONDS = 2.0
# States of a generation that has nothing which could be believed.
_NOTHING = ("new", "stale")


class Soundness:
    """Shared by all datasets. What is counted is at once in memory, and soon in the file."""

    def __init__(self, state_dir: Path | None = None) -> None:
        self._path = None if state_dir is None else trust.file_of(state_dir)
        self.kept = trust.Kept()
        self._saved = trust.Kept()
        self.lost = ""  # why it is not known which trouble was the last: all is suspect
        self.unknown = False  # nor may a number be given, before those in the store are known
        self._dirty = asyncio.Event()

    def start(self) -> None:
        """Read what an earlier agent kept. HostError when a newer one wrote it."""
        if self._path is None:
            return
        found = trust.load(self._path)
        if isinstance(found, kit.formats.Damage):
            self.lost = str(found)
            log.error("the store's troubles are forgotten; all stored files are suspect",
                      why=self.lost)  # fmt: skip
        self.unknown = not isinstance(found, trust.Kept)
        self._saved = found if isinstance(found, trust.Kept) else trust.Kept()
        self._set(trust.begun(self._saved, procfs.boot_id()))
        if self.kept.crashes > self._saved.crashes:
            log.warning("the node went down while the agent ran; scrubs come sooner")

    def number_from(self, highest: int) -> None:
        """``highest``: number of the last trouble after which anything in the store was verified.
        The next trouble gets a higher number; what is suspect does not count as verified."""
        if self.unknown:
            self.unknown = False
            number = highest + bool(self.lost) + self.kept.troubles  # those since the start
            self._set(dataclasses.replace(self.kept, troubles=number))

    @property
    def troubles(self) -> int:
        return self.kept.troubles

    def suspects(self, generation: generations.Generation) -> bool:
        """Whether its files must be verified before they are served."""
        suspect = generation.verified < self.kept.troubles or bool(self.lost and self.unknown)
        return generation.state not in _NOTHING and suspect

    def verified(
        self, generation: generations.Generation, before: generations.Generation | None
    ) -> int:
        """``Generation.verified`` when its fill begins: nothing of a new one was there in earlier
        trouble, beside what it shares with the one ``before``."""
        if generation.state != "new":
            return generation.verified
        return self.troubles if before is None else min(self.troubles, before.verified)

    def count_trouble(self, why: str) -> None:
        """The disk failed: what is stored is suspect."""
        self._set(dataclasses.replace(self.kept, troubles=self.kept.troubles + 1))
        log.warning("stored files are verified before they are used again", why=why)

    def new_errors(self, counted: int | None) -> int:
        """How many errors ext4 has counted since they were last looked at."""
        known = self.kept.errors
        if counted == known:
            return 0
        self._set(dataclasses.replace(self.kept, errors=counted))
        return max(0, counted - known) if counted is not None and known is not None else 0

    def _set(self, kept: trust.Kept) -> None:
        self.kept = kept
        self._dirty.set()

    async def follow(self) -> None:
        """Saves what changes. Runs until it is cancelled."""
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            try:
                await self._save(self.kept)
            except (kit.errors.AgentError, OSError, RuntimeError) as error:
                log.warning("the store's troubles could not be noted; tried again", why=str(error))
                self._dirty.set()
                await asyncio.sleep(RETRY_SECONDS)

    async def stop(self) -> None:
        """The agent ends before the node does."""
        try:
            await self._save(dataclasses.replace(self.kept, clean=True))
        except (kit.errors.AgentError, OSError, RuntimeError) as error:
            log.warning("the end of the agent could not be noted", why=str(error))

    async def _save(self, kept: trust.Kept) -> None:
        if self._path is None or kept == self._saved or self.unknown:
            return  # while the numbers are unknown, the file stays as it was found
        fields = trust.fields_of(kept)
        await kit.child.call(trust.save, str(self._path), fields, deadline=SAVE_SECONDS)
        self._saved = kept
