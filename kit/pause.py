"""How long to wait: after failures (pauses grow, and chance keeps many nodes apart), and where only
so much per second may come.
"""

import random
import time
from collections.abc import Callable

_MOST_DOUBLINGS = 32  # a float has room for them


def grown(failures: int, first: float, longest: float) -> float:
    """Seconds to wait after ``failures`` (1 or more) in a row: ``first``, doubled with each further
    one, ``longest`` at most. Without chance."""
    return min(first * 2.0 ** min(failures - 1, _MOST_DOUBLINGS), longest)


def jittered(seconds: float) -> float:
    """``seconds``, less up to a quarter by chance."""
    return seconds * random.uniform(0.75, 1.0)


class Backoff:
    """Growing, jittered pauses between attempts, from ``first`` to ``longest`` seconds."""

    def __init__(self, first: float = 1.0, longest: float = 60.0) -> None:
        self.first, self.longest = first, longest
        self.attempts = 0

    def next(self) -> float:
        """The pause after one more failure."""
        self.attempts += 1
        return jittered(grown(self.attempts, self.first, self.longest))

    def reset(self) -> None:
        self.attempts = 0


class Bucket:
    """So much per second, and a little at once: a token bucket.

    ``rate``: units per second, which may change. ``burst``: units that may come at once; the
    bucket is full at first.
    """

    __slots__ = ("_clock", "_level", "_when", "burst", "rate")

    def __init__(self, rate: float, burst: float, clock: Callable[[], float] | None = None) -> None:
        self.rate, self.burst = rate, burst
        self._clock = clock or time.monotonic
        self._level, self._when = burst, self._clock()

    @property
    def level(self) -> float:
        """Units that may come now; below zero after ``owe`` took more than there was."""
        now = self._clock()
        self._level = min(self.burst, self._level + (now - self._when) * self.rate)
        self._when = now
        return self._level

    def take(self, amount: float = 1.0, keep: float = 0.0) -> bool:
        """Take ``amount`` if ``keep`` is left then. Returns whether it did."""
        if self.level < amount + keep:
            return False
        self._level -= amount
        return True

    def owe(self, amount: float) -> float:
        """Take ``amount`` in any case. Returns the seconds after which it may come."""
        self._level = self.level - amount
        return max(0.0, -self._level / self.rate)

    def give_back(self, amount: float = 1.0) -> None:
        self._level = min(self.burst, self.level + amount)
