"""While the runtime pulls: would several connections fetch its large layers faster?

A second connection reads from the same layer for a moment, and what it reads is thrown away.
``lanes`` decides what the rates say.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from preheat import lanes, manifest
from preheat.failure import PullError
from preheat.runtimes import base

LOOK_SECONDS = 0.5
# A rate is taken over at least so long and so many bytes: containerd shows steps of 1 MiB.
MEASURE_SECONDS = 1.0
MEASURE_BYTES = 8 * 1024**2
MEASURE_LOOK_SECONDS = 0.05
LONGEST_SECONDS = 30.0  # a rate that takes longer is not measured
MOST_TRIES = 3
# The runtime ends a cancelled download within some milliseconds.
STILL_LOOKS = 20
STILL_SECONDS = 0.1

Ingests = Callable[[], Awaitable[Mapping[str, base.Ingest]]]
Open = Callable[[manifest.Layer, int], AsyncGenerator[bytes, None]]
_NONE = base.Ingest()


@dataclass
class Trial:
    """Of one pull. ``ingests``: what the runtime fetches; ``open``: a layer from a byte on."""

    layers: Sequence[manifest.Layer]
    ingests: Ingests
    open: Open
    read: int = 0  # bytes thrown away

    async def limits_connections(self) -> bool:
        """Whether each connection is limited for itself. Waits for the first large layer."""
        try:
            layer = await self._begun()
            if not lanes.is_idle(os.getloadavg()[0], os.cpu_count() or 1):
                return False
            for _ in range(MOST_TRIES):
                before = await self._rate(layer)
                if not lanes.is_worth(before, layer.size - await self._offset(layer)):
                    return False
                during, beside = await self._with_second(layer)
                found = lanes.verdict(before, during, beside)
                if found is not lanes.Verdict.UNCLEAR:
                    return found is lanes.Verdict.SEVERAL
        except (base.RuntimeCallError, TimeoutError):
            return False
        return False

    async def _begun(self) -> manifest.Layer:
        """The largest layer that the runtime fetches, once it fetches a large one."""
        while True:
            found = await self.ingests()
            fetching = [each for each in self.layers if found.get(each.digest, _NONE).theirs]
            if fetching:
                return max(fetching, key=lambda each: each.size)
            await asyncio.sleep(LOOK_SECONDS)

    async def _offset(self, layer: manifest.Layer) -> int:
        """Of the runtime; the layer's size when it has all of it."""
        theirs = (await self.ingests()).get(layer.digest, _NONE).theirs
        return layer.size if theirs is None else theirs

    async def _rate(self, layer: manifest.Layer) -> float:
        """Bytes per second of the runtime's connection, from one step to another; 0 at its end."""
        async with asyncio.timeout(LONGEST_SECONDS):
            last = await self._offset(layer)
            start: tuple[float, int] | None = None
            while last < layer.size:
                await asyncio.sleep(MEASURE_LOOK_SECONDS)
                offset, now = await self._offset(layer), time.monotonic()
                if offset == last:
                    continue
                last = offset
                if start is None:
                    start = now, offset
                spent, came = now - start[0], offset - start[1]
                if spent >= MEASURE_SECONDS and came >= MEASURE_BYTES:
                    return came / spent
        return 0.0

    async def _with_second(self, layer: manifest.Layer) -> tuple[float, float]:
        """The rates of the runtime and of a second connection beside it."""
        begun: list[float] = []
        before = self.read
        reader = asyncio.create_task(self._read(layer, begun), name="second connection")
        try:
            during = await self._rate(layer)
            spent = time.monotonic() - begun[0] if begun else 0.0
            return during, (self.read - before) / spent if spent else 0.0
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _read(self, layer: manifest.Layer, begun: list[float]) -> None:
        """Read the layer's last half until cancelled; ``begun`` gets the time of the first byte."""
        with contextlib.suppress(PullError):
            async with contextlib.aclosing(self.open(layer, layer.size // 2)) as stream:
                async for chunk in stream:
                    if not chunk:  # it has no ranges and sends the layer from its start
                        return
                    if begun:
                        self.read += len(chunk)
                    else:
                        begun.append(time.monotonic())


async def still(ingests: Ingests) -> Mapping[str, base.Ingest]:
    """What the runtime has of layers, once it writes nothing more: its pull was cancelled."""
    last: Mapping[str, base.Ingest] = {}
    for _ in range(STILL_LOOKS):
        found = await ingests()
        if found == last:
            break
        last = found
        await asyncio.sleep(STILL_SECONDS)
    return last
