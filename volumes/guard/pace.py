"""How soon a device is looked at again: after somebody tried to write to it (``Pace``), because it
did not answer (``Doubt``), and because its content may have changed unnoticed (``due``). Pure.

A device that did not answer once is slow; one that did not answer twice is in trouble. A storm of
slow requests makes probes fail on healthy volumes. So a failed read counts only after a second one
some seconds later, and until then the device is looked at soon again.

Each attempt that is denied asks for a look: the device may have changed. A process that tries again
and again must not have the device read each time: 8 MB where nothing is recognised. So after the
first look that tells nothing new the next one waits until its verdict is ``AGAIN_SECONDS`` old, and
further ones wait longer and longer. None is left out, it only comes later; and another attachment
has a pace of its own, which begins anew. A device that does not answer costs no read, and is looked
at sooner: it may answer again.
"""

import math
import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import kit.pause
from volumes.probe.examine import Kind, Verdict

SILENT = frozenset({Kind.TIMEOUT, Kind.UNREADABLE, Kind.NO_MEDIA})
DOUBT_SECONDS = 6.0  # until the second look at one; doubled with each further one
LONGEST_DOUBT_SECONDS = 600.0
FIRST_SECONDS = 0.3
AGAIN_SECONDS = 5.0
LONGEST_SECONDS = 60.0
CHECK_AGAIN_SECONDS = 600.0  # a device whose content may have changed unnoticed
CHECK_IN_USE_SECONDS = 4 * 3600.0  # the same while a file system on it is live

# The verdict, whether a format was refused, and the process that formats (0: none).
Outcome = tuple[Kind | None, bool, int]


@dataclass(frozen=True)
class Pace:
    """``same``: looks in a row with this outcome. ``last``: CLOCK_MONOTONIC of the last one."""

    outcome: Outcome | None = None
    same: int = 0
    last: float = -math.inf

    def after(self, outcome: Outcome, now: float) -> "Pace":
        """A device at which nobody tried to write for a while begins anew."""
        if outcome != self.outcome:
            return Pace(outcome, 1, now)
        rested = now - self.last > 2 * LONGEST_SECONDS
        return Pace(outcome, 2 if rested else self.same + 1, now)

    def wait(self, now: float) -> float:
        """Seconds until the next look; 0: now."""
        return max(0.0, self.last + self._pause() - now) if self.same else 0.0

    def _pause(self) -> float:
        verdict = self.outcome[0] if self.outcome else None
        if self.same < 2 or verdict is None or verdict in SILENT:
            return kit.pause.grown(self.same, FIRST_SECONDS, AGAIN_SECONDS)
        return kit.pause.grown(self.same - 1, AGAIN_SECONDS, LONGEST_SECONDS)


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
        wait = kit.pause.grown(self.looks, DOUBT_SECONDS, LONGEST_DOUBT_SECONDS)
        return wait * random.uniform(1.0, 1.5)

    def after(self, seen: Verdict, now: float) -> "Doubt":
        """A look sooner than ``DOUBT_SECONDS`` after the last one is the same look."""
        if seen.verdict not in SILENT:
            return Doubt()
        if self.looks and now - self.last < DOUBT_SECONDS:
            return self
        return Doubt(self.looks + 1, now)


def due(
    checked: Mapping[str, float], in_use: Collection[str], now: float, interval: float
) -> list[str]:
    """The devices whose turn it is, the oldest first. ``checked``: CLOCK_MONOTONIC of their last
    checks; ``interval``: seconds until this is asked again. Those that were attached together do
    not stay together."""
    waits = {
        name: CHECK_IN_USE_SECONDS if name in in_use else CHECK_AGAIN_SECONDS for name in checked
    }
    found = sorted((at, name) for name, at in checked.items() if now - at >= waits[name])
    most = math.ceil(len(checked) * interval / CHECK_AGAIN_SECONDS)
    return [name for _, name in found[:most]]
