"""Which datasets are whole on this node, for schedulers; and a word before one is no longer."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from cache.dataset.dataset import Dataset


class Presence:
    """``datasets``: those of the settings; ``take`` gets each that is added later."""

    def __init__(self, datasets: Mapping[str, Dataset]) -> None:
        self._tell: Callable[[], Awaitable[None]] | None = None
        self._datasets = datasets

    def listen(self, tell: Callable[[], Awaitable[None]]) -> None:
        """``tell`` is awaited before a dataset stops being whole."""
        self._tell = tell
        for each in self._datasets.values():
            self.take(each)

    def take(self, dataset: Dataset) -> None:
        """A dataset that loses files tells it, too."""
        dataset.tell = self._tell

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
            if self._tell is not None:
                await self._tell()
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
    component.presence.listen(tell)
