"""The cache as the process sees it."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from prometheus_client.core import Metric

import cache.settings
import kit.component
import kit.finding


class Cache:
    name = "cache"

    def __init__(
        self,
        settings: cache.settings.CacheSettings,
        *,
        state_dir: Path,
        reporter: kit.finding.Reporter,
    ) -> None:
        self._settings = settings

    async def start(self) -> None: ...

    async def reconcile(self, settings: cache.settings.CacheSettings) -> Sequence[str]:
        return ()

    async def stop(self) -> None: ...

    def health(self) -> kit.component.Health:
        return kit.component.Health(alive=True, ready=True)

    def metrics(self) -> Iterable[Metric]:
        return ()
