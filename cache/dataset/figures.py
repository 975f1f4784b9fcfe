"""What is known of a dataset beside its generation: figures, its last verify, its running job."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import kit.units
from cache.fill.protocol import Phase
from cache.sources import base
from cache.store import manifest

# Opens are watched in a short window once a minute (``cache.space.uses``): two windows without one
# are needed to say that nobody opens files.
RECENT_SECONDS = 120.0


@dataclass(frozen=True)
class Figures(manifest.Counts):
    """How much there is and how much is stored. From the running job, else as last known."""

    used: int = 0  # SSD bytes
    shared: int = 0  # those of them that the generation before has too
    estimated: bool = True  # files and bytes are not counted yet

    def at_least(self, reached: base.Reached) -> "Figures":
        """With what the source counts where it has more."""
        files, size = max(self.files, reached.files or 0), max(self.bytes, reached.bytes or 0)
        return dataclasses.replace(self, files=files, bytes=size)


@dataclass(frozen=True)
class Requested:
    """What an operator asked for. ``state``: '', queued, running, or how it ended."""

    state: str = ""

    @property
    def queued(self) -> bool:
        return self.state == "queued"

    @property
    def pending(self) -> bool:
        """From the request until the result is known, including the withdrawal of bad files."""
        return self.state in ("queued", "running")


@dataclass(frozen=True)
class Verification(Requested):
    """The last verify; it ends as good, bad, cancelled or failed."""

    source: bool = False  # compares with the source too
    why: str = ""
    result: dict[str, int] | None = None  # named as in the API
    at: float = 0.0  # Unix time of its end


@dataclass(frozen=True)
class Opens:
    """Files that jobs opened through a view: those that lie in the store, and the others."""

    store: int = 0
    source: int = 0

    def __add__(self, other: "Opens") -> "Opens":
        return Opens(self.store + other.store, self.source + other.source)


@dataclass(frozen=True)
class Use:
    """By jobs: pods and processes that are none of the agent's."""

    last: float = 0.0  # Unix time when one was last seen; the dataset's first time before that
    by: str = ""  # one that holds the view now
    opened: float = 0.0  # Unix time at which a file was last seen to be opened through the view

    def opener(self, now: float) -> str:
        """Somebody who opens and closes files, whom no look at a moment finds; empty: nobody."""
        ago = now - self.opened
        recent = 0 <= ago < RECENT_SECONDS
        return f"somebody who opened a file {kit.units.format_duration(ago)} ago" if recent else ""

    def reader(self, now: float) -> str:
        """One that holds the view or opens files; empty when nobody does."""
        return self.by or self.opener(now)


@dataclass(frozen=True)
class Loss:
    """That others took what was mounted for jobs, since the agent's start."""

    count: int = 0
    at: float = 0.0  # Unix time of the last
    what: str = ""


@dataclass(frozen=True)
class Eviction(Requested):
    """Last eviction by an operator. One that failed after it had begun continues."""

    state: Literal["", "queued", "running", "evicted", "failed"] = ""
    to: int = 0  # SSD bytes that may stay
    why: str = ""  # why it failed; what had begun goes on by itself
    files: int = 0  # taken out
    bytes: int = 0  # SSD bytes that became free
    at: float | None = None  # Unix time of its end


ScrubReason = Literal["", "suspect", "crash", "round"]


@dataclass(frozen=True)
class Scrub:
    """The scrub of a generation. ``state``: '', running, good, bad, cancelled or failed."""

    state: str = ""
    reason: ScrubReason = ""  # why this round
    why: str = ""
    files: int = 0  # to check in all
    bytes: int = 0
    checked_files: int = 0
    checked_bytes: int = 0
    bad: int = 0  # of this round
    replaced: int = 0
    withdrawn: int = 0


@dataclass
class Scrubs:
    """What all scrubs did since the agent's start."""

    bad: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class Totals:
    """What became of datasets since the agent's start; it only grows."""

    evicted_files: int = 0
    scrubbed_bytes: int = 0

    def __add__(self, other: "Totals") -> "Totals":
        return Totals(
            self.evicted_files + other.evicted_files, self.scrubbed_bytes + other.scrubbed_bytes
        )


class Job(Protocol):
    """The running job of a dataset (``cache.work.jobs``)."""

    kind: str  # fill, update, verify or withdraw
    phase: Phase

    def rates(self) -> tuple[float, float]:
        """Files and bytes per second."""

    def trend(self) -> Sequence[float]:
        """Bytes per second since it began, in points of equal time (``rates.MOST_POINTS``)."""

    def eta(self) -> float | None:
        """Seconds left, None when they cannot be estimated."""

    async def cancel(self) -> None:
        """Ends it after a last commit; kills it when it takes too long."""
