"""Which share of what jobs read is on the SSD: a sample of the files that they open.

While the kernel serves, nobody counts. So opens are watched in a short window now and then
(``cache.space.uses``), and each opened file is looked up in the store. What the share of all opens
is follows from the sample only within bounds, which are told with it.
Where the store alone serves, or the source alone, it is known without a sample.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from cache.dataset.figures import Opens
from cache.views.view import Stage

KEPT_SECONDS = 900.0  # a change of the job or of the store shows after this
MOST_POINTS = 60  # of the history: an hour, a minute each (cache.space.uses)
_Z = 1.96  # of a normal distribution: 95 % lie within


@dataclass(frozen=True)
class Ratio:
    """Share of reads from the SSD."""

    # Of the files that jobs opened in the last 15 minutes; 1 or 0 where the store or the source
    # alone serves.
    ratio: float
    low: float  # with 95 % certainty the share of all opens is above this
    high: float  # and below this
    opens: int  # how many opens were watched; 0 where it is known without


class Hits:
    """The samples of one dataset, the latest KEPT_SECONDS of them, and how the ratio went."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, Opens]] = deque()
        self._points: deque[float | None] = deque(maxlen=MOST_POINTS)

    def add(self, opens: Opens, now: float) -> None:
        """``now``: time.monotonic()."""
        self._samples.append((now, opens))
        while self._samples[0][0] < now - KEPT_SECONDS:
            self._samples.popleft()

    def note(self, stage: Stage, now: float) -> None:
        """One more point of the history, called at equal times. What is not known is a gap."""
        ratio = self.ratio(stage, now)
        if ratio is not None or self._points:  # what was before anything was known is no gap
            self._points.append(None if ratio is None else round(ratio.ratio, 3))

    def history(self) -> Sequence[float | None]:
        """The oldest first."""
        return tuple(self._points)

    def ratio(self, stage: Stage, now: float) -> Ratio | None:
        """None where it is not known: nothing serves, or no job was seen to open a file."""
        if stage in (Stage.STORE, Stage.SOURCE):
            whole = float(stage is Stage.STORE)
            return Ratio(whole, whole, whole, 0)
        recent = (opens for at, opens in self._samples if at >= now - KEPT_SECONDS)
        total = sum(recent, Opens())
        known = stage is Stage.OVERLAY and total.store + total.source > 0
        return estimate(total) if known else None


def estimate(opens: Opens) -> Ratio:
    """The share in the store, with Wilson's bounds. ``opens``: at least one."""
    count = opens.store + opens.source
    share = opens.store / count
    middle = (share + _Z**2 / (2 * count)) / (1 + _Z**2 / count)
    half = (
        _Z / (1 + _Z**2 / count) * math.sqrt(share * (1 - share) / count + _Z**2 / (4 * count**2))
    )
    low, high = max(0.0, middle - half), min(1.0, middle + half)
    return Ratio(round(share, 4), round(low, 4), round(high, 4), count)
