"""Whether what is stored can be believed: the agent remembers the store's troubles.

A file system that had I/O errors may have lost bytes that it had promised to be durable. So each
trouble of the disk gets a number, and a generation carries the number of the last trouble after
which all its files were verified (``Generation.verified``). One with a lower number is *suspect*:
it is not served until it is verified. Numbers, not times: clocks jump. A damaged file has lost the
number: then all that is stored is suspect.

An unclean shutdown of the node is counted too. It breaks no promise of a file system, so it raises
no doubt; the scrub only comes sooner (``Generation.crashes``).

Kept in ``state_dir``, because the disk in trouble may not keep it. Invariant: what is in memory is
at least as high as what is in the file, so a failing write may be tried again later.
"""

import asyncio
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import structlog

import kit.child
import kit.errors
import kit.formats
from cache.store import generations
from linux import procfs

log = structlog.get_logger("store")

FORMAT = 1
SAVE_SECONDS = 15.0
RETRY_SECONDS = 2.0
# States of a generation that has nothing which could be believed.
_NOTHING = ("new", "stale")


Count = Annotated[int, msgspec.Meta(ge=0)]


@dataclass(frozen=True)
class Kept:
    """The file's fields."""

    troubles: Count = 0
    crashes: Count = 0
    boot: str = ""  # of the kernel that the agent ran on last
    clean: bool = True  # the agent ended before that kernel did
    errors: Count | None = None  # that ext4 had counted at the last look; None: none was there


def file_of(state_dir: Path) -> Path:
    return state_dir / "cache-trust.json"


def load(path: Path) -> Kept | kit.formats.Damage | None:
    """As ``kit.formats.read``."""
    return kit.formats.read(path, FORMAT, _kept)


def _kept(fields: dict[str, Any]) -> Kept:
    """ValueError for what no agent wrote."""
    fields["troubles"]  # without a number nothing may be believed
    return msgspec.convert(fields, Kept)


def begun(kept: Kept, boot: str) -> Kept:
    """At the agent's start: whether the node went down while an agent ran. Pure."""
    crashed = bool(kept.boot) and kept.boot != boot and not kept.clean
    return replace(kept, boot=boot, clean=False, crashes=kept.crashes + crashed)


class Soundness:
    """Shared by all datasets. What is counted is at once in memory, and soon in the file."""

    def __init__(self, state_dir: Path | None = None) -> None:
        self._path = None if state_dir is None else file_of(state_dir)
        self.kept = Kept()
        self._saved = Kept()
        self.lost = ""  # why it is not known which trouble was the last: all is suspect
        self.unknown = False  # nor may a number be given, before those in the store are known
        self._dirty = asyncio.Event()

    def start(self) -> None:
        """Read what an earlier agent kept. HostError when a newer one wrote it."""
        if self._path is None:
            return
        found = load(self._path)
        if isinstance(found, kit.formats.Damage):
            self.lost = str(found)
            log.error("the store's troubles are forgotten; all stored files are suspect",
                      why=self.lost)  # fmt: skip
        self.unknown = not isinstance(found, Kept)
        self._saved = found if isinstance(found, Kept) else Kept()
        self._set(begun(self._saved, procfs.boot_id()))
        if self.kept.crashes > self._saved.crashes:
            log.warning("the node went down while the agent ran; scrubs come sooner")

    def number_from(self, highest: int) -> None:
        """``highest``: number of the last trouble after which anything in the store was verified.
        The next trouble gets a higher number; what is suspect does not count as verified."""
        if self.unknown:
            self.unknown = False
            number = highest + bool(self.lost) + self.kept.troubles  # those since the start
            self._set(replace(self.kept, troubles=number))

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
        self._set(replace(self.kept, troubles=self.kept.troubles + 1))
        log.warning("stored files are verified before they are used again", why=why)

    def new_errors(self, counted: int | None) -> int:
        """How many errors ext4 has counted since they were last looked at."""
        known = self.kept.errors
        if counted == known:
            return 0
        self._set(replace(self.kept, errors=counted))
        return max(0, counted - known) if counted is not None and known is not None else 0

    def _set(self, kept: Kept) -> None:
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
            await self._save(replace(self.kept, clean=True))
        except (kit.errors.AgentError, OSError, RuntimeError) as error:
            log.warning("the end of the agent could not be noted", why=str(error))

    async def _save(self, kept: Kept) -> None:
        if self._path is None or kept == self._saved or self.unknown:
            return  # while the numbers are unknown, the file stays as it was found
        await kit.child.call(
            kit.formats.save, str(self._path), asdict(kept), FORMAT, deadline=SAVE_SECONDS
        )
        self._saved = kept
