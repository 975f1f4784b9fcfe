"""The limit on downloads: bytes per second, for all pulls of the agent together."""

import asyncio
from collections.abc import Callable

from kit.pause import Bucket

# A download may be this far ahead of the limit: smooth at low rates, no burst at high ones.
BURST_SECONDS = 0.25


class Limiter:
    """A limit in bytes per second that all downloads of the agent share. ``rate`` may change."""

    def __init__(self, rate: float | None = None, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock
        self._bucket: Bucket | None = None
        self.rate = rate

    @property
    def rate(self) -> float | None:
        return self._bucket.rate if self._bucket else None

    @rate.setter
    def rate(self, rate: float | None) -> None:
        if rate != self.rate:
            self._bucket = Bucket(rate, rate * BURST_SECONDS, self._clock) if rate else None

    async def take(self, size: int) -> None:
        """Wait until ``size`` bytes may flow."""
        if self._bucket and (wait := self._bucket.owe(size)):
            await asyncio.sleep(wait)
