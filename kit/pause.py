"""Pauses after failures: they grow, and chance keeps many nodes apart."""

import random

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
