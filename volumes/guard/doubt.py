"""A device that did not answer once is slow; one that did not answer twice is in trouble. Pure.

A storm of slow requests makes probes fail on healthy volumes. So a failed read counts only after a
second one some seconds later, and until then the device is looked at soon again.
"""

import random
from dataclasses import dataclass

import kit.pause
from volumes.probe.examine import Kind, Verdict

SILENT = frozenset({Kind.TIMEOUT, Kind.UNREADABLE, Kind.NO_MEDIA})
AGAIN_SECONDS = 6.0  # until the second look; doubled with each further one
LONGEST_SECONDS = 600.0


@dataclass(frozen=True)
class Doubt:
    """Looks in a row that read nothing. ``last``: CLOCK_MONOTONIC of the last one that counts."""

    looks: int = 0
    last: float = 0.0

    @property
    def agreed(self) -> bool:
        return self.looks > 1

    @property
    def wait(self) -> float | None:
        """Seconds until the next look; spread, because a cluster's trouble hits every device."""
        if not self.looks:
            return None
        wait = kit.pause.grown(self.looks, AGAIN_SECONDS, LONGEST_SECONDS)
        return wait * random.uniform(1.0, 1.5)

    def after(self, seen: Verdict, now: float) -> "Doubt":
        """A look sooner than ``AGAIN_SECONDS`` after the last one is the same look."""
        if seen.verdict not in SILENT:
            return Doubt()
        if self.looks and now - self.last < AGAIN_SECONDS:
            return self
        return Doubt(self.looks + 1, now)


def content_is_missing(seen: Verdict, doubt: Doubt) -> bool:
    """Whether it is certain that content which was there cannot be seen."""
    return not seen.has_content and (seen.verdict not in SILENT or doubt.agreed)
