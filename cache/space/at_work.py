"""On which dataset each slot works: no two on one, so no two passes meet in one tree."""

import contextlib
from collections.abc import Iterator

JOBS, EVICTIONS = "jobs", "evictions"


class Work:
    """What the slots of a node are at, each from its turn to the end of what it has to note."""

    def __init__(self) -> None:
        self._now: list[tuple[str, str]] = []  # slot, name

    @contextlib.contextmanager
    def on(self, slot: str, name: str) -> Iterator[None]:
        self._now.append((slot, name))
        try:
            yield
        finally:
            self._now.remove((slot, name))

    def of(self, *slots: str) -> frozenset[str]:
        """The names of the datasets that they work on."""
        return frozenset(name for slot, name in self._now if slot in slots)
