"""The limit on downloads: bytes per second, for all pulls of the agent together."""

import asyncio
import time
from collections.abc import Callable

# A download may be this far ahead of the limit: smooth at low rates, no burst at high ones.
BURST_SECONDS = 0.25


class Limiter:
    """A limit in bytes per second that all downloads of the agent share. ``rate`` may change."""

    def __init__(
        self, rate: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.rate = rate
        self._clock = clock
        self._paid_until = 0.0

    async def take(self, size: int) -> None:
        """Wait until ``size`` bytes may flow."""
        if not self.rate:
            return
        now = self._clock()
        self._paid_until = max(self._paid_until, now - BURST_SECONDS) + size / self.rate
        wait = self._paid_until - now
        if wait > 0:
            await asyncio.sleep(wait)
