"""How many connections fetch a layer, and whether more than the runtime's one would help at all.

Some registries and the networks before them limit each connection; others share one limit among
all. Only in the first case do more connections help, and only measuring tells. So the runtime
begins. Where its one connection is slow, the agent reads from the same layer beside it for a
moment: a limit of each connection gives both the same rate and takes nothing from the first. When
the agent then fetches the layer itself, connections are added while each one adds to the total.

Pure but for its memory; rates are bytes per second.
"""

import enum
import time
from collections.abc import Callable
from dataclasses import dataclass

# One connection this fast leaves little to gain: the store hashes and writes hardly faster.
FAST = 100_000_000
# What is left must take the runtime so long that measuring and beginning anew pay.
WORTH_SECONDS = 15.0
# Rates of one limit differ by no more than this part; half of a connection's rate must be added.
STEADY = 0.25
ADDS = 0.5
WINDOW_SECONDS = 1.0
WINDOW_PIECES = 4  # for each connection: fewer pieces make no rate


class Verdict(enum.Enum):
    ALONE = "alone"  # the runtime's one connection is as good as several
    SEVERAL = "several"  # each connection is limited for itself
    UNCLEAR = "unclear"  # the rate is not steady yet


def is_idle(load: float, cores: int) -> bool:
    """Whether the processor leaves room. Where it is what limits a pull, each connection gets its
    part of it, which looks like a limit of each connection, and fetching by the agent takes more of
    it (measured: 0.4 of the runtime's rate)."""
    return load < cores


def is_worth(rate: float, left: int) -> bool:
    """Whether several connections could save time: at ``rate``, with ``left`` bytes to fetch."""
    return 0 < rate < FAST and left / rate >= WORTH_SECONDS


def verdict(before: float, during: float, beside: float) -> Verdict:
    """What a second connection tells.

    ``before``, ``during``: the runtime's rate without and with it; ``beside``: its own rate.
    """
    if during < before * (1 - STEADY):
        return Verdict.ALONE  # they share one limit
    if during > before * (1 + STEADY):
        return Verdict.UNCLEAR  # it is still growing, so the first rate says nothing
    if beside > during / ADDS:
        return Verdict.ALONE  # not the connection limits the runtime, but its disk or processor
    return Verdict.SEVERAL if beside >= during * ADDS else Verdict.ALONE


@dataclass
class Lanes:
    """The number of connections of one layer: grows to ``most`` while each one adds."""

    most: int
    many: int = 1
    clock: Callable[[], float] = time.monotonic
    _rate: float | None = None  # with one connection less
    _settled: bool = False
    _since: float | None = None
    _bytes: int = 0
    _pieces: int = 0

    def took(self, size: int) -> None:
        """A piece of ``size`` bytes has come."""
        if self._settled:
            return
        now = self.clock()
        if self._since is None:  # the first one came before there was a rate
            self._since = now
            return
        self._bytes += size
        self._pieces += 1
        spent = now - self._since
        if spent < WINDOW_SECONDS or self._pieces < WINDOW_PIECES * self.many:
            return
        rate = self._bytes / spent
        if self._rate is not None and rate < self._rate * (1 + ADDS / (self.many - 1)):
            self.many -= 1
            self._settled = True
        elif self.many >= self.most:
            self._settled = True
        else:
            self._rate = rate
            self.many += 1
        self._since, self._bytes, self._pieces = None, 0, 0
