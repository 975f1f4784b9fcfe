"""Deadlines that are over when a test says so, and not when the clock does.

A test whose subject is a deadline must not depend on how far a child or a server has come within
it. Such a test gives its deadline a number of seconds of its own; ``asyncio.timeout`` of that
number waits for ``pass_all``.
"""

import asyncio
from typing import Any

import pytest

from tests.testbed import waiting


class Expiry:
    """``seconds``: what the test gives as the deadline; no other timeout has exactly that."""

    def __init__(self, patch: pytest.MonkeyPatch, seconds: float = 59.875) -> None:
        self.seconds = seconds
        self._real = asyncio.timeout
        self._made: list[asyncio.Timeout] = []
        patch.setattr(asyncio, "timeout", self._timeout)

    def _timeout(self, delay: float | None) -> asyncio.Timeout:
        if delay != self.seconds:
            return self._real(delay)
        made = self._real(None)
        self._made.append(made)
        return made

    async def running(self, number: int = 1) -> None:
        """Wait until so many of them were begun."""
        await waiting.until_async(lambda: len(self._made) >= number, 30, "the deadline's begin")

    def pass_all(self) -> None:
        """Those that run are over now."""
        now = asyncio.get_running_loop().time()
        for each in self._made:
            _end(each, now)
        self._made.clear()


def _end(timeout: Any, now: float) -> None:
    try:
        timeout.reschedule(now)
    except RuntimeError:
        pass  # it has ended already
