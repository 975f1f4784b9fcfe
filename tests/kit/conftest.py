"""No child of a test outlives its loop."""

import asyncio
import inspect
from collections.abc import AsyncIterator

import pytest

from kit import processes


@pytest.fixture(autouse=True)
def settled_in_time(request: pytest.FixtureRequest) -> None:
    if inspect.iscoroutinefunction(request.function):  # the others have no loop
        request.getfixturevalue("settled")


@pytest.fixture
async def settled(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """Wait until what a test killed is gone, and its pipes are closed: a busy machine may need
    longer for that than anybody waits for a process that hangs."""
    monkeypatch.setattr(processes, "KILLED_SECONDS", 60.0)
    yield
    while processes.hanging():
        await asyncio.sleep(0.01)
    for _ in range(10):
        await asyncio.sleep(0.005)
