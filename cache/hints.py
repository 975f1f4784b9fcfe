"""What jobs open while a dataset fills is fetched sooner: one listening process per such dataset.

Off costs nothing; on, it listens for a fraction of the time (settings ``hints``).
"""

import asyncio
import contextlib
import json
import sys
from typing import TYPE_CHECKING

import structlog

from cache.view import Stage

if TYPE_CHECKING:
    from cache.component import Cache
    from cache.dataset import Dataset

log = structlog.get_logger("hints")

LOOK_SECONDS = 2.0


class Listener:
    """One process of cache.hintprobe."""

    def __init__(self, dataset: "Dataset") -> None:
        self._dataset = dataset
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        hints = self._dataset.cache.hints
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "cache.hintprobe", self._dataset.view),
            *(str(hints.window), str(hints.every)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            limit=4 * 1024 * 1024,
        )
        self._task = asyncio.create_task(self._follow(), name=f"hints {self._dataset.name}")

    async def _follow(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            self._dataset.hint(json.loads(line))

    @property
    def ended(self) -> bool:
        return self._task is None or self._task.done()

    def stop(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        if self._task is not None:
            self._task.cancel()


async def follow(cache: "Cache") -> None:
    """For ever: a listener for each dataset that fills behind an overlay, if hints are on."""
    listeners: dict[str, Listener] = {}
    try:
        while True:
            wanted = {
                name: dataset
                for name, dataset in cache.datasets.items()
                if cache.settings.hints.enabled
                and dataset.work.kind == "fill"
                and dataset.stage is Stage.OVERLAY
            }
            for name in [n for n in listeners if n not in wanted or listeners[n].ended]:
                listeners.pop(name).stop()
            for name, dataset in wanted.items():
                if name not in listeners:
                    listeners[name] = Listener(dataset)
                    await listeners[name].start()
            await asyncio.sleep(LOOK_SECONDS)
    finally:
        for listener in listeners.values():
            listener.stop()
