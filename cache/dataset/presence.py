"""Which datasets are whole on this node, for schedulers; and a word before one is no longer."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from cache.dataset.dataset import Dataset


class Presence:
    """``datasets``: those of the settings. ``listener`` is awaited before one stops being whole."""

    def __init__(self, datasets: Mapping[str, Dataset]) -> None:
        self.listener: Callable[[], Awaitable[None]] | None = None
        self._datasets = datasets

    async def tell(self) -> None:
        if self.listener is not None:
            await self.listener()

    def whole(self) -> Mapping[str, str]:
        """The generation of each dataset that jobs read from the SSD alone, by name."""
        return {
            name: Path(each.folder).name
            for name, each in sorted(self._datasets.items())
            if each.whole()
        }

    @contextlib.asynccontextmanager
    async def ending(self, name: str) -> AsyncIterator[None]:
        """While a dataset is removed, also one that the settings lost. It may stay after all."""
        dataset = self._datasets.get(name)
        if dataset is not None:
            dataset.leaving = True
        try:
            await self.tell()
            yield
        finally:
            if dataset is not None:
                dataset.leaving = False


def read(component: Any) -> Mapping[str, str]:
    """For the process (``kit.room.Presence``)."""
    found: Presence = component.presence
    return found.whole()


def listen(component: Any, tell: Callable[[], Awaitable[None]]) -> None:
    """``tell`` is awaited before a dataset loses files; ``read`` leaves it out by then."""
    component.presence.listener = tell
